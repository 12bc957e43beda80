"""`Socket` and `SocketSession`: an accepted WebSocket, the messages of its client, and the streams that it shows.

Messages are read in order, one at a time. What may wait has a task of its own: a start and an input, for the engine; a
stop, for the log; each stream that is shown (subscriptions.py). So a stop, an ack and a disconnect take effect at once.
On the event loop; knows no handshake (websocket.py).
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

from streamserve.api.answers import Answers
from streamserve.api.call import admitted
from streamserve.api.conversations import Conversations, ids_of, with_history
from streamserve.api.interrupts import with_approvals
from streamserve.api.logs import get_logger
from streamserve.api.resume import gone, not_there
from streamserve.conf import SiteConfig
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
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Gone, StreamserveError
from streamserve.protocol.json_body import decode_json
from streamserve.protocol.requests import Turn
from streamserve.rows.receivers import note_refusal, telling_refusals
from streamserve.streams.store import answer_turn
from streamserve.streams.stream import Stream
from streamserve.web.auth import KnownCaller
from streamserve.web.permissions import has_lost_permission, permission_lost
from streamserve.web.subscriptions import SocketGone, Subscriptions

log = get_logger(__name__)

_IN_CONVERSATION = "That stream is in a conversation: send start with 'conversation' and the new question."
_WITHOUT_PERMISSION = ("ack", "ping", "pong")  # they start and read nothing
_MAY_WAIT = ("start", "input", "approve", "stop")
_ASKING = ("start", "input", "approve")
# Such messages, beside the starts that wait for a place: then the socket is not read until one ends.
_MAX_WAITING = 64
_LAST_STOPS_SECONDS = 2.0  # how long a stop may take that its client does not wait for


def _model_of(message: Mapping[str, Any]) -> str:
    """Return the model that a message's request names; "" for none."""
    request = message.get("request")
    model = request.get("model") if isinstance(request, Mapping) else None
    return model if isinstance(model, str) else ""


class Socket:
    """The way to one client: messages, pings while nothing else is sent, and one close, after which nothing is sent.

    A message is sent once there is room for it. Raises SocketGone where the client has left; the disconnect follows.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], Awaitable[None]]) -> None:
        self.is_closed = False
        self._send = send
        self._sent_at = time.monotonic()
        self._ping_seconds = math.inf
        self._pinging: asyncio.Task[None] | None = None

    async def send(self, value: Mapping[str, Any]) -> None:
        """Send a message."""
        if self.is_closed:
            raise SocketGone
        await self._send_raw({"type": "websocket.send", "text": json.dumps(value, ensure_ascii=False)})

    async def close(self, code: CloseCode) -> None:
        """Close. A second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            await self._send_raw({"type": "websocket.close", "code": int(code)})

    def keep_alive(self, seconds: float | None) -> None:
        """Send pings; of what the site and the streams want, the shortest silence counts. None and 0 want none."""
        if seconds and seconds < self._ping_seconds:
            self._ping_seconds = seconds
            self.end()
            ping = self._ping(seconds)
            self._pinging = asyncio.get_running_loop().create_task(ping, name="websocket ping", context=Context())

    def end(self) -> None:
        """Send no more pings."""
        if self._pinging is not None:
            self._pinging.cancel()

    async def _ping(self, seconds: float) -> None:
        """Send a ping whenever nothing was sent for `seconds`."""
        with suppress(SocketGone):
            while True:
                left = self._sent_at + seconds - time.monotonic()
                if left > 0:
                    await asyncio.sleep(left)
                else:
                    await self.send({"type": "ping"})

    async def _send_raw(self, message: Mapping[str, Any]) -> None:
        self._sent_at = time.monotonic()
        try:
            await self._send(message)
        except OSError:  # raised by uvicorn (ASGI 3, "Disconnected client")
            raise SocketGone from None


