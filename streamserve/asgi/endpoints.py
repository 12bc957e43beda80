"""The routes of the framework-free app: what each does, who may call it, in whose words it fails. Plain ASGI, asyncio.

The same addresses, bodies and answers as the Django side's (docs/api.md), without what needs a database: no stored
text, no other process's streams, no /metrics, no WebSocket.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from streamserve.api.readiness import readiness
from streamserve.api.resume import encoder_for, gone, is_event_source, place_in, read_on
from streamserve.asgi.callers import Caller
from streamserve.asgi.drain import is_going_down
from streamserve.asgi.request import Request
from streamserve.asgi.site import Service
from streamserve.dialects import native, openai_chat
from streamserve.dialects.native import NativeRequest
from streamserve.protocol.errors import ErrorBody, Gone, NotFound
from streamserve.protocol.ids import parse_event_id
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to one route. `caller` is somebody, but for routes that are open."""

    request: Request
    service: Service
    caller: Caller
    default_model: str
    stream_id: str = ""

    def find(self) -> Stream:
        """Return the stream of the address."""
        return self.service.find(self.caller, self.stream_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """An address. Callers are authenticated unless it `is_open`."""

    pattern: re.Pattern[str]
    endpoint: Callable[[Call], Awaitable[None]]
    methods: tuple[str, ...] = ("GET",)
    is_open: bool = False
    error_json: Callable[[ErrorBody], dict[str, Any]] = native.error_json


def find_route(path: str) -> tuple[Route, str]:
    """Return the route of a path and the stream id in it, "" if there is none."""
    for route in ROUTES:
        match = route.pattern.fullmatch(path)
        if match is not None:
            return route, match.groupdict().get("stream_id", "")
    raise AssertionError("the last route matches everything")


async def start_stream(call: Call) -> None:
    """POST /streams: start an answer and stream it."""
    body = await call.request.json()
    await _start(call, native.parse(body, call.service.limits, default_model=call.default_model))


async def new_stream(call: Call) -> None:
    """GET /streams/new?prompt=...: for a bare EventSource. With a Last-Event-ID it resumes and never starts anew."""
    query, event_id = call.request.query(), call.request.headers.get("last-event-id")
    if not event_id:
        await _start(call, native.parse_query(query, call.service.limits, default_model=call.default_model))
        return
    parsed = parse_event_id(event_id)
    stream = None if parsed is None else call.service.find_log(call.caller, parsed[0])
    if stream is None or parsed is None:
        await _say_gone(call, gone())
    else:
        await _read_on(call, stream, parsed[1], query)


async def _start(call: Call, asked: NativeRequest) -> None:
    stream = await call.service.start_stream(call.caller, asked.generate, asked.on_disconnect)
    encoder = encoder_for(asked.format, stream.log_id)
    await call.request.send_stream(Delivery(call.service.streams, stream, encoder))


async def stream_state(call: Call) -> None:
    """GET /streams/{id}: what the stream is and how far it has come."""
    await call.request.send_json(_state_json(call.find()))


async def stream_events(call: Call) -> None:
    """GET /streams/{id}/events: replay what the reader has not seen, and follow."""
    query = call.request.query()
    try:
        stream = call.find()
    except Gone as error:
        await _say_gone(call, error)
        return
    await _read_on(call, stream, place_in(stream, call.request.headers.get("last-event-id"), query.get("after")), query)


async def _read_on(call: Call, stream: Stream, after: int | None, query: dict[str, str]) -> None:
    try:
        delivery = read_on(call.service.streams, stream, after, query.get("format", "native"))
    except Gone as error:
        await _say_gone(call, error)
        return
    await (call.request.send_nothing(204) if delivery is None else call.request.send_stream(delivery))


async def _say_gone(call: Call, error: Gone) -> None:
    if not is_event_source(call.request.headers.get("accept", "")):
        raise error
    await call.request.send_nothing(204)


async def stop_stream(call: Call) -> None:
    """POST /streams/{id}/stop {seen_seq}: end the answer where its reader has read to. Twice is no mistake."""
    seen_seq = native.parse_stop(await call.request.json(optional=True))
    stream = call.find()
    await stream.stop(seen_seq)
    await call.request.send_json(_state_json(stream))


def _state_json(stream: Stream) -> dict[str, Any]:
    summary = stream.summary()
    return {
        "id": stream.id,
        "log_id": stream.log_id,
        "model": stream.model,
        "created": stream.created,
        "state": stream.state,
        "finish_reason": summary.finish_reason,
        "error_code": summary.error_code,
        "last_seq": stream.last_seq,
        "usage": stream.usage.as_json(),
        "resumable": True,
    }


async def chat_completions(call: Call) -> None:
    """POST /v1/chat/completions, streamed or whole. Closing the connection stops the answer."""
    body, service = await call.request.json(), call.service
    asked = openai_chat.parse(body, service.limits, default_model=call.default_model)
    stream = await service.start_stream(call.caller, asked.generate, "abort")
    if asked.stream:
        encoder = openai_chat.encoder_for(stream, asked)
        await call.request.send_stream(Delivery(service.streams, stream, encoder))
        return
    events = await call.request.unless_left(collect(service.streams, stream))
    whole = openai_chat.collect(events, **openai_chat.identity(stream, asked))
    await call.request.send_json(whole, headers={"x-stream-id": stream.id})


async def models(call: Call) -> None:
    """GET /v1/models: what may be asked for."""
    await call.request.send_json(openai_chat.models_json([one.describe() for one in call.service.clients.values()]))


async def livez(call: Call) -> None:
    """GET /livez: this process answers."""
    await call.request.send_json({"live": True})


async def readyz(call: Call) -> None:
    """GET /readyz: 200 while every model is ready, else 503, why, and how far loading has come. It starts loading."""
    call.service.start_loading()
    models = (one.describe() for one in call.service.clients.values())
    status, body = readiness(models, shows_messages=False, is_going_down=is_going_down(call.request.scope))
    await call.request.send_json(body, status=status)


async def unknown(call: Call) -> None:
    """Any other address."""
    raise NotFound("There is nothing at this address. See docs/api.md for the routes.", code="unknown_url")


_ID = "(?P<stream_id>[0-9a-f]{32})"
_READ, _ANY = ("GET", "HEAD"), ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def _route(pattern: str, endpoint: Callable[[Call], Awaitable[None]], *methods: str, **rest: Any) -> Route:
    return Route(pattern=re.compile(pattern), endpoint=endpoint, methods=methods or ("GET",), **rest)


ROUTES = (
    _route("/streams", start_stream, "POST"),
    _route("/streams/new", new_stream),
    _route(f"/streams/{_ID}", stream_state),
    _route(f"/streams/{_ID}/events", stream_events),
    _route(f"/streams/{_ID}/stop", stop_stream, "POST"),
    _route("/v1/chat/completions", chat_completions, "POST", error_json=openai_chat.error_json),
    _route("/v1/models", models, error_json=openai_chat.error_json),
    _route("/v1/.*", unknown, *_ANY, is_open=True, error_json=openai_chat.error_json),
    _route("/livez", livez, *_READ, is_open=True),
    _route("/readyz", readyz, *_READ, is_open=True),
    _route("(?s:.*)", unknown, *_ANY, is_open=True),
)
