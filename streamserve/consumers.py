"""One Channels consumer for `/ws/streams`: it reads, relays and stops. Generation never runs inside `receive`.

Each stream it shows is relayed by a task of its own, so "stop" and a disconnect are seen at once. Tokens come from the
log, never over the channel layer (which drops silently past 100 messages). One instance a socket, on the event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing
from contextvars import Context
from typing import Any

import structlog
from channels.consumer import AsyncConsumer
from channels.db import database_sync_to_async
from channels.exceptions import StopConsumer
from django.conf import settings as django_settings
from django.http.request import split_domain_port, validate_host

from streamserve.auth import Principal, authenticate, check_same_origin
from streamserve.conf import get_settings
from streamserve.dialects import native
from streamserve.dialects.fields import Table, any_object, integer, read, required, text
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import BadRequest, Forbidden, Gone, NotFound, StreamserveError, Unauthorized, to_body
from streamserve.protocol.json_body import decode_json
from streamserve.rights import owners_without_rights
from streamserve.routes import CHAT_CALLERS, Access, check_access
from streamserve.runtime import get_runtime, get_streams
from streamserve.streams.follow import follow
from streamserve.streams.stream import Stream

log = structlog.get_logger("streamserve")

TOO_BIG, NOT_TEXT = 1009, 1003
CLOSE_CODES = {"rights_lost": 4401, "too_many_on_socket": 4429}  # errors that end the socket too
MAX_SEQ = 2**53

FIELDS: Mapping[str, Table] = {
    "start": {"type": text(1, 16), "request": any_object, "ref": text(1, 64)},
    "stop": {"type": text(1, 16), "id": text(32, 32), "seen_seq": integer(0, MAX_SEQ)},
    "resume": {"type": text(1, 16), "id": text(32, 32), "after": integer(0, MAX_SEQ)},
}


class StreamConsumer(AsyncConsumer):  # type: ignore[misc]  # channels ships no types
    """start, stop, resume in; started, event, error out (docs/api.md)."""

    access = Access(callers=CHAT_CALLERS, methods=("WEBSOCKET",))

    async def websocket_connect(self, message: Mapping[str, Any]) -> None:
        """Accept a caller who may chat, from our own pages or from no page."""
        self._relays: dict[str, asyncio.Task[None]] = {}
        headers = _headers(self.scope)
        try:
            _check_handshake(self.scope, headers)
            principal = await authenticate(headers, self.scope.get("user"), self.scope.get("session"))
            check_access(self.access, principal)
        except StreamserveError:
            await self.send({"type": "websocket.close"})  # before accept: HTTP 403
            return
        assert principal is not None
        self._principal: Principal = principal
        await self.send({"type": "websocket.accept"})

    async def websocket_receive(self, message: Mapping[str, Any]) -> None:
        """Do what one message asks; what is wrong with it is answered, not punished."""
        frame = message.get("text")
        if frame is None:
            await self._close(NOT_TEXT)
            return
        body = frame.encode("utf-8", "surrogatepass")
        if len(body) > get_settings().limits.max_websocket_message_bytes:
            await self._close(TOO_BIG)
            return
        about: dict[str, Any] = {}
        try:
            await self._handle(body, about)
        except StreamserveError as error:
            await self._send({"type": "error", **about, **native.error_json(to_body(error))})
            if error.code in CLOSE_CODES:
                await self._close(CLOSE_CODES[error.code])
        except Exception:
            # The edge of a socket: the cause is logged, the client learns that it was not its fault.
            log.exception("websocket_message_failed", **about)
            await self._send({"type": "error", **about, **native.error_json(to_body(_internal()))})

    async def websocket_disconnect(self, message: Mapping[str, Any]) -> None:
        """The reader has left: end the relays, which counts it out of its streams."""
        relays = list(self._relays.values())
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        raise StopConsumer

    async def _handle(self, body: bytes, about: dict[str, Any]) -> None:
        """Read one message and act on it. `about` is filled with what an error answer should refer to."""
        values = decode_json(body, get_settings().limits)
        kind = values.get("type")
        if not isinstance(kind, str) or kind not in FIELDS:
            raise BadRequest(f"'type' is one of {', '.join(FIELDS)}.", code="unknown_type", param="type")
        about |= {name: values[name] for name in ("ref", "id") if _is_short_text(values.get(name))}
        checked = read(values, FIELDS[kind])
        await self._check_rights()
        if kind == "start":
            await self._start(checked)
        elif kind == "stop":
            await self._stop(checked)
        else:
            await self._resume(checked)

    async def _start(self, message: Mapping[str, Any]) -> None:
        await self._check_room()
        settings = get_settings()
        body = required(message, "request")
        asked = native.parse(body, settings.limits, default_model=settings.default_model)
        stream = await get_runtime().start_stream(self._principal, asked.generate, on_disconnect=asked.on_disconnect)
        await self._send({"type": "started", "id": stream.id, "log_id": stream.log_id, "ref": message.get("ref")})
        self._relay(stream, 0)

    async def _resume(self, message: Mapping[str, Any]) -> None:
        await self._check_room()
        stream = await self._own_stream(required(message, "id"))
        after = message.get("after", 0)
        if stream is None or after > stream.last_seq:
            raise Gone("These events are no longer kept. Ask the question again.")
        self._relay(stream, after)

    async def _stop(self, message: Mapping[str, Any]) -> None:
        stream = await self._own_stream(required(message, "id"))
        if stream is not None:
            await stream.stop(message.get("seen_seq"))

    async def _own_stream(self, stream_id: str) -> Stream | None:
        """Return the stream, None if its events are gone. Raises NotFound unless it is the caller's."""
        if not await StreamRow.objects.for_principal(self._principal).filter(pk=stream_id).aexists():
            raise NotFound("There is no stream of that id.", code="stream_not_found")
        return await get_streams().reach(stream_id)

    def _relay(self, stream: Stream, after: int) -> None:
        """Show `stream` from `after` on; a relay of the same stream that runs already is replaced."""
        before = self._relays.pop(stream.id, None)
        if before is not None:
            before.cancel()
        relay = asyncio.get_running_loop().create_task(self._forward(stream, after), context=Context())
        self._relays[stream.id] = relay

    async def _forward(self, stream: Stream, after: int) -> None:
        """Send the events of one stream, as far as the socket takes them."""
        try:
            async with aclosing(follow(get_streams(), stream, after)) as events:
                async for logged in events:
                    await self._send(native.websocket_message(stream.id, stream.log_id, logged))
        except StreamserveError as error:
            await self._send({"type": "error", "id": stream.id, **native.error_json(to_body(error))})
        except Exception:
            log.exception("websocket_relay_failed", stream_id=stream.id)
            await self._send({"type": "error", "id": stream.id, **native.error_json(to_body(_internal()))})
        finally:
            if self._relays.get(stream.id) is asyncio.current_task():
                del self._relays[stream.id]

    async def _check_rights(self) -> None:
        """A socket may outlive a key or an account: look again before each thing it asks for."""
        owners = {self._principal.owner}
        if await database_sync_to_async(owners_without_rights)(owners):
            raise Unauthorized("Your key or account is no longer active.", code="rights_lost")

    async def _check_room(self) -> None:
        if len(self._relays) >= get_settings().limits.max_streams_per_principal:
            raise BadRequest("This socket shows as many streams as it may. Open another.", code="too_many_on_socket")

    async def _send(self, value: Mapping[str, Any]) -> None:
        await self.send({"type": "websocket.send", "text": json.dumps(value, ensure_ascii=False)})

    async def _close(self, code: int) -> None:
        await self.send({"type": "websocket.close", "code": code})


