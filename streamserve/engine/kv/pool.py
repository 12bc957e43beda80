"""`BlockPool`: which block of KV memory belongs to whom. Reference counts, LRU free list, prefix cache; all O(1).

Knows ids and hashes; no tensors and no scheduling. Engine thread only. Block 0 is the null block: never given out, so
that padding may point at it. A freed block keeps its name and content until it is given out again: "cached" blocks are
free blocks that are still worth something. What can be checked in O(1) is, always, and raises `IntegrityError`.

    free list:  [ unnamed, newest first | named, least recently used first ]   taken from the left

(Idea: vLLM V1's block_pool.py; nano-vllm for the size. Differences: names are registered only after the step that
wrote the block, see vllm PR#43569; a name has one block, duplicates stay unnamed.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streamserve.engine.kv.free_list import Block, FreeList
from streamserve.engine.kv.hashing import extend_hashes, root_hash
from streamserve.engine.kv.integrity import IntegrityError
from streamserve.engine.sequence import Sequence, State


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Blocks by use, the null block apart: used + cached + free = total. Queries and hits are tokens."""

    total: int
    used: int
    cached: int
    free: int
    prefix_queries: int
    prefix_hits: int


class BlockPool:
    """All blocks of one engine. `on_forget(block_id)` is told when a block's content has lost its last use (tests)."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        revision: str = "",
        prefix_caching: bool = True,
        on_forget: Callable[[int], None] | None = None,
    ) -> None:
        self.block_size = block_size
        self._revision = revision
        self._prefix_caching = prefix_caching
        self._on_forget = on_forget
        self._root = root_hash(revision, block_size)
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._by_hash: dict[bytes, Block] = {}
        self._free = FreeList()
        self._num_used = 0
        self._num_free_named = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        for block in self._blocks[1:]:
            self._free.push_back(block)

    def renewed(self) -> BlockPool:
        """Return an empty pool of the same kind, which goes on counting where this one stands."""
        pool = BlockPool(
            len(self._blocks),
            self.block_size,
            revision=self._revision,
            prefix_caching=self._prefix_caching,
            on_forget=self._on_forget,
        )
        pool._prefix_queries, pool._prefix_hits = self._prefix_queries, self._prefix_hits
        return pool

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold; the null block is not one."""
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now, cached ones included."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Give out blocks with unknown content. The caller has compared with `num_free`."""
        return [self._take(self._free.pop_front()) for _ in range(num_blocks)]

    def free(self, block_table: list[int]) -> None:
        """Drop one reference to each block of a table, tail first, so that a cached tail is evicted before its head."""
        for block_id in reversed(block_table):
            block = self._blocks[block_id]
            if block.ref_count <= 0:
                raise IntegrityError(f"block {block_id} is freed, and nobody holds it")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._num_used -= 1
                self._put_back(block)

    def find_prefix(self, sequence: Sequence) -> list[Block]:
        """Return the cached blocks the sequence can start with; at least one token is left to compute."""
        if not self._prefix_caching:
            return []
        num_blocks = (sequence.num_tokens - 1) // self.block_size
        extend_hashes(sequence, num_blocks, self.block_size, self._root)
        found: list[Block] = []
        for name in sequence.block_hashes[:num_blocks]:
            block = self._by_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def start(self, sequence: Sequence, prefix: list[Block]) -> None:
        """Give the sequence its cached `prefix` and fresh blocks for the rest of its known tokens."""
        if sequence.block_table:
            raise IntegrityError(f"sequence {sequence.seq_id} starts and holds {len(sequence.block_table)} blocks")
        for block in prefix:
            self._share(block)
        sequence.num_computed_tokens = len(prefix) * self.block_size
        if sequence.num_preemptions == 0:  # finding one's own blocks again is no hit
            self._prefix_queries += sequence.num_tokens
            self._prefix_hits += sequence.num_computed_tokens
        rest = self.num_blocks_for(sequence.num_tokens) - len(prefix)
        sequence.block_table = [block.block_id for block in prefix] + self.allocate(rest)

    def register(self, sequence: Sequence, num_written: int) -> None:
        """Name the blocks that a finished step filled: those of the last `num_written` computed tokens."""
        if not self._prefix_caching:
            return
        # Invariant: a name exists only while the block holds what a successful step wrote.
        last = sequence.num_computed_tokens // self.block_size
        first = (sequence.num_computed_tokens - num_written) // self.block_size
        extend_hashes(sequence, last, self.block_size, self._root)
        for index in range(first, last):
            self._name(self._blocks[sequence.block_table[index]], sequence.block_hashes[index])

    def forget(self, names: Iterable[bytes]) -> None:
        """Take these names off the blocks that have them: nobody new will find them. Holders keep their blocks."""
        for name in names:
            block = self._by_hash.get(name)
            if block is not None:
                self._forget(block)

    def stats(self) -> PoolStats:
        """Return the present counts."""
        return PoolStats(
            total=self.num_usable,
            used=self._num_used,
            cached=self._num_free_named,
            free=len(self._free) - self._num_free_named,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
        )

    def _forget(self, block: Block) -> None:
        self._unname(block)
        if block.ref_count == 0:
            self._free.remove(block)
            self._num_free_named -= 1
            self._put_back(block)

    def _take(self, block: Block) -> int:
        if block.block_id == 0 or block.ref_count:
            raise IntegrityError(f"block {block.block_id} is given out, and has {block.ref_count} holders")
        self._num_used += 1
        if block.block_hash is not None:
            self._num_free_named -= 1
            self._unname(block)
            self._tell_forgotten(block)
        block.ref_count = 1
        return block.block_id

    def _share(self, block: Block) -> None:
        if block.ref_count == 0:
            self._free.remove(block)
            self._num_free_named -= 1
            self._num_used += 1
        block.ref_count += 1

    def _put_back(self, block: Block) -> None:
        if block.block_hash is None:
            self._free.push_front(block)
            self._tell_forgotten(block)
        else:
            self._free.push_back(block)
            self._num_free_named += 1

    def _name(self, block: Block, name: bytes) -> None:
        if block.block_hash is None and name not in self._by_hash:
            block.block_hash = name
            self._by_hash[name] = block

    def _unname(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            block.block_hash = None

    def _tell_forgotten(self, block: Block) -> None:
        if self._on_forget is not None:
            self._on_forget(block.block_id)

    def check_counts(self) -> None:
        """Raise `IntegrityError` unless the counters add up. O(1), so that every step can afford it."""
        free, used, named = len(self._free), self._num_used, self._num_free_named
        if free + used != self.num_usable or not 0 <= named <= min(free, len(self._by_hash)):
            raise IntegrityError(
                f"free {free} (cached {named} of {len(self._by_hash)} named) + used {used} != total {self.num_usable}"
            )

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise `IntegrityError` unless the books add up; `sequences` are all that the engine knows. O(blocks)."""
        sequences = list(sequences)
        self.check_counts()
        self._check_references(sequences)
        self._check_free_list()
        self._check_names()
        for sequence in sequences:
            self._check_sequence(sequence)

    def _check_references(self, sequences: list[Sequence]) -> None:
        held = Counter(block_id for sequence in sequences for block_id in sequence.block_table)
        for block in self._blocks:
            if held[block.block_id] != block.ref_count:
                raise IntegrityError(
                    f"block {block.block_id}: {held[block.block_id]} table entries, reference count {block.ref_count}"
                )

    def _check_free_list(self) -> None:
        free = Counter(block.block_id for block in self._free)
        used = sum(block.ref_count > 0 for block in self._blocks)
        named = sum(block.block_hash is not None for block in self._free)
        if len(free) != free.total() or len(free) != len(self._free) or len(free) + used != self.num_usable:
            raise IntegrityError(
                f"free {len(free)} ({free.total()} links, counted {len(self._free)}) + used {used}"
                f" != total {self.num_usable}"
            )
        if 0 in free or any(self._blocks[block_id].ref_count for block_id in free):
            raise IntegrityError("the null block or a held block is in the free list")
        if named != self._num_free_named:
            raise IntegrityError(f"cached blocks: {named} in the free list, counted {self._num_free_named}")

    def _check_names(self) -> None:
        named = {block.block_hash: block for block in self._blocks if block.block_hash is not None}
        if named != self._by_hash:
            raise IntegrityError(f"{len(named)} blocks have names, {len(self._by_hash)} names have blocks")

    def _check_sequence(self, sequence: Sequence) -> None:
        table, computed = sequence.block_table, sequence.num_computed_tokens
        if sequence.state is not State.RUNNING and (table or computed):
            raise IntegrityError(f"sequence {sequence.seq_id} is {sequence.state.value} and holds {len(table)} blocks")
        if len(table) < self.num_blocks_for(computed) or computed > sequence.num_tokens:
            raise IntegrityError(
                f"sequence {sequence.seq_id}: {computed} of {sequence.num_tokens} tokens computed, {len(table)} blocks"
            )
        self._check_shared(sequence)

    def _check_shared(self, sequence: Sequence) -> None:
        """A block that can still be written has one holder, and a named block is what its holder's chain says."""
        num_full = sequence.num_computed_tokens // self.block_size
        for index, block_id in enumerate(sequence.block_table):
            block = self._blocks[block_id]
            if index >= num_full and (block.ref_count > 1 or block.block_hash is not None):
                raise IntegrityError(
                    f"sequence {sequence.seq_id} will write block {block_id}, which has {block.ref_count} holders"
                    f" and {'a' if block.block_hash else 'no'} name"
                )
            if block.block_hash is not None and block.block_hash != sequence.block_hashes[index]:
                raise IntegrityError(f"block {block_id} has another name than sequence {sequence.seq_id} gives it")
