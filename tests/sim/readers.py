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
        self._ahead: dict[int, float] = {}

    def note_admission(self, asked: Asked) -> None:
        """Note how far ahead an answer is at its admission: after a pause it may be far ahead."""
        if asked.received is not None:
            self._unread[asked.seq_id] = len(asked.shown) - int(asked.received)

    def note_ahead(self, now: float) -> None:
        """Note how far running answers are ahead of their readers; one without a new token may not be parked."""
        may_park = [s for s in self.sim.core.scheduler.running if s.num_output_tokens > len(s.request.output_token_ids)]
        self._ahead |= {s.seq_id: self.sim.laws.hunger.ahead(s, now) for s in may_park}

    def check_waiting(self, plan: StepPlan) -> None:
        """No sequence waits for memory that an answer far ahead of its reader could free (a conservative estimate)."""
        scheduler, shape, laws = self.sim.core.scheduler, self.sim.shape, self.sim.laws
        decodes = {sequence.seq_id for sequence in laws.decodes()}
        heads = [s for s in scheduler.waiting if s.seq_id in laws.debts.heads]
        if not heads or heads[0].num_output_tokens:  # no seat is free, or it has shown tokens: no park for it
            return
        if any(chunk.seq_id not in decodes for chunk in plan.chunks):
            return
        if plan.num_tokens + shape.block_size > laws.budget_of_plan or laws.has_preempted:
            return
        if laws.has_refused() or len(scheduler.running) == shape.max_admitted:
            return
        ahead = [s for s in scheduler.running if self._may_park(s)]
        fits = surely_fits(self.sim, heads[0], [s for s in scheduler.running if s not in ahead], ahead)
        assert not ahead or not fits, f"23: {heads[0].seq_id} waits, and {ahead[0].seq_id} does not park"

    def _may_park(self, sequence: Sequence) -> bool:
        return self._ahead.get(sequence.seq_id, float("-inf")) >= self.sim.shape.min_ahead_seconds

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
        """The parked one was the furthest ahead, by enough, and another waits or got its memory."""
        assert update.park is not None
        laws = self.sim.laws
        ahead = self._ahead.get(update.seq_id)
        assert ahead is not None, "23: parked without a reader, or a new token"
        assert ahead >= self.sim.shape.min_ahead_seconds - 1e-9, f"23: parked only {ahead} s ahead"
        staying = [self._ahead.get(s.seq_id, 0.0) for s in laws.stayed()]
        assert all(ahead >= one - 1e-9 for one in staying), "23: another was further ahead"
        right = min(ahead / 2, 30.0)
        assert abs(update.park.resume_seconds - right) < 1e-6, "23: another time to ask again"
        before = {s.seq_id for s in laws.running}
        came = [s for s in self.sim.core.scheduler.running if s.seq_id not in before]
        assert came or self.sim.core.scheduler.waiting or laws.answers.has_ended, "23: parked, and none waits"
        new = [s for s in (*came, *self.sim.core.scheduler.waiting) if s.num_output_tokens <= 1]
        assert new or laws.answers.has_ended, "23: parked for answers that have shown tokens"

    def after_step(self) -> None:
        """A paused engine holds no sequence."""
        sim = self.sim
        if sim.is_paused and not sim.has_changed_meanwhile:
            assert not sim.core._sequences, "24: a paused engine holds sequences"
