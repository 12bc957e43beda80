"""`StreamConsumer`: the Channels consumer for `/ws/streams`. One instance per socket, on the event loop.

Messages are read in order, one at a time. What may wait has a task of its own: a start and an input, for the engine; a
stop, for the log; each stream that is shown (subscriptions.py). So a stop, an ack and a disconnect take effect at once.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import replace
from typing import Any

from channels.consumer import AsyncConsumer
from channels.exceptions import StopConsumer
from django.core.handlers.asgi import get_script_prefix as script_prefix_of
from django.urls import NoReverseMatch, get_script_prefix, reverse

from streamserve.api.call import admitted
from streamserve.api.logs import get_logger
from streamserve.api.resume import gone, not_there
from streamserve.api.routes import CHAT_CALLERS, Access
from streamserve.asgi.types import App, Receive, Scope, Send
from streamserve.conf import get_settings
from streamserve.dialects import native
from streamserve.dialects.fields import read, required
from streamserve.dialects.pace import SITES_OWN, Pace, pace_of
from streamserve.dialects.websocket import (
    CLOSES,
    FIELDS,
    CloseCode,
    NextTurn,
    about,
    check_pace,
    failure,
    internal_error,
    started,
)
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Gone, NotFound, Refused, StreamserveError
from streamserve.protocol.json_body import decode_json
from streamserve.streams.store import answer_turn
from streamserve.streams.stream import Stream
from streamserve.web.access import check_access, check_handshake, headers_of
from streamserve.web.auth import authenticate, cookie_headers
from streamserve.web.permissions import PermissionChecks, has_lost_permission, permission_lost
from streamserve.web.sealed import unseal
from streamserve.web.site import begin_to_drain, get_site
from streamserve.web.subscriptions import SocketGone, Subscriptions

log = get_logger(__name__)

_WITHOUT_PERMISSION = ("ack", "ping", "pong")  # they start and read nothing
_MAY_WAIT = ("start", "input", "stop")
# Of those, beside the starts that wait for a place: then the socket is not read until one ends.
_MAX_WAITING = 64
_LAST_STOPS_SECONDS = 2.0  # how long a stop may take that its client does not wait for


class StreamConsumer(AsyncConsumer):  # type: ignore[misc]  # channels ships no types
    """Takes start, resume, ack, stop, input, ping; sends started, event, error, farewell, pong (docs/api.md)."""

    access = Access(callers=CHAT_CALLERS)

    def __init__(self) -> None:
        self._shown = Subscriptions(self._send, self._leave)
        self._tasks: list[asyncio.Task[None]] = []
        self._on_drain: set[Callable[[], None]] = set()
        self._permissions: PermissionChecks | None = None  # that hold this socket
        self._is_busy = False  # handling a message
        self._waiting: dict[asyncio.Task[None], str] = {}  # messages that have a task, with their type
        self._num_starting = 0
        self._has_closed = False
        self._sent_at = time.monotonic()
        self._ping_seconds = math.inf
        self._pinging: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one socket. When this returns, its reader is detached from every stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_drain.discard(self._begin_to_leave)
            if self._permissions is not None:
                self._permissions.release(self)
            await self._end_waiting()
            for task in self._tasks:
                task.cancel()
            await self._shown.aclose()

    async def websocket_connect(self, message: Mapping[str, Any]) -> None:
        """Accept a caller with the scope "chat", from a page of this site or from no page."""
        headers = headers_of(self.scope)
        try:
            check_handshake(self.scope, headers)
            address = (self.scope.get("client") or ("",))[0]
            user, session = self.scope.get("user"), self.scope.get("session")
            known = await authenticate(headers, user, session, address=address, wrong_keys=get_site().wrong_keys)
            self._principal = check_access(self.access, known)
        except Refused as refused:  # not now, as while the database is away
            await _deny(self.scope, self.send, refused)
            return
        except StreamserveError:
            await self.send({"type": "websocket.close"})  # before accept: HTTP 403
            return
        await self.send({"type": "websocket.accept", "headers": cookie_headers(self._principal)})
        self._permissions = get_site().permissions
        self._permissions.hold(self, self._principal, StreamConsumer._lose_permission)
        self._join_drain()
        self._keep_alive(get_settings().streams.ping_seconds)

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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task in an empty context, until the socket ends."""
        self._tasks.append(asyncio.get_running_loop().create_task(work, context=Context()))
        return self._tasks[-1]

    async def websocket_disconnect(self, message: Mapping[str, Any]) -> None:
        """End the consumer: the client has left."""
        raise StopConsumer

    async def _end_waiting(self) -> None:
        """Cancel what would begin an answer for a client that has left; a stop that it has sent takes effect."""
        for task, kind in self._waiting.items():
            if kind != "stop":
                task.cancel()
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=_LAST_STOPS_SECONDS)
        for task in self._waiting:
            task.cancel()

    async def _answer(self, body: bytes) -> None:
        subject: dict[str, Any] = {}
        await self._report(self._handle(body, subject), subject)

    async def _report(self, work: Awaitable[None], subject: Mapping[str, Any]) -> None:
        """Handle a message, and answer its error."""
        try:
            await work
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
        message, received_at = read(values, FIELDS[kind]), time.monotonic()
        if kind not in _WITHOUT_PERMISSION:
            await self._check_permission()
        if kind in _MAY_WAIT:
            message["arrival"] = admitted(received_at, {"x-request-start": str(message.get("sent_at", ""))})
        work = getattr(self, f"_on_{kind}")(message)
        if kind in _MAY_WAIT:
            await self._handle_beside(work, kind, dict(subject))
        else:
            await work

    async def _handle_beside(self, work: Coroutine[Any, Any, None], kind: str, subject: Mapping[str, Any]) -> None:
        """Handle a message in a task of its own, once there is room for one more."""

        async def run() -> None:
            try:
                with suppress(SocketGone):
                    await self._report(work, subject)
            finally:
                del self._waiting[task]
            if self._shown.is_leaving:
                await self._leave()

        task = asyncio.get_running_loop().create_task(run(), name=f"websocket {kind}", context=Context())
        self._waiting[task] = kind
        if len(self._waiting) >= _MAX_WAITING + _most_starts():
            await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)

    ### Messages of the client

    async def _on_start(self, message: Mapping[str, Any]) -> None:
        settings = get_settings()
        with self._place():
            body = required(message, "request")
            asked = native.parse(body, settings.limits, default_model=settings.default_model, unseal=unseal)
            check_pace(asked.pace)
            answers = get_site().answers
            request = answers.with_class(asked.generate, asked.latency_class, self._principal, "websocket")
            await self._begin(replace(asked, generate=request), message)

    async def _on_resume(self, message: Mapping[str, Any]) -> None:
        stream_id = required(message, "id")
        self._check_room(beside=stream_id)
        stream = await self._own_stream(stream_id)
        after = message.get("after", 0)
        if after > stream.last_seq:
            raise not_there(stream, after)
        self._show(stream, after, message, pace_of(message))

    async def _on_ack(self, message: Mapping[str, Any]) -> None:
        is_away = message.get("away", False)
        self._shown.ack(required(message, "id"), required(message, "seq"), is_away=is_away)

    async def _on_stop(self, message: Mapping[str, Any]) -> None:
        stream_id = required(message, "id")
        with suppress(Gone):  # then there is nothing to stop
            stream = await self._own_stream(stream_id)
            await stream.stop(message.get("seen_seq"))

    async def _on_input(self, message: Mapping[str, Any]) -> None:
        """Stop the answer and continue its conversation. Every refusal comes before the stop."""
        stream_id = required(message, "id")
        turn = NextTurn(message, get_settings().limits)
        with self._place(beside=stream_id):
            stream, pace = await self._own_stream(stream_id), self._shown.pace_of(stream_id)
            turn.after(stream.request, "", stream.on_disconnect)
            await stream.stop(message.get("seen_seq"))
            if stream.terminal is None:
                raise EngineUnavailable("The server is shutting down.")
            answer = await answer_turn(get_site().log, stream.log_id)
            asked = turn.after(stream.request, answer, stream.on_disconnect)
            await self._begin(replace(asked, pace=pace) if asked.pace == SITES_OWN else asked, message)

    async def _on_ping(self, message: Mapping[str, Any]) -> None:
        await self._send({**message, "type": "pong"})

    async def _on_pong(self, message: Mapping[str, Any]) -> None:
        """Ignore the answer to our ping: the ping itself has kept the connection open."""

    async def _begin(self, asked: native.NativeRequest, message: Mapping[str, Any]) -> None:
        stream = await get_site().answers.start(
            self._principal,
            asked.generate,
            asked.on_disconnect,
            received_at=message["arrival"],
            begins_unloaded=True,
        )
        await self._send(started(stream, message))
        self._show(stream, 0, message, asked.pace)

    def _show(self, stream: Stream, after: int, message: Mapping[str, Any], pace: Pace) -> None:
        self._shown.show(get_site().streams, stream, after, message.get("credit"), pace)
        self._keep_alive(pace.keepalive_seconds)

    ### Checks

    async def _own_stream(self, stream_id: str) -> Stream:
        """Return the stream. Raises NotFound unless it is the caller's, Gone if its events are no longer kept."""
        found = await get_site().answers.find(self._principal, stream_id=stream_id)
        if found.stream is None:
            raise gone()
        return found.stream

    async def _check_permission(self) -> None:
        """Raise Unauthorized if the key, account or login is no longer active: a socket may outlive them."""
        if await has_lost_permission(self._principal):
            raise permission_lost()

    def _lose_permission(self) -> None:
        """Send the error and close: a check has found that the permission is lost."""
        self._spawn(self._close_for_lost_permission())

    async def _close_for_lost_permission(self) -> None:
        with suppress(SocketGone):
            await self._send(failure(permission_lost(), {}))
            await self._close(CLOSES["rights_lost"])

    @contextmanager
    def _place(self, beside: str = "") -> Iterator[None]:
        """Check that there is room for a stream, and hold its place while it starts."""
        self._check_room(beside)
        self._num_starting += 1
        try:
            yield
        finally:
            self._num_starting -= 1

    def _check_room(self, beside: str = "") -> None:
        """Raise for one stream too many, and for any while the server shuts down. `beside`: the stream it replaces."""
        if self._shown.is_leaving:
            raise EngineUnavailable("The server is restarting. Connect again.", retry_after=1)
        num_shown = len(self._shown) + self._num_starting - (beside in self._shown)
        if num_shown >= _most_starts():
            raise BadRequest("This socket shows as many streams as it may. Open another.", code="too_many_on_socket")

    ### Messages to the client

    def _keep_alive(self, seconds: float | None) -> None:
        """Send pings; of what the site and the streams want, the shortest silence counts. None and 0 want none."""
        if seconds and seconds < self._ping_seconds:
            self._ping_seconds = seconds
            if self._pinging is not None:
                self._pinging.cancel()
            self._pinging = self._spawn(self._ping(seconds))

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
        if not (self._shown or self._waiting or self._is_busy):
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


