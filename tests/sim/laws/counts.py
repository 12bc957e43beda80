"""`CountLaws`: what a device has counted for penalties, row by row, according to the plans it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamserve.engine.budget import StepBudget
from streamserve.engine.plan import PENDING, Chunk
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import Sequence

if TYPE_CHECKING:
    from tests.sim.asked import Asked
    from tests.sim.simulation import Simulation


class CountLaws:
    """For each row: its sequence, since which start and which failed step, and how many output tokens it holds."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._rows: dict[int, tuple[tuple[int, int, int], int]] = {}
        self._most_running = 0

    def watch(self, scheduler: Scheduler) -> None:
        """Note how many run at once, and what each finds in the cache: also of those that end before the step does."""
        start = scheduler._start

        def noted(sequence: Sequence, step: StepBudget, now: float) -> bool:
            has_started = start(sequence, step, now)
            self._most_running = max(self._most_running, len(scheduler.running))
            self.sim.laws.note_found()
            return has_started

        scheduler._start = noted  # type: ignore[method-assign]

    def check(self, asked: Asked, sequence: Sequence, chunk: Chunk) -> None:
        """A draw begins its row if the row may be incomplete, and otherwise brings the one new token."""
        if not chunk.samples:
            return
        (spec,) = chunk.samples
        is_wanted = asked.request.sampling.repetition_penalty != 1.0
        assert (spec.penalty_slot is not None) == is_wanted, "33: counts without a penalty, or none"
        if spec.penalty_slot is None:
            return
        shown = tuple(asked.shown)
        laws = self.sim.laws
        if laws.has_tried or (laws.was_flying and not self.sim.runner.launched):
            # Before a suspect is tried alone the steps in flight are collected; their tokens are not in updates yet.
            shown = tuple(asked.answer[: sequence.num_output_tokens])
        num_noticed = self.sim.core._num_out_of_memory  # a step may fail late, after another was launched on top of it
        start = sequence.seq_id, sequence.num_preemptions, self.sim.num_failures + num_noticed
        num_output = spec.position - len(asked.request.prompt_token_ids)
        begun, num_counted = self._rows.get(spec.penalty_slot, (None, 0))
        if spec.prompt_token_ids:
            assert begun != start, "33: counted from the beginning, and had been"
            assert spec.prompt_token_ids == asked.request.prompt_token_ids, "33: another prompt is counted"
            assert spec.output_token_ids == shown, "33: another output is counted"
            assert len(shown) == num_output, "33: begun without the pending token"
        else:
            assert begun is not None, "33: a row that was never begun"
            assert begun[:2] == start[:2], "33: another sequence's row"
            assert num_counted == num_output - 1, f"33: {num_counted} tokens are counted before token {num_output}"
            assert len(chunk.token_ids) == 1, "33: more than a token is new"
            assert chunk.token_ids[0] in (PENDING, *shown[-1:]), "33: another token is new"
        # A step on top of one that ran out of memory is void: the row begins again.
        is_void = any(plan in self.sim.runner.failed for plan in self.sim.runner.launched)
        self._rows[spec.penalty_slot] = (*start[:2], -1 if is_void else start[2]), num_output

    def after_step(self) -> None:
        """Each running sequence with penalties has a row of its own, and no other sequence has one; rows are reused."""
        sequences = self.sim.core._sequences.values()
        rows = [s.held.penalty_slot for s in sequences if s.held.penalty_slot is not None]
        wanted = [s for s in self.sim.core.scheduler.running if s.constraints.has_penalties]
        assert len(set(rows)) == len(rows) == len(wanted), f"33: rows {rows} for {len(wanted)} sequences"
        assert max(rows, default=-1) < self._most_running, f"33: row {max(rows)} is used"
