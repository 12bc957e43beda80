"""The hand-over: how an app passes a streaming response to the outer ASGI layer, and how that layer streams it.

    await respond(scope, receive, send, delivery)      plain ASGI, inside a StreamMiddleware or without it
    return Response(headers=hand_over(delivery))       any framework, inside a StreamMiddleware only

The inner app sends `HEADER: offer(delivery)` on an ordinary empty response. `Exchange`, the middleware's part of one
request, holds that response and streams the delivery when the app has returned. Ids are random, work once, and expire.
Event loop only. The process dict of offers is the one place where the two sides meet. (Idea: X-Accel-Redirect, GRIP.)
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any

from streamserve.api.call import Body
from streamserve.asgi.flow.transport import kernel_bytes
from streamserve.asgi.receiver import RECEIVER, Receiver
from streamserve.asgi.types import App, Message, Receive, Scope, Send
from streamserve.protocol.errors import StreamserveError
from streamserve.streams.reader.channel import nothing

logger = logging.getLogger("streamserve.asgi")

HEADER = "streamserve-handover"
# In the scope: a list of further headers of the response, whatever app makes it. Until it starts.
MORE_HEADERS = "streamserve.more_headers"

_HEADER = HEADER.encode()
# These headers of the inner response describe its empty body.
_DROPPED = frozenset({_HEADER, b"content-length", b"etag"})
_END: Message = {"type": "http.response.body", "body": b"", "more_body": False}
# A framework that takes longer from offer to response start has lost the response.
_EXPIRES_SECONDS = 30.0

_offers: dict[str, tuple[Body, asyncio.TimerHandle]] = {}

# The ids offered during one request. `Exchange.serve` sets it, and withdraws the offers that were not taken.
_offered: ContextVar[list[str] | None] = ContextVar("streamserve_offers", default=None)


def offer(delivery: Body, *, expires_seconds: float = _EXPIRES_SECONDS) -> str:
    """Keep `delivery` until its id is taken, and return the id."""
    offer_id = secrets.token_urlsafe(16)
    timer = asyncio.get_running_loop().call_later(expires_seconds, withdraw, offer_id)
    _offers[offer_id] = (delivery, timer)
    offered = _offered.get()
    if offered is not None:
        offered.append(offer_id)
    return offer_id


def take(offer_id: str) -> Body | None:
    """Return the delivery of that id, once. The caller must run or close it."""
    delivery, timer = _offers.pop(offer_id, (None, None))
    if timer is not None:
        timer.cancel()
    return delivery


def withdraw(offer_id: str) -> None:
    """Close the delivery of that id, unless it was taken."""
    delivery = take(offer_id)
    if delivery is not None:
        delivery.close()


def hand_over(delivery: Body) -> dict[str, str]:
    """Return the header of an empty response in whose place the StreamMiddleware streams `delivery`. Send it once."""
    return {HEADER: offer(delivery)}


async def respond(
    scope: Scope,
    receive: Receive,
    send: Send,
    delivery: Body,
    *,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Stream `delivery`, or pass it to the StreamMiddleware outside, which streams when the app has returned.

    Awaits `receive` for the client's disconnect, so the caller must not, also afterwards. The delivery is closed in
    every case.
    """
    start: Message = {"type": "http.response.start", "status": status, "headers": list(headers)}
    if not scope.get("streamserve"):
        await Exchange(scope, receive, send).respond(start, delivery)
        return
    start["headers"] += [(name.encode(), value.encode()) for name, value in hand_over(delivery).items()]
    await send(start)
    await send({"type": "http.response.body", "body": b""})


class DeliveryFailed(Exception):
    """The response is not whole. The server aborts the connection."""


