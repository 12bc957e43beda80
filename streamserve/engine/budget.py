"""Token budgets: `TokenBudget` over time, `StepBudget` while one plan is made.

Counts tokens; knows no queue, no blocks and no clock. Engine thread only.
"""

from __future__ import annotations

import math

from streamserve.engine.config import EngineConfig
from streamserve.engine.plan import PENDING, Chunk
from streamserve.engine.sequence import Sequence
from streamserve.engine.step_time import StepTime, num_pairs

# A lowered budget doubles after this many steps without another lowering: some ten seconds of work. Memory that ran out
# once may be free again, and each early try costs a failed step.
_STEPS_TO_RECOVER = 500


class TokenBudget:
    """Tokens that a step may compute. Halved when a step ran out of memory, and slowly back to what is configured.

    Never less than `max_num_seqs`, so that every decoding sequence still advances in each step, nor than one block.
    """

    def __init__(self, config: EngineConfig, block_size: int) -> None:
        self._most = config.max_num_batched_tokens
        self._least = min(self._most, max(config.max_num_seqs, block_size))
        self.num_tokens = self._most
        self._num_good_steps = 0

    def lower(self, num_tokens: int) -> None:
        """Halve the budget after a step of `num_tokens` ran out of memory: half of that, or of the present if less."""
        self.num_tokens = max(self._least, min(self.num_tokens, num_tokens) // 2)
        self._num_good_steps = 0

    def recover(self) -> None:
        """Count a planned step."""
        if self.num_tokens == self._most:
            return
        self._num_good_steps += 1
        if self._num_good_steps == _STEPS_TO_RECOVER:
            self.num_tokens = min(self._most, 2 * self.num_tokens)
            self._num_good_steps = 0


class StepBudget:
    """The tokens one step may still compute, and its chunks so far, by sequence. Decodes are added first.

    `is_short`: the step may take `itl_target_seconds` only, because readers wait for it, or a request that comes would.
    `closed_from`: no sequence of this rank or a later one starts: a sequence of it has just lost its blocks.
    """

    def __init__(self, num_tokens: int, config: EngineConfig, block_size: int, step_time: StepTime) -> None:
        self.num_tokens = num_tokens
        self.chunks: dict[int, Chunk] = {}
        self.is_short = False
        self.closed_from = math.inf
        self._config = config
        self._block_size = block_size
        self._step_time = step_time
        self._num_spent = 0
        self._num_pairs = 0
        self._prefills: dict[int, int] = {}  # tokens, by sequence

    @property
    def has_prefill(self) -> bool:
        """Whether it holds a part of a prompt."""
        return bool(self._prefills)

    @property
    def has_enough(self) -> bool:
        """Whether it holds a part of a prompt and pays for its start: further prompts are left to the next steps.

        Prompts of one step have their first tokens together, when the last of them is done. In steps of their own the
        first of them are sooner, and the last no later but for the steps' starts.
        """
        return self.has_prefill and self._step_time.is_worth_its_start(tokens=self._num_spent, pairs=self._num_pairs)

    def num_prefill_tokens(self, start: int) -> int:
        """Return how much of a prompt from position `start` may still join: 0 once the step is full.

        What keeps the step within `max_step_seconds`, a short step within `itl_target_seconds`. Until the step-time
        model is fitted: what is left of the budget, in a short step `prefill_chunk`. In each case at least a block, so
        that every step advances the prompt.
        """
        config, num_prefill = self._config, sum(self._prefills.values())
        seconds = min(config.max_step_seconds, config.itl_target_seconds if self.is_short else math.inf)
        within = self._step_time.tokens_within(seconds, tokens=self._num_spent, pairs=self._num_pairs, start=start)
        if within is None:
            within = config.prefill_chunk - num_prefill if self.is_short else self.num_tokens
        return max(0, min(self.num_tokens, max(self._block_size - num_prefill, within)))

    def add(self, sequence: Sequence, num_tokens: int, *, num_rows: int = 1, is_prefill: bool = False) -> None:
        """Add the next `num_tokens` of a sequence; only the chunk that reaches its last token samples.

        `num_rows`: after the last token, and after each proposed token behind it.

        [ computed )[ in flight )[ start .... end )[ proposed )
        """
        chunk = self.chunks[sequence.seq_id] = chunk_of(sequence, num_tokens, num_rows, self._block_size)
        self._count(len(chunk.token_ids), num_pairs(chunk.start, len(chunk.token_ids)))
        if is_prefill:
            self._prefills[sequence.seq_id] = num_tokens

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Add so many tokens to a prompt's chunk, which keeps its place in the step."""
        chunk = self.chunks[sequence.seq_id]
        self._count(-len(chunk.token_ids), -num_pairs(chunk.start, len(chunk.token_ids)))
        self.add(sequence, len(chunk.token_ids) + num_tokens, is_prefill=True)

    def remove(self, sequence: Sequence) -> None:
        """Remove the chunk of a sequence, if it has a chunk."""
        chunk = self.chunks.pop(sequence.seq_id, None)
        if chunk is not None:
            num_tokens = len(chunk.token_ids)
            self._count(-num_tokens, -num_pairs(chunk.start, num_tokens))
            self._prefills.pop(sequence.seq_id, None)

    def _count(self, num_tokens: int, pairs: int) -> None:
        self.num_tokens -= num_tokens
        self._num_spent += num_tokens
        self._num_pairs += pairs


def chunk_of(sequence: Sequence, num_tokens: int, num_rows: int, block_size: int) -> Chunk:
    """Return the chunk of the next `num_tokens` of a sequence, with up to `num_rows` rows. See `StepBudget.add`."""
    start = sequence.num_launched_tokens
    end = start + num_tokens
    samples = sequence.sample_specs(num_rows) if num_tokens == sequence.num_unplanned_tokens else ()
    proposed = sequence.proposed_ids[: len(samples) - 1] if len(samples) > 1 else ()
    known = (PENDING,) if end > len(sequence.token_ids) else tuple(sequence.token_ids[start:end])
    end += len(proposed)
    num_blocks, held = -(-end // block_size), sequence.held
    return Chunk(
        seq_id=sequence.seq_id,
        start=start,
        token_ids=known + proposed,
        block_table=tuple(held.block_table[:num_blocks]),
        other_tables=tuple([tuple(table[:num_blocks]) for table in held.other_tables]) if held.other_tables else (),
        samples=samples,
        scores=sequence.score_spec(start, end),
        adapter=sequence.request.adapter,
    )
