"""`Hardened`: other people's `text/event-stream` responses, made to behave. `StreamMiddleware(app, harden=True)`.

For a 200 of that type that is not handed over: the headers that keep proxies from holding it back, no length, first
bytes at once, a comment in silence (only between events), a bound for each event, and an end of the app when its client
has left, whether the app listens or not. Nothing else is touched. asyncio; runs in the server's task for the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from streamserve.asgi.ears import Ears
from streamserve.asgi.event_stream import EventBounds
from streamserve.asgi.handover import HEADER
from streamserve.asgi.types import App, Message, Receive, Scope, Send
from streamserve.protocol.sse import FIRST_BYTES, KEEPALIVE

logger = logging.getLogger("streamserve.asgi")

_ADDED = ((b"cache-control", b"no-cache, no-transform"), (b"x-accel-buffering", b"no"), (b"content-encoding", b"identity"))
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DROPS_A_YIELD = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardening:
    """Seconds of silence before a comment; bytes of one event; seconds that an app has to end once its client left."""

    keepalive_seconds: float = 15.0
    event_bytes: int = 1024 * 1024
    grace_seconds: float = 5.0


class EventTooLarge(RuntimeError):
    """The app sent an event over the bound. Raised by its `send`; the response is cut off."""


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
        self._ears = Ears(receive)
        self._bounds = EventBounds()
        self._turn = asyncio.Lock()  # one message at a time: the app's, or a comment
        self._app_task = asyncio.current_task()
        self._num_cancels = 0 if self._app_task is None else self._app_task.cancelling()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_guarding = self._is_encoded = self._has_left = self._has_cancelled = False
        self._num_sending = self._num_dropped = 0
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
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._take_back()

    async def send(self, message: Message) -> None:
        """Send the app's message, guarded or not. Once the client has left it is dropped: the app is to end."""
        if message["type"] == "http.response.start" and self._is_theirs(message):
            await self._begin(message)
        elif not self._is_guarding or message["type"] != "http.response.body":
            await self._send(message)
        elif self._has_left:
            await self._drop()
        else:
            await self._send_body(message)

    # The response

    def _is_theirs(self, message: Message) -> bool:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        is_ours = HEADER.encode() in headers
        is_whole = message["status"] != 200 or self._scope["method"] == "HEAD"
        return kind == b"text/event-stream" and not is_ours and not is_whole

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
        self._num_sending += 1
        try:
            async with self._turn:
                if not self._is_encoded:
                    message = self._checked(message)
                await self._send(message)
                self._sent_at = time.monotonic()
                if not message.get("more_body", False):
                    self._stop_guarding()
        finally:
            self._num_sending -= 1
            if self._has_left and self._is_guarding:  # not before: a generator is closed where it waits, not where it yields
                asyncio.get_running_loop().call_soon(self._cancel)

    def _checked(self, message: Message) -> Message:
        body = bytes(message.get("body", b""))
        if not self._num_sent and body.startswith(_BYTE_ORDER_MARK):  # it stands at the very beginning, or it is text
            body = body[len(_BYTE_ORDER_MARK) :]
        return message

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
