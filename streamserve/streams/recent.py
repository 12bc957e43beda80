"""`RecentEvents`: the newest events that this process has committed, so that readers here need not ask the log.

Only what a durable log has committed gets in, so it is a part of the truth, never ahead of it. Kept as bytes: as
objects they take five times as much, more with log-probabilities. Lives on the event loop.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice

from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.frames import decode_event

# About four pages of plain tokens a stream, and 256 streams.
_LOG_BYTES = 16 * 1024
_ALL_BYTES = 4 * 1024 * 1024


class _Run:
    """Consecutive events of one log, encoded, up to `last_seq`."""

    def __init__(self) -> None:
        self.bodies: deque[bytes] = deque()
        self.last_seq = 0
        self.num_bytes = 0

    @property
    def first_seq(self) -> int:
        return self.last_seq - len(self.bodies) + 1


class RecentEvents:
    """Fed with what each append committed, in order; the oldest events, and the logs untouched longest, go first."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._num_bytes = 0

    def add(self, log_id: str, last_seq: int, bodies: Sequence[bytes]) -> None:
        """Keep the encoded events that end at `last_seq`. If others have written in between, keep only these."""
        run = self._runs.get(log_id)
        if run is None or run.last_seq != last_seq - len(bodies):
            self.drop(log_id)
            run = self._runs[log_id] = _Run()
        run.bodies.extend(bodies)
        run.last_seq = last_seq
        self._count(run, sum(map(len, bodies)))
        self._runs.move_to_end(log_id)
        self._make_room(run)

    def read(self, log_id: str, after: int, limit: int) -> list[LoggedEvent]:
        """Return the events that follow `after` directly, or none."""
        run = self._runs.get(log_id)
        if run is None or not run.first_seq <= after + 1 <= run.last_seq:
            return []
        start = after + 1 - run.first_seq
        bodies = islice(run.bodies, start, start + limit)
        return [LoggedEvent(seq=seq, event=decode_event(body)) for seq, body in enumerate(bodies, after + 1)]

    def last_seq(self, log_id: str) -> int:
        """Return the last seq that is kept, 0 if none is."""
        run = self._runs.get(log_id)
        return 0 if run is None else run.last_seq

    def drop(self, log_id: str) -> None:
        """Forget a log."""
        run = self._runs.pop(log_id, None)
        if run is not None:
            self._num_bytes -= run.num_bytes

    def _make_room(self, run: _Run) -> None:
        while run.num_bytes > _LOG_BYTES and len(run.bodies) > 1:
            self._count(run, -len(run.bodies.popleft()))
        while self._num_bytes > _ALL_BYTES and len(self._runs) > 1:
            self.drop(next(iter(self._runs)))

    def _count(self, run: _Run, num_bytes: int) -> None:
        run.num_bytes += num_bytes
        self._num_bytes += num_bytes
