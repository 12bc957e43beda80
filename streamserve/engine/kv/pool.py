"""`BlockPool`: the blocks of KV memory. Reference counts, LRU free list, prefix cache; all O(1). And the penalty slots
of running sequences.

Knows ids and hashes; no tensors and no scheduling. Engine thread only. Block 0 is the null block: never allocated, so
that padding may point at it. A freed block keeps its hash and content until it is allocated again: "cached" blocks are
free blocks whose content can be reused. O(1) checks always run, and raise `IntegrityError`.

    free list:  [ uncached, newest first | cached, least recently used first ]   allocated from the left

The hash of a full block is sha256 over (parent, tokens, salt), starting from a root for the model revision: equal
hashes mean equal K/V, and that the same tenant, or the server itself, wrote the tokens.

(Idea: vLLM V1's block_pool.py and its hash chain; nano-vllm for the size. Differences: a block is cached only after the
step that wrote it, see vllm PR#43569; a hash has one block, duplicates stay uncached. Lessons: vllm PR#12621, hash
collisions; confidential-model-router#386, unframed salts; vllm PR#37961, a salt on everything ends the sharing of the
common system prompt.)

Each group of layers has a table of its own in a sequence (see groups.py), and blocks from this one pool. A block's name
in the cache is its hash and its group.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from heapq import heappop, heappush

from streamserve.engine.kv.free_list import Block, FreeList, IntegrityError
from streamserve.engine.kv.groups import ONE_GROUP, Windows, first_read, most_blocks, most_in_window
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
    """All blocks of one engine. `on_evict(block_id)` is called when a block's content is lost for reuse (tests).

    `windows`: of each group of layers. `step_tokens`: the most tokens that a step computes.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        revision: str = "",
        prefix_caching: bool = True,
        on_evict: Callable[[int], None] | None = None,
        windows: Windows = ONE_GROUP,
        step_tokens: int = 0,
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self._step_tokens = step_tokens
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._names = [bytes([group]) if group else b"" for group in range(len(windows))]  # after a hash
        self._revision = revision
        self._prefix_caching = prefix_caching
        self._on_evict = on_evict
        self._root = root_hash(revision, block_size)
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._by_hash: dict[bytes, Block] = {}
        self._free = FreeList()
        self._num_used = 0
        self._num_free_cached = 0
        self._num_penalty_slots = 0
        # A heap: low numbers first, as the runner has memory up to the highest.
        self._free_penalty_slots: list[int] = []
        self._prefix_queries = 0
        self._prefix_hits = 0
        for block in self._blocks[1:]:
            self._free.push(block, at_front=False)

    @property
    def has_windows(self) -> bool:
        """Whether a group of layers has a window: its blocks are allocated while a prompt is computed."""
        return bool(self._windowed)

    def renewed(self) -> BlockPool:
        """Return an empty pool of the same kind, with this pool's query and hit counts."""
        pool = BlockPool(
            len(self._blocks),
            self.block_size,
            revision=self._revision,
            prefix_caching=self._prefix_caching,
            on_evict=self._on_evict,
            windows=self.windows,
            step_tokens=self._step_tokens,
        )
        pool._prefix_queries, pool._prefix_hits = self._prefix_queries, self._prefix_hits
        return pool

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can hold; the null block does not count."""
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached blocks included."""
        return self._free.num_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks with unknown content. The caller has compared with `num_free`."""
        block_ids = []
        for _ in range(num_blocks):
            block = self._free.pop_front()
            if block.block_id == 0 or block.ref_count:
                raise IntegrityError(f"block {block.block_id} is allocated, and has {block.ref_count} holders")
            self._num_used += 1
            if block.block_hash is not None:
                self._num_free_cached -= 1
                self._uncache(block)
                if self._on_evict is not None:
                    self._on_evict(block.block_id)
            block.ref_count = 1
            block_ids.append(block.block_id)
        return block_ids

    def free(self, block_table: list[int]) -> None:
        """Drop one reference to each block of a table, tail first, so that a cached tail is evicted before its head."""
        for block_id in reversed(block_table):
            block = self._blocks[block_id]
            if block.ref_count <= 0:
                raise IntegrityError(f"block {block_id} is freed, and has no holder")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._num_used -= 1
                self._put_back(block)

    def free_penalty_slot(self, slot: int) -> None:
        """Take back a sequence's penalty slot. Its content is void: the next holder begins it afresh."""
        heappush(self._free_penalty_slots, slot)

    def _allocate_penalty_slot(self) -> int:
        if self._free_penalty_slots:
            return heappop(self._free_penalty_slots)
        self._num_penalty_slots += 1
        return self._num_penalty_slots - 1

    def find_prefix(self, sequence: Sequence) -> list[list[Block]]:
        """Return the cached blocks the sequence can start with, for each group; what is to be computed is left.

        Outside a group's window they are null blocks.
        """
        num_blocks = min(len(sequence.token_ids) - 1, sequence.num_reusable_tokens) // self.block_size
        hashes = self.hashes(sequence, 0, num_blocks)
        found: list[list[Block]] = [[] for _ in self.windows]
        for blocks, name, window in zip(found, self._names, self.windows, strict=True):
            if window is not None:
                continue
            for hash_ in hashes:
                block = self._by_hash.get(hash_ + name)
                if block is None:
                    break
                blocks.append(block)
            hashes = hashes[: len(blocks)]
        if not self._windowed:
            return [blocks[: len(hashes)] for blocks in found]
        return self._cut_to_windows(found, hashes)

    def _cut_to_windows(self, found: list[list[Block]], hashes: list[bytes]) -> list[list[Block]]:
        """Return the longest prefix of which each windowed group has what the next token reads.

        `found` are the blocks of the other groups.
        """
        num_found = len(hashes)
        while (missing := self._last_missing(hashes, num_found)) is not None:
            num_found = missing  # every longer prefix has that block in its window
        for group, window in self._windowed:
            first = first_read(num_found * self.block_size, window, self.block_size)
            own = [self._by_hash[hash_ + self._names[group]] for hash_ in hashes[first:num_found]]
            found[group] = [self._blocks[0]] * first + own
        return [blocks[:num_found] for blocks in found]

    def _last_missing(self, hashes: list[bytes], num_blocks: int) -> int | None:
        """Return the last block that a windowed group lacks of a prefix of `num_blocks`."""
        last = None
        for group, window in self._windowed:
            first, name = first_read(num_blocks * self.block_size, window, self.block_size), self._names[group]
            for index in range(num_blocks - 1, first - 1, -1):
                if index == last:
                    break
                if hashes[index] + name not in self._by_hash:
                    last = index
                    break
        return last

    def num_taken(self, sequence: Sequence, prefix: list[list[Block]]) -> int:
        """Return how many free blocks `start` takes: those of the prefix that have no holder, and fresh ones."""
        num_free = sum(block.ref_count == 0 and block.block_id > 0 for blocks in prefix for block in blocks)
        return num_free + sum(self._num_fresh(sequence, prefix))

    def _num_fresh(self, sequence: Sequence, prefix: list[list[Block]]) -> list[int]:
        """Return how many fresh blocks a sequence starts with, by group: with a window as many as a step fills."""
        num_left = -(-len(sequence.token_ids) // self.block_size) - len(prefix[0])
        return [
            num_left if window is None else min(num_left, most_in_window(window, self.block_size, self._step_tokens))
            for window in self.windows
        ]

    def start(self, sequence: Sequence, prefix: list[list[Block]]) -> None:
        """Give the sequence its cached `prefix`, fresh blocks for its other known tokens, and a row if it counts."""
        held = sequence.held
        if held.block_table:
            raise IntegrityError(f"sequence {sequence.seq_id} starts and holds {len(held.block_table)} blocks")
        for block in (block for blocks in prefix for block in blocks if block.block_id):
            self._share(block)
        sequence.num_computed_tokens = len(prefix[0]) * self.block_size
        sequence.num_launched_tokens = sequence.num_computed_tokens
        if sequence.num_preemptions == 0:  # after a preemption its own blocks are no hit
            self._prefix_queries += len(sequence.token_ids)
            self._prefix_hits += sequence.num_computed_tokens
        tables = [
            [block.block_id for block in blocks] + self.allocate(num)
            for blocks, num in zip(prefix, self._num_fresh(sequence, prefix), strict=True)
        ]
        held.block_table, held.other_tables = tables[0], tables[1:]
        held.num_null_blocks = sum(tables[group].count(0) for group, _ in self._windowed)
        if sequence.constraints.has_penalties:
            held.penalty_slot = self._allocate_penalty_slot()

    def num_lacking(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks a running sequence lacks for its first `num_tokens`, in all groups."""
        num_blocks, held = -(-num_tokens // self.block_size), sequence.held
        num_lacking = num_blocks - len(held.block_table)
        if not held.other_tables:
            return num_lacking if num_lacking > 0 else 0
        num_lacking = max(0, num_lacking)
        for table in held.other_tables:
            num_lacking += max(0, num_blocks - len(table))
        return num_lacking

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate the blocks that it lacks for its first `num_tokens`. The caller has compared with `num_free`."""
        num_blocks = -(-num_tokens // self.block_size)
        for table in sequence.held.tables:
            if len(table) < num_blocks:
                table += self.allocate(num_blocks - len(table))

    def num_tokens_with_room(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` of a sequence the free blocks have room for."""
        start = sequence.num_launched_tokens
        while num_tokens > 0 and self.num_lacking(sequence, start + num_tokens) > self.num_free:
            num_tokens = (start + num_tokens - 1) // self.block_size * self.block_size - start
        return max(0, num_tokens)

    def free_unread(self, sequence: Sequence) -> None:
        """Free the blocks that no token still to be computed reads: those before a window. They stay cached.

        Steps in flight compute tokens after the computed ones, so they read none of these either.
        """
        for group, window in self._windowed:
            table = sequence.held.tables[group]
            end = first = first_read(sequence.num_computed_tokens, window, self.block_size)
            while first > 0 and table[first - 1]:
                first -= 1
            if first < end:
                self.free(table[first:end])
                table[first:end] = [0] * (end - first)
                sequence.held.num_null_blocks += end - first

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence holds that has computed so many tokens."""
        if not self._windowed:
            return -(-num_tokens // self.block_size) * len(self.windows)
        return most_blocks(num_tokens, self.windows, self.block_size, 0)

    def release(self, sequence: Sequence) -> None:
        """Free every block of the sequence. Only outside RUNNING; a second call finds nothing to free.

        Results in flight are dropped; the device runs the steps in order, so the blocks may be allocated again at once.
        """
        if sequence.state is State.RUNNING:
            raise IntegrityError(f"sequence {sequence.seq_id} frees its blocks while running")
        if sequence.held.penalty_slot is not None:
            self.free_penalty_slot(sequence.held.penalty_slot)
        self.free(sequence.lose_blocks())

    def adopt(self, sequence: Sequence) -> None:
        """Take over blocks that were cached since the sequence started, in place of own blocks that it has not begun.

        Found before it has computed anything they are hits, as at the start.
        """
        if sequence.num_launched_tokens != sequence.num_computed_tokens:
            return
        is_fresh = sequence.num_computed_tokens == sequence.num_cached_tokens and sequence.num_preemptions == 0
        while (hash_ := self.next_hash(sequence)) is not None and self.is_cached(hash_):
            index = sequence.num_computed_tokens // self.block_size
            for table, name in zip(sequence.held.tables, self._names, strict=True):
                block = self._by_hash[hash_ + name]
                self._share(block)
                self.free(table[index : index + 1])
                table[index : index + 1] = [block.block_id]
            sequence.num_computed_tokens += self.block_size
            sequence.num_launched_tokens += self.block_size
            if is_fresh:
                sequence.num_cached_tokens += self.block_size
                self._prefix_hits += self.block_size
            self.free_unread(sequence)

    def next_hash(self, sequence: Sequence) -> bytes | None:
        """Return the hash of the block that the next chunk begins; None if it could not be taken over.

        That is: it is begun already, or not full, or holds the last token or a token to be scored: such tokens are
        computed.
        """
        index, begun = divmod(sequence.num_launched_tokens, self.block_size)
        end = (index + 1) * self.block_size
        is_computed = end >= len(sequence.token_ids) or end > sequence.num_reusable_tokens
        return None if begun or is_computed else next(iter(self.hashes(sequence, index, index + 1)), None)

    def hashes(self, sequence: Sequence, first: int, last: int) -> list[bytes]:
        """Return the hashes of full blocks `first` to `last`; none without the prefix cache."""
        if not self._prefix_caching:
            return []
        if len(sequence.block_hashes) < last:
            extend_hashes(sequence, last, self.block_size, self._root)
        return sequence.block_hashes[first:last]

    def is_cached(self, hash_: bytes) -> bool:
        """Whether a block with this hash can be taken over, in all groups."""
        return all(hash_ + name in self._by_hash for name in self._names)

    def cache_blocks(self, sequence: Sequence, num_written: int) -> None:
        """Cache the blocks that a finished step filled: the blocks of the last `num_written` computed tokens."""
        if not self._prefix_caching:
            return
        # Invariant: a block has a hash only while it holds what a successful step wrote.
        last = sequence.num_computed_tokens // self.block_size
        first = (sequence.num_computed_tokens - num_written) // self.block_size
        if first == last:  # nearly every token
            return
        if len(sequence.block_hashes) < last:
            extend_hashes(sequence, last, self.block_size, self._root)
        for table, name in zip(sequence.held.tables, self._names, strict=True):
            for index in range(first, last):
                self._cache(self._blocks[table[index]], sequence.block_hashes[index] + name)

    def evict(self, hashes: Iterable[bytes]) -> None:
        """Take the blocks with these hashes out of the prefix cache. Their holders keep them."""
        for name in (hash_ + group for hash_ in hashes for group in self._names):
            block = self._by_hash.get(name)
            if block is not None:
                self._evict(block)

    def stats(self) -> PoolStats:
        """Return the present counts."""
        return PoolStats(
            total=self.num_usable,
            used=self._num_used,
            cached=self._num_free_cached,
            free=self._free.num_blocks - self._num_free_cached,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
        )

    def _evict(self, block: Block) -> None:
        self._uncache(block)
        if block.ref_count == 0:
            self._free.remove(block)
            self._num_free_cached -= 1
            self._put_back(block)

    def _share(self, block: Block) -> None:
        if block.ref_count == 0:
            self._free.remove(block)
            self._num_free_cached -= 1
            self._num_used += 1
        block.ref_count += 1

    def _put_back(self, block: Block) -> None:
        if block.block_hash is None:
            self._free.push(block, at_front=True)
            if self._on_evict is not None:
                self._on_evict(block.block_id)
        else:
            self._free.push(block, at_front=False)
            self._num_free_cached += 1

    def _cache(self, block: Block, hash_: bytes) -> None:
        if block.block_hash is None and hash_ not in self._by_hash:
            block.block_hash = hash_
            self._by_hash[hash_] = block

    def _uncache(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            block.block_hash = None

    def check_counts(self) -> None:
        """Raise `IntegrityError` unless the counters add up. O(1), so that every step can afford it."""
        free, used, cached = self._free.num_blocks, self._num_used, self._num_free_cached
        if free + used != self.num_usable or not 0 <= cached <= min(free, len(self._by_hash)):
            raise IntegrityError(
                f"free {free} ({cached} of {len(self._by_hash)} cached) + used {used} != total {self.num_usable}"
            )

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise `IntegrityError` unless everything adds up; `sequences` are all that the engine knows. O(blocks)."""
        sequences = list(sequences)
        self.check_counts()
        self._check_references(sequences)
        self._check_free_list()
        self._check_hashes()
        self._check_rows(sequences)
        for sequence in sequences:
            self._check_sequence(sequence)

    def _check_references(self, sequences: list[Sequence]) -> None:
        tables = [table for sequence in sequences for table in sequence.held.tables]
        held = Counter(block_id for table in tables for block_id in table)
        del held[0]  # null blocks are checked with each sequence
        for block in self._blocks:
            if held[block.block_id] != block.ref_count:
                raise IntegrityError(
                    f"block {block.block_id}: {held[block.block_id]} table entries, reference count {block.ref_count}"
                )

    def _check_free_list(self) -> None:
        free = Counter(block.block_id for block in self._free)
        used = sum(block.ref_count > 0 for block in self._blocks)
        cached = sum(block.block_hash is not None for block in self._free)
        if len(free) != free.total() or len(free) != self._free.num_blocks or len(free) + used != self.num_usable:
            raise IntegrityError(
                f"free {len(free)} ({free.total()} links, counted {self._free.num_blocks}) + used {used}"
                f" != total {self.num_usable}"
            )
        if 0 in free or any(self._blocks[block_id].ref_count for block_id in free):
            raise IntegrityError("the null block or a held block is in the free list")
        if cached != self._num_free_cached:
            raise IntegrityError(f"cached blocks: {cached} in the free list, counted {self._num_free_cached}")

    def _check_hashes(self) -> None:
        cached = {block.block_hash: block for block in self._blocks if block.block_hash is not None}
        if cached != self._by_hash:
            raise IntegrityError(f"{len(cached)} blocks have hashes, {len(self._by_hash)} hashes have blocks")

    def _check_rows(self, sequences: list[Sequence]) -> None:
        slots = [sequence.held.penalty_slot for sequence in sequences]
        held = [slot for slot in slots if slot is not None]
        if sorted([*held, *self._free_penalty_slots]) != list(range(self._num_penalty_slots)):
            free, total = self._free_penalty_slots, self._num_penalty_slots
            raise IntegrityError(f"penalty slots: {held} held + {free} free != total {total}")

    def _check_sequence(self, sequence: Sequence) -> None:
        computed, num_known = sequence.num_computed_tokens, len(sequence.token_ids)
        held = sequence.held
        drafted, num_held, tables = held.num_drafted_tokens, held.num_blocks, held.tables
        if sequence.state is not State.RUNNING:
            if num_held or computed or drafted:
                raise IntegrityError(
                    f"sequence {sequence.seq_id} is {sequence.state.value} and holds {num_held} blocks"
                )
            return
        if len(tables) != len(self.windows):
            raise IntegrityError(f"sequence {sequence.seq_id} has {len(tables)} tables")
        num_slots = min(map(len, tables)) * self.block_size
        if num_slots < computed or computed > num_known:
            raise IntegrityError(
                f"sequence {sequence.seq_id}: {computed} of {num_known} tokens computed, {num_held} blocks"
            )
        if drafted > min(num_known, num_slots):
            raise IntegrityError(
                f"sequence {sequence.seq_id}: {drafted} of {num_known} tokens drafted, {num_held} blocks"
            )
        if held.num_null_blocks != sum(table.count(0) for table in tables):
            raise IntegrityError(f"sequence {sequence.seq_id} counts {held.num_null_blocks} null blocks")
        for table, window, name in zip(tables, self.windows, self._names, strict=True):
            first = first_read(computed, window, self.block_size)
            if any(table[:first]) or 0 in table[first:]:
                raise IntegrityError(f"sequence {sequence.seq_id} reads from block {first} on, and holds {table}")
            self._check_shared(sequence, table, name)

    def _check_shared(self, sequence: Sequence, table: list[int], name: bytes) -> None:
        """Check that a block that can still be written has one holder, and a cached block its holder's hash."""
        num_full = sequence.num_computed_tokens // self.block_size
        for index, block_id in enumerate(table):
            block = self._blocks[block_id]
            if index >= num_full and (block.ref_count > 1 or block.block_hash is not None):
                raise IntegrityError(
                    f"sequence {sequence.seq_id} will write block {block_id}, which has {block.ref_count} holders"
                    f" and {'a' if block.block_hash else 'no'} hash"
                )
            if block.block_hash is not None and block.block_hash != sequence.block_hashes[index] + name:
                raise IntegrityError(f"block {block_id} has another hash than the block of sequence {sequence.seq_id}")


def root_hash(revision: str, block_size: int) -> bytes:
    """Return the hash of the empty prefix of one model revision."""
    return hashlib.sha256(b"streamserve-kv-1" + _framed(revision.encode()) + block_size.to_bytes(8, "big")).digest()


def block_hash(parent: bytes, token_ids: TokenIds[int], salt: str | None) -> bytes:
    """Hash a full block by its parent and its tokens. `salt` None means unsalted, which no salt string equals."""
    extra = b"" if salt is None else b"salt" + _framed(salt.encode())
    return hashlib.sha256(parent + _framed(array("q", token_ids).tobytes()) + extra).digest()


def extend_hashes(sequence: Sequence, num_blocks: int, block_size: int, root: bytes) -> None:
    """Extend the sequence's hashes to `num_blocks`; earlier hashes are kept, as known tokens never change."""
    hashes = sequence.block_hashes
    for index in range(len(hashes), num_blocks):
        start, end = index * block_size, (index + 1) * block_size
        parent = hashes[-1] if hashes else _root_of(sequence.request.adapter, root)
        hashes.append(block_hash(parent, sequence.token_ids[start:end], _salt_of_block(sequence, start, end)))


def _root_of(adapter: str, root: bytes) -> bytes:
    """Return where the chain of an adapter begins: what it computes of a prefix is not what the model does."""
    return hashlib.sha256(root + b"adapter" + _framed(adapter.encode())).digest() if adapter else root


def _salt_of_block(sequence: Sequence, start: int, end: int) -> str | None:
    """The salt enters the chain once: in the first block that is not wholly public.

    [ public ..... | caller's ................ )
    [ none ][ none ][ salt ][ chain ][ chain ]
    """
    public = sequence.request.num_public_tokens
    is_first_private = start <= public < end
    return sequence.request.admission.salt if is_first_private and sequence.request.admission.salt else None


def _framed(data: bytes) -> bytes:
    """Prefix the length, so that no two lists of fields give the same bytes."""
    return len(data).to_bytes(8, "big") + data
