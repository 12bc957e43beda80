"""`follow`: one reader of a stream as events, for WebSockets and commands; `collect`: all of them, for whole answers.

asyncio; framework-free. A `Follow` must be closed: `close` is synchronous, and when it returns the engine knows that
the reader has gone.
"""

from __future__ import annotations

import asyncio
from collections import deque

from streamserve.dialects.pace import SITES_OWN, Pace
from streamserve.protocol.errors import Gone
from streamserve.protocol.events import LoggedEvent
from streamserve.streams.reader.channel import Channel, check_sent
from streamserve.streams.reader.pages import read_page
from streamserve.streams.reader.reader import BrokenStream, Reader
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream


class Follow:
    """An async iterator over a stream's events, neighbouring tokens joined; see `follow`. Seq 0: not in the log."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.seq = reader.sent_seq  # of the last event given
        self._channel = Channel()
        self._events: deque[LoggedEvent] = deque()

    def __aiter__(self) -> Follow:
        return self

    async def __anext__(self) -> LoggedEvent:
        if not self.reader.has_begun:
            self.reader.attach()
            self.reader.start(self._channel)
        if not self._events:
            events = await self._channel.pull()
            if events is None:
                raise StopAsyncIteration
            self._events.extend(events)
        logged = self._events.popleft()
        self.seq = logged.seq or self.seq
        return logged

    def ack(self, seq: int, *, is_away: bool = False) -> None:
        """Note that the reader has every event up to `seq`, and whether it looks away; see `Reader.ack`."""
        check_sent(seq, self.seq)
        self.reader.ack(seq, is_away=is_away)

    def close(self) -> None:
        """Detach the reader. Idempotent and synchronous; call it when the socket closes, whatever else waits."""
        self._events.clear()
        self.reader.close()
        self._channel.end(None)

    async def aclose(self) -> None:
        """Do `close`, for `contextlib.aclosing`."""
        self.close()


def follow(
    streams: Streams,
    stream: Stream,
    after: int = 0,
    *,
    watcher: bool = False,
    transport: str = "websocket",
    credit: int | None = None,
    pace: Pace = SITES_OWN,
) -> Follow:
    """Return an iterator over the events after `after`, which ends after the terminal event.

    It attaches an owner's reader from the first `__anext__` until `close`: always use it in `async with aclosing(...)`.
    With `credit`, the reader acknowledges (`ack`), and no more events than that are unacknowledged; without, an event
    counts as read when the next is asked for. Raises Gone when `after` is past the last event.
    """
    reader = Reader(
        streams,
        stream,
        None,
        after=after,
        transport=transport,
        is_watcher=watcher,
        takes_snapshots=transport == "websocket",
        credit=credit,
        pace=pace,
    )
    return Follow(reader)


class _Whole(Attachment):
    """The reader of a whole answer, which waits for the end of the stream, or of the wait for it."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(transport="whole", is_paced=False)
        self.is_over = asyncio.Event()
        self._stream = stream

    def advance(self) -> None:
        if self._stream.ended.is_set():
            self.is_over.set()

    def go_away(self) -> None:
        self.is_over.set()


async def collect(streams: Streams, stream: Stream) -> list[LoggedEvent]:
    """Wait for the stream's end as its owner's reader and return every event. Cancelled, the reader has left.

    Raises LogUnavailable when the log is away for too long, BrokenStream for a stream without an end.
    """
    reader = _Whole(stream)
    stream.attach(reader)
    try:
        reader.advance()
        await reader.is_over.wait()
        if not stream.ended.is_set():
            streams.writer.refuse_if_down()
        events: list[LoggedEvent] = []
        while stream.terminal is not None and len(events) < stream.last_seq:
            events += await read_page(streams.log, stream, len(events))
    except Gone:
        raise BrokenStream(stream.id) from None
    finally:
        stream.detach(reader, is_dismissed=reader.is_over.is_set())
    if stream.terminal is None:
        raise BrokenStream(stream.id)
    return events
