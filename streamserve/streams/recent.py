"""`Recent`: the newest committed events of one stream, so that its readers here need not ask the log.

The last batch is kept as objects, which nearly every reader takes next; older events as bytes, which take a fifth of
the memory, and so is a large last batch once the readers that are level have taken it. Lives on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.frames import decode_event, encode_event

# About four pages of plain tokens.
_MAX_BYTES = 16 * 1024
# A batch of plain tokens is smaller; one with log-probabilities takes some hundred kilobytes as objects.
_MAX_OBJECT_BYTES = 4 * 1024


class Recent:
    """Fed every committed event in order; drops the oldest above `_MAX_BYTES`.

    events:  … | older: bytes ......... | last batch: objects |
               ^first_seq                ^_last[0].seq         ^last_seq
    """

    def __init__(self) -> None:
        self._last: list[LoggedEvent] = []
        self._last_bodies: Sequence[bytes] | None = None
        self._older: deque[bytes] = deque()
        self._last_seq = 0
        self._num_bytes = 0

    def add(self, events: list[LoggedEvent], bodies: Sequence[bytes] | None) -> None:
        """Keep a batch; `bodies` are its events encoded, where known. After a gap only this batch is kept."""
        if self._last_seq + 1 != events[0].seq:
            self.clear()
        elif self._last:
            self._demote()
        self._last, self._last_bodies = events, bodies
        self._last_seq = events[-1].seq

    def shrink(self) -> None:
        """Keep the last batch as bytes if it is large."""
        if self._last_bodies is not None and sum(map(len, self._last_bodies)) > _MAX_OBJECT_BYTES:
            self._demote()

    def _demote(self) -> None:
        bodies = self._last_bodies or [encode_event(logged.event) for logged in self._last]
        self._older.extend(bodies)
        self._num_bytes += sum(map(len, bodies))
        while self._num_bytes > _MAX_BYTES:
            self._num_bytes -= len(self._older.popleft())
        self._last, self._last_bodies = [], None

    def since(self, after: int, limit: int) -> list[LoggedEvent]:
        """Return up to `limit` events that follow `after` directly, or none."""
        if after >= self._last_seq:
            return []
        last = self._last
        start = after + 1 - (self._last_seq - len(last) + 1)
        if start >= 0:
            return last if start == 0 and len(last) <= limit else last[start : start + limit]
        start += len(self._older)
        if start < 0:
            return []
        bodies = islice(self._older, start, start + limit)
        return [LoggedEvent(seq, decode_event(body)) for seq, body in enumerate(bodies, after + 1)]

    def clear(self) -> None:
        """Keep nothing."""
        self._last, self._last_bodies, self._num_bytes, self._last_seq = [], None, 0, 0
        self._older.clear()
