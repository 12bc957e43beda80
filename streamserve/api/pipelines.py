"""`/pipelines/{name}`: a run as JSON or as a stream. asyncio; framework-free.

A pipeline is in the site's clients, beside the models, so `POST /streams`, the WebSocket and `/v1` serve it by its name
as well. These routes take `input` and answer in JSON unless the caller wants a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamserve.api.call import Call, Reply, Site, json_reply, with_class
from streamserve.api.idempotency import once_of
from streamserve.api.native import PROMPT_IN_URL
from streamserve.api.resume import encoder_for, gone_reply, resume
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.dialects import native
from streamserve.dialects.base import run_json
from streamserve.protocol.errors import Forbidden, NotFound
from streamserve.protocol.ids import parse_event_id
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.store import Once

_EVENT_STREAM = "text/event-stream"


async def pipelines(call: Call, site: Site) -> Reply:
    """GET /pipelines: names, descriptions and models."""
    found = [client for client in site.clients.values() if isinstance(client, PipelineClient)]
    return json_reply({"pipelines": [client.as_json() for client in found]})


async def run(call: Call, site: Site) -> Reply:
    """Start a run, or resume one that a reader has lost."""
    return await (_get_run(call, site) if call.method == "GET" else _post_run(call, site))


async def _post_run(call: Call, site: Site) -> Reply:
    """POST /pipelines/{name}: `input`, `messages` or `prompt`, and the fields of POST /streams.

    The answer is JSON; with `"stream": true` or `Accept: text/event-stream` it is a stream.
    """
    name = _known(call, site)
    body = await call.json(site.limits)
    once = once_of(call, f"pipelines/{name}", body)
    wants_stream = native.read_flag(body, "stream", default=_EVENT_STREAM in call.headers.get("accept", ""))
    rest = {key: value for key, value in body.items() if key != "stream"}
    return await _start(call, site, {**rest, "model": name}, once, wants_stream=wants_stream)


async def _get_run(call: Call, site: Site) -> Reply:
    """GET /pipelines/{name}?question=...: the query is the `input`. For a bare EventSource, and for a link.

    With a Last-Event-ID it resumes, and never starts another run.
    """
    name = _known(call, site)
    event_id = call.headers.get("last-event-id")
    if event_id:
        return await _resume(call, site, event_id)
    if not site.takes_prompt_in_url:
        raise Forbidden(PROMPT_IN_URL.replace("/streams,", f"/pipelines/{name},"), code="prompt_in_url_off")
    wants_stream = _EVENT_STREAM in call.headers.get("accept", "")
    return await _start(call, site, {"model": name, "input": dict(call.query())}, None, wants_stream=wants_stream)


async def _start(call: Call, site: Site, body: Mapping[str, Any], once: Once | None, *, wants_stream: bool) -> Reply:
    asked = native.parse(body, site.limits, default_model=site.default_model)
    on_disconnect = asked.on_disconnect if wants_stream or "on_disconnect" in body else "abort"
    request = with_class(asked.generate, asked.latency_class, call.caller, site, "pipelines")
    stream = await site.start(call.caller, request, on_disconnect, received_at=call.received_at, once=once)
    if wants_stream:
        return Reply(body=Delivery(site.streams, stream, encoder_for(asked.format, stream)))
    events = await call.wait(collect(site.streams, stream))
    whole = run_json(events, stream_id=stream.id, pipeline=stream.model, created=stream.created)
    return json_reply(whole, headers={"X-Stream-Id": stream.id})


async def _resume(call: Call, site: Site, event_id: str) -> Reply:
    parsed = parse_event_id(event_id)
    if parsed is None:
        return gone_reply(call)
    log_id, after = parsed
    try:
        found = await site.find(call.caller, log_id=log_id)
    except NotFound:
        return gone_reply(call)
    return gone_reply(call) if found.stream is None else resume(call, site, found.stream, after, {})


def _known(call: Call, site: Site) -> str:
    """Return the pipeline's name. Raises NotFound."""
    name = call.params["name"]
    if not isinstance(site.clients.get(name), PipelineClient):
        names = [one for one, client in site.clients.items() if isinstance(client, PipelineClient)]
        known = f"Known: {', '.join(names)}." if names else "The site has none: see docs/pipelines.md."
        raise NotFound(f"There is no pipeline {name[:64]!r} here. {known}", code="pipeline_not_found", param="name")
    return name
