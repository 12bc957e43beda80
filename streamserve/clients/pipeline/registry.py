"""`pipeline`: register an async function as a pipeline, under a name by which it is called like a model.

    @pipeline(model="chat")
    async def billing(run: Run) -> None:
        passages = await run.step("Looking up your bill", search, run.question, of=2)
        await run.generate([{"role": "user", "content": f"{passages}\\n\\n{run.question}"}])

Registered by import, as Django's admin is: the site imports `<app>/pipelines.py` of each app once, at its start. It
holds nothing of a request; no I/O.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from streamserve.clients.pipeline.filters import OutputFilter
from streamserve.protocol.requests import LATENCY_CLASSES

if TYPE_CHECKING:
    from streamserve.clients.pipeline.run import Run

Function = Callable[["Run"], Awaitable[Any]]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A registered pipeline. `model` "": the site's default. `filters` make a new chain for each run."""

    name: str
    function: Function
    model: str = ""
    filters: Sequence[Callable[[], OutputFilter]] = ()
    latency_class: str = ""
    description: str = field(default="", compare=False)


_pipelines: dict[str, Pipeline] = {}
PIPELINES: Mapping[str, Pipeline] = MappingProxyType(_pipelines)


def pipeline(
    name: str | Function = "",
    *,
    model: str = "",
    filters: Sequence[Callable[[], OutputFilter]] = (),
    latency_class: str = "",
) -> Any:
    """Register an async function that takes a `Run`, and return it unchanged.

    `name`: the function's, unless given. Its text goes through `filters` before a reader sees any of it. Raises
    ValueError for a name that is no name or is taken, TypeError for a function that is not async.
    """

    def register(function: Function) -> Function:
        own = name if isinstance(name, str) and name else getattr(function, "__name__", "")
        if not _NAME.fullmatch(own):
            raise ValueError(f"{own!r} is no name of a pipeline: 1 to 64 of A-Z a-z 0-9 . _ -")
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"the pipeline {own} must be an async function: async def {own}(run): ...")
        if latency_class and latency_class not in LATENCY_CLASSES:
            raise ValueError(f"latency_class of the pipeline {own} is one of {', '.join(LATENCY_CLASSES)}")
        known = _pipelines.get(own)
        if known is not None and _source(known.function) != _source(function):
            raise ValueError(f"there are two pipelines {own}: {_source(known.function)} and {_source(function)}")
        _pipelines[own] = Pipeline(
            name=own,
            function=function,
            model=model,
            filters=tuple(filters),
            latency_class=latency_class,
            description=inspect.cleandoc(function.__doc__ or ""),
        )
        return function

    return register(name) if callable(name) else register


def _source(function: Function) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', '')}"


def forget(name: str) -> None:
    """Take a pipeline out of the registry: for tests."""
    _pipelines.pop(name, None)
