"""`run_pipeline`: a whole run of a pipeline from Python, with its citations and steps. docs/pipelines.md shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamserve.dialects.run import run_json
from streamserve.protocol.events import Usage
from streamserve.streams.reader.follow import collect
from streamserve.web.calls.answers import Answer, Messages
from streamserve.web.site import get_site


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A whole run. `str()` of it is its text; `citations` and `steps` are the events of these names, in order."""

    text: str
    citations: tuple[dict[str, Any], ...]
    steps: tuple[dict[str, Any], ...]
    finish_reason: str
    stream_id: str
    usage: Usage

    def __str__(self) -> str:
        return self.text


async def run_pipeline(
    name: str, question: str | Messages = "", *, input: dict[str, Any] | None = None, **options: Any
) -> RunResult:
    """Return the whole run of a pipeline; leaving early ends it.

    `question` is a text or a list of messages, `input` what the pipeline takes besides. Options are those of
    `acomplete`: `request`, `user` or `tenant`, `timeout_seconds`. Raises StreamserveError. From synchronous code:
    `async_to_sync`.
    """
    if input is not None:
        options["input"] = input
    started = await Answer(question, model=name, **options).abegin()
    events = await collect(get_site().streams, started)
    whole = run_json(events, stream_id=started.id, pipeline=name, created=started.created)
    return RunResult(
        text=whole["text"],
        citations=tuple(whole["citations"]),
        steps=tuple(whole["steps"]),
        finish_reason=whole["finish_reason"],
        stream_id=started.id,
        usage=started.usage,
    )
