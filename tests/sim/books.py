"""`Books`: an independent account of the blocks: their holders, their hashes ("names"), their contents."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from streamserve.engine.plan import Chunk
from tests.sim.model import entries

if TYPE_CHECKING:
    from streamserve.engine.kv.pool import BlockPool
    from tests.sim.asked import Asked
    from tests.sim.simulation import Simulation

# What a block stands for: all tokens up to its end, the salt with the block at which it enters, if before the end, and
# the adapter that it was computed with, and the group of layers.
Meaning = tuple[tuple[int, ...], tuple[str, int] | None, str, int]


def meaning(asked: Asked, index: int, size: int, group: int = 0) -> Meaning:
    """Return what block `index` of an answer stands for. The salt enters with the first block not wholly public."""
    request, end = asked.request, (index + 1) * size
    is_public = end <= request.num_public_tokens or not request.admission.salt
    salt = None if is_public else (request.admission.salt, request.num_public_tokens // size)
    return asked.tokens[:end], salt, request.adapter, group


class Books:
    """Keeps, over a whole run, what each name means, and which sequence wrote each block last."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._size = sim.shape.block_size
        self._names: dict[bytes, Meaning] = {}
        self._named: dict[Meaning, bytes] = {}
        self._writer: dict[int, tuple[Asked, int, int, int]] = {}  # answer, index, sequence, group
        self._hits: dict[tuple[int, int], list[int]] = {}
        self._begun: dict[int, list[tuple[int, int]]] = {}  # the step and the start of each chunk
        self._forget_all()

    def _forget_all(self) -> None:
        self._seen: list[bytes | None] = [None] * self.sim.shape.num_blocks
        self._means: dict[int, Meaning] = {}

    def check_writes(self, asked: Asked, chunk: Chunk) -> None:
        """A sequence that writes a block is its only holder, and the block has no name."""
        blocks, size = self.sim.core.pool._blocks, self._size
        self._begun.setdefault(asked.seq_id, []).append((self.sim.plans[-1].step_id, chunk.start))
        for group, (table, window) in enumerate(zip(chunk.tables, self.sim.shape.windows, strict=True)):
            first = 0 if window is None else max(0, chunk.start + 1 - window) // size
            assert 0 not in table[first:], "2: the null block in a table"
            for index in range(chunk.start // size, len(table)):
                block = blocks[table[index]]
                assert block.ref_count == 1, f"3: writes block {block.block_id} of {block.ref_count} holders"
                assert block.block_hash is None, f"3: writes block {block.block_id}, which has a name"
                self._writer[block.block_id] = (asked, index, asked.seq_id, group)

    def check_hit(self, asked: Asked, tables: Iterable[Iterable[int]], num_tokens: int) -> None:
        """Cached blocks hold what the sequence would have written, and its tenant may share them.

        A checked block counts as the sequence's own. It loses its name if the sequence that wrote it fails.
        """
        assert num_tokens % self._size == 0, "17: half a block from the cache"
        for group, table in enumerate(tables):
            checked = self._hits.setdefault((asked.seq_id, group), [])
            for index, block_id in enumerate(islice(table, num_tokens // self._size)):
                if not block_id:  # before the window
                    checked[index : index + 1] = [0]
                elif checked[index : index + 1] != [block_id]:
                    found = self._means.get(block_id)
                    assert found == meaning(asked, index, self._size, group), "17: another block from the cache"
                    checked[index:] = [block_id]

    def is_all_found(self, asked: Asked, chunk: Chunk) -> bool:
        """Whether the sequence wrote no block before this chunk: its first step failed, and then it found more."""
        found = [block for table in chunk.tables for block in table[: chunk.start // self._size]]
        if 0 in found and self._has_written(asked, chunk):
            return False
        found = [block for block in found if block]
        return chunk.start % self._size == 0 and all(self._writer[block][2] != asked.seq_id for block in found)

    def _has_written(self, asked: Asked, chunk: Chunk) -> bool:
        """Whether an earlier step wrote what may lie before a window now."""
        begun, failed = self._begun.get(asked.seq_id, []), {plan.step_id for plan in self.sim.runner.failed}
        return any(start < chunk.start and step_id not in failed for step_id, start in begun)

    def forget_hits(self, asked: Asked) -> None:
        """Forget the hits of a sequence whose blocks were taken away."""
        self._begun.pop(asked.seq_id, None)
        for group in range(len(self.sim.shape.windows)):
            self._hits.pop((asked.seq_id, group), None)

    def is_cached(self, means: Meaning) -> bool:
        """Whether a block with this meaning can be found, in all groups of layers."""
        names = (self._named.get((*means[:3], group), b"") for group in range(len(self.sim.shape.windows)))
        return all(name in self.sim.core.pool._by_hash for name in names)

    def check(self, failed: list[Asked]) -> None:
        """Check all blocks after a step; blocks of `failed` must not be found again."""
        pool = self.sim.core.pool
        if self._is_new(pool):
            self._forget_all()
        self._check_blocks(pool)
        self._check_names(pool)
        self._check_tables(pool)
        for asked in failed:
            self._check_forgotten(pool, asked)

    def _is_new(self, pool: BlockPool) -> bool:
        is_new = pool is not getattr(self, "_pool", pool)
        self._pool = pool
        return is_new

    def _check_blocks(self, pool: BlockPool) -> None:
        held = [0] * len(pool._blocks)
        for sequence in self.sim.core._sequences.values():
            for block_id in (block_id for table in sequence.held.tables for block_id in table if block_id):
                held[block_id] += 1
        counts = [block.ref_count for block in pool._blocks]
        assert counts == held, f"1: reference counts {counts}, table entries {held}"
        free = [block.block_id for block in pool._free]
        assert sorted(free) == [b for b, num in enumerate(held) if b and not num], "2: free and held are not all blocks"
        stats, num_named = pool.stats(), len([b for b in free if pool._blocks[b].block_hash is not None])
        books = (len(held) - 1, len(held) - 1 - len(free), num_named, len(free) - num_named)
        reported = (stats.total, stats.used, stats.cached, stats.free)
        assert reported == books, f"2: blocks are {books}, the statistics show {reported}"
        assert pool.num_free == len(free), f"2: {len(free)} blocks are free, not {pool.num_free}"

    def _check_names(self, pool: BlockPool) -> None:
        names = [block.block_hash for block in pool._blocks]
        assert len(names) - names.count(None) == len(pool._by_hash), "4: a name without a block, or a block without"
        if names == self._seen:
            return
        for block_id, (name, seen) in enumerate(zip(names, self._seen, strict=True)):
            if name is not None:
                assert pool._by_hash.get(name) is pool._blocks[block_id], "4: a name that leads elsewhere"
            if name != seen:
                self._means.pop(block_id, None)
                if name is not None:
                    self._check_new_name(block_id, name)
        self._seen = names

    def _check_new_name(self, block_id: int, name: bytes) -> None:
        """The block was written to its end by a step that succeeded, and holds what its name means."""
        asked, index, _, group = self._writer[block_id]
        means = meaning(asked, index, self._size, group)
        self._means[block_id] = means
        assert self._names.setdefault(name, means) == means, "4: one name for two meanings"
        assert self._named.setdefault(means, name) == name, "4: two names for one meaning"
        assert self.sim.runner.block(block_id) == entries(means[0], means[2], group)[-self._size :], (
            "5: named before it was written"
        )

    def _check_tables(self, pool: BlockPool) -> None:
        size = self._size
        for sequence in self.sim.core._sequences.values():
            computed = sequence.num_computed_tokens
            assert computed <= len(sequence.token_ids), "6: more tokens computed than known"
            # One block may be allocated for the next token, and with a step in flight one for the token after it.
            most = -(-(len(sequence.token_ids) + 2) // size)
            for group, table in enumerate(sequence.held.tables):
                assert -(-computed // size) <= len(table) <= most, f"6: {len(table)} blocks for {computed} tokens"
                for block_id in table[computed // size :]:
                    block = pool._blocks[block_id]
                    assert (block.ref_count, block.block_hash) == (1, None), "3: a block still to be written is shared"
                self._check_window(table, computed, group)

    def _check_window(self, table: list[int], computed: int, group: int) -> None:
        """What the next token reads is held, and holds the right numbers; what lies before it is not held."""
        window = self.sim.shape.windows[group]
        first = 0 if window is None else max(0, computed + 1 - window) // self._size
        assert not any(table[:first]), f"41: {table[:first]} is held, before a window of {window} at {computed}"
        assert 0 not in table[first:], f"41: {table[first:]} has a gap, in a window of {window} at {computed}"
        for index in range(first, min(computed // self._size, len(table))) if window is not None else ():
            asked, place, _, of_group = self._writer[table[index]]
            assert (place, of_group) == (index, group), "41: a block of another place or group in a window"
            means = meaning(asked, index, self._size, group)
            wanted = entries(means[0], means[2], group)[-self._size :]
            assert self.sim.runner.block(table[index]) == wanted, "41: a block in a window was overwritten"

    def _check_forgotten(self, pool: BlockPool, asked: Asked) -> None:
        """What failed or follows a stop has no name, unless another wrote the same, or it was named before a park."""
        kept = 0 if asked.stopped_at is None else len(asked.request.prompt_token_ids) + asked.stopped_at
        whole = range(kept // self._size, len(asked.tokens) // self._size)
        for index, group in ((index, group) for index in whole for group in range(len(self.sim.shape.windows))):
            means = meaning(asked, index, self._size, group)
            block = pool._by_hash.get(self._named.get(means, b""))
            if block is not None:
                assert self._writer[block.block_id][2] != asked.seq_id, "18: blocks of a failed or stopped sequence"
