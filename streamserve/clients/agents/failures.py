"""`ours`: what the exceptions of agents' frameworks mean here. Knows them by their names. Pure.

a model's 429, 5xx, lost connection     engine_unavailable, retryable
an error of the site's own model        that error, by its code
too many turns, a limit of usage        too_many_tool_rounds
a guardrail, a provider's own filter    the end `content_filter`, as of our filters
anything else                           as it is: the pipeline failed, and the log has the cause
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from streamserve.clients.pipeline.filters import Stopped
from streamserve.protocol.codes import CODES
from streamserve.protocol.errors import EngineUnavailable, StreamserveError, error_for
from streamserve.protocol.requests import Approved

_STOPS = {
    *("ContentFilterError", "InputGuardrailTripwireTriggered", "OutputGuardrailTripwireTriggered"),
    *("ToolInputGuardrailTripwireTriggered", "ToolOutputGuardrailTripwireTriggered"),
}
_TOO_MANY = {"UsageLimitExceeded", "MaxTurnsExceeded", "GraphRecursionError"}
_LOST = {"ModelConnectionError", "ModelTimeoutError", "ModelRequestTimeout", "APIConnectionError", "APITimeoutError"}
_OFTEN = (408, 409, 425, 429)


def ours(error: Exception) -> Exception:
    """Return what is raised in place of a framework's exception."""
    chain = list(_chain(error))
    for one in chain:
        if isinstance(one, StreamserveError | Stopped):
            return one
    for one in chain:
        if (known := _of_our_model(one)) is not None:
            return known
    names = {base.__name__ for one in chain for base in type(one).__mro__}
    if names & _STOPS:
        return Stopped()
    if names & _TOO_MANY:
        message = "The agent made more calls than it may, and gave no answer."
        return StreamserveError(message, code="too_many_tool_rounds")
    if names & _LOST or any(_is_passing(getattr(one, "status_code", None)) for one in chain):
        return EngineUnavailable("The model that the agent asks is not available now. Try again.")
    return error


def needs_decision() -> StreamserveError:
    """Return the error of an agent that waits for what is no answer of its user: the result of an outside call."""
    message = "The agent waits for the result of a call that something else makes, which it cannot be given here."
    return StreamserveError(message, code="pipeline_failed")


def refusal(answer: Approved | None) -> str:
    """Return what a model is told of a call that its user has refused."""
    said = "" if answer is None else answer.message
    return "The user has refused this call." + (f" {said}" if said else "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that it was raised for, groups too."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        waiting += [next_ for next_ in (one.__cause__, one.__context__) if next_ is not None]


def _of_our_model(error: BaseException) -> StreamserveError | None:
    """Return the error that the site's own model has answered, by its body."""
    body: Any = getattr(error, "body", None)
    if isinstance(body, Mapping) and isinstance(body.get("error"), Mapping):
        body = body["error"]
    if not isinstance(body, Mapping) or body.get("code") not in CODES or not isinstance(body.get("message"), str):
        return None
    return error_for(body["code"], body["message"], retryable=_is_passing(getattr(error, "status_code", None)))


def _is_passing(status: object) -> bool:
    return isinstance(status, int) and (status in _OFTEN or status >= 500)
