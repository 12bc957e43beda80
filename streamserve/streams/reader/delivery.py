"""`Delivery`: what one reader of a stream is sent over HTTP, as a response's body. `JoinedDelivery`: several streams.

asyncio; framework-free. `run(send)` is for servers that take bytes, `async for` for frameworks that pull. A Delivery
must be run or closed: `close` is synchronous, and when it returns the engine knows that the reader has gone.

Joined streams are sent each frame as it comes. Each stream has a reader of its own, so parks, limits and places are
counted for each. The response cannot be resumed as a whole; each of its streams can, by its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing

from streamserve.dialects.encoder import Encoder
from streamserve.dialects.pace import SITES_OWN, Pace
from streamserve.streams.reader.channel import Channel, nothing
from streamserve.streams.reader.reader import Reader
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream

_TRANSPORTS = {"text/event-stream": "sse", "text/plain": "text"}


def stream_headers(content_type: str, stream_ids: str) -> list[tuple[bytes, bytes]]:
    """Return what every streamed response has, in ASGI form. Identity keeps GZipMiddleware away; there is no length."""
    return [
        (b"content-type", content_type.encode()),
        (b"cache-control", b"no-cache, no-transform"),
        (b"x-accel-buffering", b"no"),
        (b"content-encoding", b"identity"),
        *([(b"x-stream-id", stream_ids.encode())] if stream_ids else []),
    ]


class Closing:
    """The end of a response's body, as every `Body` has it: `close`, and what is to be done then."""

    is_closed = False
    _on_close: tuple[Callable[[], None], ...] = ()

    def on_close(self, call: Callable[[], None]) -> None:
        """Call `call` once when the body closes; at once if it has."""
        if self.is_closed:
            call()
        else:
            self._on_close += (call,)

    def close(self) -> None:
        """End. Idempotent and synchronous."""
        self.is_closed = True
        calls, self._on_close = self._on_close, ()
        for call in calls:
            call()


