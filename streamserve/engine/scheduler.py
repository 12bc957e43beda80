"""`Scheduler`: which tokens of which sequences the next step computes.

No prefill and no decode phase: every running sequence's computed tokens chase its known ones under one token budget.
Decodes come first, so that no prompt makes readers wait; prefill takes what the step-time model allows, prompts that
have begun and those that wait in one order. Knows ints, one order key and how far readers are; no tensors, no text.
Engine thread only; time is an argument.
(Idea: vLLM V1's scheduler; SGLang's decaying reserve for admission; Andes, arXiv 2404.16283, for parking sequences that
are ahead of their readers; nano-vllm for the size.)

Wait bound. A key is arrival + the class's TTFT budget + the tenant's debt, which is within ± `max_debt_seconds` and
fixed when a sequence is added; waiting sequences are admitted strictly in its order. So a request that arrives more
than (TTFT of r's class + 2 * max_debt_seconds - the smallest TTFT of any class) after r is never admitted before r.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from streamserve.engine.budget import StepBudget, TenantDebt, TokenBudget
from streamserve.engine.config import WARM, EngineConfig
from streamserve.engine.kv.free_list import Block, IntegrityError
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.patience import Patience
from streamserve.engine.plan import Chunk
from streamserve.engine.sequence import Sequence, SequenceRequest, State
from streamserve.engine.shared_prefill import BlockWriters
from streamserve.engine.step_time import StepTime
from streamserve.protocol.park import Park

# Share of their remaining max_tokens kept free for running sequences on admission. Most answers end long before
# max_tokens, so it decays while nothing goes wrong, and starts again after a preemption (SGLang's new_token_ratio).
RESERVE_SHARE = 0.7
MIN_RESERVE_SHARE = 0.1
RESERVE_DECAY = 0.995

# Order of the queue and of the batch: smaller goes first. Set by `Scheduler.add`.
order_key = attrgetter("order_key")
# Order of the prompts that share what another one left of a step: the shortest first.
_num_lacking = attrgetter("num_unplanned_tokens", "order_key")


def max_servable_tokens(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """Return the largest prompt + max_tokens that can ever run: the model's length, or all blocks but the null one."""
    return min(max_model_len, (num_blocks - 1) * block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The next step's chunks, decodes first, and the sequences parked to make room: finished, without blocks.

    No chunks: there are no tokens to compute, or all are in flight, or (when nothing runs) the first in the queue can
    never fit.
    """

    chunks: tuple[Chunk, ...]
    parked: tuple[tuple[Sequence, Park], ...] = ()


def _is_warm(sequence: Sequence) -> bool:
    return sequence.request.latency_class == WARM


class Scheduler:
    """Waiting and running sequences, both in order of `order_key`.

    The core feeds each step's cost to `step_time` and `charge`. `forced_preempt` (tests) returns running sequences to
    preempt before a step.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is less than"
                f" max_num_seqs={config.max_num_seqs}: some sequences could never advance."
                " Raise it or lower max_num_seqs."
            )
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.step_time = StepTime()
        self.forced_preempt: Callable[[tuple[Sequence, ...]], Iterable[Sequence]] | None = None
        self._config = config
        self._pool = pool
        self._debt = TenantDebt()
        self._patience = Patience(config.classes)
        self._budget = TokenBudget(config, pool.block_size)
        self._reserve_share = RESERVE_SHARE

    @property
    def token_budget(self) -> int:
        """Tokens that a step may compute now."""
        return self._budget.num_tokens

    @property
    def queued_tokens(self) -> int:
        """Known tokens of all that wait."""
        return sum(sequence.num_tokens for sequence in self.waiting)

    def lower_budget(self, num_tokens: int) -> None:
        """Plan smaller steps for a while: one of `num_tokens` ran out of memory. See `TokenBudget`."""
        self._budget.lower(num_tokens)

    def charge(self, tenant: str, num_tokens: int, now: float) -> None:
        """Record what a step computed for a tenant; above its share, its new requests queue later."""
        self._debt.charge(tenant, num_tokens, now)

    def queued_seconds(self) -> float:
        """Return how long the prefill of all that wait takes by the step-time model; 0 until that is fitted."""
        num_tokens = self.queued_tokens
        num_steps = -(-num_tokens // self.token_budget)
        return self.step_time.seconds_for(num_tokens, num_steps) or 0.0 if num_steps else 0.0

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a new sequence; its order key never changes."""
        request = sequence.request
        latency_class = self._config.classes[request.latency_class]
        most = self._config.max_debt_seconds
        debt = max(-most, min(self._debt.seconds(request.tenant, now), most))
        sequence.order_key = request.arrived_at + latency_class.ttft_seconds + debt, request.seq_id
        if not sequence.num_output_tokens:
            sequence.expires_at = now + self._queue_seconds(request, now)
        self._enqueue(sequence)

    def _queue_seconds(self, request: SequenceRequest, now: float) -> float:
        """Return how long a new sequence may wait: as it was promised, or as the queue stands."""
        if request.queue_seconds is not None:
            return request.queue_seconds
        name = request.latency_class
        is_empty = not any(one.is_new and one.request.latency_class == name for one in self.waiting)
        return self._patience.seconds(name, now, is_empty=is_empty)

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
        self._pool, self.running, self.waiting = pool, [], []
        touched: list[Sequence] = []
        for sequence in sequences:
            if sequence.state is State.WAITING and not sequence.block_table:
                self._enqueue(sequence)
                continue
            if sequence.state is not State.FINISHED:
                sequence.transition(State.FINISHED)
            sequence.lose_blocks()
            touched.append(sequence)
        return touched

    def expired(self, now: float) -> list[Sequence]:
        """Return the sequences that waited too long for their first step (see `Patience`); resumed ones may wait.

        Called after `schedule`: a sequence that can start now is not refused, however long the step before took.
        """
        late = [one for one in self.waiting if one.expires_at < now and one.scheduled_at is None]
        for sequence in late:
            self._patience.note_refusal(sequence.request.latency_class, now)
        return late

    def schedule(self, now: float) -> Schedule:
        """Choose the next step's chunks, and the sequences that park for a waiting one."""
        if self.forced_preempt is not None:
            for sequence in list(self.forced_preempt(tuple(self.running))):
                self._preempt(sequence)
        budget = StepBudget(self._budget.num_tokens, self._config, self._pool.block_size, self.step_time)
        self._make_way(budget)
        self._schedule_decodes(budget)
        parked = tuple(self._schedule_prefills(budget, now))
        self._reserve_share = max(MIN_RESERVE_SHARE, self._reserve_share * RESERVE_DECAY)
        self._budget.recover()
        return Schedule(chunks=tuple(budget.chunks), parked=parked)

    def _make_way(self, budget: StepBudget) -> None:
        """Take prompts that are only to be cached out of the batch if there is other work; their blocks stay cached.

        Where they are all the work, their steps are as short as beside decodes: a request that comes waits for one.
        """
        if all(map(_is_warm, self.running)) and all(map(_is_warm, self.waiting)):
            budget.has_decodes = True
            return
        share, num_preemptions = self._reserve_share, self.num_preemptions
        for sequence in [one for one in self.running if _is_warm(one)]:
            self._preempt(sequence)
        self._reserve_share, self.num_preemptions = share, num_preemptions  # no memory was short

    def _schedule_decodes(self, budget: StepBudget) -> None:
        for sequence in [one for one in self.running if one.num_unplanned_tokens == 1]:
            if sequence.state is not State.RUNNING:
                continue
            budget.has_decodes = True
            if not sequence.must_wait(self._config.max_model_len) and self._make_room(sequence, budget):
                budget.add(sequence, 1)

    def _schedule_prefills(self, budget: StepBudget, now: float) -> Iterable[tuple[Sequence, Park]]:
        """Continue and start prompts in order of their key; what the first leaves to the others, by what they lack.

        So the oldest prompt always gets most of a step, and no long prompt keeps a short one waiting. Sequences start
        strictly in order: one that does not fit holds back those behind it. Yields the sequences that park for it.
        """
        begun = [one for one in self.running if one.num_unplanned_tokens > 1]
        may_start = not budget.has_preempted
        writers = BlockWriters(self._pool, self.running, budget.chunks)
        while budget.has_room:
            prompts = begun + self.waiting[:may_start]
            if not prompts:
                break
            sequence = min(prompts, key=_num_lacking if budget.is_shared else order_key)
            if sequence.state is State.WAITING and not self._start(sequence, now):
                victim = self._furthest_ahead(sequence, now)
                if victim is None:
                    may_start = False
                    continue
                begun = [one for one in begun if one is not victim]
                yield self._park(victim, budget, now)
                continue
            turn = writers.turn_of(sequence)
            begun = [one for one in begun if one is not sequence and one is not turn]
            if turn is not None:  # otherwise it waits for a block that another one is writing
                budget.prefill(turn, has_others=bool(begun or (may_start and self.waiting)))
                writers.note(turn, budget.chunks[-1])
        budget.return_share()

    def _start(self, sequence: Sequence, now: float) -> bool:
        """Start the sequence, with blocks for all its known tokens, if these and the reserve for growth are free."""
        if len(self.running) == self._config.max_num_seqs:
            return False
        if _is_warm(sequence) and not all(map(_is_warm, self.running)):
            return False
        prefix = self._pool.find_prefix(sequence)
        if not self._fits(sequence, prefix, self.running, self._pool.num_free):
            return False
        self.waiting.remove(sequence)
        self._pool.start(sequence, prefix)
        sequence.transition(State.RUNNING)
        insort(self.running, sequence, key=order_key)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def _fits(self, sequence: Sequence, prefix: list[Block], beside: list[Sequence], num_free: int) -> bool:
        """Whether `num_free` blocks are enough for its known tokens and the reserve for the growth of all."""
        num_held = sum(block.ref_count > 0 for block in prefix)
        needed = self._pool.num_blocks_for(sequence.num_tokens) - num_held
        if beside:  # a sequence that would run alone always has room
            growth = sum(self._num_growth_blocks(other) for other in (*beside, sequence))
            needed += int(growth * self._reserve_share)
        return needed <= num_free

    def _num_growth_blocks(self, sequence: Sequence) -> int:
        most = sequence.num_tokens + sequence.num_remaining_tokens
        return self._pool.num_blocks_for(most) - self._pool.num_blocks_for(sequence.num_tokens)

    def _furthest_ahead(self, waiting: Sequence, now: float) -> Sequence | None:
        """Return the sequence furthest ahead of its reader, if far enough; None if all such together free too little.

        They may share blocks, so one may park in vain. Only for a sequence without output: a resumed one waits for a
        place, or all would take turns and compute twice.
        """
        if waiting.num_output_tokens:
            return None
        if _is_warm(waiting):
            return None
        ahead = [(one, self._ahead_seconds(one, now)) for one in self.running]
        spare = [pair for pair in ahead if pair[1] >= self._config.min_ahead_seconds]
        if not spare:
            return None
        others = [one for one, seconds in ahead if seconds < self._config.min_ahead_seconds]
        num_free = self._pool.num_free + sum(len(one.block_table) for one, _ in spare)
        if not self._fits(waiting, self._pool.find_prefix(waiting), others, num_free):
            return None
        return max(spare, key=itemgetter(1))[0]

    def _ahead_seconds(self, sequence: Sequence, now: float) -> float:
        """Return how far it is ahead of its reader; minus infinity for a sequence that may not park."""
        seconds = sequence.ahead_seconds(self._config.classes[sequence.request.latency_class].pace, now)
        return float("-inf") if seconds is None else seconds

    def _park(self, sequence: Sequence, budget: StepBudget, now: float) -> tuple[Sequence, Park]:
        seconds = self._ahead_seconds(sequence, now)
        budget.remove(sequence)
        self.finish(sequence)
        return sequence, Park(reason="ahead", resume_seconds=seconds / 2)

    def _make_room(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Allocate a block for the next token, preempting from the back; False if the sequence itself was preempted."""
        if self._pool.num_blocks_for(sequence.num_launched_tokens + 1) <= len(sequence.block_table):
            return True
        if sequence.num_launched_tokens > len(sequence.block_table) * self._pool.block_size:
            raise IntegrityError(f"sequence {sequence.seq_id} has fewer blocks than it has filled")
        while self._pool.num_free == 0:
            # Invariant: the oldest is never a victim, and alone it always has room.
            victim = self.running[-1]
            if victim is self.running[0]:
                raise IntegrityError(
                    f"sequence {victim.seq_id} runs alone and has no room: its blocks have other holders"
                )
            self._preempt(victim)
            budget.has_preempted = True
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
        self._enqueue(sequence)
        self.num_preemptions += 1
        self._reserve_share = RESERVE_SHARE

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=order_key)