def _headers(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the handshake's headers by lower-case name. One sent twice is joined, and then matches nothing."""
    out: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        out[name] = f"{out[name]},{value}" if name in out else value
    return out


def _check_handshake(scope: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """Check Host as Django does for HTTP; with cookies, insist on an Origin of ours."""
    host = headers.get("host", "")
    allowed = django_settings.ALLOWED_HOSTS or ([".localhost", "127.0.0.1", "[::1]"] if django_settings.DEBUG else [])
    if not validate_host(split_domain_port(host)[0], allowed):
        raise Forbidden("This host is not in ALLOWED_HOSTS.")
    if "authorization" in headers or "x-api-key" in headers:
        return
    if "cookie" in headers and "origin" not in headers:
        raise Forbidden("A handshake with cookies needs an Origin.", code="cross_origin")
    check_same_origin(headers, scheme=_page_scheme(scope, headers), host=host)


def _page_scheme(scope: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Return the scheme of the pages that this socket belongs to; behind a proxy with TLS, as Django is told of it."""
    if django_settings.SECURE_PROXY_SSL_HEADER:
        name, secure = django_settings.SECURE_PROXY_SSL_HEADER
        told = headers.get(name.removeprefix("HTTP_").replace("_", "-").lower())
        if told is not None:
            return "https" if told.partition(",")[0].strip() == secure else "http"
    return {"ws": "http", "wss": "https"}.get(scope.get("scheme", "ws"), "http")


def _is_short_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 64


def _internal() -> StreamserveError:
    return StreamserveError("The server failed on this message. Its log has the cause.")
