"""`FreeList`: the blocks nobody holds, in the order in which they are given out, and `Block`, its link.

Knows nothing of hashes or sequences. Engine thread only. (Idea: vLLM V1's FreeKVCacheBlockQueue.)
"""

from __future__ import annotations

from collections.abc import Iterator

from streamserve.engine.kv.integrity import IntegrityError


class Block:
    """One block: who holds it, what it is named, and its neighbours in the free list."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev: Block | None = None
        self.next: Block | None = None


class FreeList:
    """An intrusive doubly linked list: O(1) at both ends and for taking a block out of the middle."""

    def __init__(self) -> None:
        self._end = Block(-1)  # a ring with one sentinel has no special cases
        self._end.prev = self._end.next = self._end
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        block = self._end.next
        while block is not None and block is not self._end:
            yield block
            block = block.next

    def push_front(self, block: Block) -> None:
        """Make `block` the next to be taken."""
        self._insert(block, after=self._end)

    def push_back(self, block: Block) -> None:
        """Make `block` the last to be taken."""
        assert self._end.prev is not None
        self._insert(block, after=self._end.prev)

    def pop_front(self) -> Block:
        """Take the block that is worth least."""
        block = self._end.next
        if block is None or block is self._end:
            raise IntegrityError("a block is wanted and none is free")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take `block` out, wherever it is."""
        if block.prev is None or block.next is None:
            raise IntegrityError(f"block {block.block_id} is not in the free list")
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._len -= 1

    def _insert(self, block: Block, after: Block) -> None:
        if block.prev is not None:
            raise IntegrityError(f"block {block.block_id} is freed twice")
        assert after.next is not None
        block.prev, block.next = after, after.next
        after.next.prev = block
        after.next = block
        self._len += 1
