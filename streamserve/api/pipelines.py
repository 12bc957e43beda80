"""`/pipelines/{name}`: a run as JSON or as a stream. `/jobs`: runs that a worker makes, whether anybody reads them.

A pipeline is in the site's clients, beside the models, so `POST /streams`, the WebSocket and `/v1` serve it by its name
as well. These routes take `input` and answer in JSON unless the caller wants a stream.

A job's events are those of its stream: `GET /jobs/{id}/events` resumes like `GET /streams/{id}/events`. asyncio;
framework-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Caller, Reply, json_reply
from streamserve.api.idempotency import once_of
from streamserve.api.native import PROMPT_IN_URL, stream_events
from streamserve.api.resume import encoder_for, gone_reply, head_of_new, resume
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.dialects import native
from streamserve.dialects.batches import Page
from streamserve.dialects.fold import Answer
from streamserve.dialects.pace import PACE
from streamserve.dialects.query import query_values
from streamserve.protocol.errors import BadRequest, Forbidden, NotFound
from streamserve.protocol.ids import parse_event_id
from streamserve.protocol.requests import GenerateRequest, Once
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect

_EVENT_STREAM = "text/event-stream"
# Of jobs.
STATUSES = ("queued", "running", "done", "failed", "cancelled")
MAX_PAGE = 100
_PAGE = 20
_OF_READERS = ("on_disconnect", "format", "stream", "model", *PACE)
_CLASS = "document"  # a job has no reader who waits for its first token


async def pipelines(call: Call, answers: Answers) -> Reply:
    """GET /pipelines: names, descriptions and models."""
    found = [client for client in answers.clients.values() if isinstance(client, PipelineClient)]
    return json_reply({"pipelines": [client.as_json() for client in found]})


async def post_run(call: Call, answers: Answers) -> Reply:
    """POST /pipelines/{name}: `input`, `messages` or `prompt`, and the fields of POST /streams.

    The answer is JSON; with `"stream": true` or `Accept: text/event-stream` it is a stream.
    """
    name = _known(call, answers)
    body = await call.json(answers.limits)
    once = once_of(call, f"pipelines/{name}", body)
    wants_stream = native.read_flag(body, "stream", default=_EVENT_STREAM in call.headers.get("accept", ""))
    rest = {key: value for key, value in body.items() if key != "stream"}
    return await _start(call, answers, {**rest, "model": name}, once, wants_stream=wants_stream)


async def get_run(call: Call, answers: Answers) -> Reply:
    """GET /pipelines/{name}?question=...: the query is the `input`. For a bare EventSource, and for a link.

    The fields of a reader's pace (dialects/pace.py) are no input.
    With a Last-Event-ID it resumes, and never starts another run.
    """
    name = _known(call, answers)
    query, event_id = call.query(), call.headers.get("last-event-id")
    pace = {name: query.pop(name) for name in PACE if name in query}
    if event_id:
        return await _resume(call, answers, event_id, pace)
    if not answers.config.takes_prompt_in_url:
        raise Forbidden(PROMPT_IN_URL.replace("/streams,", f"/pipelines/{name},"), code="prompt_in_url_off")
    wants_stream = _EVENT_STREAM in call.headers.get("accept", "")
    body = {**query_values(pace), "model": name, "input": query}
    return await _start(call, answers, body, None, wants_stream=wants_stream)


async def _start(
    call: Call, answers: Answers, body: Mapping[str, Any], once: Once | None, *, wants_stream: bool
) -> Reply:
    asked = native.parse(body, answers.limits, default_model=answers.default_model)
    if call.is_head:
        return head_of_new(asked.format) if wants_stream else json_reply({})
    on_disconnect = asked.on_disconnect if wants_stream or "on_disconnect" in body else "abort"
    request = answers.with_class(asked.generate, asked.latency_class, call.caller, "pipelines")
    stream = await answers.begin(call, request, on_disconnect, once=once)
    if wants_stream:
        return Reply(body=Delivery(answers.streams, stream, encoder_for(asked.format, stream), pace=asked.pace))
    events = await call.wait(collect(answers.streams, stream))
    whole = native.run_json(Answer.of(events), stream_id=stream.id, pipeline=stream.model, created=stream.created)
    return json_reply(whole, headers={"X-Stream-Id": stream.id})


async def _resume(call: Call, answers: Answers, event_id: str, pace: Mapping[str, str]) -> Reply:
    parsed = parse_event_id(event_id)
    if parsed is None:
        return gone_reply(call)
    log_id, after = parsed
    try:
        found = await answers.find(call.caller, log_id=log_id)
    except NotFound:
        return gone_reply(call)
    return gone_reply(call) if found.stream is None else resume(call, answers, found.stream, after, pace)


def _known(call: Call, answers: Answers) -> str:
    """Return the pipeline's name. Raises NotFound."""
    name = call.params["name"]
    if not isinstance(answers.clients.get(name), PipelineClient):
        names = [one for one, client in answers.clients.items() if isinstance(client, PipelineClient)]
        known = f"Known: {', '.join(names)}." if names else "The site has none: see docs/pipelines.md."
        raise NotFound(f"There is no pipeline {name[:64]!r} here. {known}", code="pipeline_not_found", param="name")
    return name


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


