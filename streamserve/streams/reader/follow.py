"""`follow`: one reader of a stream as events, for WebSockets; `collect`: all of them, for whole answers.

asyncio; framework-free. Whoever follows must `close`: it is synchronous, and when it returns the engine knows that the
reader has gone. With `credit`, the reader says how far it is (`ack`), and is given no more than that many events it has
not acknowledged; without, what was given counts as read when the next is asked for.
"""

from __future__ import annotations

import asyncio
from collections import deque

from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import LoggedEvent
from streamserve.streams.reader.tail import BrokenStream, Tail, read_page
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Reader, Stream


class Follow:
    """An async iterator over a stream's events, neighbouring tokens joined; see `follow`."""

    def __init__(
        self, streams: Streams, stream: Stream, after: int, reader: Reader, *, credit: int | None = None
    ) -> None:
        self.seq = after  # of the last event given
        self._stream, self._reader, self._credit = stream, reader, credit
        self._tail = Tail(streams, stream, after, reader, snapshots=reader.transport == "websocket")
        self._given: deque[LoggedEvent] = deque()
        self._unacked: deque[int] = deque()  # at most `credit`
        self._acked = asyncio.Event()
        self._has_begun = self._is_closed = False

    def __aiter__(self) -> Follow:
        return self

    async def __anext__(self) -> LoggedEvent:
        if not self._has_begun:
            self._has_begun = True
            self._tail.begin()
        while self._given or not self._tail.is_over:
            if self._is_out_of_credit:
                await self._wait_for_ack()
            elif self._given:
                return self._note(self._given.popleft())
            else:
                if not self._reader.is_acking:
                    self._stream.moved(self._reader, self._tail.given_seq)
                self._given.extend(await self._tail.next())
        self.close()
        raise StopAsyncIteration

    def ack(self, seq: int) -> None:
        """Note that the reader has every event up to `seq`; less than it said before is no news.

        Raises BadRequest (code "not_sent") for an event that it was not given.
        """
        if seq > self.seq:
            message = f"Event {seq} has not been sent; the last one was {self.seq}."
            raise BadRequest(message, code="not_sent", param="seq")
        if self._credit is None or self._is_closed or seq <= self._reader.seq:
            return
        while self._unacked and self._unacked[0] <= seq:
            self._unacked.popleft()
        self._acked.set()
        self._stream.moved(self._reader, seq)

    def close(self) -> None:
        """Detach the reader. Idempotent and synchronous; call it when the socket closes, whoever else is waiting."""
        self._is_closed = True
        self._given.clear()
        self._tail.close()
        self._acked.set()

    async def aclose(self) -> None:
        """Do `close`, for `contextlib.aclosing`."""
        self.close()

    def _note(self, logged: LoggedEvent) -> LoggedEvent:
        self.seq = logged.seq
        if self._credit is not None:
            self._unacked.append(logged.seq)
        return logged

    @property
    def _is_out_of_credit(self) -> bool:
        return self._credit is not None and len(self._unacked) >= self._credit

    async def _wait_for_ack(self) -> None:
        """Wait until the reader has said something. A stream that leaves this process waits for no reader."""
        ended = self._stream.ended
        if ended.is_set() and self._stream.has_left:
            self.close()
            return
        self._acked.clear()
        news = [self._acked] if ended.is_set() else [self._acked, ended]
        waits = [asyncio.ensure_future(one.wait()) for one in news]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def follow(
    streams: Streams,
    stream: Stream,
    after: int = 0,
    *,
    watcher: bool = False,
    transport: str = "websocket",
    credit: int | None = None,
) -> Follow:
    """Return an iterator over the events after `after`, which ends after the terminal one.

    It attaches an owner's reader from the first `__anext__` until `close`: always use it in `async with aclosing(...)`.
    Raises BadRequest (code "unknown_event_id") when `after` is past the last event.
    """
    reader = Reader(is_watcher=watcher, is_acking=credit is not None, transport=transport, seq=after)
    return Follow(streams, stream, after, reader, credit=credit)


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
