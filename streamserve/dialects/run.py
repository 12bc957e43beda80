"""What a run of a pipeline shows beside its text: steps, citations, what `trim` left out; and its whole JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamserve.dialects.base import TextBlocks, ending
from streamserve.protocol.errors import error_for
from streamserve.protocol.events import BlockStart, Citation, Done, Event, LoggedEvent, Status, Token

# The statuses of a run: a step begins; `trim` has left something out.
STEP, TRIMMED = "step", "trimmed"


def is_outline(event: Event) -> bool:
    """Return whether an event is of the run's outline: a step or a citation."""
    return isinstance(event, Citation) or (isinstance(event, Status) and event.status in (STEP, TRIMMED))


def outline_json(outline: Iterable[Citation | Status]) -> dict[str, list[dict[str, Any]]]:
    """Return steps and citations, each in order."""
    events = list(outline)
    return {
        "steps": [event.payload() for event in events if isinstance(event, Status)],
        "citations": [event.payload() for event in events if isinstance(event, Citation)],
    }


def trimmed_of(outline: Iterable[Citation | Status]) -> list[dict[str, Any]]:
    """Return what was cut of the contexts: passages kept, of how many, and the sentence that readers saw."""
    cut = (event for event in outline if isinstance(event, Status) and event.status == TRIMMED)
    return [{"kept": event.step, "of": event.of, "message": event.message} for event in cut]


def run_json(events: Iterable[LoggedEvent], *, stream_id: str, pipeline: str, created: int) -> dict[str, Any]:
    """Return id, text, steps, citations, and what `done` says. Raises the error that the run ended with."""
    text: list[str] = []
    outline: list[Citation | Status] = []
    blocks, out = TextBlocks(), {"id": stream_id, "pipeline": pipeline, "created": created}
    for _, event in events:
        if isinstance(event, BlockStart):
            blocks.note(event)
        elif isinstance(event, Token) and event in blocks:
            text.append(event.text)
        elif isinstance(event, Citation | Status) and is_outline(event):
            outline.append(event)
        failed = ending(event)
        if failed is not None:
            raise error_for(failed.code, failed.message, retryable=failed.retryable)
        if isinstance(event, Done):
            trimmed = trimmed_of(outline)
            out |= {"meta": {"trimmed": trimmed}} if trimmed else {}
            out |= {"text": "".join(text), **outline_json(outline), **event.payload()}
    return out
