"""`GiverLaws`: who gives memory up for whom, looked at in the moment when a plan takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from streamserve.engine.budget import StepBudget
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import Sequence, State
from tests.sim.laws.debts import is_row

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class GiverLaws:
    """`counts`: how often each kind of giving happened; a law without cases would hold nothing."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.stalled: set[int] = set()  # parked because their readers have not moved
        self.counts: Counter[str] = Counter()
        self._taker: Sequence | None = None  # for whom the plan looks for memory now
        self._is_waiting = False
        self._now = 0.0  # when it looks
        self._wrong: list[str] = []

    def watch(self, scheduler: Scheduler) -> None:
        """Look at each park and each preemption when it happens."""
        make_room, has_room = scheduler._make_room, scheduler._has_room
        park, preempt = scheduler._park, scheduler._preempt

        def noted_make(taker: Sequence, step: StepBudget, now: float, *, spares_peers: bool = False) -> bool:
            self._taker, self._is_waiting, self._now = taker, taker.state is State.WAITING, now
            has_room = make_room(taker, step, now, spares_peers=spares_peers)
            self._taker = None
            return has_room

        def noted_room(sequence: Sequence, leaving: Iterable[Sequence] = ()) -> bool:
            is_free = has_room(sequence, leaving)
            if not is_free and not leaving and sequence.state is State.WAITING:
                self._check_needed(scheduler, sequence)
            return is_free

        def noted_park(sequence: Sequence, step: StepBudget, now: float) -> None:
            self._check_park(scheduler, sequence, set(step.chunks), now)
            park(sequence, step, now)

        def noted_preempt(sequence: Sequence, step: StepBudget) -> None:
            assert self._taker is not None, "12: preempted for none"
            self._check_preempt(scheduler, sequence, self._taker)
            self._check_rest(sequence, self._taker, set(step.chunks))
            preempt(sequence, step)

        scheduler._make_room = noted_make  # type: ignore[method-assign]
        scheduler._has_room = noted_room  # type: ignore[method-assign]
        scheduler._park = noted_park  # type: ignore[method-assign]
        scheduler._preempt = noted_preempt  # type: ignore[method-assign]

    def after_step(self) -> None:
        """Who gave was the one to give."""
        assert not self._wrong, self._wrong[0]

    def _check_needed(self, scheduler: Scheduler, waiting: Sequence) -> None:
        """What waits has no room beside those that do not give way to it."""
        most, pool = self.sim.shape.max_admitted, self.sim.core.pool
        if is_row(waiting) or (most is not None and len(scheduler.running) >= most):
            return
        others = [s for s in scheduler.running if not is_row(s)]
        self.counts["places"] += len(others) < len(scheduler.running)
        if scheduler._reserve.fits(pool, waiting, pool.find_prefix(waiting), others, pool.num_free):
            self._wrong.append(f"23: place is made for {waiting.seq_id}, which has room")

    def _check_park(self, scheduler: Scheduler, sequence: Sequence, planned: set[int], now: float) -> None:
        hunger, taker = self.sim.laws.hunger, self._taker
        if taker is None:
            seconds = hunger.still_seconds(sequence, now) if hunger.rests(sequence) else 0.0
            if seconds < self.sim.shape.stalled_seconds:
                self._wrong.append(f"22: {sequence.seq_id} parks for none, and its reader moves")
            self.stalled.add(sequence.seq_id)
            return
        if is_row(sequence) is not is_row(taker):
            self._wrong.append(f"23: {sequence.seq_id} parks for {taker.seq_id}, which is of another kind")
        rows = [s.seq_id for s in scheduler.running if is_row(s) and s.seq_id not in planned]
        if rows and not is_row(taker):
            self._wrong.append(f"23: {sequence.seq_id} parks, and row {rows[0]} stays")
        resting = self._resting(scheduler, sequence)
        own = hunger.ahead(sequence, now)
        if any(hunger.ahead(one, now) > own + 1e-9 for one in resting):
            self._wrong.append(f"23: {sequence.seq_id} parks, and another was further ahead")
        self.counts["parks" if self._is_waiting else "parks for a token"] += 1
        self.counts["parks of several"] += len(resting) > 1 and not self._is_waiting

    def _check_preempt(self, scheduler: Scheduler, sequence: Sequence, taker: Sequence) -> None:
        """A row of a batch gives way to all others; else only peers do, and only if none that rests can park."""
        if is_row(sequence) and not is_row(taker):
            self.counts["rows"] += 1
            return
        self.counts["preemptions"] += 1
        if is_row(taker) and not is_row(sequence):
            self._wrong.append(f"12: {sequence.seq_id} is preempted for row {taker.seq_id}")
        resting = [s.seq_id for s in self._resting(scheduler, sequence)]
        if resting or self._is_waiting:
            self._wrong.append(f"12: {sequence.seq_id} is preempted, and {resting} could park")

    def _check_rest(self, sequence: Sequence, taker: Sequence, planned: set[int]) -> None:
        """An answer that its reader does not wait for costs no peer its blocks, but in a step that else is empty."""
        lead = self.sim.laws.hunger.ahead(taker, self._now)
        if self._is_waiting or is_row(sequence) is not is_row(taker) or lead < self.sim.shape.hungry_seconds:
            return
        self.counts["preemptions for a lead"] += 1
        if taker.num_unplanned_tokens == 1 and planned:
            self._wrong.append(f"12: {sequence.seq_id} is preempted for {taker.seq_id}, whose reader has time")

    def _resting(self, scheduler: Scheduler, sequence: Sequence) -> list[Sequence]:
        peers = (s for s in scheduler.running if is_row(s) is is_row(sequence))
        return [s for s in peers if self.sim.laws.hunger.rests(s)]
