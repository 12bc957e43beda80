"""`adapted`: an agent of another framework as the function of a pipeline. Knows the frameworks by their names only.

    pydantic_ai.Agent              pydantic_agent.py
    langgraph, a compiled graph    graph.py
    agents.Agent (OpenAI's)        openai_agent.py

Each adapter has `respond(agent, run)`. It is imported with the first agent of its kind: the frameworks are extras.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from streamserve.clients.agents.failures import ours
from streamserve.clients.pipeline.run import Run


@dataclass(frozen=True, slots=True)
class _Kind:
    """A framework's class of agents, by its package, and its adapter."""

    package: str
    name: str
    adapter: str
    extra: str


_KINDS = (
    _Kind("pydantic_ai", "AbstractAgent", "pydantic_agent", "pydantic-ai"),
    _Kind("langgraph", "Pregel", "graph", "langgraph"),
    _Kind("agents", "Agent", "openai_agent", "openai-agents"),
)


def adapted(given: Any) -> Callable[[Run], Awaitable[Any]] | None:
    """Return the pipeline's function of an agent; None for anything else, as a function.

    Raises TypeError for a graph that is not compiled, ImportError for a release that the adapter does not know.
    """
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(given).__mro__}
    if ("langgraph", "StateGraph") in bases:
        raise TypeError("This graph is not compiled: pipeline(name, graph.compile()).")
    kind = next((one for one in _KINDS if (one.package, one.name) in bases), None)
    if kind is None:
        return None
    try:
        adapter = import_module(f"streamserve.clients.agents.{kind.adapter}")
    except ImportError as error:
        message = f"The installed {kind.package} lacks what this release needs: pip install 'streamserve[{kind.extra}]'"
        raise ImportError(message) from error

    async def function(run: Run) -> Any:
        try:
            return await adapter.respond(given, run)
        except Exception as error:
            raise ours(error) from error

    function.__name__ = adapter.name_of(given)
    function.__module__, function.__qualname__ = type(given).__module__, f"{type(given).__name__} {id(given):x}"
    function.__doc__ = adapter.description_of(given)
    return function
