"""`Recent`: the newest committed events of one stream, so that its readers here need not ask the log.

The last batch is kept as objects, which nearly every reader takes next; older events as bytes, which take a fifth of
the memory. Lives on the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.frames import decode_event, encode_event

# About four pages of plain tokens.
_MAX_BYTES = 16 * 1024


class Recent:
    """Fed every committed event in order; drops the oldest above `_MAX_BYTES`.

    events:  … | older: bytes ......... | last batch: objects |
               ^first_seq                ^_last[0].seq         ^last_seq
    """

    def __init__(self) -> None:
        self._last: list[LoggedEvent] = []
        self._last_bodies: Sequence[bytes] | None = None
        self._older: deque[bytes] = deque()
        self._num_bytes = 0

    def add(self, events: list[LoggedEvent], bodies: Sequence[bytes] | None) -> None:
        """Keep a batch; `bodies` are its events encoded, where known. After a gap only this batch is kept."""
        if self._last and self._last[-1].seq + 1 == events[0].seq:
            bodies_before = self._last_bodies or [encode_event(logged.event) for logged in self._last]
            self._older.extend(bodies_before)
            self._num_bytes += sum(map(len, bodies_before))
            while self._num_bytes > _MAX_BYTES:
                self._num_bytes -= len(self._older.popleft())
        else:
            self.clear()
        self._last, self._last_bodies = events, bodies

    def since(self, after: int, limit: int) -> list[LoggedEvent]:
        """Return up to `limit` events that follow `after` directly, or none."""
        last = self._last
        if not last:
            return []
        start = after + 1 - last[0].seq
        if start >= 0:
            return last if start == 0 and len(last) <= limit else last[start : start + limit]
        start += len(self._older)
        if start < 0:
            return []
        bodies = islice(self._older, start, start + limit)
        return [LoggedEvent(seq, decode_event(body)) for seq, body in enumerate(bodies, after + 1)]

    def clear(self) -> None:
        """Keep nothing."""
        self._last, self._last_bodies, self._num_bytes = [], None, 0
        self._older.clear()
