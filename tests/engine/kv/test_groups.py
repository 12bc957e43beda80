"""Groups of layers: how they are made, what they read and hold; and the pool's blocks before a window."""

from __future__ import annotations

import sys

import pytest

from streamserve.engine.kv.free_list import IntegrityError
from streamserve.engine.kv.groups import (
    Windows,
    first_read,
    group_layers,
    most_blocks,
    most_in_window,
    most_sequences,
    most_tokens,
)
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.sequence import Sequence, State
from tests.support.engines.cores import request

BLOCK = 4


def layers(pattern: str, num_layers: int) -> dict[int, int | None]:
    """Return the windows of layers by a pattern of f (full) and w (512)."""
    return {index: None if pattern[index % len(pattern)] == "f" else 512 for index in range(num_layers)}


@pytest.mark.parametrize(
    ("pattern", "num_layers", "sizes"),
    [
        ("f", 32, [32]),
        ("w", 32, [32]),  # Mistral 0.1
        ("wf", 24, [12, 12]),  # gpt-oss 20b
        ("wf", 26, [13, 13]),  # Gemma 2 2b
        ("wwwf", 32, [8] * 4),  # OLMo 3 7b
        ("wwwwwf", 18, [3] * 6),  # Gemma 3 270m
        ("wwwwwf", 26, [4] * 6 + [2]),  # Gemma 3 1b
        ("wwwwwf", 34, [5] * 6 + [4]),  # Gemma 3 4b
        ("wwwwwf", 62, [10] * 6 + [2]),  # Gemma 3 27b
        ("fwwwwwwwwwwwwwww", 16, [16]),  # a group for each layer: more than are worth it
        ("f" * 11 + "w" * 13, 24, [24]),  # numbers that do not divide
    ],
)
def test_grouped(pattern: str, num_layers: int, sizes: list[int]) -> None:
    """Groups have as many layers each, full layers first; models whose layers do not divide well have one group."""
    windows = layers(pattern, num_layers)
    groups = group_layers(windows)
    assert [len(group) for group in groups] == sizes
    assert sorted(layer for group in groups for layer in group) == list(range(num_layers))
    if len(groups) > 1:
        assert all(len({windows[layer] for layer in group}) == 1 for group in groups)
        assert windows[groups[0][0]] is None


def test_first_read() -> None:
    """The first block that holds a position which the next token, or a later token, sees."""
    for window in range(1, 12):
        for computed in range(40):
            first = max(0, computed + 1 - window)
            assert first_read(computed, window, BLOCK) == first // BLOCK
    assert first_read(1_000, None, BLOCK) == 0


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (None, 6, 30), (6, 30), (None, None, 9)], ids=str)
def test_most_tokens(windows: Windows) -> None:
    """The longest sequence that fits needs no more blocks than there are, and a block more does not fit."""
    for num_blocks in range(80):
        longest = most_tokens(num_blocks, windows, BLOCK, 5)
        if longest == sys.maxsize:
            assert None not in windows
            longest = 10_000
        else:
            assert most_blocks(longest + 1, windows, BLOCK, 5) > num_blocks
        assert most_blocks(longest, windows, BLOCK, 5) <= num_blocks


def new_pool(windows: Windows, num_blocks: int = 60) -> BlockPool:
    return BlockPool(num_blocks, BLOCK, windows=windows, step_tokens=8)


def start(pool: BlockPool, seq_id: int, num_tokens: int) -> Sequence:
    sequence = Sequence(request(seq_id, range(num_tokens)))
    sequence.transition(State.RUNNING)
    pool.start(sequence, pool.find_prefix(sequence))
    return sequence


def compute(pool: BlockPool, sequence: Sequence, num_tokens: int) -> None:
    """Compute so many tokens as a step does."""
    pool.extend(sequence, sequence.num_computed_tokens + num_tokens)
    sequence.launch(num_tokens, num_rows=0)
    sequence.mark_computed(num_tokens)
    pool.cache_blocks(sequence, num_tokens)
    pool.free_unread(sequence)
    pool.check_integrity([sequence])


