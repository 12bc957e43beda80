"""`MemoryReserve`: how many blocks stay free on an admission, for what is still to come of the answers that run.

Knows sequences and counts of blocks; decides no order. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from streamserve.engine.kv.free_list import Block
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.policy.lengths import AnswerLengths
from streamserve.engine.sequence import Sequence

# Until it is known how long answers of a class are, the share of their remaining max_tokens kept free for running
# sequences on admission. Most answers end long before max_tokens, so it decays while nothing goes wrong, and starts
# again after a preemption (SGLang's new_token_ratio). Later it is what is kept free beyond the expected length.
_SHARE = 0.7
_LEAST_SHARE = 0.1
_DECAY = 0.995


class MemoryReserve:
    """Learns how long answers are, and whether memory ran short."""

    def __init__(self) -> None:
        self._lengths = AnswerLengths()
        self._share = _SHARE

    def note_length(self, sequence: Sequence) -> None:
        """Record that an answer has ended: the next ones of its class reserve memory by its length."""
        self._lengths.note(sequence.request.latency_class, sequence.num_output_tokens)

    def note_step(self) -> None:
        """Record that a step was planned."""
        self._share = max(_LEAST_SHARE, self._share * _DECAY)

    def note_shortage(self) -> None:
        """Record that a sequence was preempted for want of a block: too little was reserved."""
        self._share = _SHARE

    def fits(
        self, pool: BlockPool, sequence: Sequence, prefix: list[Block], beside: Iterable[Sequence], num_free: int
    ) -> bool:
        """Whether `num_free` blocks are enough for its known tokens and the growth of all; `prefix` is cached."""
        num_held = sum(block.ref_count > 0 for block in prefix)
        needed = pool.num_blocks_for(sequence.num_tokens) - num_held
        growth = [self._num_growth_blocks(pool, one) for one in beside]
        if growth:  # a sequence that would run alone always has room
            needed += int(sum(growth) + self._num_growth_blocks(pool, sequence))
        return needed <= num_free

    def _num_growth_blocks(self, pool: BlockPool, sequence: Sequence) -> float:
        """Return the blocks to keep free for what may still come of an answer."""
        num_left, name = sequence.num_remaining_tokens, sequence.request.latency_class
        expected, share = self._lengths.left(name, sequence.num_output_tokens), self._share
        if expected is not None:
            num_left, share = min(num_left, math.ceil(expected)), 1.0 + share
        most = pool.num_blocks_for(sequence.num_tokens + num_left)
        return share * (most - pool.num_blocks_for(sequence.num_tokens))
