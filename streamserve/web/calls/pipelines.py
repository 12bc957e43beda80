"""Pipelines from Python: `run_pipeline` returns a whole run, `enqueue_job` and `aenqueue_job` queue one as a job.

docs/pipelines.md and docs/jobs.md show them, in views, tasks and commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import transaction

from streamserve.api.idempotency import once_for
from streamserve.api.jobs import JobView, job_request
from streamserve.dialects.base import run_json
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import Usage
from streamserve.streams.reader.follow import collect
from streamserve.web.calls import background
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


def enqueue_job(
    name: str, question: str | Messages = "", *, input: dict[str, Any] | None = None, **options: Any
) -> JobView:
    """Queue a run of the pipeline `name` and return the job: its `id` is that of GET /jobs/{id}.

    `question` is a text or a list of messages, `input` what the pipeline takes besides. Options: `request`, `user` or
    `tenant`, whose job it is; `webhook`; `once`, a key that queues one job however often it is sent; the fields of POST
    /jobs. Inside a transaction the job is queued at once and may run before the commit: use `transaction.on_commit`.
    Raises StreamserveError.
    """
    if transaction.get_connection().in_atomic_block and transaction.get_connection().vendor == "sqlite":
        message = "SQLite lets no job be queued inside a transaction: call transaction.on_commit(lambda: ...)."
        raise BadRequest(message, code="inside_transaction")
    job = _Job(name, question, input, options)
    caller = job.answer.caller("await aenqueue_job()")
    return background.run(lambda: job.enqueue(caller), "await aenqueue_job()")


async def aenqueue_job(
    name: str, question: str | Messages = "", *, input: dict[str, Any] | None = None, **options: Any
) -> JobView:
    """Do what `enqueue_job` does, from async code."""
    job = _Job(name, question, input, options)
    return await job.enqueue(await job.answer.acaller())


class _Job:
    """One call."""

    def __init__(
        self, name: str, question: str | Messages, input: dict[str, Any] | None, options: dict[str, Any]
    ) -> None:
        self._webhook, self._key = options.pop("webhook", ""), options.pop("once", "")
        if input is not None:
            options["input"] = input
        self.answer = Answer(question, **options)
        self._body = {**self.answer.bodies[0], "pipeline": name}

    async def enqueue(self, caller: Any) -> JobView:
        site = get_site()
        once = once_for(caller, self._key, "jobs", self._body) if self._key else None
        request = job_request(self._body, caller, site)
        return await site.jobs.enqueue(caller, request, webhook=self._webhook, once=once)
