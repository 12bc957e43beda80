"""`RecentEvents`: the newest events that this process has committed, so that readers here need not ask the log.

Only what a durable log has committed gets in, so it is a part of the truth, never ahead of it. Lives on the event loop.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from streamserve.protocol.events import Event, LoggedEvent

# In encoded bytes: about four pages of plain tokens a stream (five times that as objects), and 256 streams.
_LOG_BYTES = 16 * 1024
_ALL_BYTES = 4 * 1024 * 1024


class _Run:
    """Consecutive events of one log, and how many bytes each was."""

    def __init__(self) -> None:
        self.events: deque[LoggedEvent] = deque()
        self.sizes: deque[int] = deque()
        self.num_bytes = 0


class RecentEvents:
    """Fed with what each append committed, in order; the oldest events, and the logs untouched longest, go first."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._num_bytes = 0

    def add(self, log_id: str, last_seq: int, events: Sequence[Event], sizes: Sequence[int]) -> None:
        """Keep the events that end at `last_seq`. If others have written in between, keep only these."""
        first_seq = last_seq - len(events) + 1
        run = self._runs.get(log_id)
        if run is None or run.events[-1].seq + 1 != first_seq:
            self.drop(log_id)
            run = self._runs[log_id] = _Run()
        run.events.extend(LoggedEvent(seq=seq, event=event) for seq, event in enumerate(events, first_seq))
        run.sizes.extend(sizes)
        self._count(run, sum(sizes))
        self._runs.move_to_end(log_id)
        self._make_room(run)

    def read(self, log_id: str, after: int, limit: int) -> list[LoggedEvent]:
        """Return the events that follow `after` directly, or none."""
        run = self._runs.get(log_id)
        if run is None or not run.events[0].seq <= after + 1 <= run.events[-1].seq:
            return []
        num_newer = run.events[-1].seq - after
        return [run.events[index] for index in range(-num_newer, min(0, limit - num_newer))]

    def last_seq(self, log_id: str) -> int:
        """Return the last seq that is kept, 0 if none is."""
        run = self._runs.get(log_id)
        return run.events[-1].seq if run is not None else 0

    def drop(self, log_id: str) -> None:
        """Forget a log."""
        run = self._runs.pop(log_id, None)
        if run is not None:
            self._num_bytes -= run.num_bytes

    def _make_room(self, run: _Run) -> None:
        while run.num_bytes > _LOG_BYTES and len(run.events) > 1:
            run.events.popleft()
            self._count(run, -run.sizes.popleft())
        while self._num_bytes > _ALL_BYTES and len(self._runs) > 1:
            self.drop(next(iter(self._runs)))

    def _count(self, run: _Run, num_bytes: int) -> None:
        run.num_bytes += num_bytes
        self._num_bytes += num_bytes
