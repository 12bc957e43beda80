"""`Outbox`: what a process has for the log of one stream: own events, its ending, and the batch that is in flight.

    own events ──┐
    the engine's ┴──► pack ──► the batch in flight ──► settle: what is committed, or a failure for the stream's task
    the ending ───────► alone, after what is in flight

One batch at a time, sized by the events of the batch before. It asks no log and no engine: the log writer takes what is
packed, and the stream passes what the engine has. Event loop only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count

from streamserve.protocol.events import TERMINALS, Done, Error, Event, LoggedEvent, Meta
from streamserve.protocol.frames import encode_event
from streamserve.streams.log.base import Batch, Result
from streamserve.streams.writer import MAX_BATCH_EVENTS

# Of a batch: with log-probabilities sixteen events are some hundred kilobytes while they are committed.
_MAX_BATCH_BYTES = 8 * 1024


class Outbox:
    """See above. `ending` is the terminal event that this process commits; `failure` a commit's, for the task."""

    def __init__(self) -> None:
        self.ending: Done | Error | None = None
        self.failure: Exception | None = None
        self.in_flight: Batch | None = None
        self.num_bytes = 0  # of all events that were packed here, as the log has them
        self._own: deque[Event] = deque()  # committed before what the engine has
        self._has_backlog = False  # the engine had more than fits into a batch
        self._max_events = MAX_BATCH_EVENTS  # of the next batch, from how large the events of the last batch were

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be committed but what the engine has."""
        return self.in_flight is None and not self._own and self.ending is None

    @property
    def has_more(self) -> bool:
        """Whether another batch can be packed now, as far as is known here."""
        return self._has_backlog or self.ending is not None or self.in_flight is not None or bool(self._own)

    def put(self, events: Iterable[Event]) -> None:
        """Have own events committed."""
        self._own.extend(events)

    def end_with(self, ending: Done | Error) -> None:
        """Have `ending` committed after what is in flight, and nothing else but a first event."""
        self.ending = ending
        self._own = deque(event for event in self._own if isinstance(event, Meta))

    def pack(
        self,
        log_id: str,
        fence: int,
        last_seq: int,
        ready: Callable[[int], list[Event]],
        as_kept: Callable[[Done | Error], Done | Error],
        is_new: Callable[[Event], bool] | None = None,
    ) -> Batch | None:
        """Put the next batch in flight and return it; None if there is none, or a batch is in flight.

        `ready` takes what the engine has, up to so many events, of which those that `is_new` are committed;
        `as_kept` makes the terminal event what the log keeps.
        """
        if self.in_flight is not None:
            return None
        # Invariant: `meta` is the first event of a log. The ending of a stream that has not begun waits for it.
        if last_seq == 0 and not (self._own and isinstance(self._own[0], Meta)):
            return None
        is_end = self.ending is not None
        events: list[Event] = []
        while self._own and (is_end or len(events) < self._max_events):
            events.append(self._own.popleft())
        if self.ending is not None:
            events.append(as_kept(self.ending))
        limit = self._max_events - len(events)
        self._has_backlog = limit <= 0
        while limit > 0 and not is_end:
            taken = ready(limit)
            self._has_backlog = len(taken) == limit
            for event in taken:
                if isinstance(event, TERMINALS):
                    events.append(as_kept(event))
                    is_end = True
                    break
                if is_new is None or is_new(event):
                    events.append(event)
            if events or not taken:
                break
        if events:
            bodies = [encode_event(event) for event in events]
            self.in_flight = Batch(log_id, fence, last_seq, events, bodies, is_end)
            num_bytes = sum(map(len, bodies))
            self.num_bytes += num_bytes
            num_fitting = len(bodies) * _MAX_BATCH_BYTES // num_bytes
            self._max_events = min(MAX_BATCH_EVENTS, num_fitting) or 1
        return self.in_flight

    def settle(self, batch: Batch | None, result: Result | Exception) -> list[LoggedEvent]:
        """Take the result of `batch`, None if packing it failed; return what is in the log now.

        A batch that is not in flight any more was given up in an outage: the log may have it, and its fence is old.
        """
        is_awaited = batch is self.in_flight
        if is_awaited:
            self.in_flight = None
        if batch is not None and isinstance(result, int):
            first_seq = result - len(batch.events) + 1
            return list(map(LoggedEvent, count(first_seq), batch.events))
        if is_awaited and isinstance(result, Exception):
            self.failure = result
        return []

    def take_failure(self) -> Exception | None:
        """Return the failure that the task has not acted on yet, once."""
        failure, self.failure = self.failure, None
        return failure

    def clear(self) -> None:
        """Drop what is in flight, its failure and the own events: another process may write from now on.

        The ending stays.
        """
        self.in_flight = self.failure = None
        self._own.clear()

    def drop_own(self) -> None:
        """Drop the own events that are not in flight."""
        self._own.clear()
