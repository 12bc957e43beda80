"""`WaitLaws`: how long each sequence may wait for its first step, computed from a list of all that was seen.

An overload stands for a class when requests that are in time have been waiting for four times its `max_late_seconds`;
a queue that is empty counts for nothing while the last refusal is younger than three times the shortest of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import Sequence

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

STANDING, REFUSAL = 4.0, 3.0


class WaitLaws:
    """Records each moment at which the scheduler looks at its queue. `late_at`, `until`: of each sequence, by id."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.late_at: dict[int, float] = {}
        self.until: dict[int, float] = {}
        self._wrong: list[str] = []
        self._empty_at: list[float] = []  # when no sequence waited that was in time, and not through refusals
        self._refused_at: list[float] = []

    def watch(self, scheduler: Scheduler) -> None:
        """Record what this scheduler is given, what it looks at, and what it refuses."""
        queue = scheduler.queue
        add, expired, note = queue.add, queue.expired, queue.note

        def checked_add(sequence: Sequence, now: float) -> None:
            add(sequence, now)
            self._check_add(sequence, now)

        def noted(now: float) -> None:
            self._note(scheduler.waiting, now)
            note(now)

        def checked_expired(now: float) -> list[Sequence]:
            right = {s.seq_id for s in scheduler.waiting if self._waits(s) and self._is_over(s, now)}
            late = expired(now)
            if {s.seq_id for s in late} != right:
                self._wrong.append(f"20: {[s.seq_id for s in late]} are refused, not {right}")
            self._refused_at += [now] * bool(late)
            return late

        queue.add = checked_add  # type: ignore[method-assign]
        queue.note = noted  # type: ignore[method-assign]
        queue.expired = checked_expired  # type: ignore[method-assign]

    def may_refuse(self, seq_id: int) -> bool:
        """Whether a sequence may be refused in this step; never one that has shown a token."""
        return min(self.late_at.get(seq_id, float("inf")), self.until.get(seq_id, float("inf"))) < self.sim.clock()

    def is_late(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence has waited too long to be in time."""
        return self._waits(sequence) and self.late_at[sequence.seq_id] < now

    def after_step(self) -> None:
        """What was refused is right, and so is what may wait."""
        assert not self._wrong, self._wrong[0]

    def _check_add(self, sequence: Sequence, now: float) -> None:
        latency_class = self.sim.core._config.classes[sequence.request.latency_class]
        self.late_at[sequence.seq_id] = self.until[sequence.seq_id] = float("inf")
        if self._waits(sequence):
            in_time = latency_class.ttft_seconds + 0.8 * latency_class.max_late_seconds
            most = latency_class.max_queue_seconds or float("inf")
            is_standing = self._is_standing(sequence.request.latency_class, now)
            self.late_at[sequence.seq_id] = now + min(most, in_time) if most < float("inf") else most
            self.until[sequence.seq_id] = self.late_at[sequence.seq_id] if is_standing else now + most
        seen = sequence.ticket.late_at, sequence.ticket.expires_at
        right = self.late_at[sequence.seq_id], self.until[sequence.seq_id]
        if any(abs(one - other) > 1e-9 for one, other in zip(seen, right, strict=True) if one != other):
            self._wrong.append(f"20: {sequence.seq_id} is late and over at {seen}, not {right}")

    def _is_over(self, sequence: Sequence, now: float) -> bool:
        is_late = self.late_at[sequence.seq_id] < now
        is_standing = is_late and self._is_standing(sequence.request.latency_class, now)
        return self.until[sequence.seq_id] < now or is_standing

    def _is_standing(self, name: str, now: float) -> bool:
        seconds = STANDING * self.sim.core._config.classes[name].max_late_seconds
        return bool(self._empty_at) and now - self._empty_at[-1] > seconds

    def _note(self, waiting: list[Sequence], now: float) -> None:
        quiet = REFUSAL * min(one.max_late_seconds for one in self.sim.core._config.classes.values())
        is_empty = not any(now <= self.late_at[s.seq_id] < float("inf") for s in waiting if self._waits(s))
        if not self._empty_at or (is_empty and not any(now - at <= quiet for at in self._refused_at)):
            self._empty_at.append(now)

    def _waits(self, sequence: Sequence) -> bool:
        return sequence.scheduled_at is None and not sequence.request.output_token_ids
