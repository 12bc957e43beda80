"""Faults of the block pool, its free list and its names."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_pool = partial(Mutant, file="kv/pool.py")

MUTANTS = (
    _pool(
        name="a penalty slot is never given back",
        law=33,
        old="            self.free_penalty_slot(sequence.held.penalty_slot)\n",
        new="            pass\n",
    ),
    _pool(
        name="two sequences count in one row",
        law=33,
        old="        if self._free_penalty_slots:\n            return heappop(self._free_penalty_slots)",
        new="        if self._free_penalty_slots:\n            return self._free_penalty_slots[0]",
    ),
    _pool(
        name="a table's first block is never freed",
        law=1,
        old="for block_id in reversed(block_table):",
        new="for block_id in reversed(block_table[1:]):",
    ),
    _pool(
        name="double free",
        law=1,
        old="for block_id in reversed(block_table):",
        new="for block_id in reversed(block_table + block_table[:1]):",
    ),
    _pool(
        name="sharing a block counts one holder",
        law=1,
        old="            self._num_used += 1\n        block.ref_count += 1",
        new="            self._num_used += 1\n        block.ref_count = 1",
    ),
    _pool(
        name="a shared block stays in the free list",
        law=2,
        old=(
            "            self._free.remove(block)\n"
            "            self._num_free_cached -= 1\n"
            "            self._num_used += 1"
        ),
        new="            self._num_free_cached -= 1\n            self._num_used += 1",
    ),
    _pool(
        name="the null block is given out",
        law=2,
        old="for block in self._blocks[1:]:",
        new="for block in self._blocks:",
    ),
    _pool(
        name="a freed block is not put back",
        law=2,
        old="                self._num_used -= 1\n                self._put_back(block)",
        new="                self._num_used -= 1",
    ),
    _pool(
        name="used blocks are not counted down",
        law=2,
        old="                self._num_used -= 1\n                self._put_back(block)",
        new="                self._put_back(block)",
    ),
    _pool(
        name="a forgotten cached block leaves the free list",
        law=2,
        old=(
            "            self._free.remove(block)\n"
            "            self._num_free_cached -= 1\n"
            "            self._put_back(block)"
        ),
        new="            self._free.remove(block)\n            self._num_free_cached -= 1",
    ),
    _pool(
        name="a block keeps its name when it is given out",
        law=3,
        old="                self._num_free_cached -= 1\n                self._uncache(block)\n",
        new="                self._num_free_cached -= 1\n",
    ),
    _pool(
        name="a lost name still leads to its block",
        law=4,
        old="            del self._by_hash[block.block_hash]\n",
        new="",
    ),
    _pool(
        name="a block takes a name that another has",
        law=4,
        old="if block.block_hash is None and hash_ not in self._by_hash:",
        new="if block.block_hash is None:",
    ),
    _pool(
        name="a block is named when it is half full",
        law=5,
        old="last = sequence.num_computed_tokens // self.block_size\n",
        new="last = -(-sequence.num_computed_tokens // self.block_size)\n",
    ),
    _pool(
        name="names are one block off",
        law=5,
        old="self._cache(self._blocks[table[index]], sequence.block_hashes[index] + name)",
        new="self._cache(self._blocks[table[index]], sequence.block_hashes[index - 1] + name)",
    ),
    _pool(
        name="the whole prompt comes from the cache",
        law=9,
        old="num_blocks = min(len(sequence.token_ids) - 1, sequence.num_reusable_tokens) // self.block_size",
        new="num_blocks = len(sequence.token_ids) // self.block_size",
    ),
    _pool(
        name="a hole in the cached prefix is skipped",
        law=17,
        old="                if block is None:\n                    break",
        new="                if block is None:\n                    continue",
    ),
    _pool(
        name="a cached block counts as one token",
        law=9,
        old="sequence.num_computed_tokens = len(prefix[0]) * self.block_size",
        new="sequence.num_computed_tokens = len(prefix[0])",
    ),
    _pool(
        name="forgetting forgets nothing",
        law=18,
        old="            if block is not None:\n                self._evict(block)",
        new="            if block is None:\n                self._evict(block)",
    ),
    _pool(
        name="hits are counted after every preemption",
        law=30,
        old="if sequence.num_preemptions == 0:  # after a preemption its own blocks are no hit",
        new="if True:",
    ),
    _pool(
        name="a renewed pool keeps its names",
        law=27,
        old="        pool._prefix_queries, pool._prefix_hits",
        new="        pool._by_hash = self._by_hash\n        pool._prefix_queries, pool._prefix_hits",
    ),
    Mutant(
        name="a block's name ignores what is before it",
        law=4,
        file="kv/pool.py",
        old="hashlib.sha256(parent + _framed(",
        new="hashlib.sha256(_framed(",
    ),
    Mutant(
        name="no salt",
        law=17,
        file="kv/pool.py",
        old="return sequence.request.admission.salt if is_first_private and sequence.request.admission.salt else None",
        new="return None",
    ),
    Mutant(
        name="no salt where the public part ends with a block",
        law=17,
        file="kv/pool.py",
        old="is_first_private = start <= public < end",
        new="is_first_private = start < public < end",
    ),
    Mutant(
        name="a block that is partly the caller's is public",
        law=17,
        file="kv/pool.py",
        old="public = sequence.request.num_public_tokens",
        new="public = -(-sequence.request.num_public_tokens // (end - start)) * (end - start)",
    ),
    Mutant(
        name="the free list loses count",
        law=2,
        file="kv/free_list.py",
        old="        self.num_blocks -= 1\n",
        new="",
    ),
    Mutant(
        name="the free list forgets the link back",
        law=2,
        file="kv/free_list.py",
        old="        after.next.prev = block\n",
        new="",
    ),
)