def _most_starts() -> int:
    """Return how many streams a socket may show or start: as many as one caller may have and have wait."""
    limits = get_settings().limits
    return limits.max_streams_per_principal + limits.max_queued_per_principal


class SocketRouter:
    """An ASGI app: our WebSocket at its path, which follows the prefix of the site's urls.py; `others` elsewhere."""

    def __init__(self, ours: App, others: App) -> None:
        self._ours, self._others = ours, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compare the path as Django does: without FORCE_SCRIPT_NAME, or the root path, in front."""
        path = scope["path"].removeprefix(script_prefix_of(scope)).lstrip("/")
        app = self._ours if f"/{path}" == socket_path() else self._others
        await app(scope, receive, send)


def socket_path() -> str:
    """Return the path of our WebSocket, beside the HTTP routes: "/ws/streams", or "/ai/ws/streams" under "ai/"."""
    return f"{path_of('streams').removesuffix('streams')}ws/streams"


def path_of(name: str) -> str:
    """Return the path of a route by its name, without the script name; "/<name>" where urls.py does not include us."""
    try:
        return "/" + reverse(f"streamserve:{name}").removeprefix(get_script_prefix())
    except NoReverseMatch:
        return f"/{name}"


async def deny_unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a handshake at an unknown path: 404 if the server can (ASGI's "WebSocket Denial Response"), else 403."""
    await receive()
    await _deny(scope, send, NotFound("There is no WebSocket at this address."))


async def _deny(scope: Scope, send: Send, error: StreamserveError) -> None:
    """Refuse a handshake with the error's status, where the server can; else it is a 403."""
    if "websocket.http.response" in scope.get("extensions", {}):
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        if isinstance(error, Refused):
            headers.append((b"retry-after", str(error.retry_after).encode()))
        await send({"type": "websocket.http.response.start", "status": error.http_status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": f"{error.message}\n".encode()})
        return
    await send({"type": "websocket.close"})  # before accept: HTTP 403
