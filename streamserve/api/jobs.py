"""`/jobs`: runs of pipelines that a worker makes, with or without a reader. asyncio; framework-free.

A job's events are its stream's events: `GET /jobs/{id}/events` resumes like `GET /streams/{id}/events`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Caller, Reply, json_reply
from streamserve.api.idempotency import once_of
from streamserve.api.interrupts import with_approvals
from streamserve.api.native import stream_events
from streamserve.dialects import native
from streamserve.dialects.approvals import read_approvals
from streamserve.dialects.batches import Page
from streamserve.dialects.fields import Fields, Table, digits, one_of, plain_text, read, text
from streamserve.dialects.pace import PACE
from streamserve.protocol.errors import BadRequest, NotFound
from streamserve.protocol.requests import GenerateRequest, Once
from streamserve.protocol.trace import Trace

STATUSES = ("queued", "running", "done", "failed", "cancelled")
MAX_PAGE = 100
_PAGE = 20
OF_READERS = ("on_disconnect", "format", "stream", "model", *PACE)
_NAME = text(1, 64)
CONTINUED: Table = Fields(
    {"continues": _NAME, "approvals": read_approvals, "pipeline": _NAME, "webhook": text(0, 200)},
    *("approvals", "continues"),
)
LIST: Table = {"status": one_of(*STATUSES, ""), "after": plain_text(0, 64), "limit": digits(1, MAX_PAGE)}
_CLASS = "document"  # a job has no reader who waits for its first token


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job as its owner sees it. `place`: how many jobs are taken before a queued job; `error` its code and message.

    `waits_for`, of a queued job: "worker" (no worker that runs jobs is alive), "retry" (until `due_at`) or "turn".
    """

    id: str
    stream_id: str
    pipeline: str
    status: str
    attempts: int
    place: int | None
    waits_for: str | None
    progress: dict[str, Any] | None
    result: dict[str, Any] | None
    error: tuple[str, str] | None
    webhook: str
    created_at: datetime
    due_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    def as_json(self) -> dict[str, Any]:
        """Return its JSON. Times are Unix seconds."""
        error = None if self.error is None else {"code": self.error[0], "message": self.error[1]}
        out = {
            "job_id": self.id,
            "status": self.status,
            "pipeline": self.pipeline,
            "stream_id": self.stream_id,
            "created_at": _seconds(self.created_at),
            "started_at": _seconds(self.started_at),
            "finished_at": _seconds(self.finished_at),
            "attempts": self.attempts,
            "progress": self.progress,
            "result": self.result,
            "error": error,
        }
        if self.status == "queued":
            out |= {"place": self.place, "due_at": _seconds(self.due_at), "waits_for": self.waits_for}
        return out | ({"webhook": self.webhook} if self.webhook else {})


class Jobs(Protocol):
    """The jobs of a site. Every call may raise a database error."""

    async def enqueue(
        self,
        caller: Caller,
        request: GenerateRequest,
        *,
        webhook: str = "",
        once: Once | None = None,
        trace: Trace | None = None,
    ) -> JobView:
        """Queue a run of a pipeline; with `once`, return the job that its key has queued before.

        `trace`: what it belongs to, whenever it runs.
        """

    async def find(self, caller: Caller, job_id: str) -> JobView:
        """Return a job of the caller's tenant. Raises NotFound."""

    async def page(self, caller: Caller, page: Page, *, status: str = "") -> tuple[Sequence[JobView], bool]:
        """Return a part of the tenant's jobs, without their results, and whether there are more."""

    async def cancel(self, caller: Caller, job_id: str) -> JobView:
        """End a job as cancelled; a job that has ended stays as it is."""


async def enqueue(call: Call, jobs: Jobs, answers: Answers) -> Reply:
    """POST /jobs {pipeline, input | messages | prompt, webhook?, the fields of POST /streams}: queue a run, 202.

    Or {continues, approvals, webhook?}: a run that continues an interrupted run.
    """
    body = await call.json(answers.limits)
    once = once_of(call, "jobs", body)
    webhook = body.get("webhook", "")
    if not isinstance(webhook, str):
        raise BadRequest("'webhook' is the name of one of the site's webhooks.", param="webhook")
    request = await job_request(body, call.caller, answers, once)
    queued = await jobs.enqueue(call.caller, request, webhook=webhook, once=once, trace=call.trace)
    return json_reply(queued.as_json(), status=202, headers={"X-Stream-Id": queued.stream_id})


async def job_request(
    body: dict[str, Any], caller: Caller, answers: Answers, once: Once | None = None
) -> GenerateRequest:
    """Return the request in the body of a job. Raises BadRequest, and as `with_approvals`."""
    if "continues" in body:
        return await _continued(body, caller, answers, once)
    name = body.get("pipeline")
    if not isinstance(name, str) or not name:
        raise BadRequest("A job needs 'pipeline', the name of a pipeline. GET /pipelines lists them.", param="pipeline")
    for field in OF_READERS:
        if field in body:
            message = f"A job has no {field!r}: it runs to its end, and its events are at /jobs/<job_id>/events."
            raise BadRequest(message, code="unknown_field", param=field)
    rest = {key: value for key, value in body.items() if key not in ("pipeline", "webhook")}
    asked = native.parse({**rest, "model": name}, answers.limits, default_model="")
    return answers.with_class(asked.generate, asked, caller, "jobs", default=_CLASS)


async def _continued(body: Mapping[str, Any], caller: Caller, answers: Answers, once: Once | None) -> GenerateRequest:
    values = read(body, CONTINUED)
    request = await with_approvals(caller, values["continues"], values["approvals"], answers, once)
    if values.get("pipeline", request.model) != request.model:
        message = f"That stream is a run of {request.model!r}. Leave pipeline out."
        raise BadRequest(message, code="conflicting_fields", param="pipeline")
    return request


async def list_jobs(call: Call, jobs: Jobs) -> Reply:
    """GET /jobs?status=&after=&limit=: the newest first."""
    query = read(call.query(), LIST)
    page = Page(limit=query.get("limit", _PAGE), after=query.get("after", ""))
    found, has_more = await jobs.page(call.caller, page, status=query.get("status", ""))
    last_id = found[-1].id if found else None
    return json_reply({"jobs": [one.as_json() for one in found], "has_more": has_more, "last_id": last_id})


async def job(call: Call, jobs: Jobs) -> Reply:
    """GET /jobs/{id}: status, place, progress, result, error."""
    found = await jobs.find(call.caller, call.params["job_id"])
    return json_reply(found.as_json())


async def job_events(call: Call, jobs: Jobs, answers: Answers) -> Reply:
    """GET /jobs/{id}/events: the events of its stream, replayed and followed."""
    found = await jobs.find(call.caller, call.params["job_id"])
    return await stream_events(replace(call, params={"stream_id": found.stream_id}), answers)


async def cancel_job(call: Call, jobs: Jobs, answers: Answers) -> Reply:
    """POST /jobs/{id}/cancel: end it as cancelled, queued or running. Idempotent."""
    await call.json(answers.limits, optional=True)
    return json_reply((await jobs.cancel(call.caller, call.params["job_id"])).as_json())


def no_job() -> NotFound:
    """Return the error for an id that names no job of the caller's."""
    message = "No job has that id. It is the `job_id` in the answer to POST /jobs: 32 hex digits."
    return NotFound(message, code="job_not_found", param="job_id")


def _seconds(when: datetime | None) -> float | None:
    return None if when is None else round(when.timestamp(), 3)
