"""The JSON of a whole run of a pipeline: a fold of its events, without the streaming. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamserve.dialects.base import TextBlocks, ending
from streamserve.protocol.errors import error_for
from streamserve.protocol.events import BlockStart, Citation, Done, LoggedEvent, Status, Token


def run_json(events: Iterable[LoggedEvent], *, stream_id: str, pipeline: str, created: int) -> dict[str, Any]:
    """Return id, text, steps, citations, and what `done` says. Raises the error that the run ended with."""
    text: list[str] = []
    steps: list[dict[str, Any]] = []
    citations: list[dict[str, Any]] = []
    blocks, out = TextBlocks(), {"id": stream_id, "pipeline": pipeline, "created": created}
    for _, event in events:
        if isinstance(event, BlockStart):
            blocks.note(event)
        elif isinstance(event, Token) and event in blocks:
            text.append(event.text)
        elif isinstance(event, Status) and event.status in ("step", "trimmed"):
            steps.append(event.payload())
        elif isinstance(event, Citation):
            citations.append(event.payload())
        failed = ending(event)
        if failed is not None:
            raise error_for(failed.code, failed.message, retryable=failed.retryable)
        if isinstance(event, Done):
            out |= {"text": "".join(text), "steps": steps, "citations": citations, **event.payload()}
    return out