class Exchange:
    """One HTTP request: what the inner app sees of it, what it hands over, and the stream that follows.

    Runs in the server's task for the request. A stream takes two child tasks, which are ended with it: one runs the
    delivery, the other, the `Receiver`'s, waits for `http.disconnect`.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_seconds: float = 0.0) -> None:
        self._scope, self._send = scope, send
        self._receiver = Receiver(receive)
        has_server_timeout = "streamserve.flow" in scope.get("extensions", {})
        self._stall_seconds = 0.0 if has_server_timeout else stall_seconds
        self._sending_since: float | None = None  # while the server does not take a frame
        self._start: Message | None = None
        self._delivery: Body | None = None

    async def serve(self, app: App) -> None:
        """Run the inner app, with the `Receiver` in its scope; when it has returned, stream what it handed over."""
        self._scope[RECEIVER] = self._receiver
        offered: list[str] = []
        token = _offered.set(offered)
        try:
            try:
                await app(self._scope, self._receiver.receive, self.send)
            finally:
                _offered.reset(token)
                for offer_id in _offers.keys() & offered:  # those that were not taken
                    withdraw(offer_id)
            if self._delivery is not None and self._start is not None and not self._receiver.has_left:
                await self._respond(self._start, self._delivery)
        finally:
            self._receiver.close()
            if self._delivery is not None:
                self._delivery.close()

    async def respond(self, start: Message, delivery: Body) -> None:
        """Stream `delivery` for an app that has no StreamMiddleware outside."""
        try:
            await self._respond(start, delivery)
        finally:
            self._receiver.close()
            delivery.close()

    async def send(self, message: Message) -> None:
        """Pass the inner response on. If it hands over, hold its start and drop its body."""
        if self._start is not None:
            return
        offer_id: bytes | None = None
        if message["type"] == "http.response.start":
            if more := self._scope.get(MORE_HEADERS):
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            headers = message.get("headers", ())
            offer_id = next((value for name, value in headers if name.lower() == _HEADER), None)
        if offer_id is None:
            await self._send(message)
            return
        self._start, self._delivery = message, take(bytes(offer_id).decode("latin-1"))
        if self._delivery is None:
            raise RuntimeError("the response hands over a delivery that was taken before, or has expired")

    async def _respond(self, start: Message, delivery: Body) -> None:
        """Send the inner response's headers (cookies, CORS, CSP, …) and the delivery's, which win; then stream it."""
        ours = delivery.headers
        dropped = _DROPPED.union(name for name, _ in ours)
        kept = [(name.lower(), value) for name, value in start.get("headers", ()) if name.lower() not in dropped]
        try:
            await self._send({**start, "headers": kept + ours})
            if self._scope["method"] != "HEAD":
                await self._stream(delivery)
            if not self._receiver.has_left:
                await self._send(_END)
        except OSError:  # ASGI 2.4: the client has left
            logger.debug("stream %s: the client left during a send", delivery.stream.id)

    async def _stream(self, delivery: Body) -> None:
        """Run the delivery until its end or the client's disconnect, whichever comes first.

        Raises what ended the delivery early, so that the server aborts the connection: a clean end, with a last chunk,
        would make half an answer look whole.
        """
        self._receiver.drop_body()
        send = self._send_watched if self._stall_seconds else Frames(self._send)
        running = asyncio.create_task(delivery.run(send, untaken_of(self._scope, self._send)), name="delivery")
        self._receiver.on_left(delivery.close)  # the engine is freed before anything else runs
        watching, last_frame = self._receiver.watching(), None
        try:
            is_stalled = await self._wait_first({running, watching})
            unread = watching.exception() if watching.done() and not running.done() else None
        except asyncio.CancelledError:  # uvicorn, for example, when its time to shut down is over
            last_frame = None if self._receiver.has_left else delivery.cut_off()
            raise
        finally:
            delivery.close()
            running.cancel()
            [result] = await asyncio.gather(running, return_exceptions=True)
            if last_frame is not None:
                await self._send_frame(last_frame)
                await self._send(_END)
        if is_stalled:
            logger.info("stream %s: a reader took nothing for %g s", delivery.stream.id, self._stall_seconds)
            raise DeliveryFailed(delivery.stream.id)
        if unread is not None:
            logger.info("stream %s: its request cannot be read any more: %s", delivery.stream.id, unread)
            raise DeliveryFailed(delivery.stream.id) from unread
        if isinstance(result, OSError):
            raise result
        if isinstance(result, StreamserveError):
            logger.info("stream %s: a reader is cut off: %s", delivery.stream.id, result.code)
            raise DeliveryFailed(delivery.stream.id) from result
        if isinstance(result, Exception):
            logger.error("stream %s: its delivery failed", delivery.stream.id, exc_info=result)
            raise DeliveryFailed(delivery.stream.id) from result

    async def _wait_first(self, tasks: set[asyncio.Task[None]]) -> bool:
        """Wait until one of `tasks` is done. Return whether the reader has taken nothing for `stall_seconds` before."""
        while True:
            done, _ = await asyncio.wait(
                tasks, timeout=self._stall_seconds / 4 or None, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return False
            since = self._sending_since
            if since is not None and time.monotonic() - since >= self._stall_seconds:
                return True

    def _send_frame(self, data: bytes) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_watched(self, data: bytes) -> None:
        self._sending_since = time.monotonic()
        await self._send_frame(data)
        self._sending_since = None


class Frames:
    """Sends the frames of a delivery, which are pieces of a response's body.

    `now` sends a frame and returns True if that needs no wait. It is FlowServer's, where no layer wraps its `send`.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.now: Callable[[bytes], bool] | None = getattr(send, "now", None)

    def __call__(self, data: bytes) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": data, "more_body": True})


def untaken_of(scope: Scope, send: Send) -> Callable[[], int]:
    """Return what counts the bytes that the reader's system has not taken; `nothing` where that is not known.

    They are what a transport holds, and what the kernel holds. FlowServer offers the count in the scope. uvicorn does
    not; its `send` is a method of the request, whose transport has the same numbers. Of any other server, and behind a
    middleware that wraps `send`, nothing is known: what was accepted counts as taken. Relies on, in uvicorn 0.54:
    `protocols/http/*_impl.py` RequestResponseCycle (`send`, `transport`). HTTP/1.1 only, so a transport carries one
    response at a time.
    """
    offered: Callable[[], int] | None = scope.get("extensions", {}).get("streamserve.flow", {}).get("num_untaken")
    if offered is not None:
        return offered
    cycle = getattr(send, "__self__", None)
    transport = getattr(cycle, "transport", None)
    if not type(cycle).__module__.startswith("uvicorn.") or not hasattr(transport, "get_write_buffer_size"):
        return nothing
    return lambda: _untaken_by(transport)


def _untaken_by(transport: Any) -> int:
    tcp = transport.get_extra_info("socket")
    return int(transport.get_write_buffer_size()) + (0 if tcp is None else kernel_bytes(tcp))
