"""`ReaderLaws`: what holds between the engine, readers and waiting sequences: parks, pauses, queue times."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import StepPlan
from streamserve.engine.sequence import Sequence
from tests.sim.laws.debts import is_row
from tests.sim.laws.prompts import surely_fits

if TYPE_CHECKING:
    from tests.sim.asked import Asked
    from tests.sim.simulation import Simulation


class ReaderLaws:
    """Laws of readers and waiting sequences; counts parks of each kind."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.parks: Counter[str] = Counter()
        self._unread: dict[int, int] = {}
        self._again: dict[int, int] = {}
        self._ahead: dict[int, float] = {}
        self.resting: set[int] = set()  # when the step began
        self._lent: set[int] = set()  # rows that the last plan computes for another class

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
        self._lent = laws.sharing.lent_rows(plan)
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
        if is_row(heads[0]) and len(plan.chunks) >= shape.max_num_seqs:
            return
        alike = [s for s in scheduler.running if is_row(s) is is_row(heads[0])]
        ahead = [s for s in alike if self._may_park(s)]
        ahead += [] if is_row(heads[0]) else [s for s in scheduler.running if is_row(s) and s.seq_id not in self._lent]
        fits = surely_fits(self.sim, heads[0], [s for s in scheduler.running if s not in ahead], ahead)
        assert not ahead or not fits, f"23: {heads[0].seq_id} waits, and {ahead[0].seq_id} does not park"

    def _may_park(self, sequence: Sequence) -> bool:
        is_ahead = self._ahead.get(sequence.seq_id, float("-inf")) >= self.sim.shape.min_ahead_seconds
        return is_ahead or self.sim.laws.hunger.rests(sequence)

    def check_update(self, asked: Asked, update: SequenceUpdate) -> None:
        """A park has its reason, and no answer gets further ahead than the lead; after a preemption by a token."""
        lead = self.sim.shape.lead_tokens
        unread = len(asked.shown) + len(update.token_ids) - int(asked.received or 0)
        if asked.received is not None and update.token_ids:
            sequence = self.sim.core._sequences.get(update.seq_id)
            self._again[update.seq_id] = sequence.num_preemptions if sequence else self._again.get(update.seq_id, 0)
            most = max(lead, self._unread[update.seq_id] + 1) + self._again[update.seq_id]
            beyond, has_tried = self.sim.laws.hunger.beyond, self.sim.laws.has_tried
            beyond |= {update.seq_id} if has_tried and unread > most else set()  # its plan was not looked at
            is_lent = update.seq_id in beyond
            assert unread <= most or update.is_last or is_lent, f"22: {unread} tokens unread"
        if update.park is None:
            return
        self.parks[update.park.reason] += 1
        if update.park.reason == "lead":
            assert asked.received is not None, "22: parked at the lead without a reader"
            assert unread >= lead, f"22: parked with {unread} unread"
            assert update.park.resume_at_lead == lead // 2, "22: another time to ask again"
            assert update.seq_id in self.sim.laws.givers.stalled or self._is_needed(), (
                "22: parked though memory is free"
            )
        elif update.park.reason == "ahead":
            self._check_ahead(asked, update)
        else:
            why = (update.park.reason, self.sim.was_paused)
            assert why == ("paused", True), f"24: parked because {why[0]}"

    def _check_ahead(self, asked: Asked, update: SequenceUpdate) -> None:
        """The parked one was the furthest ahead, by enough, and another waits or got its memory; rows go before it."""
        assert update.park is not None
        laws = self.sim.laws
        ahead = self._ahead.get(update.seq_id)
        assert ahead is not None, "23: parked without a reader, or a new token"
        assert ahead >= self.sim.shape.min_ahead_seconds - 1e-9, f"23: parked only {ahead} s ahead"
        of_batch = asked.request.latency_class == "batch"
        assert of_batch or not any(s for s in laws.stayed() if is_row(s) and s.seq_id not in self._lent), (
            "23: parked, and a row of a batch stays"
        )
        staying = [self._ahead.get(s.seq_id, 0.0) for s in laws.stayed() if is_row(s) is of_batch]
        assert all(ahead >= one - 1e-9 for one in staying), "23: another was further ahead"
        right = min(ahead / 2, 30.0)
        assert abs(update.park.resume_seconds - right) < 1e-6, "23: another time to ask again"
        before = {s.seq_id for s in laws.running}
        came = [s for s in self.sim.core.scheduler.running if s.seq_id not in before]
        assert self._is_needed(), "23: parked, and none waits"
        new = [s for s in (*came, *self.sim.core.scheduler.waiting) if s.num_output_tokens <= 1]
        assert new or laws.answers.has_ended, "23: parked for answers that have shown tokens"

    def _is_needed(self) -> bool:
        """Whether another one waits or came, or lacked a block for its next token."""
        laws, scheduler = self.sim.laws, self.sim.core.scheduler
        before = {s.seq_id for s in laws.running}
        came = [s for s in scheduler.running if s.seq_id not in before]
        return bool(came or scheduler.waiting or laws.answers.has_ended or laws.num_wanted > laws.num_free)

    def _check_held(self) -> None:
        """No answer holds memory for ever; and while nothing but held ones runs, none waits."""
        laws, running = self.sim.laws, self.sim.core.scheduler.running
        for sequence in laws.stayed():
            if sequence.seq_id in self.resting and laws.hunger.rests(sequence) and not laws.was_flying and laws.is_calm:
                seconds = laws.hunger.still_seconds(sequence, laws.started_at)
                has_left = seconds < self.sim.shape.stalled_seconds
                assert has_left, f"22: the reader of {sequence.seq_id} has not moved for {seconds} s"
        is_quiet = laws.is_calm and not laws.was_flying and not laws.has_refused() and not laws.had_messages
        if running and is_quiet and len(laws.plans) == laws.num_plans and all(map(laws.hunger.rests, running)):
            assert all(map(is_row, self.sim.core.scheduler.waiting)), "10: all that run are held, and another waits"

    def after_step(self) -> None:
        """A paused engine holds no sequence."""
        self._check_held()
        sim = self.sim
        if sim.is_paused and not sim.has_changed_meanwhile:
            assert not sim.core._sequences, "24: a paused engine holds sequences"