class SocketSession:
    """What one caller does over one socket: start, resume, ack, stop, input, approve, ping (docs/websocket.md).

    Holds what is shown, and what still starts. It never shows a caller another tenant's streams, and never waits for
    the engine while the next message could be read.
    """

    def __init__(
        self,
        socket: Socket,
        caller: KnownCaller,
        answers: Answers,
        settings: SiteConfig,
        conversations: Conversations | None = None,
    ) -> None:
        self._socket, self._caller, self._answers = socket, caller, answers
        self._conversations = conversations
        self._limits = settings.limits
        self._shown = Subscriptions(socket.send, self._leave)
        self._tasks: list[asyncio.Task[None]] = []  # of leaving
        self._waiting: dict[asyncio.Task[None], str] = {}  # messages that have a task, with their type
        self._num_starting = 0
        self._is_busy = False  # handling a message
        socket.keep_alive(settings.streams.ping_seconds)

    async def receive(self, frame: str | None) -> None:
        """Handle one message; None: a frame that is no text. A wrong message gets an error and keeps the socket."""
        if self._socket.is_closed:
            return  # the client sent it before our close frame arrived
        self._is_busy = True
        with suppress(SocketGone):
            if frame is None:
                await self._socket.close(CloseCode.NOT_TEXT)
            elif len(body := frame.encode("utf-8", "surrogatepass")) > self._limits.max_websocket_message_bytes:
                await self._socket.close(CloseCode.TOO_BIG)
            else:
                subject: dict[str, Any] = {}
                await self._report(self._handle(body, subject), subject)
        self._is_busy = False
        if self._shown.is_leaving:
            await self._leave()

    def begin_to_leave(self) -> None:
        """Refuse new streams, and close once no stream is shown."""
        self._shown.is_leaving = True
        self._spawn(self._leave())

    def lose_permission(self) -> None:
        """Send the error and close: a check has found that the permission is lost."""
        self._spawn(self._close_for_lost_permission())

    async def aclose(self) -> None:
        """End what waits and what is shown: the client has left. A stop that it has sent takes effect."""
        for task, kind in self._waiting.items():
            if kind != "stop":
                task.cancel()
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=_LAST_STOPS_SECONDS)
        for task in (*self._waiting, *self._tasks):
            task.cancel()
        self._socket.end()
        await self._shown.aclose()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task in an empty context, until the socket ends."""
        self._tasks.append(asyncio.get_running_loop().create_task(work, context=Context()))

    async def _leave(self) -> None:
        """Close, unless a stream is shown or a message is being handled; either calls this again when it ends."""
        if not (self._shown or self._waiting or self._is_busy):
            with suppress(SocketGone):
                await self._socket.close(CloseCode.GOING_DOWN)

    async def _close_for_lost_permission(self) -> None:
        with suppress(SocketGone):
            await self._socket.send(failure(permission_lost(), {}))
            await self._socket.close(CLOSES["rights_lost"])

    # Messages

    async def _report(self, work: Awaitable[None], subject: Mapping[str, Any]) -> None:
        """Handle a message, and answer its error."""
        try:
            await work
        except StreamserveError as error:
            await self._socket.send(failure(error, subject))
            if error.code in CLOSES:
                await self._socket.close(CLOSES[error.code])
        except SocketGone:
            raise
        except Exception:
            # The edge of a socket: the cause is logged, the client gets an internal error.
            log.exception("websocket_message_failed", **subject)
            await self._socket.send(failure(internal_error(), subject))

    async def _handle(self, body: bytes, subject: dict[str, Any]) -> None:
        """Decode one message and handle it. `subject` gets the fields that an error to it repeats."""
        values = decode_json(body, self._limits)
        kind = values.get("type")
        if not isinstance(kind, str) or kind not in FIELDS:
            raise BadRequest(f"'type' is one of {', '.join(FIELDS)}.", code="unknown_type", param="type")
        subject |= about(values)
        message, received_at = read(values, FIELDS[kind]), time.monotonic()
        # A socket may outlive its caller's key, account or login.
        if kind not in _WITHOUT_PERMISSION and await has_lost_permission(self._caller):
            if kind in _ASKING:
                note_refusal(permission_lost(), self._caller, "websocket", _model_of(values))
            raise permission_lost()
        if kind in _MAY_WAIT:
            message["arrival"] = admitted(received_at, {"x-request-start": str(message.get("sent_at", ""))})
        work = getattr(self, f"_on_{kind}")(message)
        if kind in _ASKING:
            work = self._asked(work, _model_of(values))
        if kind in _MAY_WAIT:
            await self._handle_beside(work, kind, dict(subject))
        else:
            await work

    async def _asked(self, work: Awaitable[None], model: str) -> None:
        """Start an answer; a refusal is told to the site's receivers."""
        with telling_refusals(self._caller, "websocket", model):
            await work

    async def _handle_beside(self, work: Coroutine[Any, Any, None], kind: str, subject: Mapping[str, Any]) -> None:
        """Handle a message in a task of its own, once there is room for another task."""

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
        if len(self._waiting) >= _MAX_WAITING + self._most_starts:
            await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)

    async def _on_start(self, message: Mapping[str, Any]) -> None:
        config = self._answers.config
        with self._place():
            body = required(message, "request")
            model = await self._answers.default_model(self._caller)
            asked = native.parse(body, config.limits, default_model=model, unseal=config.unseal, in_conversations=True)
            check_pace(asked.pace)
            asked, turn = await with_history(asked, self._caller, self._answers, self._conversations)
            request = self._answers.with_class(asked.generate, asked, self._caller, "websocket")
            await self._begin(replace(asked, generate=request), message, turn)

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
        turn = NextTurn(message, self._limits)
        with self._place(beside=stream_id):
            stream, pace = await self._own_stream(stream_id), self._shown.pace_of(stream_id)
            if self._conversations is not None and await self._conversations.turn_of(stream.id) is not None:
                raise BadRequest(_IN_CONVERSATION, code="in_conversation", param="id")
            turn.after(stream.request, "", stream.on_disconnect)
            await stream.stop(message.get("seen_seq"))
            if stream.terminal is None:
                raise EngineUnavailable("The server is shutting down.")
            answer = await answer_turn(self._answers.streams.log, stream.log_id)
            asked = turn.after(stream.request, answer, stream.on_disconnect)
            await self._begin(replace(asked, pace=pace) if asked.pace == SITES_OWN else asked, message)

    async def _on_approve(self, message: Mapping[str, Any]) -> None:
        """Continue an interrupted run with its user's answers."""
        stream_id, given = required(message, "id"), required(message, "approvals")
        with self._place(beside=stream_id):
            request = await with_approvals(self._caller, stream_id, given, self._answers)
            turn = None if self._conversations is None else await self._conversations.continuation(stream_id)
            await self._begin(native.NativeRequest(generate=request, pace=pace_of(message)), message, turn)

    async def _on_ping(self, message: Mapping[str, Any]) -> None:
        await self._socket.send({**message, "type": "pong"})

    async def _on_pong(self, message: Mapping[str, Any]) -> None:
        """Ignore the answer to our ping: the ping itself has kept the connection open."""

    # Streams

    async def _begin(self, asked: native.NativeRequest, message: Mapping[str, Any], turn: Turn | None = None) -> None:
        stream = await self._answers.start(
            self._caller,
            asked.generate,
            asked.on_disconnect,
            received_at=message["arrival"],
            begins_unloaded=True,
            turn=turn,
        )
        await self._socket.send(started(stream, message, ids_of(turn)))
        self._show(stream, 0, message, asked.pace)

    def _show(self, stream: Stream, after: int, message: Mapping[str, Any], pace: Pace) -> None:
        self._shown.show(self._answers.streams, stream, after, message.get("credit"), pace)
        self._socket.keep_alive(pace.keepalive_seconds)

    async def _own_stream(self, stream_id: str) -> Stream:
        """Return the stream. Raises NotFound unless it is the caller's, Gone if its events are no longer kept."""
        found = await self._answers.find(self._caller, stream_id=stream_id)
        if found.stream is None:
            raise gone()
        return found.stream

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
        if num_shown >= self._most_starts:
            raise BadRequest("This socket shows as many streams as it may. Open another.", code="too_many_on_socket")

    @property
    def _most_starts(self) -> int:
        """How many streams the socket may show or start: as many as its caller may have and have wait."""
        return self._limits.max_streams_per_principal + self._limits.max_queued_per_principal
