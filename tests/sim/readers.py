"""`ReaderLaws`: what holds between the engine, readers and waiting sequences: parks, pauses, queue times."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import StepPlan
from streamserve.engine.sequence import Sequence
from tests.sim.prompts import surely_fits

if TYPE_CHECKING:
    from tests.sim.asked import Asked
    from tests.sim.simulation import Simulation


class ReaderLaws:
    """Laws of readers and waiting sequences; counts parks of each kind."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.parks: Counter[str] = Counter()
        self._unread: dict[int, int] = {}

    def note_admission(self, asked: Asked) -> None:
        """Note how far ahead an answer is at its admission: after a pause it may be far ahead."""
        if asked.received is not None:
            self._unread[asked.seq_id] = len(asked.shown) - int(asked.received)

    def _ahead_seconds(self, asked: Asked) -> float | None:
        """Return how far an answer was ahead of its reader's pace when the step began; None: it may not be parked."""
        if asked.received is None or asked.first_token_at is None or len(asked.shown) == asked.num_shown_before:
            return None
        pace = self.sim.core._config.classes[asked.request.latency_class].pace
        read = min(int(asked.received), pace * (self.sim.laws.started_at - asked.first_token_at))
        return (len(asked.shown) - read) / pace

    def check_waiting(self, plan: StepPlan) -> None:
        """No sequence waits for room that an answer far ahead of its reader could free (a conservative estimate)."""
        scheduler, shape = self.sim.core.scheduler, self.sim.shape
        decodes = {sequence.seq_id for sequence in self.sim.laws.decodes()}
        if not scheduler.waiting or scheduler.waiting[0].num_output_tokens:  # it has shown tokens: no park for it
            return
        if any(chunk.seq_id not in decodes for chunk in plan.chunks):
            return
        if plan.num_tokens + shape.block_size > self.sim.laws.budget_of_plan or self.sim.laws.has_preempted:
            return
        if self.sim.laws.has_refused():
            return
        ahead = [s for s in scheduler.running if self._may_park(s)]
        fits = surely_fits(self.sim, [s for s in scheduler.running if s not in ahead], ahead)
        head = scheduler.waiting[0]
        assert not ahead or not fits, f"23: {head.seq_id} waits, and {ahead[0].seq_id} does not park"

    def _may_park(self, sequence: Sequence) -> bool:
        asked = self.sim.by_seq_id.get(sequence.seq_id)
        ahead = None if asked is None else self._ahead_seconds(asked)
        return ahead is not None and ahead >= self.sim.shape.min_ahead_seconds

    def check_update(self, asked: Asked, update: SequenceUpdate) -> None:
        """A park has its reason, and no answer gets further ahead than the lead."""
        lead = self.sim.shape.lead_tokens
        unread = len(asked.shown) + len(update.token_ids) - int(asked.received or 0)
        if asked.received is not None and update.token_ids:
            most = max(lead, self._unread[update.seq_id] + 1)
            assert unread <= most, f"22: {unread} tokens unread"
            has_stopped = update.is_last or unread < lead
            assert has_stopped, f"22: {unread} tokens unread, and it continues"
        if update.park is None:
            return
        self.parks[update.park.reason] += 1
        if update.park.reason == "lead":
            assert asked.received is not None, "22: parked at the lead without a reader"
            assert unread >= lead, f"22: parked with {unread} unread"
            assert update.park.resume_at_lead == lead // 2, "22: another time to ask again"
        elif update.park.reason == "ahead":
            self._check_ahead(update)
        else:
            why = (update.park.reason, self.sim.was_paused)
            assert why == ("paused", True), f"24: parked because {why[0]}"

    def _check_ahead(self, update: SequenceUpdate) -> None:
        """The parked one was the furthest ahead, by enough, and another waits or got its place."""
        assert update.park is not None
        by_seq_id = self.sim.by_seq_id
        ahead = self._ahead_seconds(by_seq_id[update.seq_id])
        assert ahead is not None, "23: parked without a reader"
        assert ahead >= self.sim.shape.min_ahead_seconds, f"23: parked only {ahead} s ahead"
        staying = [by_seq_id[s.seq_id] for s in self.sim.laws.stayed()]
        assert all(ahead >= (self._ahead_seconds(one) or 0.0) for one in staying), "23: another was further ahead"
        assert update.park.resume_seconds == ahead / 2, "23: another time to ask again"
        before = {s.seq_id for s in self.sim.laws.running}
        came = [s for s in self.sim.core.scheduler.running if s.seq_id not in before]
        assert came or self.sim.core.scheduler.waiting or self.sim.laws.answers.has_ended, "23: parked, and none waits"
        new = [s for s in (*came, *self.sim.core.scheduler.waiting) if s.num_output_tokens <= 1]
        assert new or self.sim.laws.answers.has_ended, "23: parked for answers that have shown tokens"

    def after_step(self) -> None:
        """A paused engine holds no sequence."""
        sim = self.sim
        if sim.is_paused and not sim.has_changed_meanwhile:
            assert not sim.core._sequences, "24: a paused engine holds sequences"
