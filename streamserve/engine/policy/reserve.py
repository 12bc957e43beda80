"""`MemoryReserve`: how many blocks stay free on an admission, for what is still to come of the answers that run.

Enough for the time when they hold most: they grow, and those that end give their blocks back to those that do not.
`AnswerLengths` are what is expected of them: how long the answers of each class were that have ended. (Reserving for
`max_tokens` holds memory free that most answers never take; SGLang lets such a reserve decay, which guesses.)

Knows sequences and counts of blocks; decides no order. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from streamserve.engine.kv.free_list import Block
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.sequence import Sequence, State

# Fewer answers tell little: until then memory is reserved for a share of what was asked for.
NUM_TO_KNOW = 8
_NEWEST = 1 / 32
# An answer that is longer than the mean already has this share of the mean left, as far as anything is known.
_LEAST_LEFT = 0.25


class AnswerLengths:
    """The running mean of each class."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._numbers: dict[str, int] = {}

    def note(self, latency_class: str, num_tokens: int) -> None:
        """Record that an answer has ended after `num_tokens`."""
        number = self._numbers.get(latency_class, 0) + 1
        mean = self._means.get(latency_class, 0.0)
        self._numbers[latency_class] = number
        self._means[latency_class] = mean + (num_tokens - mean) * max(1 / number, _NEWEST)

    def left(self, latency_class: str, num_tokens: int) -> float | None:
        """Return how many tokens may still come in an answer that has `num_tokens`; None: too few answers ended."""
        if self._numbers.get(latency_class, 0) < NUM_TO_KNOW:
            return None
        mean = self._means[latency_class]
        return max(mean - num_tokens, _LEAST_LEFT * mean)


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
        """Record that an answer has ended: the next answers of its class reserve memory by its length."""
        self._lengths.note(sequence.request.latency_class, sequence.num_output_tokens)

    def note_step(self) -> None:
        """Record that a step was planned."""
        self._share = max(_LEAST_SHARE, self._share * _DECAY)

    def note_shortage(self) -> None:
        """Record that a sequence was preempted for want of a block: too little was reserved."""
        self._share = _SHARE

    def fits(
        self, pool: BlockPool, sequence: Sequence, prefix: list[list[Block]], beside: Iterable[Sequence], num_free: int
    ) -> bool:
        """Whether `num_free` blocks are enough for its known tokens and the growth of all; `prefix` is cached."""
        needed = pool.num_taken(sequence, prefix)
        parts = [(self._num_growth_blocks(pool, one), _num_own_blocks(pool, one)) for one in beside]
        if parts:  # a sequence that would run alone always has room
            parts.append((self._num_growth_blocks(pool, sequence), needed))
            needed += math.ceil(_peak(parts))
        return needed <= num_free

    def _num_growth_blocks(self, pool: BlockPool, sequence: Sequence) -> float:
        """Return the blocks to keep free for what may still come of an answer."""
        num_left, name = sequence.num_remaining_tokens, sequence.request.latency_class
        expected, share = self._lengths.left(name, sequence.num_output_tokens), self._share
        if expected is not None:
            num_left, share = min(num_left, math.ceil(expected)), 1.0 + share
        present = pool.num_blocks_for(len(sequence.token_ids))
        growth = share * (pool.num_blocks_for(len(sequence.token_ids) + num_left) - present)
        if pool.has_windows and sequence.state is State.RUNNING:  # its prompt gets blocks as it is computed
            growth += max(0, present - sequence.held.num_blocks)
        return growth


def _num_own_blocks(pool: BlockPool, sequence: Sequence) -> int:
    """Return how many blocks it gives back when it ends; other sequences may hold what it found in the cache."""
    num_cached = sequence.num_cached_tokens // pool.block_size * pool.windows.count(None)
    return max(0, sequence.held.num_blocks - num_cached)


def _peak(parts: list[tuple[float, int]]) -> float:
    """Return the most blocks that sequences hold together at any time from now on, beyond those that they hold now.

    Each part: how much one still grows, and what it gives back then. All grow side by side, and the shortest end first.
    (Idea: the Past-Future scheduler, arXiv 2507.10150.)
    """
    most, num_back = 0.0, 0
    for index, (growth, num_own) in enumerate(sorted(parts)):
        most = max(most, growth * (len(parts) - index) - num_back)
        num_back += num_own
    return most
