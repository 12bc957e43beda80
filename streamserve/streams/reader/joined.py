"""`JoinedDelivery`: several streams as the body of one response, each frame as it comes.

asyncio; framework-free. Each stream has a reader of its own, so parks, limits and places are counted for each. The
response cannot be resumed as a whole; each of its streams can, by its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing

from streamserve.dialects.base import Encoder
from streamserve.streams.reader.channel import PullChannel
from streamserve.streams.reader.delivery import NO_FLOW, Closing, Flow
from streamserve.streams.reader.reader import Reader
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream


class JoinedDelivery(Closing):
    """`first_bytes` once, the frames of every stream from its start, and when all have ended `last_bytes`.

    See `Delivery`.
    """

    def __init__(
        self, streams: Streams, parts: Sequence[tuple[Stream, Encoder]], last_bytes: Callable[[], bytes]
    ) -> None:
        super().__init__()
        self.stream = parts[0][0]
        self._ids = [stream.id for stream, _ in parts]
        self._encoder = parts[0][1]
        self._readers = [Reader(streams, stream, encoder, after=0, transport="sse") for stream, encoder in parts]
        self._channels: list[PullChannel] = []
        self._last_bytes = last_bytes
        self._has_begun = False

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, in ASGI form. `X-Stream-Id` has the ids of all streams, in the prompts' order."""
        return [
            (b"content-type", self._encoder.content_type.encode()),
            (b"cache-control", b"no-cache, no-transform"),
            (b"x-accel-buffering", b"no"),
            (b"content-encoding", b"identity"),
            (b"x-stream-id", ", ".join(self._ids).encode()),
        ]

    async def run(self, send: Callable[[bytes], Awaitable[None]], flow: Flow = NO_FLOW) -> None:
        """Send everything; return after the last terminal event. Cancel it to disconnect."""
        async with aclosing(self._frames(flow)) as frames:
            async for frame in frames:
                await send(frame)

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what `run` sends."""
        return self._frames(NO_FLOW)

    async def _frames(self, flow: Flow) -> AsyncGenerator[bytes, None]:
        self._begin()
        pulls: set[asyncio.Task[bytes | None]] = set()
        try:
            yield self._encoder.first_bytes
            by_task: dict[asyncio.Task[bytes | None], PullChannel] = {}
            for reader in self._readers:
                channel = PullChannel(flow.num_untaken)
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
        has_begun = self._has_begun
        self.close()
        return self._encoder.going_away(open_.going_away()) if has_begun and open_ is not None else None

    def break_off(self, error: Exception) -> None:
        """Close, and break the connection: `run` raises `error`."""
        for channel in self._channels:
            channel.end(error)
        self.close()

    def close(self) -> None:
        """Detach all readers. Idempotent and synchronous."""
        for reader in self._readers:
            reader.close()
        for channel in self._channels:
            channel.end(None)
        super().close()

    def _begin(self) -> None:
        if self._has_begun:
            raise RuntimeError("a JoinedDelivery runs once")
        self._has_begun = True
        for reader in self._readers:
            reader.attach()


def _pull(channel: PullChannel, pulls: set[asyncio.Task[bytes | None]]) -> asyncio.Task[bytes | None]:
    task: asyncio.Task[bytes | None] = asyncio.create_task(channel.pull(), name="joined pull")
    pulls.add(task)
    return task
