"""`Hardened`: the `text/event-stream` responses of other code, corrected. `StreamMiddleware(app, harden=True)`.

A 200 of that type that is not handed over gets headers that keep proxies from buffering it, no length, first bytes at
once, a comment after silence (only between events), and a bound on the size of an event. When its client has left, its
app is ended, whether or not it awaits `receive`. Every other response passes unchanged.

`EventBounds`: where the events of a `text/event-stream` end, while its bytes come in pieces of any size. Pure.

asyncio; plain ASGI; runs in the server's task for the request, whose `Receiver` learns that the client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from dataclasses import dataclass

from streamserve.asgi.handover import HEADER
from streamserve.asgi.receiver import RECEIVER, Receiver
from streamserve.asgi.types import App, Message, Receive, Scope, Send
from streamserve.protocol.sse import FIRST_BYTES, KEEPALIVE

logger = logging.getLogger("streamserve.asgi")

# WHATWG HTML, 9.2.5: a line ends with CRLF, LF or CR; a blank line ends an event. A piece may end inside a CRLF.
_LINE_END = re.compile(rb"\r\n|\n|\r")
_ADDED = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
    (b"content-encoding", b"identity"),
)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A dropped send yields to the loop this often: an app that awaits nothing else would block it for ever.
_DROPS_A_YIELD = 100


class EventBounds:
    """Fed every byte of a stream. `size` is the number of bytes of the open event so far."""

    def __init__(self) -> None:
        self.size = 0
        self._is_line_empty = True
        self._ends_in_cr = False  # a following LF belongs to it
        self._has_bare_cr = False  # lines of this stream end in CR alone

    @property
    def is_between(self) -> bool:
        """Whether a comment may go here: no event is open, and the last line end is not a CR that may become a CRLF."""
        return self.size == 0 and (self._has_bare_cr or not self._ends_in_cr)

    def feed(self, data: bytes) -> int:
        """Take the next bytes; return the size so far of the largest event that any of them belongs to."""
        if not data:
            return self.size
        position = int(self._ends_in_cr and data.startswith(b"\n"))
        self._has_bare_cr |= self._ends_in_cr and not position
        largest = 0
        for end in _LINE_END.finditer(data, position):
            self._has_bare_cr |= end.group() == b"\r" and end.end() < len(data)
            is_blank = self._is_line_empty and end.start() == position
            self.size += end.end() - position
            largest = max(largest, self.size)
            self.size = 0 if is_blank else self.size
            self._is_line_empty = True
            position = end.end()
        self._is_line_empty = self._is_line_empty and position == len(data)
        self._ends_in_cr = data.endswith(b"\r")
        self.size += len(data) - position
        return max(largest, self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardening:
    """Seconds of silence before a comment; bytes of one event; seconds an app has to end after its client left."""

    keepalive_seconds: float = 15.0
    event_bytes: int = 1024 * 1024
    grace_seconds: float = 5.0


class EventTooLarge(RuntimeError):
    """The app sent an event over the bound. Raised when the app has ended, so that the server aborts the response."""


class Hardened:
    """Wraps an ASGI app. Only its event streams change."""

    def __init__(self, app: App, options: Hardening) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _Guard(scope, send, self._options).serve(self._app, receive)
        else:
            await self._app(scope, receive, send)


class _Guard:
    """One request and its response."""

    def __init__(self, scope: Scope, send: Send, options: Hardening) -> None:
        self._scope, self._send, self._options = scope, send, options
        self._receiver: Receiver = scope[RECEIVER]
        self._bounds = EventBounds()
        self._turn = asyncio.Lock()  # one message at a time: the app's, or a comment
        self._app_task = asyncio.current_task()
        self._num_cancels = 0 if self._app_task is None else self._app_task.cancelling()
        self._keeping_alive: asyncio.Task[None] | None = None
        self._is_guarding = self._is_encoded = self._has_sent = self._is_broken = False
        self._has_cancelled = False
        self._num_dropped = 0
        self._sent_at = 0.0

    async def serve(self, app: App, receive: Receive) -> None:
        """Run the app. A cancellation that this guard caused ends here."""
        try:
            await app(_uncompressed(self._scope), receive, self.send)
        except asyncio.CancelledError:
            if not self._has_cancelled:
                raise
        finally:
            self._stop_guarding()
            await self._absorb_cancel()
            if self._keeping_alive is not None:
                [result] = await asyncio.gather(self._keeping_alive, return_exceptions=True)
                if isinstance(result, Exception) and not isinstance(result, OSError):  # ASGI 2.4: the client has left
                    logger.error("the event stream of %s was not kept alive", self._scope["path"], exc_info=result)
        if self._is_broken:
            limit = f"{self._options.event_bytes:,} bytes"
            raise EventTooLarge(f"an event of {self._scope['path']} has more than {limit}")

    async def send(self, message: Message) -> None:
        """Send the app's message. A body message after the client left is dropped, because the app is being ended."""
        if message["type"] == "http.response.start" and self._is_event_stream(message):
            await self._begin(message)
        elif not self._is_guarding or message["type"] != "http.response.body":
            await self._send(message)
        elif self._receiver.has_left:
            await self._drop(message)
        else:
            await self._send_body(message)

    # The response

    def _is_event_stream(self, message: Message) -> bool:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        is_handed_over = HEADER.encode() in headers
        is_stream = message["status"] == 200 and self._scope["method"] != "HEAD"
        return kind == b"text/event-stream" and is_stream and not is_handed_over

    async def _begin(self, start: Message) -> None:
        given = [(name.lower(), value) for name, value in start["headers"] if name.lower() != b"content-length"]
        names = {name for name, _ in given}
        self._is_encoded = dict(given).get(b"content-encoding", b"identity").lower() != b"identity"
        self._is_guarding = True
        added = [(name, value) for name, value in _ADDED if name not in names]
        await self._send({**start, "headers": given + added})
        if not self._is_encoded:  # a comment inside compressed bytes would corrupt them
            await self._put(FIRST_BYTES)
            self._keeping_alive = asyncio.create_task(self._keep_alive(), name="event stream guard")
        self._receiver.on_left(self._leave)
        self._receiver.watching()

    async def _send_body(self, message: Message) -> None:
        try:
            async with self._turn:
                measured = message if self._is_encoded else self._measured(message)
                if measured is not None:
                    await self._send(measured)
                self._sent_at = time.monotonic()
                if not message.get("more_body", False):
                    self._stop_guarding()
        except asyncio.CancelledError:
            if not self._receiver.has_left:
                raise
            _cancel_at_next_await()

    def _measured(self, message: Message) -> Message | None:
        """Return the message, or None if it makes an event larger than allowed; then the app is ended."""
        body = bytes(message.get("body", b""))
        if not self._has_sent and body.startswith(_BYTE_ORDER_MARK):  # the first bytes were FIRST_BYTES
            body = body[len(_BYTE_ORDER_MARK) :]
        self._has_sent = self._has_sent or bool(body)
        if self._bounds.feed(body) > self._options.event_bytes:
            self._is_broken = True
            self._receiver.leave()
            return None
        return {**message, "body": body}

    async def _put(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_at = time.monotonic()

    async def _keep_alive(self) -> None:
        while True:
            silence_left = self._sent_at + self._options.keepalive_seconds - time.monotonic()
            if silence_left > 0:
                await asyncio.sleep(silence_left)
                continue
            async with self._turn:
                if self._bounds.is_between:
                    await self._put(KEEPALIVE)
                self._sent_at = time.monotonic()

    # The client's disconnect

    def _leave(self) -> None:
        is_told = self._receiver.is_told  # then the app gets time to end by itself
        asyncio.get_running_loop().call_later(self._options.grace_seconds if is_told else 0, self._cancel)

    async def _drop(self, message: Message) -> None:
        """Return without waiting, so that a cancel reaches the app and not this `send`; yield to the loop at times."""
        if not message.get("more_body", False):
            self._stop_guarding()
        self._num_dropped += 1
        if self._num_dropped % _DROPS_A_YIELD == 0:
            await asyncio.sleep(0)

    def _cancel(self) -> None:
        if self._is_guarding and not self._has_cancelled and self._app_task is not None:
            self._has_cancelled = True
            self._app_task.cancel()

    def _stop_guarding(self) -> None:
        self._is_guarding = False
        self._receiver.off_left(self._leave)
        if self._keeping_alive is not None:
            self._keeping_alive.cancel()

    async def _absorb_cancel(self) -> None:
        """End this guard's own cancellation here; re-raise a cancellation by the server."""
        if self._has_cancelled and self._app_task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            if self._app_task.uncancel() > self._num_cancels:
                raise asyncio.CancelledError


def _cancel_at_next_await() -> None:
    """Cancel this task at its next await: here the cancel would leave a generator at its `yield`, uncollected."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
        asyncio.get_running_loop().call_soon(task.cancel)


def _uncompressed(scope: Scope) -> Scope:
    """Return the scope; of a request for an event stream without `accept-encoding`, so that the app sends it plain."""
    headers = [(name.lower(), value) for name, value in scope["headers"]]
    if b"text/event-stream" not in dict(headers).get(b"accept", b""):
        return scope
    return {**scope, "headers": [(name, value) for name, value in headers if name != b"accept-encoding"]}
