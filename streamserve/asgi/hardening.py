"""`ReceiveTee`: `receive` for an app, while somebody else waits for its client to leave. asyncio; plain ASGI.

Two who await a server's `receive` at once are not allowed by ASGI: one of them would never hear that the client left.

`EventBounds`: where the events of a `text/event-stream` end, while its bytes come in pieces of any size. Pure.

WHATWG HTML, 9.2.5: a line ends with CRLF, LF or CR; a blank line ends an event. A piece may end inside a CRLF.

`Hardened`: other people's `text/event-stream` responses, made to behave. `StreamMiddleware(app, harden=True)`.

For a 200 of that type that is not handed over: the headers that keep proxies from holding it back, no length, first
bytes at once, a comment in silence (only between events), a bound for each event, and an end of the app when its client
has left, whether the app listens or not. Nothing else is touched. asyncio; runs in the server's task for the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import deque
from dataclasses import dataclass

from streamserve.asgi.handover import HEADER
from streamserve.asgi.types import App, Message, Receive, Scope, Send
from streamserve.protocol.sse import FIRST_BYTES, KEEPALIVE

# Messages of a body that the app does not read, which are kept for it. Then it alone hears.
_MAX_AHEAD = 16


class ReceiveTee:
    """One request's. `has_left`: the client; `is_heard`: the app is about to be told, or was."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._turn = asyncio.Lock()
        self._ahead: deque[Message] = deque()
        self._left = asyncio.Event()
        self._num_listening = 0
        self._is_told = False

    @property
    def has_left(self) -> bool:
        return self._left.is_set()

    @property
    def is_heard(self) -> bool:
        return self._is_told or self._num_listening > 0

    async def receive(self) -> Message:
        """Return the client's next message: what the app awaits."""
        self._num_listening += 1
        try:
            async with self._turn:
                message = self._ahead.popleft() if self._ahead else await self._hear()
        finally:
            self._num_listening -= 1
        self._is_told = message["type"] == "http.disconnect"
        return message

    def leave(self) -> None:
        """Be told, and tell the app, that the client has left, though it has not."""
        self._left.set()

    async def until_left(self) -> None:
        """Return when the client has left, whoever hears of it."""
        while not self._left.is_set():
            async with self._turn:
                if len(self._ahead) == _MAX_AHEAD:
                    break
                message = await self._hear()
                if message["type"] != "http.disconnect":
                    self._ahead.append(message)
        await self._left.wait()

    async def _hear(self) -> Message:
        """Return the server's next message; when `leave` is called meanwhile, that the client has left."""
        if not self._left.is_set():
            hearing, leaving = asyncio.create_task(_await(self._receive)), asyncio.create_task(self._left.wait())
            try:
                await asyncio.wait({hearing, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if hearing.done() and hearing.result()["type"] != "http.disconnect":
                    return hearing.result()
            finally:
                hearing.cancel()
                leaving.cancel()
                await asyncio.gather(hearing, leaving, return_exceptions=True)
            self._left.set()
        return {"type": "http.disconnect"}


async def _await(receive: Receive) -> Message:
    return await receive()


_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventBounds:
    """Fed every byte of a stream. `size`: how many bytes of the event that is open there are."""

    def __init__(self) -> None:
        self.size = 0
        self._is_line_empty = True
        self._ends_in_cr = False  # an LF that comes next belongs to it
        self._has_bare_cr = False  # lines of this stream end in CR alone

    @property
    def is_between(self) -> bool:
        """Whether a comment may be put here: no event is open, and no LF is missing of the CRLF that ended the last."""
        return self.size == 0 and (self._has_bare_cr or not self._ends_in_cr)

    def feed(self, data: bytes) -> int:
        """Take the next bytes; return the size of the largest event that any of them belongs to, as far as it came."""
        if not data:
            return self.size
        place = int(self._ends_in_cr and data.startswith(b"\n"))
        self._has_bare_cr |= self._ends_in_cr and not place
        largest = 0
        for end in _LINE_END.finditer(data, place):
            self._has_bare_cr |= end.group() == b"\r" and end.end() < len(data)
            is_blank = self._is_line_empty and end.start() == place
            self.size += end.end() - place
            largest = max(largest, self.size)
            self.size = 0 if is_blank else self.size
            self._is_line_empty = True
            place = end.end()
        self._is_line_empty = self._is_line_empty and place == len(data)
        self._ends_in_cr = data.endswith(b"\r")
        self.size += len(data) - place
        return max(largest, self.size)


logger = logging.getLogger("streamserve.asgi")

_ADDED = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
    (b"content-encoding", b"identity"),
)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DROPS_A_YIELD = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardening:
    """Seconds of silence before a comment; bytes of one event; seconds that an app has to end once its client left."""

    keepalive_seconds: float = 15.0
    event_bytes: int = 1024 * 1024
    grace_seconds: float = 5.0


class EventTooLarge(RuntimeError):
    """The app sent an event over the bound. Raised when the app has ended, so that the server cuts the response off."""


class Hardened:
    """Wraps an ASGI app."""

    def __init__(self, app: App, options: Hardening) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _Guard(scope, receive, send, self._options).serve(self._app)
        else:
            await self._app(scope, receive, send)


class _Guard:
    """One request, whatever its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, options: Hardening) -> None:
        self._scope, self._send, self._options = scope, send, options
        self._ears = ReceiveTee(receive)
        self._bounds = EventBounds()
        self._turn = asyncio.Lock()  # one message at a time: the app's, or a comment
        self._app_task = asyncio.current_task()
        self._num_cancels = 0 if self._app_task is None else self._app_task.cancelling()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_guarding = self._is_encoded = self._has_sent = self._is_broken = False
        self._has_cancelled = False
        self._num_dropped = 0
        self._sent_at = 0.0

    async def serve(self, app: App) -> None:
        """Run the app; a cancellation of ours ends here."""
        try:
            await app(_uncompressed(self._scope), self._ears.receive, self.send)
        except asyncio.CancelledError:
            if not self._has_cancelled:
                raise
        finally:
            self._stop_guarding()
            await self._take_back()
            for result in await asyncio.gather(*self._tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, OSError):  # ASGI 2.4: the client has left
                    logger.error("an event stream of %s was not kept alive", self._scope["path"], exc_info=result)
        if self._is_broken:
            limit = f"{self._options.event_bytes:,} bytes"
            raise EventTooLarge(f"an event of {self._scope['path']} has more than {limit}")

    async def send(self, message: Message) -> None:
        """Send the app's message, guarded or not. Once the client has left it is dropped: the app is to end."""
        if message["type"] == "http.response.start" and self._is_theirs(message):
            await self._begin(message)
        elif not self._is_guarding or message["type"] != "http.response.body":
            await self._send(message)
        elif self._ears.has_left:
            await self._drop(message)
        else:
            await self._send_body(message)

    # The response

    def _is_theirs(self, message: Message) -> bool:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        is_ours = HEADER.encode() in headers
        is_stream = message["status"] == 200 and self._scope["method"] != "HEAD"
        return kind == b"text/event-stream" and is_stream and not is_ours

    async def _begin(self, start: Message) -> None:
        given = [(name.lower(), value) for name, value in start["headers"] if name.lower() != b"content-length"]
        names = {name for name, _ in given}
        self._is_encoded = dict(given).get(b"content-encoding", b"identity").lower() != b"identity"
        self._is_guarding = True
        added = [(name, value) for name, value in _ADDED if name not in names]
        await self._send({**start, "headers": given + added})
        work = [self._watch()]
        if not self._is_encoded:  # into compressed bytes nothing can be put
            await self._put(FIRST_BYTES)
            work.append(self._keep_alive())
        self._tasks = [asyncio.create_task(one, name="event stream guard") for one in work]

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
            if not self._ears.has_left:
                raise
            _put_off()

    def _measured(self, message: Message) -> Message | None:
        """Return the message, or None if it makes an event larger than allowed: then the app is to end."""
        body = bytes(message.get("body", b""))
        if not self._has_sent and body.startswith(_BYTE_ORDER_MARK):  # ours were the first bytes
            body = body[len(_BYTE_ORDER_MARK) :]
        self._has_sent = self._has_sent or bool(body)
        if self._bounds.feed(body) > self._options.event_bytes:
            self._is_broken = True
            self._ears.leave()
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

    # The client's leaving

    async def _watch(self) -> None:
        await self._ears.until_left()
        if self._ears.is_heard:  # it knows, and may have reasons to take a moment
            asyncio.get_running_loop().call_later(self._options.grace_seconds, self._cancel)
        else:
            self._cancel()

    async def _drop(self, message: Message) -> None:
        """Return without waiting, so that the app's end finds it where it waits and not here; but let others run."""
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
        for task in self._tasks:
            task.cancel()

    async def _take_back(self) -> None:
        """Have our own cancellation end here; the server's goes on."""
        if self._has_cancelled and self._app_task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            if self._app_task.uncancel() > self._num_cancels:
                raise asyncio.CancelledError


def _put_off() -> None:
    """Cancel this task where it waits next: here a generator would be left at its `yield`, to the garbage collector."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
        asyncio.get_running_loop().call_soon(task.cancel)


def _uncompressed(scope: Scope) -> Scope:
    """Return the scope of a request for an event stream without what would have the app compress it."""
    headers = [(name.lower(), value) for name, value in scope["headers"]]
    if b"text/event-stream" not in dict(headers).get(b"accept", b""):
        return scope
    return {**scope, "headers": [(name, value) for name, value in headers if name != b"accept-encoding"]}
