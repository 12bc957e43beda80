"""`Tail`: a reader's place in a stream's log: attach, read what is committed, join neighbouring tokens, wait for more.

asyncio. Pulls pages from the log, so a slow reader costs one page of memory, not an answer. The rule of joining is
Nagle's with a clock: a token that comes `coalesce_seconds` after the last frame, or is the first, leaves at once;
others wait for company at most that long, or until `coalesce_tokens` are there. Everything but tokens leaves at once.
To wake a task costs more than all that: who has an `Outlet` and waits is given what is committed here in the same turn.
Who takes snapshots is given one when it is more than `snapshot_events` behind, because it came late or reads slowly.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from streamserve.dialects.base import coalesce
from streamserve.protocol.errors import BadRequest, Gone, QuotaExceeded
from streamserve.protocol.events import TERMINALS, Done, Event, LoggedEvent, Token, is_terminal
from streamserve.streams.log.base import EventLog, Forked, Place
from streamserve.streams.reader.snapshot import take_snapshot
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Reader, Stream
from streamserve.streams.timers import Patience

# What is due so soon is due: to be woken again costs more than it joins.
_SOON_SECONDS = 0.01
# Events read at once; also how many a replay may go through before other tasks get their turn. As many plain tokens, or
# fewer events that name other candidates too: the page before says how large they are.
_PAGE = 64


async def read_page(log: EventLog, stream: Stream, after: int, limit: int = _PAGE) -> list[LoggedEvent]:
    """Return the committed events that follow `after`, one page at most. Raises Gone for a stream that was dropped."""
    if stream.is_forked:
        raise BrokenStream(stream.id)
    try:
        return await log.read(stream.log_id, after, min(limit, _PAGE))
    except KeyError:
        raise Gone("The stream's events are no longer kept.") from None
    except Forked:
        raise BrokenStream(stream.id) from None


class BrokenStream(Exception):
    """The stream is over and its log has no terminal event: the log could not be written. Readers just end."""


class Outlet(NamedTuple):
    """Who takes events without being waited for: `put` may be called while `is_ready`."""

    is_ready: Callable[[], bool]
    put: Callable[[list[LoggedEvent]], None]


class Tail:
    """One reader, used once: `begin`, `next` until `is_over`, `close`. `given_seq` is the last event it was given.

    What an `outlet` has taken, `next` does not return.
    """

    def __init__(
        self,
        streams: Streams,
        stream: Stream,
        after: int,
        reader: Reader,
        *,
        snapshots: bool = False,
        silence_seconds: float = math.inf,
    ) -> None:
        if not 0 <= after <= stream.last_seq:
            message = f"The stream has {stream.last_seq} events so far; it cannot be read after event {after}."
            raise BadRequest(message, code="unknown_event_id", param="after")
        # Watchers are counted apart: they keep no owner out.
        num_readers = stream.readers.num_watchers if reader.is_watcher else stream.readers.num_holding
        if num_readers >= streams.settings.max_readers:
            message = f"The stream is being read {num_readers} times. Close one of its readers."
            raise QuotaExceeded(message, code="too_many_readers", retry_after=5)
        self._read_seq = self.given_seq = after
        self.is_over = False
        self.is_let_go = False  # it is over here, and goes on elsewhere
        self._log, self._settings = streams.log, streams.settings
        self._stream, self._reader = stream, reader
        self._takes_snapshots = snapshots and self._settings.snapshot_events > 0
        self._silence_seconds = silence_seconds
        self._given_at = -math.inf  # when `next` gave something, if only that there is nothing, or the outlet took some
        self._patience = Patience(self._when_due)
        self._place = Place(after)  # of `_wait`
        self._outlet: Outlet | None = None
        self._is_waiting = False
        self._failure: Exception | None = None  # of the outlet
        self._held: list[LoggedEvent] = []
        self._num_tokens = 0  # of those that are held
        self._page = _PAGE
        self._holds_more = False  # than tokens
        self._wait_seconds = self._settings.coalesce_seconds - _SOON_SECONDS
        self._token_due_at = -math.inf  # until then tokens wait for company: the first one never does
        self._is_closed = False

    def begin(self, outlet: Outlet | None = None) -> None:
        """Attach the reader, unless it has left already."""
        self._given_at = time.monotonic()
        if not self._is_closed:
            self._outlet = outlet
            self._reader.take = None if outlet is None else self._take
            self._stream.attach(self._reader)

    def close(self) -> None:
        """Detach the reader, or say that it never came. Synchronous: the engine is told before this returns."""
        if not self._is_closed:
            self._is_closed = self.is_over = True
            self._patience.close()
            self._reader.take = None
            self._stream.detach(self._reader)
            if not self._reader.is_watcher:
                self._stream.release()

    async def next(self) -> list[LoggedEvent]:
        """Return the next events, joined. [] after `silence_seconds` without any, or when none are to come."""
        has_waited = is_woken = False
        await self._leap()
        while not self.is_over:
            if is_woken or self._may_have_more:
                await self._read()
            due_at = self._due_at()
            if due_at <= time.monotonic():
                if not has_waited:
                    await asyncio.sleep(0)
                return [] if self._is_closed else self._flush()
            if not self.is_over and not self._stream.ended.is_set():  # its log was sealed while it was read, perhaps
                is_woken, has_waited = await self._wait(due_at), True
        return []

    def _take(self, events: list[LoggedEvent]) -> None:
        """Give what has just been committed to the outlet, if that is ready and this reader waits for nothing else.

        If not, nothing is done here: the log wakes the reader.
        """
        if not self._is_waiting or events[0].seq != self._read_seq + 1:
            return
        outlet, last = self._outlet, events[-1]
        if self._held and len(events) == 1 and self._has_room_for(last.event):
            self._hold(events, last.seq)
            return
        if outlet is None or isinstance(last.event, TERMINALS) or not outlet.is_ready():
            return
        now = time.monotonic()
        if len(events) == 1 and not self._held and now >= self._token_due_at:  # nearly always
            self._read_seq = self.given_seq = self._place.seq = last.seq
            self._given_at = now
            if isinstance(last.event, Token):
                self._token_due_at = now + self._wait_seconds
            self._put(events)
            return
        self._hold(events, last.seq)
        due_at = self._due_at()
        if due_at <= now:
            self._put(self._flush())
        else:
            self._patience.hasten(due_at)
        if self._failure is None:
            self._place.seq = self._read_seq + self._num_wanted

    def _has_room_for(self, event: Event) -> bool:
        """Whether it may join what is held, and wait as long as that."""
        return isinstance(event, Token) and self._num_tokens + len(event.token_ids) < self._settings.coalesce_tokens

    def _when_due(self) -> float | None:
        """Give what is held to the outlet rather than wake the task; return until when that waits on, None: no more."""
        if self._outlet is None or not (self._held and self._is_waiting and self._outlet.is_ready()):
            return None
        self._put(self._flush())
        if self._failure is not None:
            return None
        self._place.seq = self._read_seq
        return self._due_at()

    def _put(self, events: list[LoggedEvent]) -> None:
        """Give these to the outlet. If that fails, have the reader woken, who raises it."""
        assert self._outlet is not None
        try:
            self._outlet.put(events)
        except Exception as error:
            self._failure, self._reader.take = error, None
            self._place.seq = 0

    @property
    def _may_have_more(self) -> bool:
        """Whether to read unasked. What is written here is counted here: to ask its log for nothing is dear."""
        return self._read_seq < self._stream.last_seq or not self._stream.is_writing

    async def _leap(self) -> None:
        """Hold a snapshot in place of all that the reader lacks, if that is too much."""
        until = self._last_seq_to_show()
        if not self._takes_snapshots or until - self.given_seq <= self._settings.snapshot_events:
            return
        read = partial(read_page, self._log, self._stream)
        leap = await take_snapshot(read, self.given_seq, until)
        if leap:
            self._hold(leap, until)
        else:
            self._takes_snapshots = False

    def _last_seq_to_show(self) -> int:
        """How far a snapshot may go: no client can cut one at the place where its user stopped reading."""
        end = self._stream.terminal
        kept_seq = end.kept_seq if isinstance(end, Done) else None
        return self._stream.last_seq if kept_seq is None else kept_seq

    async def _read(self) -> None:
        """Hold one page more, or find out that there will be none."""
        has_ended = self._stream.ended.is_set()  # asked before reading: what came in between is not missed
        page = await read_page(self._log, self._stream, self._read_seq, self._page)
        if page:
            self._page = max(1, _PAGE * len(page) // sum(map(_weight, page)))
            self._hold(page, page[-1].seq)
        elif has_ended and not self._held:
            self._end()

    def _end(self) -> None:
        if self._stream.terminal is None and not self._stream.has_left:
            raise BrokenStream(self._stream.id)
        self.is_over = True
        self.is_let_go = self._stream.has_left

    def _hold(self, events: list[LoggedEvent], until: int) -> None:
        self._held += events
        self._read_seq = until
        for logged in events:
            if isinstance(logged.event, Token):
                self._num_tokens += len(logged.event.token_ids) or 1
            else:
                self._holds_more = True

    def _due_at(self) -> float:
        """When the held events must leave; when none are held, how long the reader may hear nothing."""
        if not self._held:
            return self._given_at + self._silence_seconds
        if self._holds_more or self._num_tokens >= self._settings.coalesce_tokens or self._stream.ended.is_set():
            return 0.0
        return self._token_due_at

    @property
    def _num_wanted(self) -> int:
        """How many more events not to be woken for: while tokens are held, others may fill the frame."""
        return self._settings.coalesce_tokens - self._num_tokens - 1 if self._held else 0

    async def _wait(self, until: float) -> bool:
        """Wait for an event, while tokens are held until others may fill the frame; return False if time is up."""
        self._place.seq = self._read_seq + self._num_wanted
        self._is_waiting = True
        try:
            return await self._patience.wait(self._log.wait(self._stream.log_id, self._place), until)
        finally:
            self._is_waiting = False
            if self._failure is not None:
                raise self._failure

    def _flush(self) -> list[LoggedEvent]:
        self._given_at = time.monotonic()
        held, self._held = self._held, []
        if not held:
            return []
        if self._num_tokens:
            self._token_due_at = self._given_at + self._wait_seconds
        self._num_tokens, self._holds_more = 0, False
        self.given_seq = held[-1].seq
        self.is_over = is_terminal(held[-1].event)
        most = self._settings.coalesce_tokens
        is_joined = len(held) > 1 and most > 1 and self._settings.coalesce_seconds > 0
        return coalesce(held, max_tokens=most) if is_joined else held


def _weight(logged: LoggedEvent) -> int:
    """How many plain tokens an event is as large as."""
    event = logged.event
    if not isinstance(event, Token) or event.logprobs is None:
        return 1
    return 1 + sum(1 + len(position.top) for position in event.logprobs)