def end(pool: BlockPool, sequence: Sequence) -> None:
    sequence.transition(State.FINISHED)
    pool.release(sequence)


def test_blocks_before_a_window_are_freed() -> None:
    """As a prompt is computed the blocks before the window go back, and those of the full group stay."""
    pool = new_pool((None, 6))
    sequence = start(pool, 1, 40)
    held = []
    for _ in range(5):
        compute(pool, sequence, 8)
        held.append([sum(map(bool, table)) for table in sequence.held.tables])
        assert sequence.held.num_blocks == sum(held[-1]) == pool.stats().used
    assert [full for full, _ in held] == [10] * 5
    assert held[-1][1] <= most_in_window(6, BLOCK, 8)
    assert sequence.held.tables[1][:8] == [0] * 8  # 35 is the first position that the next token reads
    end(pool, sequence)
    assert pool.stats().used == 0


def test_a_prefix_needs_the_last_window_only() -> None:
    """Blocks that were freed before a window are no part of a hit; those of the window must be cached."""
    pool = new_pool((6,))
    first = start(pool, 1, 41)
    for _ in range(5):
        compute(pool, first, 8)
    end(pool, first)
    pool.allocate(pool.stats().free + 5)  # what was freed first is given out first
    again = start(pool, 2, 41)
    assert again.num_computed_tokens == 40
    assert [bool(block_id) for block_id in again.held.block_table] == [False] * 8 + [True] * 3
    pool.check_counts()


def test_a_hole_in_a_window_shortens_the_prefix() -> None:
    """Where a block of the window is lost, the longest prefix that does not need it is found."""
    pool = new_pool((None, 6))
    first = start(pool, 1, 41)
    for _ in range(5):
        compute(pool, first, 8)
    hashes = list(first.block_hashes)
    end(pool, first)
    lost = pool._by_hash[hashes[9] + b"\1"]
    pool._evict(lost)
    assert [len(blocks) for blocks in pool.find_prefix(Sequence(request(2, range(41))))] == [9, 9]
    assert pool.is_cached(hashes[8])
    assert not pool.is_cached(hashes[9])


def test_groups_do_not_share_blocks() -> None:
    """The same tokens have a block of their own in each group, also in the cache."""
    pool = new_pool((None, 100, 100))
    first = start(pool, 1, 13)
    compute(pool, first, 12)
    tables = [table[:3] for table in first.held.tables]
    assert len({block_id for table in tables for block_id in table}) == 9
    second = start(pool, 2, 13)
    assert [table[:3] for table in second.held.tables] == tables


def test_forgotten_in_all_groups() -> None:
    """What a failed sequence wrote is found in no group."""
    pool = new_pool((None, 100))
    first = start(pool, 1, 13)
    compute(pool, first, 12)
    pool.evict(first.block_hashes)
    assert not pool._by_hash
    end(pool, first)


@pytest.mark.parametrize("damage", ["held", "gap", "count"])
def test_damage_is_noticed(damage: str) -> None:
    """A block held before a window, a gap in one, and a wrong count are no state that continues."""
    pool = new_pool((6,))
    sequence = start(pool, 1, 40)
    for _ in range(4):
        compute(pool, sequence, 8)
    if damage == "held":
        [sequence.held.block_table[0]] = pool.allocate(1)
        sequence.held.num_null_blocks -= 1
    elif damage == "gap":
        pool.free(sequence.held.block_table[-1:])
        sequence.held.block_table[-1] = 0
        sequence.held.num_null_blocks += 1
    else:
        sequence.held.num_null_blocks += 1
    with pytest.raises(IntegrityError):
        pool.check_integrity([sequence])


def test_sequences_at_once() -> None:
    """The last has its prompt being computed, and needs room for a step's tokens; the others hold a window's."""
    first, others = most_blocks(100, (None, 8), BLOCK, 40), most_blocks(100, (None, 8), BLOCK, 0)
    assert first > others
    for num_blocks, wanted in ((first - 1, 0), (first, 1), (first + others - 1, 1), (first + 3 * others, 4)):
        assert most_sequences(num_blocks, 100, (None, 8), BLOCK, 40) == wanted
