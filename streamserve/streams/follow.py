"""`follow`: one reader of a stream as events, for WebSockets; `collect`: all of them, for whole answers.

asyncio; framework-free. Whoever follows must `close`: it is synchronous, and when it returns the engine knows that the
reader has gone.
"""

from __future__ import annotations

from collections import deque

from streamserve.protocol.events import LoggedEvent
from streamserve.streams.directory import Streams
from streamserve.streams.stream import Reader, Stream
from streamserve.streams.tail import BrokenStream, Tail, read_page


class Follow:
    """An async iterator over a stream's events, neighbouring tokens joined; see `follow`."""

    def __init__(self, streams: Streams, stream: Stream, after: int, reader: Reader) -> None:
        self._tail = Tail(streams, stream, after, reader)
        self._given: deque[LoggedEvent] = deque()
        self._has_begun = False

    def __aiter__(self) -> Follow:
        return self

    async def __anext__(self) -> LoggedEvent:
        if not self._has_begun:
            self._has_begun = True
            self._tail.begin()
        while not self._given:
            if self._tail.is_over:
                self.close()
                raise StopAsyncIteration
            self._given.extend(await self._tail.next())
        return self._given.popleft()

    def close(self) -> None:
        """Detach the reader. Idempotent and synchronous; call it when the socket closes, whoever else is waiting."""
        self._given.clear()
        self._tail.close()

    async def aclose(self) -> None:
        """Do `close`, for `contextlib.aclosing`."""
        self.close()


def follow(
    streams: Streams, stream: Stream, after: int = 0, *, watcher: bool = False, transport: str = "websocket"
) -> Follow:
    """Return an iterator over the events after `after`, which ends after the terminal one.

    It attaches an owner's reader from the first `__anext__` until `close`: always use it in `async with aclosing(...)`.
    Raises BadRequest (code "unknown_event_id") when `after` is past the last event.
    """
    return Follow(streams, stream, after, Reader(is_watcher=watcher, transport=transport, seq=after))


async def collect(streams: Streams, stream: Stream) -> list[LoggedEvent]:
    """Wait for the stream's end as its owner's reader and return every event. Cancelled, the reader has left."""
    reader = Reader(transport="whole", is_paced=False)
    stream.attach(reader)
    try:
        await stream.ended.wait()
        events: list[LoggedEvent] = []
        while len(events) < stream.last_seq:
            events += await read_page(streams.log, stream, len(events))
    finally:
        stream.detach(reader)
    if stream.terminal is None:
        raise BrokenStream(stream.id)
    return events
