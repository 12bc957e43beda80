"""`FreeList`: the free blocks in the order in which they are allocated, and `Block`, its link; `IntegrityError`.

Knows no hashes and no sequences. Engine thread only. (Idea: vLLM V1's FreeKVCacheBlockQueue.)
"""

from __future__ import annotations

from collections.abc import Iterator


class IntegrityError(Exception):
    """The engine's bookkeeping is inconsistent; the message holds the numbers that should add up.

    Checks that cost O(1) raise it in production too. The core answers with a quarantine (core.py): sequences that hold
    blocks fail, and the engine continues with an empty pool.
    """


class Block:
    """One block: its reference count, its hash, and its neighbours in the free list."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev: Block | None = None
        self.next: Block | None = None


class FreeList:
    """An intrusive doubly linked list: O(1) at both ends and for removal from the middle. `num_blocks`: its length."""

    def __init__(self) -> None:
        self._end = Block(-1)  # a ring with one sentinel has no special cases
        self._end.prev = self._end.next = self._end
        self.num_blocks = 0

    def __iter__(self) -> Iterator[Block]:
        block = self._end.next
        while block is not None and block is not self._end:
            yield block
            block = block.next

    def push(self, block: Block, *, at_front: bool) -> None:
        """Make `block` the next to be allocated, or the last."""
        if block.prev is not None:
            raise IntegrityError(f"block {block.block_id} is freed twice")
        after = self._end if at_front else self._end.prev
        assert after is not None
        assert after.next is not None
        block.prev, block.next = after, after.next
        after.next.prev = block
        after.next = block
        self.num_blocks += 1

    def pop_front(self) -> Block:
        """Remove and return the block that is worth least."""
        block = self._end.next
        if block is None or block is self._end:
            raise IntegrityError("a block is allocated and none is free")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Remove `block` from any position."""
        if block.prev is None or block.next is None:
            raise IntegrityError(f"block {block.block_id} is not in the free list")
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.num_blocks -= 1
