"""How a stream that did not succeed is told in dialects that have one word for it, `error`. Pure.

`cancelled` and `abandoned` are finish reasons of ours that no other dialect knows: there they are errors with these
codes, since a client that reads them as success would keep half an answer as a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamserve.protocol.events import SUCCESS_REASONS, Done, Error, Event

_MESSAGES = {
    "cancelled": "The stream was stopped before the answer was complete.",
    "abandoned": "The stream ended because nobody was reading it.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The error that a terminal event stands for."""

    code: str
    message: str
    retryable: bool = False


# To readers whose dialect cannot say "come again": nothing but a whole answer ends without an error.
LET_GO = Error(code="engine_unavailable", message="The server is shutting down.", retryable=True)


def ending(event: Event) -> Ending | None:
    """Return what to say of a terminal event, None after success."""
    if isinstance(event, Error):
        return Ending(code=event.code, message=event.message, retryable=event.retryable)
    if isinstance(event, Done) and event.finish_reason not in SUCCESS_REASONS:
        return Ending(
            code=event.finish_reason,
            message=_MESSAGES.get(event.finish_reason, "The stream ended early."),
        )
    return None
