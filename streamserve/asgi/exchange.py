"""`Exchange`: one HTTP request: what the inner app sees of it, what it handed over, and the stream that follows.

Runs in the server's task for the request. While a stream is sent, two child tasks are owned here: one runs the
delivery, one watches for `http.disconnect`; both are ended before `serve` returns.
"""

from __future__ import annotations

import asyncio
import logging

from streamserve.api.call import Body
from streamserve.asgi import handover
from streamserve.asgi.types import App, Message, Receive, Scope, Send
from streamserve.streams.reader.channel import nothing
from streamserve.streams.reader.delivery import Flow

logger = logging.getLogger("streamserve.asgi")

_HEADER = handover.HEADER.encode()
# Of the inner response's headers, these describe its empty body.
_DROPPED = frozenset({_HEADER, b"content-length", b"etag"})
_END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class DeliveryFailed(Exception):
    """The response is not whole. The server breaks the connection."""


class Exchange:
    """`serve` gives `receive` and `send` to the inner app, and does all that in the right order."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._start: Message | None = None
        self._delivery: Body | None = None
        self._has_left = False

    async def serve(self, app: App) -> None:
        """Let the inner app answer; when it has returned, stream what it handed over."""
        try:
            await self._ask(app)
            if self._delivery is not None and self._start is not None and not self._has_left:
                await self._answer(self._start, self._delivery)
        finally:
            if self._delivery is not None:
                self._delivery.close()

    async def respond(self, start: Message, delivery: Body) -> None:
        """Stream `delivery` for an app that has no StreamMiddleware outside."""
        try:
            await self._answer(start, delivery)
        finally:
            delivery.close()

    async def _ask(self, app: App) -> None:
        made: list[str] = []
        token = handover.made_here.set(made)
        try:
            await app(self._scope, self.receive, self.send)
        finally:
            handover.made_here.reset(token)
            for offer_id in made:
                handover.withdraw(offer_id)

    async def receive(self) -> Message:
        """Pass the client's next message on, and remember that it left: some servers say so only once."""
        message = await self._receive()
        self._has_left = self._has_left or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """Pass the inner response on, unless it hands over: then hold its start and swallow its body."""
        if self._start is not None:
            return
        offer_id = _offer_id(message)
        if offer_id is None:
            await self._send(message)
            return
        self._start, self._delivery = message, handover.take(offer_id)
        if self._delivery is None:
            raise RuntimeError("the response hands over a delivery that was taken before, or has expired")

    async def _answer(self, start: Message, delivery: Body) -> None:
        try:
            await self._send({**start, "headers": merge(start.get("headers", ()), delivery.headers)})
            if self._scope["method"] != "HEAD":
                await self._stream(delivery)
            if not self._has_left:
                await self._send(_END)
        except OSError:  # ASGI 2.4: the client has left
            logger.debug("stream %s: the client left while it was sent to", delivery.stream.id)

    async def _stream(self, delivery: Body) -> None:
        """Run the delivery and watch the client; whichever ends first ends the other."""
        running = asyncio.create_task(self._run(delivery), name="delivery")
        watching = asyncio.create_task(self._watch(delivery), name="delivery watch")
        last_word: bytes | None = None
        try:
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # uvicorn and others, when they go down and have waited long enough
            last_word = None if self._has_left else delivery.cut_off()
            raise
        finally:
            delivery.close()
            running.cancel()
            watching.cancel()
            results = await asyncio.gather(running, watching, return_exceptions=True)
            if last_word is not None:
                await self._send_frame(last_word)
                await self._send(_END)
        self._judge(delivery, results[0])

    async def _run(self, delivery: Body) -> None:
        """Run it with what FlowServer offers: its channel only where no middleware stands between it and this one."""
        offered = self._scope.get("extensions", {}).get("streamserve.flow", {})
        channel = offered.get("channel")
        is_ours = channel is not None and channel.send is self._send
        flow = Flow(offered.get("num_untaken", nothing), channel if is_ours else None)
        await delivery.run(self._send_frame, flow)

    async def _watch(self, delivery: Body) -> None:
        """Wait for the client to leave; the engine knows before anything else runs."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        delivery.close()

    async def _send_frame(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _judge(self, delivery: Body, result: BaseException | None) -> None:
        """Raise what ended the delivery early: the server then breaks the connection. A clean end, with a last chunk,
        would make half an answer look whole.
        """
        if isinstance(result, OSError):
            raise result
        if isinstance(result, Exception):
            logger.error("stream %s: its delivery failed", delivery.stream.id, exc_info=result)
            raise DeliveryFailed(delivery.stream.id) from result


def merge(inner: list[tuple[bytes, bytes]], ours: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the inner response's headers (cookies, CORS, CSP, …) and ours; ours win, its length goes."""
    names = _DROPPED.union(name for name, _ in ours)
    return [(name.lower(), value) for name, value in inner if name.lower() not in names] + ours


def _offer_id(message: Message) -> str | None:
    if message["type"] != "http.response.start":
        return None
    for name, value in message.get("headers", ()):
        if name.lower() == _HEADER:
            return bytes(value).decode("latin-1")
    return None
