"""`SharedPrefixes`: which blocks of the batch are being written, so that a block that prompts share is computed once.

A sequence whose next block another sequence has begun waits for it, with blocks of its own in reserve, and takes the
written block over as soon as that is cached (`BlockPool.adopt`). Nothing is promised: this is made anew for each plan
from the sequences that run, so a sequence that was aborted, parked, preempted or failed is waited for no longer, and
the first of those that waited writes the block itself. Knows sequences and block hashes, which hold the salt; no order
and no budget. Engine thread only. (Idea: SGLang's in-batch prefix caching, which holds such requests back in the
queue.)

Waits never form a circle. A sequence that waits for block i has all blocks before i. The writer of block i has begun
it, so it can only wait for a later block.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.plan import Chunk
from streamserve.engine.sequence import Sequence, State


class SharedPrefixes:
    """The writers of one plan's blocks. `chunks`: what the plan holds so far."""

    def __init__(self, pool: BlockPool, running: Iterable[Sequence], chunks: Iterable[Chunk]) -> None:
        self._pool = pool
        self._writers: dict[bytes, Sequence] = {}
        self._planned: set[int] = set()
        ends = {chunk.seq_id: chunk.start + len(chunk.token_ids) for chunk in chunks}
        for sequence in running:
            self.note(sequence, ends.get(sequence.seq_id))

    def turn_of(self, sequence: Sequence) -> Sequence | None:
        """Return whose prompt is computed now that it is this sequence's turn; None: it waits for a block in flight.

        Its own place; or the place of the sequence that has begun its next block, if that would come later.
        """
        if sequence.seq_id in self._planned:
            return None
        self._pool.adopt(sequence)
        hash_ = self._pool.next_hash(sequence)
        writer = None if hash_ is None else self._writers.get(hash_)
        if writer is None or writer.state is not State.RUNNING:
            is_cached = hash_ is not None and self._pool.is_cached(hash_)
            return None if is_cached else sequence  # cached, and not adopted as long as an own chunk is in flight
        is_begun = writer.num_launched_tokens < sequence.num_launched_tokens + self._pool.block_size
        return writer if is_begun and writer.seq_id not in self._planned else None

    def note(self, sequence: Sequence, planned_end: int | None) -> None:
        """Note the full blocks that a sequence has begun and not computed, and those up to where the plan takes it."""
        end, size = sequence.num_launched_tokens, self._pool.block_size
        if planned_end is not None:
            self._planned.add(sequence.seq_id)
            end = planned_end
        first, last = sequence.num_computed_tokens // size, min(-(-end // size), len(sequence.token_ids) // size)
        for hash_ in self._pool.hashes(sequence, first, last):
            if self._writers.setdefault(hash_, sequence).state is not State.RUNNING:
                self._writers[hash_] = sequence
