"""`Laws`: what holds before, in and after every step of a simulation. The numbers in messages are those of README.md.

Reads the core's state, and keeps an account of its own: what each block was written with, what each name means, what is
in flight. Sees the core between two steps, and when a plan was made and is about to run (`check_plan`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import PENDING, Chunk, StepPlan
from streamserve.engine.sequence import Sequence, SequenceRequest, State
from streamserve.protocol.engine import SUSPECT_LOSSES
from tests.sim.books import Books
from tests.sim.laws.answers import AnswerLaws
from tests.sim.laws.counts import CountLaws
from tests.sim.laws.debts import Debts, is_row
from tests.sim.laws.flights import Flights
from tests.sim.laws.givers import GiverLaws
from tests.sim.laws.hunger import HungerLaws
from tests.sim.laws.prompts import PromptLaws
from tests.sim.laws.readers import ReaderLaws
from tests.sim.laws.sharing import SharingLaws
from tests.sim.laws.waits import WaitLaws

if TYPE_CHECKING:
    from tests.sim.asked import Asked
    from tests.sim.simulation import Simulation


class Laws:
    """All laws; each method checks one moment."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.books = Books(sim)
        self.readers = ReaderLaws(sim)
        self.prompts = PromptLaws(sim)
        self.waits = WaitLaws(sim)
        self.debts = Debts(sim)
        self.hunger = HungerLaws(sim)
        self.givers = GiverLaws(sim)
        self.answers = AnswerLaws(sim)
        self.flights = Flights(sim)
        self.counts = CountLaws(sim)
        self.sharing = SharingLaws(sim)
        self.plans: list[StepPlan] = []
        self.prompt_tokens = 0
        self.least_prompt_tokens = 0
        self.has_evicted = False
        self._preempted: set[int] = set()
        self._started: set[tuple[int, int]] = set()
        self._cached: dict[int, int] = {}
        self._found: dict[int, int] = {}
        self._order: dict[int, tuple[int, float, int]] = {}
        self._forced: set[int] = set()

    @property
    def is_calm(self) -> bool:
        """Whether nothing failed in this step so far, and no suspect was tried: parts follow other rules."""
        return self.sim.num_failures == self.num_failures and not self.has_tried

    def cached_tokens(self, seq_id: int) -> int | None:
        """Return how many tokens a sequence found in the cache; None: it was in no step yet."""
        return self._cached.get(seq_id)

    def stayed(self) -> list[Sequence]:
        """Return the sequences that ran when the step began, and still run, in the same blocks."""
        return [s for s, before in self._ran if s.state is State.RUNNING and s.num_preemptions == before]

    def has_refused(self) -> bool:
        """Whether one of the waiting sequences has ended: another may have been the first when the plan was made."""
        return any(s.state is State.FINISHED for s in self.waiting)

    @property
    def budget_of_plan(self) -> int:
        """Tokens that this step's plan could have: a lowered budget recovers after the plan, and falls before it."""
        return min(self._budget_before, self.sim.core.scheduler.token_budget)

    def decodes(self) -> list[Sequence]:
        """Return the sequences that stayed and could decode."""
        return [sequence for sequence in self.stayed() if sequence.seq_id in self._could_decode]

    def could_decode(self, sequence: Sequence) -> bool:
        """Whether a sequence lacked one token when the step began."""
        return sequence.seq_id in self._could_decode

    def preempted_for_room(self) -> list[Sequence]:
        """Return the sequences that ran when the step began, and have lost their blocks to its plan."""
        return [s for s, _ in self._ran if s.state is State.WAITING and s.seq_id not in self._forced]

    # Called by the simulation.

    def note_admission(self, asked: Asked, one: SequenceRequest) -> None:
        """Note that an answer is submitted to the core, for the first time or again."""
        self.prompt_tokens += len(one.prompt_token_ids)
        self.readers.note_admission(asked)

    def note_preempted(self, victims: list[Sequence]) -> None:
        """Note the sequences that the simulation preempted."""
        self.has_preempted = bool(victims)
        self._forced |= {sequence.seq_id for sequence in victims}
        self._preempted |= self._forced

    def note_evicted(self, block_id: int) -> None:
        """Note that a block has lost its content for reuse, which is spoilt."""
        self.has_evicted = True
        self.sim.runner.poison(block_id)

    def note_found(self) -> None:
        """Note what running sequences without a step found in the cache: they may leave before their first step."""
        for sequence in self.sim.core.scheduler.running:
            asked = self.sim.by_seq_id.get(sequence.seq_id)
            if asked is None or (sequence.seq_id, sequence.num_preemptions) in self._started:
                continue
            self.books.check_hit(asked, sequence.held.tables, sequence.num_computed_tokens)
            if sequence.seq_id not in self._cached and sequence.num_preemptions == 0:
                self._found[sequence.seq_id] = sequence.num_computed_tokens

    # Moments of a step.

    def before_step(self) -> None:
        """Record the state before the step."""
        sim, scheduler = self.sim, self.sim.core.scheduler
        self.started_at = sim.clock()
        self._budget_before = scheduler.token_budget
        self.debts.heads.clear()
        self.num_plans = len(self.plans)
        self.had_messages = bool(sim.core._inbox)
        self.running = list(scheduler.running)
        self.waiting = list(scheduler.waiting)
        self.was_flying = bool(sim.runner.launched)
        self.parts: list[StepPlan] = []
        self.first_step_id = sim.runner.launched[0].step_id if self.was_flying else sim.core.stats.steps
        self.was_paused = sim.is_paused
        self.num_failures = sim.num_failures
        self.num_quarantines = sim.num_quarantines
        self.num_free = sim.core.pool.num_free
        self.has_preempted = self.has_tried = self.has_given_way = self.has_evicted = False
        self.answers.before_step()
        self._forced.clear()
        self.num_wanted = sum(map(self.flights.num_wanted, self.running))
        self._ran = [(s, s.num_preemptions) for s in self.running]
        self.readers.resting = {s.seq_id for s in self.running if self.hunger.rests(s)}
        self._could_decode = {s.seq_id for s in self.running if self.flights.num_unplanned(s) == 1}

    def check_plan(self, plan: StepPlan) -> None:
        """Check a plan that the core is about to launch."""
        sim = self.sim
        # A step that ran out of memory is tried again in parts, when no other step is in flight.
        is_part = not sim.runner.launched if self.was_flying else len(self.plans) > self.num_plans
        is_trial = self._check_trial(plan)
        self.note_found()
        self.plans.append(plan)
        sim.plans.append(plan)
        is_part = is_part or is_trial
        self.parts += [plan] * (is_part and not is_trial)
        assert not self.was_paused, "24: a step of a paused engine"
        assert 0 < plan.num_tokens <= sim.shape.budget, f"9: {plan.num_tokens} tokens in a step"
        assert len(plan.chunks) <= sim.shape.max_num_seqs, f"9: {len(plan.chunks)} sequences in a step"
        assert len({chunk.seq_id for chunk in plan.chunks}) == len(plan.chunks), "9: a sequence twice in a step"
        num_running, most = len(sim.core.scheduler.running), sim.shape.max_admitted
        assert most is None or num_running <= most, f"9: {num_running} are admitted"
        for sequence in sim.core.scheduler.waiting:
            if sequence.seq_id in sim.by_seq_id:
                self.books.forget_hits(sim.by_seq_id[sequence.seq_id])
        if not is_part:
            self.sharing.check_plan(plan)
            self._check_order()
            self._check_preempted()
            assert plan.num_tokens <= sim.core.scheduler.token_budget, "26: more than the lowered budget"
            self.prompts.check(plan, self.decodes())
            self.hunger.check_plan(plan, self.decodes(), self.admitted())
            self.readers.check_waiting(plan)
        for chunk in plan.chunks:
            self._check_chunk(chunk)
        self.flights.note(plan)

    def check_update(self, update: SequenceUpdate) -> Asked:
        """Check an update of the core. Returns its answer."""
        asked = self.answers.check(update)
        self.readers.check_update(asked, update)
        if update.token_ids:
            self.hunger.note_tokens(update.seq_id, update.at)
        if update.is_last and update.token_ids and update.seq_id not in self._preempted:
            self.least_prompt_tokens += len(asked.request.prompt_token_ids)
        return asked

    def after_step(self) -> None:
        """Check everything that holds after a step."""
        assert self.sim.core.has_work or not self.sim.runner.launched, "28: an uncollected step is no work"
        self.books.check(self.answers.failed)
        if self.has_tried and self.sim.num_failures == self.num_failures:
            self.flights.check_beside_trial(self.plans[self.num_plans :])
        self._check_states()
        self._check_quarantine()
        self._check_out_of_memory()
        self._check_progress()
        self._check_times()
        self.counts.after_step()
        self.note_found()
        self.readers.after_step()
        self.waits.after_step()
        self.debts.after_step()
        self.hunger.after_step()
        self.givers.after_step()

    def check_end(self) -> None:
        """Check the engine after the last request has ended."""
        sim, stats = self.sim, self.sim.core.stats
        assert not sim.core.has_work, "32: does not come to an end"
        assert all(asked.is_over for asked in sim.asked), "32: an answer without an end"
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0), "7: something is left"
        assert not sim.runner.launched, "28: a step was never collected"
        assert stats.steps == len(self.plans), f"30: {stats.steps} steps, not {len(self.plans)}"
        assert (stats.out_of_memory > 0) == (sim.num_out_of_memory > 0), "30: steps out of memory"
        for counted, seen in (
            (stats.generation_tokens, self.answers.tokens),
            (stats.parks, self.readers.parks.total()),
        ):
            # Updates of a sequence that leaves during a step are counted, and not delivered.
            assert seen <= counted <= seen + 2 * sim.num_late, f"30: {counted} counted, {seen} seen"
        assert self.least_prompt_tokens <= stats.prompt_tokens <= self.prompt_tokens, "30: prompt tokens"
        assert sim.num_unknown <= stats.unknown_ids <= sim.num_unknown + sim.num_late, "30: unknown ids"
        num_found = sum(self._found.values())
        assert stats.prefix_hits == num_found, f"30: {stats.prefix_hits} tokens hit, not {num_found}"

    # Plans.

    def _check_trial(self, plan: StepPlan) -> bool:
        """A suspect's step holds no other sequence. Returns whether this plan is such a step."""
        asked = [self.sim.by_seq_id.get(chunk.seq_id) for chunk in plan.chunks]
        is_trial = any(one is not None and one.num_losses >= SUSPECT_LOSSES for one in asked)
        if is_trial:
            assert (len(plan.chunks), self.sim.runner.launched) == (1, []), "35: a suspect among others"
            self.has_tried = True
        return is_trial

    def _check_chunk(self, chunk: Chunk) -> None:
        sim = self.sim
        asked, sequence = sim.by_seq_id.get(chunk.seq_id), sim.core._sequences.get(chunk.seq_id)
        assert asked is not None, "15: a plan with a sequence that was aborted or is over"
        assert sequence is not None, "15: a plan with an unknown sequence"
        # Before a suspect is tried alone the step in flight is collected; its updates come only after this step.
        shown = (
            asked.answer[: sequence.num_output_tokens] if self.was_flying and not sim.runner.launched else asked.shown
        )
        known, size = (*asked.request.prompt_token_ids, *shown), sim.shape.block_size
        start, end = chunk.start, chunk.start + len(chunk.token_ids)
        flying = self.flights.chunk_of(sequence)
        landed = sequence.num_computed_tokens + (len(flying.token_ids) if flying else 0)
        assert start == landed < end, f"9: a chunk from {start} to {end}, where {landed} are computed"
        if chunk.token_ids == (PENDING,):
            is_pending = flying is not None and bool(flying.samples)
            assert (is_pending, start) == (True, len(known)), "28: nothing is pending"
            is_last = len(asked.shown) + 1 >= sequence.max_tokens or len(known) + 1 >= sim.shape.max_model_len
            assert not is_last, "28: planned on top of the last token"
        else:
            assert chunk.token_ids == known[start:end], "13: a plan with other tokens than were shown"
        is_wanted = end >= len(known) and asked.request.sampling.max_tokens != 0
        assert (bool(chunk.samples)) == is_wanted, "9: samples too early, or not at all"
        for table, own in zip(chunk.tables, sequence.held.tables, strict=True):
            assert len(table) == -(-end // size), f"6: {len(table)} blocks for {end} tokens"
            assert list(table) == own[: len(table)], "6: another table"
        self.books.check_writes(asked, chunk)
        self.counts.check(asked, sequence, chunk)
        self._check_start(asked, sequence, chunk)

    def _check_start(self, asked: Asked, sequence: Sequence, chunk: Chunk) -> None:
        """What a sequence finds in the cache is what it would have written itself, and its tenant may share it."""
        key = (sequence.seq_id, sequence.num_preemptions)
        has_begun = key in self._started and not self.books.is_all_found(asked, chunk)
        if has_begun or self.flights.chunk_of(sequence) is not None:
            return
        self._started.add(key)
        self.books.check_hit(asked, chunk.tables, chunk.start)
        if sequence.num_preemptions == 0:
            self._cached[sequence.seq_id] = self._found[sequence.seq_id] = chunk.start
        self._cached.setdefault(sequence.seq_id, self._found.get(sequence.seq_id, chunk.start))

    def _check_order(self) -> None:
        """Strictly in order: each that is admitted was next, and of one tenant none goes long before an earlier one."""
        scheduler = self.sim.core.scheduler
        admitted, heads = self.admitted(), self.debts.heads
        for sequence in admitted:
            assert sequence.seq_id in heads, f"11: {sequence.seq_id} is admitted, and was not next"
        parked = {sequence.seq_id for sequence, _ in scheduler._parked}  # by this plan, which may have admitted them
        started = {sequence.seq_id for sequence in admitted} | parked
        passed = [seq_id for seq_id in heads[:-1] if seq_id not in started | {heads[-1]}]
        assert not passed or not self.is_calm, f"11: {passed} are passed by"
        for sequence in scheduler.waiting:
            for one in admitted:
                is_late = self.waits.is_late(sequence, self.started_at)
                alike = one.request.admission.share_of == sequence.request.admission.share_of and not is_late
                alike = alike and one.scheduled_at == self.started_at and not one.num_output_tokens
                alike = alike and "batch" not in (one.request.latency_class, sequence.request.latency_class)
                is_fair = one.request.arrived_at <= sequence.request.arrived_at + self._bound(sequence)
                assert is_fair or not alike, f"11: {sequence.seq_id} waits for {one.seq_id}, which came later"

    def admitted(self) -> list[Sequence]:
        """Return the sequences that this plan has started."""
        before = {sequence.seq_id for sequence in self.running} - self._forced
        return [s for s in self.sim.core.scheduler.running if s.seq_id not in before]

    def _bound(self, sequence: Sequence) -> float:
        """Return by how many seconds a request may come later and go before this one."""
        classes = self.sim.core._config.classes
        smallest = min(one.ttft_seconds for one in classes.values())
        latency_class = classes[sequence.request.latency_class]
        return latency_class.ttft_seconds + 0.35 * latency_class.max_late_seconds - smallest

    def _check_preempted(self) -> None:
        """A sequence is preempted only for want of blocks, and the last in order first."""
        scheduler = self.sim.core.scheduler
        waiting = {s.seq_id for s in scheduler.waiting}
        victims = [s for s in self.running if s.seq_id in waiting - self._forced]
        self._preempted |= {s.seq_id for s in victims}
        self.has_preempted = self.has_preempted or bool(victims)
        again = [s.seq_id for s, number in self._ran if s.state is State.RUNNING and s.num_preemptions != number]
        assert self._forced or not again, f"12: {again} are preempted, and start again at once"
        if not victims or self._forced:
            return
        lent, before = self.sharing.lent_rows(self.plans[-1]), {s.seq_id for s in self.running}
        kept = [s for s in scheduler.running if s.seq_id not in lent]
        for victim in victims:
            assert all(s.ticket.order_key < victim.ticket.order_key for s in kept), (
                f"12: {victim.seq_id} is not the last"
            )
        came = [s for s in kept if s.seq_id not in before]
        others = [s for s in (*came, *scheduler.waiting) if not is_row(s)]
        has_given_way = bool(others) and all(map(is_row, victims))
        # Where layers have a window a prompt gets blocks as it is computed, also after an admission.
        may_be_late = bool(came) and any(window is not None for window in self.sim.shape.windows)
        is_short = self.num_wanted > self.num_free or may_be_late
        assert has_given_way or is_short, "12: preempted with blocks to spare"
        self.has_given_way = has_given_way
        if has_given_way and came and self.sim.shape.max_admitted is None and not self.num_wanted:
            assert self._num_surely_needed(kept, came) > self.num_free, "12: a row gave way in vain"
        is_alone = all(not is_row(s) for s in came) if has_given_way else not came or may_be_late
        assert is_alone, "12: an admission and a preemption in one step"

    def _num_surely_needed(self, kept: list[Sequence], came: list[Sequence]) -> int:
        """More blocks than it takes to start these beside what stays of other classes than rows, and its growth."""
        size, others = self.sim.shape.block_size, [s for s in kept if not is_row(s)]
        growth = 2 * sum(-(-(len(s.token_ids) + s.num_remaining_tokens) // size) for s in others)
        return len(self.sim.shape.windows) * (growth + sum(-(-len(s.token_ids) // size) for s in came))

    # After a step.

    def _check_states(self) -> None:
        core = self.sim.core
        waiting, running = core.scheduler.waiting, core.scheduler.running
        ids = [s.seq_id for s in (*waiting, *running)]
        assert len(set(ids)) == len(ids) == len(core._sequences), "8: in two queues, or in none"
        assert set(ids) == core._sequences.keys() == self.sim.by_seq_id.keys(), "8: other sequences than are open"
        assert all(s.state is State.RUNNING for s in running), "8: runs and does not"
        for sequence in waiting:
            assert sequence.state is State.WAITING, "8: waits and does not"
            assert (sequence.held.block_table, sequence.num_computed_tokens) == ([], 0), "7: waits and holds blocks"
        for group in (waiting, running):
            keys = [s.ticket.order_key for s in group]
            assert keys == sorted(keys), "8: out of order"
            for sequence in group:
                if sequence.seq_id not in self._order:
                    self._order[sequence.seq_id] = sequence.ticket.order_key
                    self.debts.check_place(sequence)
                assert self._order[sequence.seq_id] == sequence.ticket.order_key, "25: another place in the queue"

    def _check_progress(self) -> None:
        is_idle = not self.running and not self.waiting
        if is_idle or self.had_messages or self.was_flying or self.was_paused or not self.is_calm:
            return
        has_ended = any(s.state is State.FINISHED for s in (*self.running, *self.waiting))
        has_ended = has_ended or (bool(self.running) and all(map(self.hunger.rests, self.sim.core.scheduler.running)))
        assert len(self.plans) > self.num_plans or has_ended, "10: a step advanced no sequence"

    def _check_quarantine(self) -> None:
        """It happens if and only if the books are damaged: holders of blocks end, waiting sequences stay."""
        sim = self.sim
        assert sim.core.stats.quarantines == sim.num_quarantines, "27: a quarantine without a cause"
        if sim.num_quarantines > self.num_quarantines:
            assert not any(s.seq_id in sim.core._sequences for s in self.running), "27: held blocks, and continues"

    def _check_out_of_memory(self) -> None:
        """A step that failed is tried again in parts of half its size, all of it, and the next steps are smaller."""
        sim, shape, parts = self.sim, self.sim.shape, {plan.step_id for plan in self.parts}
        recent = [plan for plan in sim.runner.failed[-8:] if plan.step_id >= self.first_step_id]
        failed = [plan for plan in recent if plan.step_id not in parts]
        if not failed or failed[0] in sim.runner.launched or self.has_tried:
            return
        least = max(shape.max_num_seqs, shape.block_size, failed[0].num_tokens // 2)
        assert sim.core.stats.token_budget <= least, "26: steps stay as large"
        if not parts or sim.num_quarantines > self.num_quarantines or sim.was_paused:
            return
        assert all(plan.num_tokens <= -(-failed[0].num_tokens // 2) for plan in self.parts), "26: tried whole again"
        tried: Counter[int] = Counter()
        for chunk in (chunk for plan in self.parts for chunk in plan.chunks):
            tried[chunk.seq_id] += len(chunk.token_ids)
        for chunk in failed[0].chunks:
            is_void = len(recent) > len(failed) or self.flights.is_void(failed[0], chunk.seq_id)
            assert is_void or tried[chunk.seq_id] == len(chunk.token_ids), f"26: {chunk.seq_id} is not tried again"

    def _check_times(self) -> None:
        for sequence in self.sim.core._sequences.values():
            request = sequence.request
            if request.deadline is not None:
                assert request.deadline > self.started_at, "19: late, and still there"
