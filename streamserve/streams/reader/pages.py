"""`Pages`: a stream's log, read a page at a time for one reader: what the stream's recent events do not have.

A page is 64 events, or fewer large ones, so a reader far behind costs a page of memory and not an answer. A log that is
away is asked again for a while. Writes nothing and decides nothing about when a reader reads.

`take_snapshot`: one event in place of those that a reader far behind has missed: the whole answer, once. It folds the
log from its beginning, page by page: a page and the answer are in memory. asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from io import StringIO

from streamserve.dialects.encoder import Encoder
from streamserve.protocol.errors import Gone
from streamserve.protocol.events import (
    TEXT,
    BlockStart,
    BlockStop,
    BlockText,
    ChoiceDone,
    ChoiceText,
    Citation,
    Done,
    Event,
    LoggedEvent,
    Meta,
    Snapshot,
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
        """Take the next page's size from how large the events of this one are."""
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
        """Return how far a snapshot may go: no client can cut one where its user stopped reading."""
        end = self.stream.terminal
        kept_seq = end.kept_seq if isinstance(end, Done) else None
        return self.stream.last_seq if kept_seq is None else kept_seq


async def read_page(log: EventLog, stream: Stream, after: int, limit: int = PAGE) -> list[LoggedEvent]:
    """Return events that follow `after`, which is not the last one, one page at most.

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


# (after, limit) -> some of the events that follow `after`, at least one while there are any.
ReadPage = Callable[[int, int], Awaitable[list[LoggedEvent]]]


async def take_snapshot(read_page: ReadPage, after: int, until: int) -> list[LoggedEvent]:
    """Return the events for a reader that has those up to `after`, in place of the ones up to `until`.

    That is `meta` if it lacks it, a snapshot as of the last event that added to the answer, and the events behind that
    one: a status that holds, the terminal event. [] if the reader lacks nothing of the answer, or if there are
    logprobs, which no snapshot has.
    """
    answer, head, behind, seq, answer_seq = _Answer(), list[LoggedEvent](), list[LoggedEvent](), 0, 0
    while seq < until:
        page = await read_page(seq, until - seq)
        if not page:
            return []
        for logged in page:
            seq, event = logged.seq, logged.event
            if isinstance(event, Token) and event.logprobs is not None:
                return []
            if answer.add(event):
                answer_seq = seq
                behind.clear()
            elif seq > after:
                (head if isinstance(event, Meta) else behind).append(logged)
        await asyncio.sleep(0)
    if answer_seq <= after:
        return []
    return [*head, LoggedEvent(seq=answer_seq, event=answer.snapshot(answer_seq)), *behind]


@dataclass(slots=True)
class _Block:
    """One block so far. `start` is None for text block 0 of a choice that had no `block_start`."""

    index: int
    start: BlockStart | None = None
    stop: BlockStop | None = None
    text: StringIO = field(default_factory=StringIO)

    @property
    def kind(self) -> str:
        return TEXT if self.start is None else self.start.kind

    def result(self, *, is_last: bool) -> BlockText:
        return BlockText(
            index=self.index,
            kind=self.kind,
            text=self.text.getvalue(),
            id=None if self.start is None else self.start.id,
            name=None if self.start is None else self.start.name,
            signature=None if self.stop is None else self.stop.signature,
            is_open=self.stop is None and is_last,
        )


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    blocks: dict[int, _Block] = field(default_factory=dict)
    done: ChoiceDone | None = None

    def block(self, index: int) -> _Block:
        if index not in self.blocks:
            self.blocks[index] = _Block(index)
        return self.blocks[index]

    def result(self) -> ChoiceText:
        blocks = list(self.blocks.values())
        is_plain = all(block.start is None for block in blocks)
        is_over = self.done is not None
        return ChoiceText(
            text="".join(block.text.getvalue() for block in blocks if block.kind == TEXT),
            finish_reason=None if self.done is None else self.done.finish_reason,
            blocks=() if is_plain else tuple(one.result(is_last=one is blocks[-1] and not is_over) for one in blocks),
            stop_string=None if self.done is None else self.done.stop_string,
        )


class _Answer:
    """The fold: all choices so far. It is fed every event, in order."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}
        self._citations: list[Citation] = []

    def add(self, event: Event) -> bool:
        """Add what `event` holds; return whether a snapshot holds it."""
        if isinstance(event, Token):
            self._choice(event.choice).block(event.index).text.write(event.text)
        elif isinstance(event, BlockStart):
            self._choice(event.choice).block(event.index).start = event
        elif isinstance(event, BlockStop):
            self._choice(event.choice).block(event.index).stop = event
        elif isinstance(event, ChoiceDone):
            self._choice(event.choice).done = event
        elif isinstance(event, Citation):
            self._citations.append(event)
        else:
            return False
        return True

    def _choice(self, number: int) -> _Choice:
        if number not in self._choices:
            self._choices[number] = _Choice()
        return self._choices[number]

    def snapshot(self, seq: int) -> Snapshot:
        choices = [self._choice(number).result() for number in range(max(self._choices, default=0) + 1)]
        return Snapshot(seq=seq, choices=tuple(choices), citations=tuple(self._citations))
