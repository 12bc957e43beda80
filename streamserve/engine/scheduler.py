"""`Scheduler`: which tokens of which sequences the next step computes.

No prefill and no decode phase: every running sequence's computed tokens chase its known ones under one token budget.
Knows ints, one order key, and how far readers are; no tensors, no text. Engine thread only; time is an argument.
(Idea: vLLM V1's scheduler; Andes, arXiv 2404.16283, for the readers; nano-vllm for the size.)

The policy. Readers are slower than the engine, so it serves more of them than a step holds (`max_num_seqs`): what has
blocks is admitted, and each step chooses among the admitted.

1. Hungry sequences decode: those whose readers can go on for less than `hungry_seconds`, least ahead first. Without a
   reader a sequence is always hungry.
2. Prompts that have begun continue. The head of the queue is admitted while hungry sequences and prompts together are
   fewer than a step holds, and its blocks fit. So no admission takes a token from a reader that would wait for it.
3. Sequences that are ahead fill the rest, oldest key first. Those left out are paused: they keep their blocks.

Memory alone makes a sequence give blocks back, and then those furthest ahead or newest; and a reader that is gone. A
sequence `lead_tokens` ahead of its reader is held: paused until that has read on, whatever is free (see `leads`).

Rows of batches are computed, by the same three rules, in the seats, tokens and memory that all other classes leave.
They are the first to give blocks back, which stay cached, and take none from another class.

The queue is in the order of the key, which never changes: arrival + the class's TTFT budget + a little for a long
prompt (see `LatencyClass.order_seconds`). What is late goes behind what is in time (see `Patience`). Among tenants
those further below their share go first (see `TenantShares`).

Bounds. An admitted sequence with a token is passed by hungrier ones only, and their hunger falls with each token that
they get, while its own grows by a second a second: of n admitted sequences with paces up to p, it gets a token within
n * (p * d + 2) steps, where d is by how many seconds it was less hungry than the hungriest. Half of a step at least is
for prompts that have begun. A request that waits for longer than its class's `max_queue_seconds` is refused; among the
requests of one tenant, none that arrives later than r by more than the TTFT of r's class - the smallest TTFT of any
class is admitted before r, until r is late.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from streamserve.engine.budget import StepBudget, TokenBudget
from streamserve.engine.config import EngineConfig
from streamserve.engine.kv.free_list import IntegrityError
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.plan import Chunk
from streamserve.engine.policy import leads
from streamserve.engine.policy.reserve import MemoryReserve
from streamserve.engine.policy.waiting import WaitingQueue, is_batch, is_warm, order_key
from streamserve.engine.sequence import Sequence, State
from streamserve.engine.shared_prefill import BlockWriters
from streamserve.engine.step_time import StepTime
from streamserve.protocol.engine import Park

# Order of the prompts that share what another one left of a step: the shortest first.
_num_lacking = attrgetter("num_unplanned_tokens", "order_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The next step's chunks, decodes first, and the sequences parked to make room: finished, without blocks.

    No chunks: there are no tokens to compute, or all are in flight, or (when nothing runs) the first in the queue can
    never fit.
    """

    chunks: tuple[Chunk, ...]
    parked: tuple[tuple[Sequence, Park], ...] = ()