class JobQueue(Protocol):
    """The jobs of a site. Every call may raise a database error."""

    async def enqueue(
        self, caller: Caller, request: GenerateRequest, *, webhook: str = "", once: Once | None = None
    ) -> JobView:
        """Queue a run of a pipeline; with `once`, return the job that its key has queued before."""

    async def find(self, caller: Caller, job_id: str) -> JobView:
        """Return a job of the caller's tenant. Raises NotFound."""

    async def page(self, caller: Caller, page: Page, *, status: str = "") -> tuple[Sequence[JobView], bool]:
        """Return a part of the tenant's jobs, without their results, and whether there are more."""

    async def cancel(self, caller: Caller, job_id: str) -> JobView:
        """End a job as cancelled; a job that has ended stays as it is."""


async def enqueue(call: Call, jobs: JobQueue, answers: Answers) -> Reply:
    """POST /jobs {pipeline, input | messages | prompt, webhook?, the fields of POST /streams}: 202."""
    body = await call.json(answers.limits)
    once = once_of(call, "jobs", body)
    webhook = body.get("webhook", "")
    if not isinstance(webhook, str):
        raise BadRequest("'webhook' is the name of one of the site's webhooks.", param="webhook")
    queued = await jobs.enqueue(call.caller, job_request(body, call.caller, answers), webhook=webhook, once=once)
    return json_reply(queued.as_json(), status=202, headers={"X-Stream-Id": queued.stream_id})


def job_request(body: dict[str, Any], caller: Caller, answers: Answers) -> GenerateRequest:
    """Return the request in the body of a job. Raises BadRequest."""
    name = body.get("pipeline")
    if not isinstance(name, str) or not name:
        raise BadRequest("A job needs 'pipeline', the name of a pipeline. GET /pipelines lists them.", param="pipeline")
    for field in _OF_READERS:
        if field in body:
            message = f"A job has no {field!r}: it runs to its end, and its events are at /jobs/<job_id>/events."
            raise BadRequest(message, code="unknown_field", param=field)
    rest = {key: value for key, value in body.items() if key not in ("pipeline", "webhook")}
    asked = native.parse({**rest, "model": name}, answers.limits, default_model=answers.default_model)
    name = asked.latency_class or caller.latency_class or _CLASS
    return answers.with_class(asked.generate, name, caller, "jobs")


async def list_jobs(call: Call, jobs: JobQueue) -> Reply:
    """GET /jobs?status=&after=&limit=: the newest first."""
    query = call.query()
    unknown = set(query) - {"status", "after", "limit"}
    if unknown:
        raise BadRequest(f"There is no parameter {min(unknown)[:64]!r}: status, after, limit.", param=min(unknown)[:64])
    status, limit = query.get("status", ""), query.get("limit", str(_PAGE))
    if status and status not in STATUSES:
        raise BadRequest(f"'status' is one of {', '.join(STATUSES)}.", param="status")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_PAGE):
        raise BadRequest(f"'limit' is a number from 1 to {MAX_PAGE}.", param="limit")
    page = Page(limit=int(limit), after=query.get("after", ""))
    found, has_more = await jobs.page(call.caller, page, status=status)
    last_id = found[-1].id if found else None
    return json_reply({"jobs": [one.as_json() for one in found], "has_more": has_more, "last_id": last_id})


async def job(call: Call, jobs: JobQueue) -> Reply:
    """GET /jobs/{id}: status, place, progress, result, error."""
    found = await jobs.find(call.caller, call.params["job_id"])
    return json_reply(found.as_json())


async def job_events(call: Call, jobs: JobQueue, answers: Answers) -> Reply:
    """GET /jobs/{id}/events: the events of its stream, replayed and followed."""
    found = await jobs.find(call.caller, call.params["job_id"])
    return await stream_events(replace(call, params={"stream_id": found.stream_id}), answers)


async def cancel_job(call: Call, jobs: JobQueue, answers: Answers) -> Reply:
    """POST /jobs/{id}/cancel: end it as cancelled, queued or running. Idempotent."""
    await call.json(answers.limits, optional=True)
    return json_reply((await jobs.cancel(call.caller, call.params["job_id"])).as_json())


def no_job() -> NotFound:
    """Return the error for an id that names no job of the caller's."""
    message = "No job has that id. It is the `job_id` in the answer to POST /jobs: 32 hex digits."
    return NotFound(message, code="job_not_found", param="job_id")


def _seconds(when: datetime | None) -> float | None:
    return None if when is None else round(when.timestamp(), 3)
