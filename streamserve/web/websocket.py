"""`StreamConsumer`: the Channels consumer for `/ws/streams`. One instance per socket, on the event loop.

Messages are handled in order, one at a time. Streams are sent by tasks of their own (subscriptions.py), never inside
`receive`, so a stop and a disconnect take effect at once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from typing import Any

import structlog
from channels.consumer import AsyncConsumer
from channels.db import database_sync_to_async
from channels.exceptions import StopConsumer

from streamserve.api.call import with_class
from streamserve.api.resume import gone
from streamserve.api.routes import CHAT_CALLERS, Access
from streamserve.asgi.types import Receive, Scope, Send
from streamserve.conf import get_settings
from streamserve.dialects import native
from streamserve.dialects.fields import read, required
from streamserve.dialects.next_turn import NextTurn
from streamserve.dialects.websocket import CLOSES, FIELDS, CloseCode, about, failure, internal_error, started
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Gone, StreamserveError, Unauthorized
from streamserve.protocol.json_body import decode_json
from streamserve.streams.store import answer_text
from streamserve.streams.stream import Stream
from streamserve.web.access import check_access, check_handshake, headers_of
from streamserve.web.auth import authenticate
from streamserve.web.permissions import owners_without_permission
from streamserve.web.site import begin_to_drain, get_site
from streamserve.web.subscriptions import SocketGone, Subscriptions

log = structlog.get_logger("streamserve")

_WITHOUT_PERMISSION = ("ack", "ping", "pong")  # they start and read nothing


class StreamConsumer(AsyncConsumer):  # type: ignore[misc]  # channels ships no types
    """Takes start, resume, ack, stop, input, ping; sends started, event, error, farewell, pong (docs/api.md)."""

    access = Access(callers=CHAT_CALLERS)

    def __init__(self) -> None:
        self._shown = Subscriptions(self._send, self._leave)
        self._tasks: list[asyncio.Task[None]] = []
        self._on_drain: set[Callable[[], None]] = set()
        self._is_busy = False  # handling a message
        self._has_closed = False
        self._sent_at = time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one socket. When this returns, its reader is detached from every stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_drain.discard(self._begin_to_leave)
            for task in self._tasks:
                task.cancel()
            await self._shown.aclose()

    async def websocket_connect(self, message: Mapping[str, Any]) -> None:
        """Accept a caller with the scope "chat", from a page of this site or from no page."""
        headers = headers_of(self.scope)
        try:
            check_handshake(self.scope, headers)
            known = await authenticate(headers, self.scope.get("user"), self.scope.get("session"))
            self._principal = check_access(self.access, known)
        except StreamserveError:
            await self.send({"type": "websocket.close"})  # before accept: HTTP 403
            return
        await self.send({"type": "websocket.accept"})
        self._join_drain()
        seconds = get_settings().streams.ping_seconds
        if seconds:
            self._spawn(self._ping(seconds))

    async def websocket_receive(self, message: Mapping[str, Any]) -> None:
        """Handle one message. A wrong one gets an error, and the socket stays open."""
        if self._has_closed:
            return  # the client sent it before our close frame arrived
        self._is_busy = True
        frame, max_bytes = message.get("text"), get_settings().limits.max_websocket_message_bytes
        with suppress(SocketGone):
            if frame is None:
                await self._close(CloseCode.NOT_TEXT)
            elif len(body := frame.encode("utf-8", "surrogatepass")) > max_bytes:
                await self._close(CloseCode.TOO_BIG)
            else:
                await self._answer(body)
        self._is_busy = False
        if self._shown.is_leaving:
            await self._leave()

    def _join_drain(self) -> None:
        """Register `_begin_to_leave` with the server's drain, if the server has one (asgi/drain.py)."""
        drain = self.scope.get("extensions", {}).get("streamserve.flow", {}).get("drain")
        if drain is not None:
            drain.on_drain(begin_to_drain)
            self._on_drain = get_site().on_drain
            self._on_drain.add(self._begin_to_leave)
            if drain.is_draining:
                self._begin_to_leave()

    def _begin_to_leave(self) -> None:
        """Refuse new streams, and close once no stream is shown."""
        self._shown.is_leaving = True
        self._spawn(self._leave())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task in an empty context, until the socket ends."""
        self._tasks.append(asyncio.get_running_loop().create_task(work, context=Context()))

    async def websocket_disconnect(self, message: Mapping[str, Any]) -> None:
        """End the consumer: the client has left."""
        raise StopConsumer

    async def _answer(self, body: bytes) -> None:
        subject: dict[str, Any] = {}
        try:
            await self._handle(body, subject)
        except StreamserveError as error:
            await self._send(failure(error, subject))
            if error.code in CLOSES:
                await self._close(CLOSES[error.code])
        except SocketGone:
            raise
        except Exception:
            # The edge of a socket: the cause is logged, the client gets an internal error.
            log.exception("websocket_message_failed", **subject)
            await self._send(failure(internal_error(), subject))

    async def _handle(self, body: bytes, subject: dict[str, Any]) -> None:
        """Decode one message and handle it. `subject` gets the fields that an error to it repeats."""
        values = decode_json(body, get_settings().limits)
        kind = values.get("type")
        if not isinstance(kind, str) or kind not in FIELDS:
            raise BadRequest(f"'type' is one of {', '.join(FIELDS)}.", code="unknown_type", param="type")
        subject |= about(values)
        message = read(values, FIELDS[kind])
        if kind not in _WITHOUT_PERMISSION:
            await self._check_permission()
        await getattr(self, f"_on_{kind}")(message)

    ### Messages of the client

    async def _on_start(self, message: Mapping[str, Any]) -> None:
        self._check_room()
        settings = get_settings()
        body = required(message, "request")
        asked = native.parse(body, settings.limits, default_model=settings.default_model)
        request = with_class(asked.generate, asked.latency_class, self._principal, get_site(), "websocket")
        await self._begin(replace(asked, generate=request), message)

    async def _on_resume(self, message: Mapping[str, Any]) -> None:
        stream_id = required(message, "id")
        self._check_room(beside=stream_id)
        stream = await self._own_stream(stream_id)
        after = message.get("after", 0)
        if after > stream.last_seq:
            raise gone()
        self._shown.show(get_site().streams, stream, after, message.get("credit"))

    async def _on_ack(self, message: Mapping[str, Any]) -> None:
        self._shown.ack(required(message, "id"), required(message, "seq"))

    async def _on_stop(self, message: Mapping[str, Any]) -> None:
        stream_id = required(message, "id")
        with suppress(Gone):  # then there is nothing to stop
            stream = await self._own_stream(stream_id)
            await stream.stop(message.get("seen_seq"))

    async def _on_input(self, message: Mapping[str, Any]) -> None:
        """Stop the answer and continue its conversation. Every refusal comes before the stop."""
        stream_id = required(message, "id")
        turn = NextTurn(message, get_settings().limits)
        self._check_room(beside=stream_id)
        stream = await self._own_stream(stream_id)
        turn.after(stream.request, "", stream.on_disconnect)
        await stream.stop(message.get("seen_seq"))
        if stream.terminal is None:
            raise EngineUnavailable("The server is shutting down.")
        answer = await answer_text(get_site().log, stream.log_id)
        await self._begin(turn.after(stream.request, answer, stream.on_disconnect), message)

    async def _on_ping(self, message: Mapping[str, Any]) -> None:
        await self._send({**message, "type": "pong"})

    async def _on_pong(self, message: Mapping[str, Any]) -> None:
        """Ignore the answer to our ping: the ping itself has kept the connection open."""

    async def _begin(self, asked: native.NativeRequest, message: Mapping[str, Any]) -> None:
        stream = await get_site().start(self._principal, asked.generate, asked.on_disconnect)
        await self._send(started(stream, message))
        self._shown.show(get_site().streams, stream, 0, message.get("credit"))

    ### Checks

    async def _own_stream(self, stream_id: str) -> Stream:
        """Return the stream. Raises NotFound unless it is the caller's, Gone if its events are no longer kept."""
        found = await get_site().find(self._principal, stream_id=stream_id)
        if found.stream is None:
            raise gone()
        return found.stream

    async def _check_permission(self) -> None:
        """Raise Unauthorized if the key or account is no longer active: a socket may outlive both."""
        owners = {self._principal.owner}
        if await database_sync_to_async(owners_without_permission)(owners):
            raise Unauthorized("Your key or account is no longer active.", code="rights_lost")

    def _check_room(self, beside: str = "") -> None:
        """Raise for one stream too many, and for any while the server shuts down. `beside`: the stream it replaces."""
        if self._shown.is_leaving:
            raise EngineUnavailable("The server is restarting. Connect again.", retry_after=1)
        num_shown = len(self._shown) - (beside in self._shown)
        if num_shown >= get_settings().limits.max_streams_per_principal:
            raise BadRequest("This socket shows as many streams as it may. Open another.", code="too_many_on_socket")

    ### Messages to the client

    async def _ping(self, seconds: float) -> None:
        """Send a ping whenever nothing was sent for `seconds`."""
        with suppress(SocketGone):
            while True:
                left = self._sent_at + seconds - time.monotonic()
                if left > 0:
                    await asyncio.sleep(left)
                else:
                    await self._send({"type": "ping"})

    async def _send(self, value: Mapping[str, Any]) -> None:
        """Send a message once there is room for it. Raises SocketGone; the disconnect follows."""
        if self._has_closed:
            raise SocketGone
        await self._send_raw({"type": "websocket.send", "text": json.dumps(value, ensure_ascii=False)})

    async def _leave(self) -> None:
        """Close, unless a stream is shown or a message is being handled; either calls this again when it ends."""
        if not self._shown and not self._is_busy:
            with suppress(SocketGone):
                await self._close(CloseCode.GOING_DOWN)

    async def _close(self, code: CloseCode) -> None:
        if not self._has_closed:
            self._has_closed = True
            await self._send_raw({"type": "websocket.close", "code": int(code)})

    async def _send_raw(self, message: Mapping[str, Any]) -> None:
        self._sent_at = time.monotonic()
        try:
            await self.send(message)
        except OSError:  # raised by uvicorn (ASGI 3, "Disconnected client")
            raise SocketGone from None


async def deny_unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a handshake at an unknown path with 404, if the server can (ASGI's "WebSocket Denial Response").

    Otherwise the socket is accepted and closed with 4404, which a page can read; a close before that is a 403.
    """
    await receive()
    if "websocket.http.response" in scope.get("extensions", {}):
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        await send({"type": "websocket.http.response.start", "status": 404, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": b"There is no WebSocket at this address.\n"})
        return
    await send({"type": "websocket.accept"})
    reason = "There is no WebSocket at this address."
    await send({"type": "websocket.close", "code": int(CloseCode.UNKNOWN_PATH), "reason": reason})
