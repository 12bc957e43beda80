"""`Scheduler`: which tokens of which sequences the next step computes.

No prefill and no decode phase: every running sequence's computed tokens chase its known ones under one token budget.
Decodes come first, so that no prompt makes readers wait; prefill takes what is left. Knows ints and one order key; no
tensors, no text, no readers. Engine thread only; time is an argument. (Idea: vLLM V1's scheduler; SGLang's decaying
reserve for admission; nano-vllm for the size.)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable

from streamserve.engine.block_pool import BlockPool
from streamserve.engine.config import EngineConfig
from streamserve.engine.plan import Chunk
from streamserve.engine.sequence import Sequence, State

# Seconds to the first token that a class may be planned with (DESIGN 6): the head start of `chat` over `batch`.
CLASS_TTFT_SECONDS = {"chat": 0.5, "completion": 0.2, "document": 3.0, "batch": 10.0}
# Share of their remaining max_tokens kept free for running sequences on admission. Most answers end long before
# max_tokens, so it decays while nothing goes wrong, and starts again after a preemption (SGLang's new_token_ratio).
RESERVE_SHARE = 0.7
MIN_RESERVE_SHARE = 0.1
RESERVE_DECAY = 0.995


def order_key(sequence: Sequence) -> tuple[float, int]:
    """Place in the queue, fixed at arrival: arrival plus the class's time to the first token. Smaller goes first."""
    request = sequence.request
    return request.arrived_at + CLASS_TTFT_SECONDS[request.latency_class], request.seq_id


def max_servable_tokens(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """Return the largest prompt + max_tokens that can ever run: the model's length, or all blocks but the null one."""
    return min(max_model_len, (num_blocks - 1) * block_size)


class _Budget:
    """What one step may still compute, and what it computes so far."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.chunks: list[Chunk] = []
        self.has_preempted = False

    def spend(self, sequence: Sequence, num_tokens: int, block_size: int) -> None:
        self.chunks.append(_make_chunk(sequence, num_tokens, block_size))
        self.num_tokens -= num_tokens


class Scheduler:
    """Waiting and running sequences, both in order of `order_key`.

    `forced_preempt` (tests) names running sequences to preempt before a step.
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
        self.forced_preempt: Callable[[tuple[Sequence, ...]], Iterable[Sequence]] | None = None
        self._config = config
        self._pool = pool
        self._reserve_share = RESERVE_SHARE

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        insort(self.waiting, sequence, key=order_key)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence wherever it is, and free what it holds."""
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        sequence.transition(State.FINISHED)
        sequence.release(self._pool)

    def schedule(self, now: float) -> tuple[Chunk, ...]:
        """Choose the next step's chunks. Empty only if nothing is known, or the first in the queue can never fit."""
        for sequence in self._to_preempt():
            self._preempt(sequence)
        budget = _Budget(self._config.max_num_batched_tokens)
        self._schedule_decodes(budget)
        if budget.chunks:
            budget.num_tokens = min(budget.num_tokens, max(1, self._config.prefill_chunk))
        self._schedule_prefills(budget)
        if not budget.has_preempted:
            self._admit(budget, now)
        self._reserve_share = max(MIN_RESERVE_SHARE, self._reserve_share * RESERVE_DECAY)
        return tuple(budget.chunks)

    def _schedule_decodes(self, budget: _Budget) -> None:
        for sequence in [s for s in self.running if s.num_uncomputed_tokens == 1]:
            if sequence.state is State.RUNNING and self._make_room(sequence, budget):
                budget.spend(sequence, 1, self._pool.block_size)

    def _schedule_prefills(self, budget: _Budget) -> None:
        """Go on with chunked prompts; their blocks were given out at admission."""
        for sequence in self.running:
            if sequence.num_uncomputed_tokens > 1 and budget.num_tokens > 0:
                budget.spend(sequence, min(sequence.num_uncomputed_tokens, budget.num_tokens), self._pool.block_size)

    def _admit(self, budget: _Budget, now: float) -> None:
        """Start waiting sequences, strictly in order: one that does not fit holds back those behind it."""
        while self.waiting and budget.num_tokens > 0 and len(self.running) < self._config.max_num_seqs:
            sequence = self.waiting[0]
            if not self._start(sequence):
                return
            del self.waiting[0]
            insort(self.running, sequence, key=order_key)
            if sequence.scheduled_at is None:
                sequence.scheduled_at = now
                sequence.num_cached_tokens = sequence.num_computed_tokens
            budget.spend(sequence, min(sequence.num_uncomputed_tokens, budget.num_tokens), self._pool.block_size)

    def _start(self, sequence: Sequence) -> bool:
        """Give the sequence blocks for all its known tokens, if they and the reserve for growth are there."""
        prefix = self._pool.find_prefix(sequence)
        num_held = sum(block.ref_count > 0 for block in prefix)
        needed = self._pool.num_blocks_for(sequence.num_tokens) - num_held
        if needed + self._num_reserved(sequence) > self._pool.num_free:
            return False
        self._pool.start(sequence, prefix)
        sequence.transition(State.RUNNING)
        return True

    def _num_reserved(self, sequence: Sequence) -> int:
        """Blocks to keep free for growth; none for a sequence that would run alone, which always has room."""
        if not self.running:
            return 0
        growth = sum(self._num_growth_blocks(other) for other in (*self.running, sequence))
        return int(growth * self._reserve_share)

    def _num_growth_blocks(self, sequence: Sequence) -> int:
        most = sequence.num_tokens + sequence.num_remaining_tokens
        return self._pool.num_blocks_for(most) - self._pool.num_blocks_for(sequence.num_tokens)

    def _make_room(self, sequence: Sequence, budget: _Budget) -> bool:
        """See to a slot for the next token, preempting from the back; False if that hit the sequence itself."""
        if self._pool.num_blocks_for(sequence.num_computed_tokens + 1) <= len(sequence.block_table):
            return True
        while self._pool.num_free == 0:
            # Invariant: the oldest is never a victim, and alone it always has room.
            victim = self.running[-1]
            assert victim is not self.running[0], "a sequence that runs alone has room, or was refused at the door"
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
        insort(self.waiting, sequence, key=order_key)
        self.num_preemptions += 1
        self._reserve_share = RESERVE_SHARE

    def _to_preempt(self) -> list[Sequence]:
        return list(self.forced_preempt(tuple(self.running))) if self.forced_preempt is not None else []


def _make_chunk(sequence: Sequence, num_tokens: int, block_size: int) -> Chunk:
    """Cut the next `num_tokens` out of a sequence; only the chunk that reaches the last known token samples."""
    start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
    return Chunk(
        seq_id=sequence.seq_id,
        start=start,
        token_ids=tuple(sequence.token_ids[start:end]),
        block_table=tuple(sequence.block_table[: -(-end // block_size)]),
        sample=sequence.sample_spec() if end == sequence.num_tokens else None,
    )
