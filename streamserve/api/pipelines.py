"""`/pipelines/{name}`: a run as JSON or as a stream. asyncio; framework-free.

A pipeline is in the site's clients, beside the models, so `POST /streams`, the WebSocket and `/v1` serve it by its name
as well. These routes take `input` and answer in JSON unless the caller wants a stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.api.idempotency import once_of
from streamserve.api.native import PROMPT_IN_URL
from streamserve.api.resume import encoder_for, gone_reply, head_of_new, resume, stream_of_event
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.dialects import native
from streamserve.dialects.fold import Answer
from streamserve.dialects.pace import PACE
from streamserve.dialects.query import query_values
from streamserve.protocol.errors import Forbidden, NotFound
from streamserve.protocol.requests import Once
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect

_EVENT_STREAM = "text/event-stream"


async def pipelines(call: Call, answers: Answers) -> Reply:
    """GET /pipelines: names, descriptions and models of those that the caller may use."""
    seen = await answers.clients_of(call.caller)
    shown = [client.as_json() for client in seen.values() if isinstance(client, PipelineClient)]
    for one in shown:
        one["model"] = one["model"] if one["model"] in seen else None
    return json_reply({"pipelines": shown})


async def post_run(call: Call, answers: Answers) -> Reply:
    """POST /pipelines/{name}: `input`, `messages` or `prompt`, and the fields of POST /streams.

    The answer is JSON; with `"stream": true` or `Accept: text/event-stream` it is a stream.
    """
    name = await _known(call, answers)
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
    name = await _known(call, answers)
    query, event_id = call.query(), call.headers.get("last-event-id")
    pace = {name: query.pop(name) for name in PACE if name in query}
    if event_id:
        stream, after = await stream_of_event(call, answers, event_id)
        return gone_reply(call) if stream is None else resume(call, answers, stream, after, pace)
    if not answers.config.takes_prompt_in_url:
        raise Forbidden(PROMPT_IN_URL.replace("/streams,", f"/pipelines/{name},"), code="prompt_in_url_off")
    wants_stream = _EVENT_STREAM in call.headers.get("accept", "")
    body = {**query_values(pace), "model": name, "input": query}
    return await _start(call, answers, body, None, wants_stream=wants_stream)


async def _start(
    call: Call, answers: Answers, body: Mapping[str, Any], once: Once | None, *, wants_stream: bool
) -> Reply:
    asked = native.parse(body, answers.limits, default_model=await answers.default_model(call.caller))
    if call.is_head:
        return head_of_new(asked.format) if wants_stream else json_reply({})
    on_disconnect = asked.on_disconnect if wants_stream or "on_disconnect" in body else "abort"
    request = answers.with_class(asked.generate, asked, call.caller, "pipelines")
    stream = await answers.begin(call, request, on_disconnect, once=once)
    if wants_stream:
        return Reply(body=Delivery(answers.streams, stream, encoder_for(asked.format, stream), pace=asked.pace))
    events = await call.wait(collect(answers.streams, stream))
    whole = native.run_json(Answer.of(events), stream_id=stream.id, pipeline=stream.model, created=stream.created)
    return json_reply(whole, headers={"X-Stream-Id": stream.id})


async def _known(call: Call, answers: Answers) -> str:
    """Return the pipeline's name. Raises NotFound."""
    name, pipelines = call.params["name"], await answers.pipelines_of(call.caller)
    if name not in pipelines:
        raise no_pipeline(name, pipelines, "name")
    return name


def no_pipeline(name: str, pipelines: Collection[str], param: str) -> NotFound:
    """Return the error for a name that no pipeline of `pipelines` has, those that the caller may use."""
    known = f"Known: {', '.join(pipelines)}." if pipelines else "There is none that you may use: see docs/pipelines.md."
    return NotFound(f"There is no pipeline {name[:64]!r} here. {known}", code="pipeline_not_found", param=param)