class Scheduler:
    """Waiting and running sequences, both in order of `order_key`.

    `waiting` is the `queue`'s own list. The core feeds each step's cost to `step_time` and to the queue's `shares`.
    `forced_preempt` (tests) returns running sequences to preempt before a step.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is less than"
                f" max_num_seqs={config.max_num_seqs}: some sequences could never advance."
                " Raise it or lower max_num_seqs."
            )
        self.queue = WaitingQueue(config)
        self.waiting = self.queue.sequences
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.step_time = StepTime()
        self.forced_preempt: Callable[[tuple[Sequence, ...]], Iterable[Sequence]] | None = None
        self._config = config
        self._max_admitted = math.inf if config.max_admitted is None else config.max_admitted
        self._pool = pool
        self._reserve = MemoryReserve()
        self._budget = TokenBudget(config, pool.block_size)
        self._parked: list[tuple[Sequence, Park]] = []  # by the plan that is being made

    @property
    def token_budget(self) -> int:
        """Tokens that a step may compute now."""
        return self._budget.num_tokens

    @property
    def queued_tokens(self) -> int:
        """Known tokens of all that wait."""
        return sum(len(sequence.token_ids) for sequence in self.waiting)

    def lower_budget(self, num_tokens: int) -> None:
        """Plan smaller steps for a while: one of `num_tokens` ran out of memory. See `TokenBudget`."""
        self._budget.lower(num_tokens)

    def note_length(self, sequence: Sequence) -> None:
        """Record that an answer has ended: the next ones of its class reserve memory by its length."""
        self._reserve.note_length(sequence)

    def queued_seconds(self) -> float:
        """Return how long the prefill of all that wait takes by the step-time model; 0 until that is fitted."""
        num_tokens = self.queued_tokens
        num_steps = -(-num_tokens // self.token_budget)
        return self.step_time.seconds_for(num_tokens, num_steps) or 0.0 if num_steps else 0.0

    def finish(self, sequence: Sequence) -> None:
        """End a waiting or running sequence and free its blocks."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.transition(State.FINISHED)
        sequence.release(self._pool)

    def start_over(self, pool: BlockPool, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Use a new pool, after an integrity check failed; of all the engine's `sequences`, the waiting ones stay.

        Returns the others, finished; their blocks are not freed.
        """
        self._pool, self.running = pool, []
        self.waiting.clear()
        touched: list[Sequence] = []
        for sequence in sequences:
            if sequence.state is State.WAITING and not sequence.block_table:
                self.queue.put(sequence)
                continue
            if sequence.state is not State.FINISHED:
                sequence.transition(State.FINISHED)
            sequence.lose_blocks()
            touched.append(sequence)
        return touched

    def schedule(self, now: float) -> Schedule:
        """Choose the next step's chunks, and the sequences that park for a waiting one. The module's text has why."""
        if self.forced_preempt is not None:
            for sequence in list(self.forced_preempt(tuple(self.running))):
                self._preempt(sequence)
        budget = StepBudget(self._budget.num_tokens, self._config, self._pool.block_size, self.step_time)
        self._parked = []
        for sequence in [one for one in self.running if leads.is_stalled(one, self._config, now)]:
            self._park(sequence, budget, now)
        self._make_way(budget)
        self._plan([one for one in self.running if not is_batch(one)], budget, now)
        budget.has_decodes = True  # beside rows of batches a step is short: a request that comes waits for it
        self._plan([one for one in self.running if is_batch(one)], budget, now, of_batch=True)
        self.queue.note(now)
        self._reserve.note_step()
        self._budget.recover()
        chunks = sorted(budget.chunks, key=lambda chunk: len(chunk.token_ids) > 1)  # decodes first
        return Schedule(chunks=tuple(chunks), parked=tuple(self._parked))

    def _plan(self, running: list[Sequence], budget: StepBudget, now: float, *, of_batch: bool = False) -> None:
        """Choose among these, and those that wait like them, for what is left of the step.

        Hungry decodes come least ahead first; those ahead, and the prompts that have begun, oldest key first. Sequences
        that are held are in none of these.
        """
        config, planned = self._config, {chunk.seq_id for chunk in budget.chunks}
        by_lead: list[tuple[float, Sequence]] = []
        ahead: list[Sequence] = []
        begun: list[Sequence] = []
        for sequence in running:
            num_lacking = 0 if sequence.seq_id in planned else sequence.num_unplanned_tokens
            if num_lacking > 1:
                begun.append(sequence)
            elif num_lacking == 1 and not leads.is_held(sequence, config):
                left = sequence.ahead_seconds(now)
                if left < config.hungry_seconds:
                    by_lead.append((left, sequence))
                else:
                    ahead.append(sequence)
        by_lead.sort(key=itemgetter(0))
        hungry = [sequence for _, sequence in by_lead]
        num_seats = config.max_num_seqs - len(planned)
        num_kept = min(len(begun), max(1, num_seats // 2))
        budget.has_decodes = budget.has_decodes or bool(hungry)
        self._plan_decodes(hungry, config.max_num_seqs - num_kept, budget, now)
        self._plan_prompts(begun, num_seats - len(hungry), budget, now, of_batch=of_batch)
        self._plan_decodes([*hungry, *ahead], config.max_num_seqs, budget, now, is_rest=True)

    def _plan_decodes(
        self, decodes: list[Sequence], most: int, budget: StepBudget, now: float, *, is_rest: bool = False
    ) -> None:
        """Plan those that can decode until the step holds `most` sequences.

        `is_rest`: these get what the others have left, seats kept for prompts too, where memory is not short.
        """
        planned = {chunk.seq_id for chunk in budget.chunks}
        for sequence in decodes:
            if len(budget.chunks) >= most or budget.num_tokens <= 0:
                return
            may_take = not (is_rest and budget.chunks) or (is_batch(self.running[-1]) and not is_batch(sequence))
            if (
                (may_take or self._pool.num_free or self._has_room(sequence))
                and sequence.seq_id not in planned
                and self._can_decode(sequence)
                and self._make_room(sequence, budget, now)
            ):
                budget.add(sequence, 1)

    def _can_decode(self, sequence: Sequence) -> bool:
        """Whether it still runs, lacks one token, and the token before that is none that may be its last."""
        return (
            sequence.state is State.RUNNING
            and sequence.num_unplanned_tokens == 1
            and not sequence.must_wait(self._config.max_model_len)
        )

    def _plan_prompts(
        self, begun: list[Sequence], num_seats: int, budget: StepBudget, now: float, *, of_batch: bool
    ) -> None:
        """Continue and start prompts in order; what the first leaves to the others, by what they lack.

        So the oldest prompt always gets most of a step, and no long prompt keeps a short one waiting. Sequences start
        strictly in order, while there are fewer prompts than `num_seats`: one that does not fit holds back those
        behind it, unless others leave for it.
        """
        begun = [one for one in begun if one.state is State.RUNNING]
        num_prompts, may_start = len(begun), not (budget.has_preempted or (of_batch and budget.has_given_way))
        writers: BlockWriters | None = None
        while budget.has_room and len(budget.chunks) < self._config.max_num_seqs:
            may_start = may_start and self.queue.is_turn(of_batch=of_batch)
            head = self.queue.head(now) if may_start and num_prompts < num_seats else None
            prompts = begun if head is None else [*begun, head]
            if not prompts:
                break
            sequence = min(prompts, key=order_key if budget.cut is None else _num_lacking)
            if sequence is head:
                if not self._start(sequence, now):
                    may_start = self._make_place(sequence, budget, now)
                    begun = [one for one in begun if one.state is State.RUNNING]
                    continue
                num_prompts += 1
            writers = writers or BlockWriters(self._pool, self.running, budget.chunks)
            turn = writers.turn_of(sequence)
            begun = [one for one in begun if one is not sequence and one is not turn]
            if turn is not None:  # otherwise it waits for a block that another one is writing
                budget.prefill(turn, has_others=bool(begun) or (may_start and self.queue.is_turn(of_batch=of_batch)))
                writers.note(turn, budget.chunks[-1])
        budget.return_share()

    def _make_way(self, budget: StepBudget) -> None:
        """Take prompts that are only to be cached out of the batch if there is other work; their blocks stay cached.

        Where they are all the work, their steps are as short as beside decodes: a request that comes waits for one.
        """
        if all(map(is_warm, self.running)) and all(map(is_warm, self.waiting)):
            budget.has_decodes = True
            return
        num_preemptions = self.num_preemptions
        for sequence in [one for one in self.running if is_warm(one)]:
            self._preempt(sequence)
        self.num_preemptions = num_preemptions  # no memory was short

    def _start(self, sequence: Sequence, now: float) -> bool:
        """Start it, with blocks for its known tokens, if these and the reserve for growth (not of rows) are free."""
        if len(self.running) >= self._max_admitted or (is_warm(sequence) and not all(map(is_warm, self.running))):
            return False
        prefix = self._pool.find_prefix(sequence)
        beside = [one for one in self.running if is_batch(sequence) or not is_batch(one)]
        if not self._reserve.fits(self._pool, sequence, prefix, beside, self._pool.num_free):
            return False
        self.waiting.remove(sequence)
        self._pool.start(sequence, prefix)
        sequence.transition(State.RUNNING)
        insort(self.running, sequence, key=order_key)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def _make_place(self, waiting: Sequence, budget: StepBudget, now: float) -> bool:
        """Take one sequence out of the batch for the waiting one; False: all that may go together free too little.

        They may share blocks, so one may go in vain. Rows of batches give way to all other classes, the last first.
        Then the sequence furthest ahead of its reader parks. Those that are held are far enough ahead; others only for
        a sequence without output: for resumed ones all would take turns and compute twice.
        """
        if is_warm(waiting):
            return False
        planned = {chunk.seq_id for chunk in budget.chunks}  # of the rows, those that another class waits for
        rows = [one for one in self.running if is_batch(one) and one.seq_id not in planned and not is_batch(waiting)]
        is_first = len(self.running) < self._max_admitted and not waiting.num_output_tokens
        least = self._config.min_ahead_seconds if is_first else math.inf
        alike = (one for one in self.running if is_batch(one) is is_batch(waiting))
        spare = [one for one in alike if leads.may_park(one, self._config, least, now)]
        leaving = rows + spare
        num_free = self._pool.num_free + sum(len(one.block_table) for one in leaving)
        others = [one for one in self.running if one not in leaving]
        fits, prefix = self._reserve.fits, self._pool.find_prefix(waiting)
        if not leaving or not fits(self._pool, waiting, prefix, others, num_free):
            return False
        if rows:
            self._give_way(rows[-1], budget)
        else:
            self._park(max(spare, key=lambda one: one.ahead_seconds(now)), budget, now)
        return True

    def _park(self, sequence: Sequence, budget: StepBudget, now: float) -> None:
        park = leads.park_of(sequence, self._config, now)
        budget.remove(sequence)
        self.finish(sequence)
        self._parked.append((sequence, park))

    def _has_room(self, sequence: Sequence) -> bool:
        return sequence.num_launched_tokens < len(sequence.block_table) * self._pool.block_size

    def _make_room(self, sequence: Sequence, budget: StepBudget, now: float) -> bool:
        """Allocate a block for the next token; False if the sequence itself was preempted.

        For want of one, rows of batches give way to other classes; then those that are held park, furthest ahead
        first; then the last in order are preempted.
        """
        if self._has_room(sequence):
            return True
        if sequence.num_launched_tokens > len(sequence.block_table) * self._pool.block_size:
            raise IntegrityError(f"sequence {sequence.seq_id} has fewer blocks than it has filled")
        while self._pool.num_free == 0:
            victim = self.running[-1]
            if is_batch(victim) and not is_batch(sequence):
                self._give_way(victim, budget)
                continue
            alike = (one for one in self.running if is_batch(one) is is_batch(sequence))
            held = [one for one in alike if leads.may_park(one, self._config, math.inf, now)]
            if held:
                self._park(max(held, key=lambda one: one.ahead_seconds(now)), budget, now)
                continue
            # Invariant: the oldest is never a victim, and alone it always has room.
            if victim is self.running[0]:
                raise IntegrityError(
                    f"sequence {victim.seq_id} runs alone and has no room: its blocks have other holders"
                )
            budget.remove(victim)  # it may be planned already
            budget.has_preempted = True
            self._reserve.note_shortage()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += self._pool.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Return a running sequence to the queue without its blocks; most of them stay cached."""
        self.running.remove(sequence)
        sequence.transition(State.WAITING)
        sequence.release(self._pool)
        sequence.num_preemptions += 1
        self.queue.put(sequence)
        self.num_preemptions += 1

    def _give_way(self, row: Sequence, budget: StepBudget) -> None:
        budget.remove(row)
        budget.has_given_way = True
        self._preempt(row)
