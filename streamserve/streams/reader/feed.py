"""`Feed`: the committed events of a stream as one reader takes them: the newest of its memory, else pages of its log.

A page is 64 events, or fewer large events, so a reader far behind costs a page of memory and not an answer. A log that
is away is asked again for a while. A reader that takes snapshots gets one snapshot in place of all that it lacks, if
that is more than `snapshot_events`. Writes nothing, and does not decide when its reader reads. asyncio.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from streamserve.dialects.encoder import Encoder
from streamserve.protocol.events import Done, LoggedEvent, Token
from streamserve.streams.log.base import EventLog, LogUnavailable
from streamserve.streams.reader.held import Held
from streamserve.streams.reader.pages import PAGE, read_page, take_snapshot
from streamserve.streams.stream import Stream

# How long a page is asked for again while the log cannot be read; then the connection ends.
_READ_SECONDS = 30.0
_RETRY_SECONDS = (0.5, 1.5)  # between two tries, at random


class Feed:
    """`read_seq` is the last event that the reader has taken. `unfed`: an encoder that lacks the events before that.

    `snapshot_events` 0: the reader takes no snapshots.
    """

    __slots__ = ("_log", "_size", "_snapshot_events", "_stream", "_task", "_unfed", "read_seq")

    def __init__(
        self, log: EventLog, stream: Stream, after: int, *, snapshot_events: int, unfed: Encoder | None
    ) -> None:
        self._log, self._stream, self.read_seq = log, stream, after
        self._snapshot_events, self._unfed = snapshot_events, unfed
        self._size = PAGE  # of the next page
        self._task: asyncio.Task[None] | None = None  # while the log is read

    @property
    def is_reading(self) -> bool:
        """Whether the log is being read."""
        return self._task is not None

    def take(self, held: Held, sent_seq: int, now: float) -> bool:
        """Hold what follows of the stream's recent events; return False if the log has to be read for that."""
        if self._unfed is not None or (not held.events and self._is_far(sent_seq, self._stream.last_seq)):
            return False
        events = self._stream.recent.since(self.read_seq, self._size)
        if not events:
            return False
        held.add(events, now)
        self.read_seq = events[-1].seq
        if held.is_large:
            self._note(events)
        return True

    def begin(self, reading: Coroutine[Any, Any, None]) -> None:
        """Read the log in a task, which is done when `end` is called."""
        self._task = asyncio.get_running_loop().create_task(reading, name="reader", context=Context())

    def end(self) -> None:
        """The log is not read any more."""
        self._task = None

    def cancel(self) -> None:
        """Read the log no further."""
        if self._task is not None:
            self._task.cancel()

    def skip_all(self) -> None:
        """Nothing is left to read: the log has lost it."""
        self._unfed, self.read_seq = None, self._stream.last_seq

    async def read(self, held: Held, sent_seq: int, on_page: Callable[[], None]) -> None:
        """Hold what the recent events do not have, page by page while the reader writes what it holds.

        Raises LogUnavailable, and Gone where the log has lost it.
        """
        if self._unfed is not None:
            await self._feed(self._unfed)
            self._unfed = None
        await self._leap(held, sent_seq)
        while not held.events and self.read_seq < self._stream.last_seq:
            if self._stream.recent.since(self.read_seq, 1):
                break
            page = await self._page(self.read_seq, self._size)
            self._note(page)
            held.add(page, time.monotonic())
            self.read_seq = page[-1].seq
            on_page()
            await asyncio.sleep(0)

    async def _feed(self, encoder: Encoder) -> None:
        """Feed the encoder the events that its reader has; its output is dropped."""
        seq = 0
        while seq < self.read_seq:
            for logged in await self._page(seq, self.read_seq - seq):
                encoder.encode(logged)
                seq = logged.seq
            await asyncio.sleep(0)

    async def _leap(self, held: Held, sent_seq: int) -> None:
        """Hold a snapshot in place of all that the reader lacks, if that is too much."""
        end = self._stream.terminal
        kept_seq = end.kept_seq if isinstance(end, Done) else None
        until = self._stream.last_seq if kept_seq is None else kept_seq  # no client can cut a snapshot there itself
        if held.events or not self._is_far(sent_seq, until):
            return
        leap = await take_snapshot(self._page, sent_seq, until)
        if leap:
            held.add(leap, time.monotonic())
            self.read_seq = until
        else:
            self._snapshot_events = 0

    def _is_far(self, sent_seq: int, until: int) -> bool:
        return 0 < self._snapshot_events < until - sent_seq

    async def _page(self, after: int, limit: int) -> list[LoggedEvent]:
        """Return events that were committed; a log that cannot be read is asked again for a while."""
        give_up_at = time.monotonic() + _READ_SECONDS
        while True:
            try:
                return await read_page(self._log, self._stream, after, limit)
            except LogUnavailable:
                if time.monotonic() >= give_up_at:
                    raise
            await asyncio.sleep(random.uniform(*_RETRY_SECONDS))

    def _note(self, page: list[LoggedEvent]) -> None:
        """Take the next page's size from how large the events of this page are."""
        self._size = max(1, PAGE * len(page) // sum(map(_weight, page)))


def _weight(logged: LoggedEvent) -> int:
    """Return how many plain tokens an event is as large as."""
    event = logged.event
    if not isinstance(event, Token) or event.logprobs is None:
        return 1
    return 1 + sum(1 + len(position.top) for position in event.logprobs)
