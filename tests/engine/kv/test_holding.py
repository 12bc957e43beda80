"""`Holding`: the blocks of all groups of layers, without null blocks."""

from __future__ import annotations

from streamserve.engine.kv.holding import Holding


def test_null_blocks_are_not_held() -> None:
    """They stand before a window, and go back to no pool."""
    held = Holding(block_table=[3, 4, 5], other_tables=[[0, 0, 6], [0, 7, 8]], num_null_blocks=3)
    assert held.tables == [[3, 4, 5], [0, 0, 6], [0, 7, 8]]
    assert held.num_blocks == len(held.block_ids) == 6
    assert held.block_ids == [3, 4, 5, 6, 7, 8]


def test_an_empty_holding_has_nothing_to_give_back() -> None:
    """It has a table for the first group all the same."""
    assert (Holding().tables, Holding().num_blocks, Holding().block_ids) == ([[]], 0, [])
