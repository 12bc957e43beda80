"""`Delivery`: what one reader of a stream is sent over HTTP, as the body of a response.

asyncio; framework-free. `run(send)` is for servers that take bytes, `async for` for frameworks that pull. A Delivery
must be run or closed: `close` is synchronous, and when it returns the engine knows that the reader has gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from streamserve.dialects.base import Encoder
from streamserve.streams.config import StreamConfig
from streamserve.streams.reader.channel import Channel, DirectChannel, PullChannel, nothing
from streamserve.streams.reader.reader import Reader
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream

_TRANSPORTS = {"text/event-stream": "sse", "text/plain": "text"}


class Flow(NamedTuple):
    """What a server offers besides `send`: how many bytes the reader's system has not taken; a channel that writes at
    once, usable after the first `send`.
    """

    num_untaken: Callable[[], int] = nothing
    channel: DirectChannel | None = None


NO_FLOW = Flow()


class Closing:
    """The end of a response's body, as every `Body` has it: `close`, and what is to be done then."""

    def __init__(self) -> None:
        self.is_closed = False
        self._on_close: list[Callable[[], None]] = []

    def on_close(self, call: Callable[[], None]) -> None:
        """Call `call` once when the body closes; at once if it has."""
        if self.is_closed:
            call()
        else:
            self._on_close.append(call)

    def close(self) -> None:
        """End. Idempotent and synchronous."""
        self.is_closed = True
        calls, self._on_close = self._on_close, []
        for call in calls:
            call()


class Delivery(Closing):
    """`first_bytes`, then the frames of every event after `after`, to the terminal one.

    `config` is the reader's own in place of the site's.
    `after` is the last seq the reader has: 0 is from the start; past the stream's last event raises Gone, one reader
    too many QuotaExceeded ("too_many_readers"). A reader that already has the terminal event: see `is_over` (answer
    204).
    """

    def __init__(
        self,
        streams: Streams,
        stream: Stream,
        encoder: Encoder,
        *,
        after: int = 0,
        watcher: bool = False,
        config: StreamConfig | None = None,
    ) -> None:
        super().__init__()
        content_type = encoder.content_type.partition(";")[0]
        self.reader = Reader(
            streams,
            stream,
            encoder,
            after=after,
            transport=_TRANSPORTS.get(content_type, content_type),
            is_watcher=watcher,
            takes_snapshots=encoder.takes_snapshots,
            config=config,
        )
        self.stream = stream
        self._encoder = encoder
        self._after = after
        self._has_begun = False
        self._channel: Channel | None = None

    @property
    def is_over(self) -> bool:
        """Whether the reader has everything, the terminal event included."""
        return self.reader.is_over or (self.stream.terminal is not None and self._after >= self.stream.last_seq)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the response must have, in ASGI form. Identity keeps GZipMiddleware away; there is no length."""
        return [
            (b"content-type", self._encoder.content_type.encode()),
            (b"cache-control", b"no-cache, no-transform"),
            (b"x-accel-buffering", b"no"),
            (b"content-encoding", b"identity"),
            (b"x-stream-id", self.stream.id.encode()),
            (b"streamserve-from", str(self._after + 1).encode()),
            (b"streamserve-reader", self.reader.id.encode()),
        ]

    async def run(self, send: Callable[[bytes], Awaitable[None]], flow: Flow = NO_FLOW) -> None:
        """Send everything; return after the terminal event. Cancel it to disconnect.

        Raises what kept the answer from being sent whole: the connection must break then, not end.
        """
        self._begin()
        try:
            await send(self._encoder.first_bytes)
            if flow.channel is not None and flow.channel.is_writable:
                self._channel = flow.channel
                self.reader.start(flow.channel)
                await flow.channel.wait_ended()
                return
            channel = self._channel = PullChannel(flow.num_untaken)
            self.reader.start(channel)
            while (frame := await channel.pull()) is not None:
                await send(frame)
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what `run` sends. The consumer closes it (`contextlib.aclosing`) or calls `close`."""
        self._begin()
        try:
            yield self._encoder.first_bytes
            channel = self._channel = PullChannel()
            self.reader.start(channel)
            while (frame := await channel.pull()) is not None:
                yield frame
        finally:
            self.close()

    def cut_off(self) -> bytes | None:
        """Close because the server waits no longer. Return the last frame, None if the stream cannot be continued."""
        can_leave = self._has_begun and self.stream.can_leave
        self.close()
        return self._encoder.going_away(self.reader.going_away()) if can_leave else None

    def break_off(self, error: Exception) -> None:
        """Close, and break the connection: `run` raises `error`."""
        if self._channel is not None:
            self._channel.end(error)
        self.close()

    def close(self) -> None:
        """Detach the reader, or give up one that never came. Idempotent and synchronous."""
        self.reader.close()
        if self._channel is not None:
            self._channel.end(None)
        super().close()

    def _begin(self) -> None:
        if self._has_begun:
            raise RuntimeError("a Delivery runs once")
        self._has_begun = True
        self.reader.attach()
