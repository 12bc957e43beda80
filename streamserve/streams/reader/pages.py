"""`Pages`: a stream's log, read a page at a time for one reader: what the stream's recent events do not have.

A page is 64 events, or fewer large events, so a reader far behind costs a page of memory and not an answer. A log that
is away is asked again for a while. Writes nothing, and does not decide when a reader reads.

`take_snapshot`: one event in place of those that a reader far behind has missed: the whole answer, once. It folds the
log from its beginning, page by page: a page and the answer are in memory. asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from streamserve.dialects.encoder import Encoder
from streamserve.dialects.fold import Answer
from streamserve.protocol.errors import Gone
from streamserve.protocol.events import (
    Approval,
    BlockStart,
    BlockStop,
    ChoiceDone,
    Citation,
    Custom,
    Done,
    LoggedEvent,
    Meta,
    State,
    Token,
)
from streamserve.streams.log.base import EventLog, LogUnavailable
from streamserve.streams.stream import Stream

# Events held at once; also how many a replay goes through before other tasks have their turn. As many plain tokens, or
# fewer events with other candidates: the page before shows how large they are.
PAGE = 64
# How long a page is asked for again while the log cannot be read; then the connection ends.
_READ_SECONDS = 30.0
_RETRY_SECONDS = (0.5, 1.5)  # between two tries, at random


@dataclass(slots=True)
class Pages:
    """The log of `stream`. `size` is how many events to take next."""

    log: EventLog
    stream: Stream
    size: int = PAGE

    def note(self, page: list[LoggedEvent]) -> None:
        """Take the next page's size from how large the events of this page are."""
        self.size = max(1, PAGE * len(page) // sum(map(_weight, page)))

    async def read(self, after: int, limit: int = PAGE) -> list[LoggedEvent]:
        """Return events that were committed; a log that cannot be read is asked again for a while."""
        give_up_at = time.monotonic() + _READ_SECONDS
        while True:
            try:
                return await read_page(self.log, self.stream, after, limit)
            except LogUnavailable:
                if time.monotonic() >= give_up_at:
                    raise
            await asyncio.sleep(random.uniform(*_RETRY_SECONDS))

    async def fold(self, encoder: Encoder, until: int) -> None:
        """Feed the encoder the events up to `until`, which its reader has; its output is dropped."""
        seq = 0
        while seq < until:
            for logged in await self.read(seq, until - seq):
                encoder.encode(logged)
                seq = logged.seq
            await asyncio.sleep(0)

    async def snapshot(self, after: int, until: int) -> list[LoggedEvent]:
        """Return a snapshot for a reader that has the events up to `after`; see `take_snapshot`."""
        return await take_snapshot(self.read, after, until)

    def last_seq_to_show(self) -> int:
        """Return how far a snapshot may go: no client can cut a snapshot where its user stopped reading."""
        end = self.stream.terminal
        kept_seq = end.kept_seq if isinstance(end, Done) else None
        return self.stream.last_seq if kept_seq is None else kept_seq


async def read_page(log: EventLog, stream: Stream, after: int, limit: int = PAGE) -> list[LoggedEvent]:
    """Return at most a page of events that follow `after`, which is not the last event.

    Raises Gone where there are none: the log was dropped, or has lost them.
    """
    page: list[LoggedEvent] = []
    if not stream.is_lost:
        with contextlib.suppress(KeyError):
            page = await log.read(stream.log_id, after, min(limit, PAGE))
    if not page:
        raise Gone("The stream's events are no longer kept.")
    return page


def _weight(logged: LoggedEvent) -> int:
    """Return how many plain tokens an event is as large as."""
    event = logged.event
    if not isinstance(event, Token) or event.logprobs is None:
        return 1
    return 1 + sum(1 + len(position.top) for position in event.logprobs)


# The events that a snapshot holds.
_OF_ANSWER = (Token, BlockStart, BlockStop, ChoiceDone, Citation, Approval, State, Custom)
# (after, limit) -> some of the events that follow `after`, at least one event while there are any.
ReadPage = Callable[[int, int], Awaitable[list[LoggedEvent]]]


async def take_snapshot(read_page: ReadPage, after: int, until: int) -> list[LoggedEvent]:
    """Return the events for a reader that has the events up to `after`, in place of the events up to `until`.

    That is `meta` if it lacks it, a snapshot as of the last event that added to the answer, and the events behind that
    event: a status that holds, the terminal event. [] if the reader has the whole answer so far, or if there are
    logprobs, which no snapshot has.
    """
    answer, head, behind, seq, answer_seq = Answer(), list[LoggedEvent](), list[LoggedEvent](), 0, 0
    while seq < until:
        page = await read_page(seq, until - seq)
        if not page:
            return []
        for logged in page:
            seq, event = logged.seq, logged.event
            if isinstance(event, Token) and event.logprobs is not None:
                return []
            if isinstance(event, _OF_ANSWER):
                answer.feed(event)
                answer_seq = seq
                behind.clear()
            elif seq > after:
                (head if isinstance(event, Meta) else behind).append(logged)
        await asyncio.sleep(0)
    if answer_seq <= after:
        return []
    return [*head, LoggedEvent(seq=answer_seq, event=answer.snapshot(answer_seq)), *behind]
