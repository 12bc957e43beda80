"""`Flights`: the launched, uncollected steps, and what is left to plan beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamserve.engine.plan import Chunk, StepPlan
from streamserve.engine.scheduler import Schedule, Scheduler
from streamserve.engine.sequence import Sequence, State
from streamserve.protocol.engine import SUSPECT_LOSSES

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class Flights:
    """A chunk in flight is void once its sequence has been preempted: the sequence starts again in other blocks."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._launched_at: dict[tuple[int, int], int] = {}
        self._planned: list[tuple[Sequence, int]] = []  # by the last plan, with how often they had been preempted

    def watch(self, scheduler: Scheduler) -> None:
        """Record what this scheduler plans."""
        schedule = scheduler.schedule

        def noted(now: float) -> Schedule:
            made = schedule(now)
            planned = (self.sim.core._sequences[chunk.seq_id] for chunk in made.chunks)
            self._planned = [(sequence, sequence.num_preemptions) for sequence in planned]
            return made

        scheduler.schedule = noted  # type: ignore[method-assign]

    def check_beside_trial(self, plans: list[StepPlan]) -> None:
        """What was planned beside a suspect is launched after it, in the same step."""
        launched = {chunk.seq_id for plan in plans for chunk in plan.chunks}
        for sequence, number in self._planned:
            is_there = sequence.state is State.RUNNING and sequence.num_preemptions == number
            is_suspect = self.sim.by_seq_id[sequence.seq_id].num_losses >= SUSPECT_LOSSES if is_there else True
            assert is_suspect or sequence.seq_id in launched, f"35: {sequence.seq_id} is left out beside a suspect"

    def note(self, plan: StepPlan) -> None:
        """Note a launched plan."""
        for chunk in plan.chunks:
            self._launched_at[plan.step_id, chunk.seq_id] = self.sim.core._sequences[chunk.seq_id].num_preemptions

    def is_void(self, plan: StepPlan, seq_id: int) -> bool:
        """Whether the result of this plan for a sequence is discarded."""
        sequence = self.sim.core._sequences.get(seq_id)
        return sequence is None or self._launched_at.get((plan.step_id, seq_id)) != sequence.num_preemptions

    def has_left_any(self) -> bool:
        """Whether a sequence in the queue had a chunk in flight when it went back there."""
        launched = {chunk.seq_id for plan in self.sim.runner.launched for chunk in plan.chunks}
        return any(sequence.seq_id in launched for sequence in self.sim.core.scheduler.waiting)

    def chunk_of(self, sequence: Sequence) -> Chunk | None:
        """Return the sequence's chunk in an uncollected step."""
        for plan in self.sim.runner.launched:
            if self._launched_at.get((plan.step_id, sequence.seq_id)) == sequence.num_preemptions:
                return next(chunk for chunk in plan.chunks if chunk.seq_id == sequence.seq_id)
        return None

    def num_unplanned(self, sequence: Sequence) -> int:
        """Return how many tokens, the pending one included, are in no step yet; 1: the sequence decodes."""
        chunk = self.chunk_of(sequence)
        if chunk is None:
            return len(sequence.token_ids) - sequence.num_computed_tokens
        is_pending = bool(chunk.samples)
        return len(sequence.token_ids) + is_pending - sequence.num_computed_tokens - len(chunk.token_ids)

    def num_wanted(self, sequence: Sequence) -> int:
        """Return how many blocks it lacks for its next token; a prompt with a window, for what a step computes."""
        num_left, size = self.num_unplanned(sequence), self.sim.shape.block_size
        landed = len(sequence.token_ids) - num_left + (num_left == 1 and self.chunk_of(sequence) is not None)
        end = landed + 1 if num_left == 1 else min(len(sequence.token_ids), landed + self.sim.shape.budget)
        return sum(max(0, -(-end // size) - len(table)) for table in sequence.held.tables) if num_left > 0 else 0

    def waits_for_token(self, sequence: Sequence) -> bool:
        """Whether its next chunk must wait: the pending token may be the last."""
        return self.sim.laws.was_flying and (
            sequence.num_output_tokens + 1 >= sequence.max_tokens
            or len(sequence.token_ids) + 1 >= self.sim.shape.max_model_len
        )
