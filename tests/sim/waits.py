"""`WaitLaws`: how long each sequence may wait for its first step, computed from a list of all arrivals and refusals."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import Sequence

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class WaitLaws:
    """Records each sequence that is added or refused. `until`: when a sequence's time is up."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.until: dict[int, float] = {}
        self._wrong: list[str] = []
        self._empty_at: defaultdict[str, list[float]] = defaultdict(list)
        self._refused_at: defaultdict[str, list[float]] = defaultdict(list)

    def watch(self, scheduler: Scheduler) -> None:
        """Record what this scheduler is given, and what it refuses."""
        add, expired = scheduler.add, scheduler.expired

        def checked_add(sequence: Sequence, now: float) -> None:
            name = sequence.request.latency_class
            others = [s for s in scheduler.waiting if s.request.latency_class == name and self._waits(s)]
            add(sequence, now)
            right = now + self._right(name, now, is_alone=not others) if self._waits(sequence) else float("inf")
            self.until[sequence.seq_id] = right
            if sequence.expires_at != right:  # an exception would be taken for one of the core's own
                self._wrong.append(f"20: {sequence.seq_id} may wait until {sequence.expires_at}, not {right}")

        def noted_expired(now: float) -> list[Sequence]:
            late = expired(now)
            for sequence in late:
                self._refused_at[sequence.request.latency_class].append(now)
            return late

        scheduler.add = checked_add  # type: ignore[method-assign]
        scheduler.expired = noted_expired  # type: ignore[method-assign]

    def is_over(self, seq_id: int) -> bool:
        """Whether a sequence's time was up when the step began; never for a sequence that has shown a token."""
        return self.until.get(seq_id, float("inf")) < self.sim.laws.started_at

    def after_step(self) -> None:
        """A sequence that waits for a first step has time left, and no more than it should have."""
        assert not self._wrong, self._wrong[0]
        for sequence in self.sim.core.scheduler.waiting:
            if self._waits(sequence) and self.sim.laws.is_calm:
                assert not self.is_over(sequence.seq_id), "20: in the queue too long"

    def _waits(self, sequence: Sequence) -> bool:
        return sequence.scheduled_at is None and not sequence.request.output_token_ids

    def _right(self, name: str, now: float, *, is_alone: bool) -> float:
        """What is left of a burst's time since the queue was empty, not by refusals; at least the budget and a bit."""
        latency_class = self.sim.core._config.classes[name]
        most, empty_at = latency_class.max_queue_seconds or float("inf"), self._empty_at[name]
        was_refused = any(now - at <= most for at in self._refused_at[name])
        if not empty_at or (is_alone and not was_refused):
            empty_at.append(now)
        standing = min(most, latency_class.ttft_seconds + latency_class.max_late_seconds)
        return max([standing, *(at + most - now for at in empty_at)])
