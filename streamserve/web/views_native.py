"""The native routes: start, state, events, stop; and the chat page. Thin: parse, ask the stream, deliver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.urls import reverse

from streamserve.api import resume as reading_on
from streamserve.conf import get_settings
from streamserve.dialects import native
from streamserve.dialects.native import NativeRequest
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import Gone, NotFound
from streamserve.protocol.ids import parse_event_id
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.stream import Stream
from streamserve.web.access import CHAT_CALLERS, Access, json_response, non_atomic, query_of, read_json, route
from streamserve.web.auth import Principal
from streamserve.web.responses import stream_response
from streamserve.web.site import get_runtime, get_streams, start_loading

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_POST = Access(callers=CHAT_CALLERS, methods=("POST",))
_GET = Access(callers=CHAT_CALLERS)


@route(_POST)
async def start_stream(request: HttpRequest, principal: Principal) -> HttpResponseBase:
    """POST /streams: start an answer and stream it."""
    settings = get_settings()
    asked = native.parse(read_json(request), settings.limits, default_model=settings.default_model)
    return await _start(request, principal, asked)


@route(_GET)
async def new_stream(request: HttpRequest, principal: Principal) -> HttpResponseBase:
    """GET /streams/new?prompt=...: for a bare EventSource. With a Last-Event-ID it resumes and never starts anew."""
    event_id = request.headers.get("Last-Event-ID")
    if event_id:
        return await _resume_by_event_id(request, principal, event_id)
    settings = get_settings()
    return await _start(
        request, principal, native.parse_query(query_of(request), settings.limits, default_model=settings.default_model)
    )


async def _start(request: HttpRequest, principal: Principal, asked: NativeRequest) -> HttpResponseBase:
    runtime = get_runtime()
    stream = await runtime.start_stream(principal, asked.generate, on_disconnect=asked.on_disconnect)
    encoder = reading_on.encoder_for(asked.format, stream.log_id)
    return stream_response(request, Delivery(runtime.streams, stream, encoder))


@route(_GET)
async def stream_state(request: HttpRequest, principal: Principal, stream_id: str) -> HttpResponseBase:
    """GET /streams/{id}: what the stream is and how far it has come."""
    row = await _row(principal, stream_id)
    return json_response(_state_json(row, await get_streams().reach(stream_id)))


@route(_GET)
async def stream_events(request: HttpRequest, principal: Principal, stream_id: str) -> HttpResponseBase:
    """GET /streams/{id}/events: replay what the reader has not seen, and follow."""
    await _row(principal, stream_id)
    query = query_of(request)
    stream = await get_streams().reach(stream_id)
    if stream is None:
        return gone(request)
    return _resume(request, stream, asked_after(request, stream), query)


@route(_POST)
async def stop_stream(request: HttpRequest, principal: Principal, stream_id: str) -> HttpResponseBase:
    """POST /streams/{id}/stop {seen_seq}: end the answer where its reader has read to. Doing it twice is no mistake."""
    seen_seq = native.parse_stop(read_json(request, optional=True))
    await _row(principal, stream_id)
    stream = await get_streams().reach(stream_id)
    if stream is not None:
        await stream.stop(seen_seq)
    return json_response(_state_json(await _row(principal, stream_id), stream))


async def _row(principal: Principal, stream_id: str) -> StreamRow:
    """Return the row that `principal` may see; another tenant's is as unknown as one that never was."""
    row = await StreamRow.objects.for_principal(principal).filter(pk=stream_id).afirst()
    if row is None:
        raise NotFound("There is no stream of that id.", code="stream_not_found")
    return row


async def _resume_by_event_id(request: HttpRequest, principal: Principal, event_id: str) -> HttpResponseBase:
    parsed = parse_event_id(event_id)
    if parsed is None:
        return gone(request)
    row = await StreamRow.objects.for_principal(principal).filter(log_id=parsed[0]).afirst()
    stream = None if row is None else await get_streams().reach(row.pk)
    if stream is None:
        return gone(request)
    return _resume(request, stream, parsed[1], query_of(request))


def _resume(request: HttpRequest, stream: Stream, after: int | None, query: Mapping[str, str]) -> HttpResponseBase:
    try:
        delivery = reading_on.read_on(get_streams(), stream, after, query.get("format", "native"))
    except Gone:
        return gone(request)
    return HttpResponse(status=204) if delivery is None else stream_response(request, delivery)


def gone(request: HttpRequest) -> HttpResponse:
    """Say that those events are not kept. An EventSource reconnects for ever unless told 204."""
    if reading_on.is_event_source(request.headers.get("Accept", "")):
        return HttpResponse(status=204)
    raise reading_on.gone()


def asked_after(request: HttpRequest, stream: Stream) -> int | None:
    """Return the last event that the reader has, by `Last-Event-ID` or `after`; None if it is of another log."""
    return reading_on.place_in(stream, request.headers.get("Last-Event-ID"), query_of(request).get("after"))


def _state_json(row: StreamRow, stream: Stream | None) -> dict[str, Any]:
    """Return the state of a stream: live figures while it is in memory, else what its row says."""
    out = {
        "id": row.pk,
        "log_id": row.log_id,
        "model": row.model,
        "created": int(row.created_at.timestamp()),
        "state": "finished" if stream is None else stream.state,
        "finish_reason": row.finish_reason or None,
        "error_code": row.error_code or None,
        "last_seq": row.last_seq,
        "usage": {"prompt_tokens": row.prompt_tokens, "completion_tokens": row.completion_tokens},
        "resumable": stream is not None,
    }
    if stream is None and row.state == "running":
        out["error_code"] = "producer_lost"  # the process that made it is gone
    if stream is not None:
        summary = stream.summary()
        out |= {"finish_reason": summary.finish_reason, "error_code": summary.error_code}
        out |= {"last_seq": stream.last_seq, "usage": stream.usage.as_json()}
    if row.text:
        out["text"] = row.text
    return out


# -- the chat page ------------------------------------------------------------------------------------------------


@non_atomic
async def chat_page(request: HttpRequest, template_name: str = "streamserve/chat_page.html") -> HttpResponse:
    """The page. Put it behind a login, or not, as any view; the streams it starts check for themselves."""
    if hasattr(request, "scope"):  # under WSGI, beside an ASGI server that streams, nothing is to be loaded
        start_loading()
    context = await chat_context(request)
    response = await sync_to_async(render)(request, template_name, context)
    response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    response["Cache-Control"] = "private, no-store"
    return response


async def chat_context(request: HttpRequest) -> dict[str, Any]:
    """Return what the page's script needs to know."""
    user = await request.auser() if hasattr(request, "auser") else None
    name = user.get_username() if user is not None and user.is_authenticated else ""
    return {"streamserve": chat_config(name)}


def chat_config(signed_in_as: str) -> dict[str, Any]:
    """Return the addresses and models that the chat element is handed as data-* attributes."""
    settings = get_settings()
    return {
        "streams_url": reverse("streamserve:streams"),
        "ready_url": reverse("streamserve:readyz"),
        "websocket_url": "/ws/streams",
        "models": list(settings.models),
        "default_model": settings.default_model,
        "signed_in_as": signed_in_as,
        "keepalive_seconds": settings.streams.keepalive_seconds,
        "csrf_cookie": django_settings.CSRF_COOKIE_NAME,
    }
