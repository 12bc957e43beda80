"""`Holding`: what the pool has given a running sequence: blocks, and a penalty slot.

The pool fills it and takes it back whole (pool.py). Knows ids; no tokens. Engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Holding:
    """A block table for each group of layers, and with penalties a penalty slot in the runner.

    `block_table` is that of the first group, `other_tables` those of the others. In them are `num_null_blocks` null
    blocks: what lies before a window. `num_drafted_tokens`: so many of the known tokens the draft model has computed,
    in the same blocks of its memory. `is_counted`: the slot holds every token that a launched step has seen; otherwise
    the next draw begins it afresh.
    """

    block_table: list[int] = field(default_factory=list)
    other_tables: list[list[int]] = field(default_factory=list)
    num_null_blocks: int = 0
    num_drafted_tokens: int = 0
    penalty_slot: int | None = None
    is_counted: bool = False

    @property
    def tables(self) -> list[list[int]]:
        """The block table of each group of layers."""
        return [self.block_table, *self.other_tables]

    @property
    def num_blocks(self) -> int:
        """How many blocks are held, in all groups."""
        return len(self.block_table) + sum(map(len, self.other_tables)) - self.num_null_blocks

    @property
    def block_ids(self) -> list[int]:
        """The blocks of all tables."""
        if self.num_null_blocks or self.other_tables:
            return [block_id for table in self.tables for block_id in table if block_id]
        return self.block_table

    @property
    def begins_counts(self) -> bool:
        """Whether the next draw begins the penalty slot afresh."""
        return self.penalty_slot is not None and not self.is_counted
