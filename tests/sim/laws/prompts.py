"""`PromptLaws`: which prompts a step computes, begun and waiting, and how much of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from streamserve.engine.plan import StepPlan
from streamserve.engine.sequence import Sequence, State
from tests.sim.laws.debts import is_row
from tests.sim.model import STEP_SECONDS, TOKEN_SECONDS

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

# After so many steps a step-time model knows what a token costs, and what a position does.
_NUM_STEPS_TO_TELL = 64


def surely_fits(sim: Simulation, head: Sequence, staying: list[Sequence], leaving: list[Sequence]) -> bool:
    """Whether the next in the queue certainly has room beside the sequences that stay (a conservative estimate)."""
    pool, size = sim.core.pool, sim.shape.block_size
    own = sum(pool._blocks[block_id].ref_count == 1 for s in leaving for table in s.held.tables for block_id in table)
    growth = 2 * sum(-(-(len(s.token_ids) + s.num_remaining_tokens) // size) for s in (*staying, head))
    return len(pool.windows) * (-(-len(head.token_ids) // size) + growth) <= pool.num_free + own


class PromptLaws:
    """Checks a plan that is about to run."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim

    def check(self, plan: StepPlan, decodes: list[Sequence]) -> None:
        """Check that prompts advance, by how much, and in which order."""
        decoding = {sequence.seq_id for sequence in decodes}
        planned = {chunk.seq_id: len(chunk.token_ids) for chunk in plan.chunks if chunk.seq_id not in decoding}
        self._check_progress(plan, planned)
        now, seconds = self.sim.laws.started_at, self.sim.shape.hungry_seconds
        hunger = self.sim.laws.hunger
        hungry = [s for s in decodes if hunger.ahead(s, now) < seconds and not hunger.is_held(s)]
        rows = {s.seq_id for s in self.sim.core.scheduler.running if is_row(s)} - self.sim.laws.sharing.lent_rows(plan)
        first = {seq_id: number for seq_id, number in planned.items() if seq_id not in rows}
        if first:
            self._check_next([s for s in hungry if not is_row(s)])
        self._check_time(plan, first, [s for s in hungry if not is_row(s)], is_short=False)
        if len(first) < len(planned):
            self._check_time(plan, planned, [s for s in decodes if not is_row(s) or s in hungry], is_short=True)
        self._check_share(first or planned, is_full=len(plan.chunks) == self.sim.shape.max_num_seqs)

    def _check_next(self, hungry: list[Sequence]) -> None:
        """What waits is looked at in each step in which hungry sequences and prompts that have begun leave a seat."""
        laws, waiting = self.sim.laws, self.sim.core.scheduler.waiting
        begun = self._begun()
        is_full = len(hungry) + len(begun) >= self.sim.shape.max_num_seqs
        if is_full or laws.has_preempted or not begun or all(map(is_row, waiting)):
            return
        assert laws.debts.heads, f"34: {waiting[0].seq_id} is not looked at beside {len(begun)} prompts"

    def _begun(self) -> list[Sequence]:
        """Prompts that had begun before the plan, but no rows of batches."""
        laws = self.sim.laws
        decodes = {s.seq_id for s in laws.decodes()}
        return [s for s in laws.stayed() if s.seq_id not in decodes and not is_row(s)]

    def _check_progress(self, plan: StepPlan, planned: dict[int, int]) -> None:
        """If any sequence has more than a token to compute, some prompt advances, as long as budget is left."""
        laws = self.sim.laws
        lent = laws.sharing.lent_rows(plan)
        rows = {s.seq_id for s in self.sim.core.scheduler.running if is_row(s)} - lent
        num_left = self.sim.shape.max_num_seqs - sum(chunk.seq_id not in rows for chunk in plan.chunks)
        running = [
            s
            for s in self.sim.core.scheduler.running
            if not laws.sharing.waits(s) and (num_left > 0 or s.seq_id not in rows)
        ]
        running = self._without_flying(running)
        longest = max((laws.flights.num_unplanned(s) for s in running), default=0)
        is_spent = plan.num_tokens >= laws.budget_of_plan
        # A prompt may have waited for the chunk in flight of a row that has given way since.
        assert longest < 2 or is_spent or planned or laws.has_given_way, "10: prefill stands still"

    def _check_time(self, plan: StepPlan, planned: dict[int, int], decodes: list[Sequence], *, is_short: bool) -> None:
        """At least a block; at most what the longest step and, beside decodes or if short, that of a token allow."""
        laws, shape, num_prefill = self.sim.laws, self.sim.shape, sum(planned.values())
        is_short = is_short or bool(decodes)
        if not laws.is_calm or self.sim.has_jumped:
            return
        step_time = self.sim.core.scheduler.step_time
        in_plan = {chunk.seq_id for chunk in plan.chunks}
        hungry = [s for s in decodes if s.seq_id in in_plan]
        hungry.sort(key=lambda sequence: laws.hunger.ahead(sequence, laws.started_at))
        # Those ahead join after the prompts, and so do the hungry ones in seats that were kept for prompts.
        num_lost = sum(not laws.could_decode(s) and not is_row(s) for s in laws.preempted_for_room())
        num_kept = min(len(self._begun()) + num_lost, max(1, shape.max_num_seqs // 2))
        num_before = min(len(hungry), shape.max_num_seqs - num_kept)
        before = {*planned, *(sequence.seq_id for sequence in hungry[:num_before])}
        until_joined = tuple(chunk for chunk in plan.chunks if chunk.seq_id in before)
        predicted = step_time.predict(replace(plan, chunks=until_joined))
        until_fitted = 0 if predicted is not None else shape.prefill_chunk if is_short else shape.budget
        seconds = min(shape.max_step_seconds, shape.itl_target_seconds if is_short else 1e9)
        by_time = round((seconds - STEP_SECONDS) / TOKEN_SECONDS) - num_before
        most = max(by_time, until_fitted, shape.block_size)
        if predicted is not None and predicted <= seconds:
            # A fit of few sizes is a token or two off, and beyond the largest step so far it is a guess. Early it may
            # take pairs for tokens: in the steps so far both grew together.
            is_young = step_time._num_steps < _NUM_STEPS_TO_TELL
            most += (by_time // 2 if is_young else 0) + 2 + max(0, plan.num_tokens - step_time._most_tokens)
        assert num_prefill <= most, f"29: {num_prefill} tokens of prefill, not {most}"

    def _check_share(self, planned: dict[int, int], *, is_full: bool) -> None:
        """The first prompt is not passed by; of a step that it could take whole, it leaves a block or half."""
        laws, scheduler = self.sim.laws, self.sim.core.scheduler
        lending = laws.sharing.writers_waited_for()  # their shared block is computed in the turn of another one
        lacks = {s.seq_id: laws.flights.num_unplanned(s) for s in scheduler.running if not laws.sharing.waits(s)}
        prompts = [s for s in scheduler.running if lacks.get(s.seq_id, 0) > max(1, planned.get(s.seq_id, 0))]
        if not planned or not laws.is_calm:
            return
        of_batch = all(is_row(s) for s in scheduler.running if s.seq_id in planned)
        prompts = [s for s in prompts if is_row(s) is of_batch] if of_batch else [s for s in prompts if not is_row(s)]
        prompts = self._without_flying(prompts, planned)
        head = self._could_start()
        if head is not None and is_row(head) is of_batch and not (of_batch and is_full):
            prompts.append(head)
            lacks[head.seq_id] = len(head.token_ids)
        if not prompts:
            return
        first = min(prompts, key=lambda s: s.ticket.order_key)
        if any(seq_id in planned and key < first.ticket.order_key for seq_id, key in lending.items()):
            return  # the step belongs to an earlier sequence, through the writer that it waits for
        if any(s.state is State.FINISHED for s in (*laws.running, *laws.waiting)) or laws.flights.has_left_any():
            return  # it waited for a writer that has just left, and has its turn in the next step
        chosen = [s for s in scheduler.running if s.seq_id in planned]
        heads = laws.debts.heads
        sooner = heads[: heads.index(first.seq_id)] if first.seq_id in heads else []  # of lighter tenants
        # It comes after these in the queue, so what has begun before them goes before it, too.
        key = max([first.ticket.order_key, *(s.ticket.order_key for s in scheduler.running if s.seq_id in sooner)])
        later = [s.seq_id for s in chosen if s.ticket.order_key > key and s.seq_id not in {*lending, *sooner}]
        if first.seq_id not in planned:  # the sequences before it took the whole budget, or left some to the shortest
            if any(s.ticket.order_key < first.ticket.order_key for s in chosen):
                later = [seq_id for seq_id in later if lacks.get(seq_id, 0) >= lacks[first.seq_id]]
            assert not later, f"34: {first.seq_id} is passed by by {later}"
            return
        num_later = sum(planned[seq_id] for seq_id in later)
        assert num_later <= self.sim.shape.block_size, f"34: {first.seq_id} gets less than those behind it: {num_later}"
        if is_full:
            return
        num_others = sum(planned.values()) - planned[first.seq_id]
        share = min(self.sim.shape.block_size, sum(planned.values()) // 2)
        lacks_blocks = self.sim.core.pool.num_free < len(
            self.sim.shape.windows
        )  # a prompt with a window then gets less
        is_fair = len(prompts) < 2 or num_others >= share or lacks_blocks
        assert is_fair, f"34: {first.seq_id} leaves {num_others} tokens to the others"
        longest = max((lacks[seq_id] for seq_id in later), default=0)
        begun = [s for s in prompts if s.seq_id not in planned and s in laws.running]
        shorter = [s.seq_id for s in begun if lacks[s.seq_id] < longest]
        assert not shorter, f"34: short prompts wait: {shorter}"

    def _without_flying(self, sequences: list[Sequence], planned: Collection[int] = ()) -> list[Sequence]:
        """Leave out those that waited for a cached block while a chunk flew, where this step has evicted any."""
        laws = self.sim.laws
        if not laws.has_evicted:
            return sequences
        return [s for s in sequences if s.seq_id in planned or laws.flights.chunk_of(s) is None]

    def _could_start(self) -> Sequence | None:
        """Return the next in the queue if it could have been admitted when the plan was made."""
        sim, scheduler = self.sim, self.sim.core.scheduler
        head = next((s for s in scheduler.waiting if s.seq_id in sim.laws.debts.heads), None)
        if head is None or sim.laws.has_preempted or sim.laws.has_refused():
            return None
        is_free = len(scheduler.running) != sim.shape.max_admitted
        return head if is_free and surely_fits(sim, head, scheduler.running, []) else None
