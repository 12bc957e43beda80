"""`Recent`: the newest committed events of one stream, for the readers of this process. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.frames import decode_event, encode_event

# What `Recent` keeps: about four pages of plain tokens.
_MAX_BYTES = 16 * 1024
# Of its last batch. A batch of plain tokens is smaller; a batch with log-probabilities takes some ten kilobytes as
# objects.
_MAX_OBJECT_BYTES = 4 * 1024


@dataclass(slots=True, eq=False)
class Recent:
    """The newest committed events, so that readers of this process need not ask the log. Fed all of them in order.

    All are kept as bytes, which take a fifth of the memory, the oldest dropped above `_MAX_BYTES`; the last batch as
    objects too, which nearly every reader takes next. A large last batch is kept as objects only until the readers that
    are level have taken it.

    bodies:  ............................. up to last_seq
    last:                 | last batch ... up to last_seq
    """

    num_bytes: int = 0
    _bodies: deque[bytes] = field(default_factory=deque)
    _last: list[LoggedEvent] = field(default_factory=list)
    _last_seq: int = 0
    _num_last_bytes: int = 0

    def add(self, events: list[LoggedEvent], bodies: Sequence[bytes] | None) -> None:
        """Keep a batch; `bodies` are its events encoded, where known. After a gap only this batch is kept."""
        if self._last_seq + 1 != events[0].seq:
            self.clear()
        if bodies is None:
            bodies = [encode_event(logged.event) for logged in events]
        self._last, self._last_seq = events, events[-1].seq
        self._bodies.extend(bodies)
        self._num_last_bytes = sum(map(len, bodies))
        self.num_bytes += self._num_last_bytes
        while self.num_bytes > _MAX_BYTES:
            self.num_bytes -= len(self._bodies.popleft())

    def shrink(self) -> None:
        """Keep the last batch as bytes only, if it is large."""
        if self._num_last_bytes > _MAX_OBJECT_BYTES:
            self._last = []

    def since(self, after: int, limit: int) -> list[LoggedEvent]:
        """Return up to `limit` events that follow `after` directly, or none."""
        if after >= self._last_seq:
            return []
        last = self._last
        start = after - self._last_seq + len(last)
        if start >= 0:
            return last if start == 0 and len(last) <= limit else last[start : start + limit]
        start = after - self._last_seq + len(self._bodies)
        if start < 0:
            return []
        bodies = islice(self._bodies, start, start + limit)
        return [LoggedEvent(seq, decode_event(body)) for seq, body in enumerate(bodies, after + 1)]

    def clear(self) -> None:
        """Keep nothing."""
        self._last, self.num_bytes, self._num_last_bytes, self._last_seq = [], 0, 0, 0
        self._bodies.clear()