class Delivery(Closing):
    """`first_bytes`, then the frames of every event after `after`, to the terminal event.

    `pace`: how often the reader wants frames.
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
        pace: Pace = SITES_OWN,
    ) -> None:
        content_type = encoder.content_type.partition(";")[0]
        self.reader = Reader(
            streams,
            stream,
            encoder,
            after=after,
            transport=_TRANSPORTS.get(content_type, content_type),
            is_watcher=watcher,
            takes_snapshots=encoder.takes_snapshots,
            pace=pace,
        )
        self.stream = stream
        self._encoder = encoder
        self._after = after
        self._channel: Channel | None = None

    @property
    def is_over(self) -> bool:
        """Whether the reader has everything, the terminal event included."""
        return self.reader.is_over or (self.stream.terminal is not None and self._after >= self.stream.last_seq)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the response must have, in ASGI form."""
        return [
            *stream_headers(self._encoder.content_type, self.stream.id),
            (b"streamserve-from", str(self._after + 1).encode()),
            (b"streamserve-reader", self.reader.id.encode()),
        ]

    async def run(self, send: Callable[[bytes], Awaitable[None]], num_untaken: Callable[[], int] = nothing) -> None:
        """Send everything; return after the terminal event. Cancel it to disconnect.

        `send.now`, where `send` has that, sends a frame and returns True if that needs no wait. `num_untaken` returns
        how many bytes of what `send` has accepted the reader's system has not taken. Raises what kept the answer from
        being sent whole: the connection must break then, not end.
        """
        self.reader.attach()
        try:
            await send(self._encoder.first_bytes)
            channel = self._channel = Channel(num_untaken, getattr(send, "now", None))
            self.reader.start(channel)
            while (frame := await channel.pull()) is not None:
                await send(frame)
            if num_untaken is not nothing and not num_untaken() and not self.reader.is_watcher:
                self.stream.readers.seen_seq = self.reader.sent_seq
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what `run` sends. The consumer closes it (`contextlib.aclosing`) or calls `close`."""
        self.reader.attach()
        try:
            yield self._encoder.first_bytes
            channel = self._channel = Channel()
            self.reader.start(channel)
            while (frame := await channel.pull()) is not None:
                yield frame
        finally:
            self.close()

    def cut_off(self) -> bytes | None:
        """Close because the server waits no longer. Return the last frame, None if the stream cannot be continued."""
        can_leave = self.reader.has_begun and self.stream.can_leave
        self.reader.dismiss()
        self.close()
        return self._encoder.going_away(self.reader.going_away()) if can_leave else None

    def break_off(self, error: Exception) -> None:
        """Close, and break the connection: `run` raises `error`."""
        if self._channel is not None:
            self._channel.end(error)
        self.reader.dismiss()
        self.close()

    def close(self) -> None:
        """Detach the reader, or give up a reader that never came. Idempotent and synchronous."""
        self.reader.close()
        if self._channel is not None:
            self._channel.end(None)
        super().close()


class JoinedDelivery(Closing):
    """`first_bytes` once, the frames of every stream from its start, and when all have ended `last_bytes`.

    See `Delivery`.
    """

    def __init__(
        self,
        streams: Streams,
        parts: Sequence[tuple[Stream, Encoder]],
        last_bytes: Callable[[], bytes],
        *,
        pace: Pace = SITES_OWN,
    ) -> None:
        self.stream = parts[0][0]
        self._ids = [stream.id for stream, _ in parts]
        self._encoder = parts[0][1]
        self._readers = [
            Reader(streams, stream, encoder, after=0, transport="sse", pace=pace) for stream, encoder in parts
        ]
        self._channels: list[Channel] = []
        self._last_bytes = last_bytes

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, in ASGI form. `X-Stream-Id` has the ids of all streams, in the prompts' order."""
        return stream_headers(self._encoder.content_type, ", ".join(self._ids))

    async def run(self, send: Callable[[bytes], Awaitable[None]], num_untaken: Callable[[], int] = nothing) -> None:
        """Send everything; return after the last terminal event. Cancel it to disconnect."""
        async with aclosing(self._frames(num_untaken)) as frames:
            async for frame in frames:
                await send(frame)

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what `run` sends."""
        return self._frames()

    async def _frames(self, num_untaken: Callable[[], int] = nothing) -> AsyncGenerator[bytes, None]:
        for reader in self._readers:
            reader.attach()
        pulls: set[asyncio.Task[bytes | None]] = set()
        try:
            yield self._encoder.first_bytes
            by_task: dict[asyncio.Task[bytes | None], Channel] = {}
            for reader in self._readers:
                channel = Channel(num_untaken)
                self._channels.append(channel)
                reader.start(channel)
            for channel in self._channels:
                by_task[_pull(channel, pulls)] = channel
            while pulls:
                done, _ = await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    pulls.discard(task)
                    channel = by_task.pop(task)
                    frame = task.result()
                    if frame is not None:
                        yield frame
                        by_task[_pull(channel, pulls)] = channel
            if last := self._last_bytes():
                yield last
        finally:
            self.close()
            for task in pulls:
                task.cancel()
            await asyncio.gather(*pulls, return_exceptions=True)

    def cut_off(self) -> bytes | None:
        """Close because the server waits no longer. Return the last frame, which is an error."""
        open_ = next((reader for reader in self._readers if not reader.is_over), None)
        has_begun = self._readers[0].has_begun
        self._dismiss()
        return self._encoder.going_away(open_.going_away()) if has_begun and open_ is not None else None

    def break_off(self, error: Exception) -> None:
        """Close, and break the connection: `run` raises `error`."""
        for channel in self._channels:
            channel.end(error)
        self._dismiss()

    def _dismiss(self) -> None:
        for reader in self._readers:
            reader.dismiss()
        self.close()

    def close(self) -> None:
        """Detach all readers. Idempotent and synchronous."""
        for reader in self._readers:
            reader.close()
        for channel in self._channels:
            channel.end(None)
        super().close()


def _pull(channel: Channel, pulls: set[asyncio.Task[bytes | None]]) -> asyncio.Task[bytes | None]:
    task: asyncio.Task[bytes | None] = asyncio.create_task(channel.pull(), name="joined pull")
    pulls.add(task)
    return task
