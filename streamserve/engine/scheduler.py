"""`Scheduler`: which tokens of which sequences the next step computes.

No prefill and no decode phase: every running sequence's computed tokens chase its known ones under one token budget.
Decodes come first, so that no prompt makes readers wait; prefill takes what is left, or what the step-time model
allows. Knows ints, one order key and how far readers are; no tensors, no text. Engine thread only; time is an argument.
(Idea: vLLM V1's scheduler; SGLang's decaying reserve for admission; Andes, arXiv 2404.16283, for parking whoever is
ahead of its reader; nano-vllm for the size.)

Wait bound. A key is arrival + the class's TTFT budget + the tenant's debt, which is within ± `max_debt_seconds` and
fixed when a sequence is added; waiting sequences are admitted strictly in its order. So nobody who arrived more than
(TTFT of r's class + 2 * max_debt_seconds - the smallest TTFT of any class) after r is admitted before r.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from streamserve.engine.budget import StepBudget, TokenBudget
from streamserve.engine.config import EngineConfig, LatencyClass
from streamserve.engine.fairness import TenantDebt
from streamserve.engine.kv.free_list import Block
from streamserve.engine.kv.integrity import IntegrityError
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.plan import Chunk
from streamserve.engine.sequence import Sequence, State
from streamserve.engine.step_time import StepTime
from streamserve.protocol.park import Park

# Share of their remaining max_tokens kept free for running sequences on admission. Most answers end long before
# max_tokens, so it decays while nothing goes wrong, and starts again after a preemption (SGLang's new_token_ratio).
RESERVE_SHARE = 0.7
MIN_RESERVE_SHARE = 0.1
RESERVE_DECAY = 0.995

# Place in the queue: smaller goes first. Set by `Scheduler.add`.
order_key = attrgetter("order_key")


def max_servable_tokens(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """Return the largest prompt + max_tokens that can ever run: the model's length, or all blocks but the null one."""
    return min(max_model_len, (num_blocks - 1) * block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The next step's chunks, decodes first, and those who parked to make room: finished, holding nothing.

    No chunks: nothing is known, or all that is known is in flight, or (when nothing runs) the first in the queue can
    never fit.
    """

    chunks: tuple[Chunk, ...]
    parked: tuple[tuple[Sequence, Park], ...] = ()


class Scheduler:
    """Waiting and running sequences, both in order of `order_key`.

    The core tells `step_time` and `charge` what each step cost. `forced_preempt` (tests) names running sequences to
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
        self.queued_tokens = 0
        self.step_time = StepTime()
        self.forced_preempt: Callable[[tuple[Sequence, ...]], Iterable[Sequence]] | None = None
        self._config = config
        self._pool = pool
        self._debt = TenantDebt()
        self._budget = TokenBudget(config, pool.block_size)
        self._reserve_share = RESERVE_SHARE

    @property
    def token_budget(self) -> int:
        """Tokens that a step may compute now."""
        return self._budget.num_tokens

    def lower_budget(self, num_tokens: int) -> None:
        """Plan smaller steps for a while: one of `num_tokens` ran out of memory. See `TokenBudget`."""
        self._budget.lower(num_tokens)

    def charge(self, tenant: str, num_tokens: int, now: float) -> None:
        """Note what a step computed for a tenant; who takes more than its share goes later in the queue."""
        self._debt.charge(tenant, num_tokens, now)

    def queued_seconds(self) -> float:
        """Return how long the prefill of all that wait takes by the step-time model; 0 until there is one."""
        num_steps = -(-self.queued_tokens // self.token_budget)
        return self.step_time.seconds_for(self.queued_tokens, num_steps) or 0.0 if num_steps else 0.0

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a new sequence; its place is fixed from here on."""
        request = sequence.request
        most = self._config.max_debt_seconds
        debt = max(-most, min(self._debt.seconds(request.tenant, now), most))
        sequence.order_key = request.arrived_at + self._class(sequence).ttft_seconds + debt, request.seq_id
        if not sequence.num_output_tokens:
            sequence.expires_at = now + self._class(sequence).queue_seconds
        self._enqueue(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence wherever it is, and free what it holds."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        else:
            self._dequeue(sequence)
        sequence.transition(State.FINISHED)
        sequence.release(self._pool)

    def start_over(self, pool: BlockPool, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Take a new pool, after the old one's books broke: of all the engine's `sequences`, those that wait go on.

        Returns the others, finished, their blocks given to nobody.
        """
        self._pool, self.running, self.waiting, self.queued_tokens = pool, [], [], 0
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
        """Return who has waited for its first step longer than its class allows; whoever was shown anything may wait.

        Ask after `schedule`: who can start now is not turned away, however long the step before took.
        """
        return [one for one in self.waiting if one.expires_at < now and one.scheduled_at is None]

    def schedule(self, now: float) -> Schedule:
        """Choose the next step's chunks, and who parks for somebody who waits."""
        for sequence in self._to_preempt():
            self._preempt(sequence)
        budget = StepBudget(self._budget.num_tokens, self._config, self._pool.block_size, self.step_time)
        self._schedule_decodes(budget)
        self._schedule_prefills(budget)
        parked = () if budget.has_preempted else tuple(self._admit(budget, now))
        self._reserve_share = max(MIN_RESERVE_SHARE, self._reserve_share * RESERVE_DECAY)
        self._budget.recover()
        return Schedule(chunks=tuple(budget.chunks), parked=parked)

    def _schedule_decodes(self, budget: StepBudget) -> None:
        for sequence in [one for one in self.running if one.num_unplanned_tokens == 1]:
            if sequence.state is not State.RUNNING:
                continue
            budget.has_decodes = True
            if not sequence.must_wait(self._config.max_model_len) and self._make_room(sequence, budget):
                budget.decode(sequence)

    def _schedule_prefills(self, budget: StepBudget) -> None:
        """Go on with chunked prompts; their blocks were given out at admission."""
        for sequence in [one for one in self.running if one.num_unplanned_tokens > 1]:
            if budget.num_prefill_tokens(sequence.num_launched_tokens) > 0:
                budget.prefill(sequence)

    def _admit(self, budget: StepBudget, now: float) -> Iterable[tuple[Sequence, Park]]:
        """Start waiting sequences, strictly in order: one that does not fit holds back those behind it.

        Yields those who park for it.
        """
        while self.waiting and budget.num_prefill_tokens(0) > 0:
            sequence = self.waiting[0]
            if not self._start(sequence):
                victim = self._furthest_ahead(sequence, now)
                if victim is None:
                    return
                yield self._park(victim, budget, now)
                continue
            if sequence.scheduled_at is None:
                sequence.scheduled_at = now
                sequence.num_cached_tokens = sequence.num_computed_tokens
            budget.prefill(sequence)

    def _start(self, sequence: Sequence) -> bool:
        """Let the sequence run, with blocks for all its known tokens, if they and the reserve for growth are there."""
        if len(self.running) == self._config.max_num_seqs:
            return False
        prefix = self._pool.find_prefix(sequence)
        if not self._fits(sequence, prefix, self.running, self._pool.num_free):
            return False
        self._dequeue(sequence)
        self._pool.start(sequence, prefix)
        sequence.transition(State.RUNNING)
        insort(self.running, sequence, key=order_key)
        return True

    def _fits(self, sequence: Sequence, prefix: list[Block], beside: list[Sequence], num_free: int) -> bool:
        num_held = sum(block.ref_count > 0 for block in prefix)
        needed = self._pool.num_blocks_for(sequence.num_tokens) - num_held
        return needed + self._num_reserved(sequence, beside) <= num_free

    def _num_reserved(self, sequence: Sequence, beside: list[Sequence]) -> int:
        """Blocks to keep free for growth; none for a sequence that would run alone, which always has room."""
        if not beside:
            return 0
        growth = sum(self._num_growth_blocks(other) for other in (*beside, sequence))
        return int(growth * self._reserve_share)

    def _num_growth_blocks(self, sequence: Sequence) -> int:
        most = sequence.num_tokens + sequence.num_remaining_tokens
        return self._pool.num_blocks_for(most) - self._pool.num_blocks_for(sequence.num_tokens)

    def _furthest_ahead(self, waiting: Sequence, now: float) -> Sequence | None:
        """Return whose reader has most to read, if that is enough; None if not even all such together make room.

        They may share blocks, so in the end one may have parked in vain. Only for somebody whose reader has nothing
        yet: an answer that comes back from a park waits for a place, or they would all take turns and compute twice.
        """
        if waiting.num_output_tokens:
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
        """How long its reader has enough to read; minus infinity for one that may not park."""
        seconds = sequence.ahead_seconds(self._class(sequence).pace, now)
        return float("-inf") if seconds is None else seconds

    def _park(self, sequence: Sequence, budget: StepBudget, now: float) -> tuple[Sequence, Park]:
        seconds = self._ahead_seconds(sequence, now)
        budget.take_back(sequence)
        self.finish(sequence)
        return sequence, Park(reason="ahead", resume_seconds=seconds / 2)

    def _make_room(self, sequence: Sequence, budget: StepBudget) -> bool:
        """See to a slot for the next token, preempting from the back; False if that hit the sequence itself."""
        if self._pool.num_blocks_for(sequence.num_launched_tokens + 1) <= len(sequence.block_table):
            return True
        if sequence.num_launched_tokens > len(sequence.block_table) * self._pool.block_size:
            raise IntegrityError(f"sequence {sequence.seq_id} has less blocks than it has filled")
        while self._pool.num_free == 0:
            # Invariant: the oldest is never a victim, and alone it always has room.
            victim = self.running[-1]
            if victim is self.running[0]:
                raise IntegrityError(f"sequence {victim.seq_id} runs alone and has no room: who holds the blocks?")
            self._preempt(victim)
            budget.has_preempted = True
            if victim is sequence:
                return False
        sequence.block_table += self._pool.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue without its blocks; it will find most of them cached."""
        self.running.remove(sequence)
        sequence.transition(State.WAITING)
        sequence.release(self._pool)
        sequence.num_preemptions += 1
        self._enqueue(sequence)
        self.num_preemptions += 1
        self._reserve_share = RESERVE_SHARE

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=order_key)
        self.queued_tokens += sequence.num_tokens

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.queued_tokens -= sequence.num_tokens

    def _class(self, sequence: Sequence) -> LatencyClass:
        return self._config.classes[sequence.request.latency_class]

    def _to_preempt(self) -> list[Sequence]:
        return list(self.forced_preempt(tuple(self.running))) if self.forced_preempt is not None else []
