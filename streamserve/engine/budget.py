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
    """The tokens one step may still compute, and its chunks so far. Decodes are added first.

    A prompt that does not fit whole, the `cut` one, leaves a share of the step to other prompts that could join: a
    block, or half of what is left if that is less. The share is for those with the least left to compute.
    `return_share` gives it what they do not take.
    """

    def __init__(self, num_tokens: int, config: EngineConfig, block_size: int, step_time: StepTime) -> None:
        self.num_tokens = num_tokens
        self.chunks: list[Chunk] = []
        self.has_decodes = False
        self.has_preempted = False
        self.has_given_way = False  # a row of a batch, to another class
        self.cut: Sequence | None = None
        self._config = config
        self._block_size = block_size
        self._step_time = step_time
        self._num_spent = 0
        self._num_pairs = 0
        self._num_prefill = 0
        self._prefills: dict[int, int] = {}  # the same by sequence
        self._share = 0  # tokens that the cut prompt left to the others

    @property
    def has_room(self) -> bool:
        """Whether another prompt may join."""
        return self._share > 0 if self.cut is not None else self.num_prefill_tokens(0) > 0

    def prefill(self, sequence: Sequence, *, has_others: bool = False) -> None:
        """Add as much of a prompt as the step allows: at least a token. Only while the step `has_room`."""
        wanted = sequence.num_plannable_tokens
        if self.cut is not None:
            num_tokens = min(wanted, self._share)
            self._share -= num_tokens
        else:
            most = min(self.num_tokens, max(1, self.num_prefill_tokens(sequence.num_launched_tokens)))
            share = min(self._block_size, most // 2) if has_others else 0
            num_tokens = min(wanted, most - share)
            if num_tokens < wanted:
                self.cut, self._share = sequence, share
        self.add(sequence, num_tokens, is_prefill=True)

    def return_share(self) -> None:
        """Give what is left of the share back to the prompt that left it, which keeps its place in the step."""
        if self.cut is None or not self._share:
            return
        sequence, planned, share = self.cut, self._prefills[self.cut.seq_id], self._share
        index = next(i for i, chunk in enumerate(self.chunks) if chunk.seq_id == sequence.seq_id)
        self.remove(sequence)
        self.add(sequence, min(sequence.num_plannable_tokens, planned + share), is_prefill=True)
        self.chunks.insert(index, self.chunks.pop())

    def num_prefill_tokens(self, start: int) -> int:
        """Return how much prefill from position `start` may still join.

        What keeps the step within `max_step_seconds`, beside decodes within `itl_target_seconds`. Until the step-time
        model is fitted: what is left of the budget, beside decodes `prefill_chunk`. In each case at least a block, so
        that every step advances the prompt.
        """
        config, least = self._config, self._block_size - self._num_prefill
        seconds = min(config.max_step_seconds, config.itl_target_seconds if self.has_decodes else math.inf)
        within = self._step_time.tokens_within(seconds, tokens=self._num_spent, pairs=self._num_pairs, start=start)
        if within is None:
            within = config.prefill_chunk - self._num_prefill if self.has_decodes else self.num_tokens
        return min(self.num_tokens, max(least, within))

    def add(self, sequence: Sequence, num_tokens: int, *, is_prefill: bool = False) -> None:
        """Add the next `num_tokens` of a sequence; only the chunk that reaches its last token samples.

        [ computed )[ in flight )[ start .... end )
        """
        start = sequence.num_launched_tokens
        end = start + num_tokens
        is_pending = end > len(sequence.token_ids)
        self.chunks.append(
            Chunk(
                seq_id=sequence.seq_id,
                start=start,
                token_ids=(PENDING,) if is_pending else tuple(sequence.token_ids[start:end]),
                block_table=tuple(sequence.block_table[: -(-end // self._block_size)]),
                sample=sequence.sample_spec() if num_tokens == sequence.num_unplanned_tokens else None,
                scores=sequence.score_spec(start, end),
            )
        )
        self.num_tokens -= num_tokens
        self._num_spent += num_tokens
        self._num_pairs += num_pairs(start, num_tokens)
        if is_prefill:
            self._num_prefill += num_tokens
            self._prefills[sequence.seq_id] = num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove the chunk of a sequence, a decode or a part of a prompt."""
        for chunk in [one for one in self.chunks if one.seq_id == sequence.seq_id]:
            self.chunks.remove(chunk)
            num_tokens = len(chunk.token_ids)
            self.num_tokens += num_tokens
            self._num_spent -= num_tokens
            self._num_pairs -= num_pairs(chunk.start, num_tokens)
        num_prefill = self._prefills.pop(sequence.seq_id, 0)
        self._num_prefill -= num_prefill
        if self.cut is sequence:
            self.cut, self._share = None, 0
        elif self.cut is not None:
            self._share += num_prefill
