"""`SharingLaws`: a block that several prompts share is written by one of them, and the others reuse it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamserve.engine.plan import Chunk, StepPlan
from streamserve.engine.sequence import Sequence
from tests.sim.books import Meaning, meaning
from tests.sim.laws.debts import is_row

if TYPE_CHECKING:
    from tests.sim.asked import Asked
    from tests.sim.simulation import Simulation


class SharingLaws:
    """Knows, by content rather than hash, which full blocks are begun and not computed yet, and their writers."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._size = sim.shape.block_size
        self._begun: dict[Meaning, int] = {}

    def check_plan(self, plan: StepPlan) -> None:
        """No chunk begins a block that another sequence has begun, or that is cached already."""
        self._begun = {}
        if not self.sim.shape.prefix_caching:
            return
        by_seq_id, running = self.sim.by_seq_id, self.sim.core.scheduler.running
        for sequence in running:
            self._begin(sequence, self._launched(sequence))
        for chunk in sorted(plan.chunks, key=self._is_lone):
            sequence, end = self.sim.core._sequences[chunk.seq_id], chunk.start + len(chunk.token_ids)
            means = self._next(by_seq_id[chunk.seq_id], sequence, chunk.start)
            if means is not None:
                writer = self._begun.get(means, chunk.seq_id)
                assert writer == chunk.seq_id, f"36: {chunk.seq_id} writes what {writer} is writing"
                assert not self.sim.laws.books.is_cached(means), f"36: {chunk.seq_id} writes what is cached"
            self._begin(sequence, end)

    def waits(self, sequence: Sequence) -> bool:
        """Whether its next block is in flight, or written by another in this plan, or cached while a chunk flies."""
        launched = self._launched(sequence)
        means = self._next(self.sim.by_seq_id[sequence.seq_id], sequence, launched)
        if means is None:
            return False
        writer = self._begun.get(means, sequence.seq_id)
        has_flight = self.sim.laws.flights.chunk_of(sequence) is not None
        return writer != sequence.seq_id or (has_flight and self.sim.laws.books.is_cached(means))

    def writers_waited_for(self) -> dict[int, tuple[int, float, int]]:
        """Return the sequences that write a block for which others wait, and the order key of the first of these."""
        found: dict[int, tuple[int, float, int]] = {}
        for sequence in self.sim.core.scheduler.running:
            if self.waits(sequence):
                means = self._next(self.sim.by_seq_id[sequence.seq_id], sequence, self._launched(sequence))
                if means in self._begun:
                    found.setdefault(self._begun[means], sequence.ticket.order_key)
        return found

    def lent_rows(self, plan: StepPlan) -> set[int]:
        """Return the rows of batches in a plan that other classes wait for: they are computed in the turn of these."""
        running = self.sim.core.scheduler.running
        waited = {
            self._begun.get(means)
            for s in running
            if not is_row(s) and (means := self._next(self.sim.by_seq_id[s.seq_id], s, self._launched(s))) is not None
        }
        rows = {s.seq_id for s in running if is_row(s)}
        return {chunk.seq_id for chunk in plan.chunks if chunk.seq_id in waited & rows}

    def _begin(self, sequence: Sequence, end: int) -> None:
        asked = self.sim.by_seq_id.get(sequence.seq_id)
        last = min(-(-end // self._size), len(sequence.token_ids) // self._size)
        for index in range(sequence.num_computed_tokens // self._size, last) if asked else ():
            self._begun.setdefault(meaning(asked, index, self._size), sequence.seq_id)

    def _next(self, asked: Asked, sequence: Sequence, start: int) -> Meaning | None:
        """Return the content of the block that a chunk from `start` begins, if the sequence could share it."""
        index, begun = divmod(start, self._size)
        is_last = (index + 1) * self._size >= len(sequence.token_ids)
        return None if begun or is_last else meaning(asked, index, self._size)

    def _is_lone(self, chunk: Chunk) -> bool:
        """Whether it is one token that begins its sequence's last block: sorted first, and planned at any time.

        That block it writes itself in any case, also after another one that shares it.
        """
        num_tokens = len(self.sim.core._sequences[chunk.seq_id].token_ids)
        return len(chunk.token_ids) == 1 and chunk.start + self._size >= num_tokens

    def _launched(self, sequence: Sequence) -> int:
        chunk = self.sim.laws.flights.chunk_of(sequence)
        return sequence.num_computed_tokens + (len(chunk.token_ids) if chunk else 0)
