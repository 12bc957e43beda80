"""How much a step may compute: `TokenBudget` over time, `StepBudget` while one plan is made.

Counts tokens; knows no queue and no blocks. Engine thread only.
"""

from __future__ import annotations

from streamserve.engine.config import EngineConfig
from streamserve.engine.plan import PENDING, Chunk
from streamserve.engine.sequence import Sequence
from streamserve.engine.step_time import StepTime, num_pairs

# A lowered budget doubles after this many steps without another lowering: some ten seconds of work. Memory that ran out
# once may be free again, and asking too often costs a failed step each time.
_STEPS_TO_RECOVER = 500


class TokenBudget:
    """Tokens that a step may compute. Halved when a step ran out of memory, and slowly back to what is configured.

    Never less than `max_num_seqs`, so that everybody who decodes still does in every step, nor less than one block.
    """

    def __init__(self, config: EngineConfig, block_size: int) -> None:
        self._most = config.max_num_batched_tokens
        self._least = min(self._most, max(config.max_num_seqs, block_size))
        self.num_tokens = self._most
        self._num_good_steps = 0

    def lower(self, num_tokens: int) -> None:
        """A step of `num_tokens` ran out of memory: half of that from now on, or of the present budget if less."""
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
    """What one step may still compute, and what it computes so far. Decodes are spent first."""

    def __init__(self, num_tokens: int, config: EngineConfig, block_size: int, step_time: StepTime) -> None:
        self.num_tokens = num_tokens
        self.chunks: list[Chunk] = []
        self.has_decodes = False
        self.has_preempted = False
        self._config = config
        self._block_size = block_size
        self._step_time = step_time
        self._num_spent = 0
        self._num_pairs = 0
        self._num_prefill = 0
        self._prefills: dict[int, int] = {}  # the same by sequence

    def decode(self, sequence: Sequence) -> None:
        """Plan the one token of a decoding sequence."""
        self._spend(sequence, 1)

    def prefill(self, sequence: Sequence) -> None:
        """Plan as much of a prompt as may be: at least a token, unless the budget is spent."""
        most = min(sequence.num_unplanned_tokens, self.num_tokens)
        num_tokens = min(most, max(1, self.num_prefill_tokens(sequence.num_launched_tokens)))
        self._num_prefill += num_tokens
        self._prefills[sequence.seq_id] = num_tokens
        self._spend(sequence, num_tokens)

    def num_prefill_tokens(self, start: int) -> int:
        """Return how much prefill from position `start` may still join.

        Without decodes: what is left of the budget. With them: what keeps the step within `itl_target_seconds`, or
        `prefill_chunk` until the step-time model knows; in both cases a block's worth, so that every step advances it.
        """
        if not self.has_decodes:
            return self.num_tokens
        least = self._block_size - self._num_prefill
        within = self._step_time.tokens_within(
            self._config.itl_target_seconds, tokens=self._num_spent, pairs=self._num_pairs, start=start
        )
        if within is None:
            within = self._config.prefill_chunk - self._num_prefill
        return min(self.num_tokens, max(least, within))

    def take_back(self, sequence: Sequence) -> None:
        """Undo what is planned of a sequence, a decode or a part of a prompt: it leaves."""
        for chunk in [one for one in self.chunks if one.seq_id == sequence.seq_id]:
            self.chunks.remove(chunk)
            self._count(chunk.start, len(chunk.token_ids), sign=-1)
        self._num_prefill -= self._prefills.pop(sequence.seq_id, 0)

    def _spend(self, sequence: Sequence, num_tokens: int) -> None:
        self.chunks.append(_make_chunk(sequence, num_tokens, self._block_size))
        self._count(sequence.num_launched_tokens, num_tokens)

    def _count(self, start: int, num_tokens: int, sign: int = 1) -> None:
        self.num_tokens -= sign * num_tokens
        self._num_spent += sign * num_tokens
        self._num_pairs += sign * num_pairs(start, num_tokens)


def _make_chunk(sequence: Sequence, num_tokens: int, block_size: int) -> Chunk:
    """Cut the next `num_tokens` out of a sequence; only the chunk that reaches its last token samples.

    [ computed )[ in flight )[ start .... end )
    """
    start = sequence.num_launched_tokens
    end = start + num_tokens
    is_pending = end > sequence.num_tokens
    return Chunk(
        seq_id=sequence.seq_id,
        start=start,
        token_ids=(PENDING,) if is_pending else tuple(sequence.token_ids[start:end]),
        block_table=tuple(sequence.block_table[: -(-end // block_size)]),
        sample=sequence.sample_spec() if num_tokens == sequence.num_unplanned_tokens else None,
    )
