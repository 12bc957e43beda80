"""Laws of the block pool: reference counts, eviction order, and which prefixes are shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamserve.engine.kv.free_list import IntegrityError
from streamserve.engine.kv.pool import BlockPool, block_hash, root_hash
from streamserve.engine.sequence import Sequence, State
from tests.support.engines.cores import request

BLOCK = 4


def new_pool(num_blocks: int = 11, **options: object) -> BlockPool:
    return BlockPool(num_blocks, BLOCK, **options)  # type: ignore[arg-type]


def start(pool: BlockPool, seq_id: int, num_tokens: int, **fields: object) -> Sequence:
    """A running sequence with cached prefix, before its first step."""
    sequence = Sequence(request(seq_id, range(num_tokens), **fields))
    sequence.transition(State.RUNNING)
    pool.start(sequence, pool.find_prefix(sequence))
    return sequence


def compute(pool: BlockPool, sequence: Sequence) -> None:
    """Mark the tokens as computed, as a step does."""
    num_written = sequence.num_uncomputed_tokens
    sequence.num_computed_tokens += num_written
    pool.cache_blocks(sequence, num_written)


def end(pool: BlockPool, sequence: Sequence) -> list[int]:
    table = sequence.held.block_table
    sequence.transition(State.FINISHED)
    pool.release(sequence)
    return table


def test_null_block_is_never_given_out() -> None:
    """Block 0 stays for padding."""
    pool = new_pool()
    assert 0 not in pool.allocate(pool.num_free)


def test_used_cached_and_free_add_up() -> None:
    """Held by a sequence, cached, and free blocks are all blocks but the null one."""
    pool = new_pool()
    sequence = start(pool, 1, 10)
    stats = pool.stats()
    assert (stats.used, stats.cached, stats.free, stats.total) == (3, 0, 7, 10)
    compute(pool, sequence)
    end(pool, sequence)
    stats = pool.stats()
    assert (stats.used, stats.cached, stats.free) == (0, 2, 8)


def test_second_sequence_shares_full_blocks() -> None:
    """The same prompt finds the blocks of the first, which then have two holders."""
    pool = new_pool()
    first = start(pool, 1, 10)
    compute(pool, first)
    second = start(pool, 2, 10)
    assert second.held.block_table[:2] == first.held.block_table[:2]
    assert second.num_computed_tokens == 8
    pool.check_integrity([first, second])


def test_one_token_is_always_left_to_compute() -> None:
    """A prompt that ends with a cached block still computes its last block, for the logits of its last token."""
    pool = new_pool()
    compute(pool, start(pool, 1, 8))
    assert start(pool, 2, 8).num_computed_tokens == 4


def test_block_is_found_only_after_its_step() -> None:
    """Between allocation and the end of the step a block is not cached."""
    pool = new_pool()
    start(pool, 1, 10)
    assert start(pool, 2, 10).num_computed_tokens == 0


def test_partly_filled_block_has_no_name() -> None:
    """Only full blocks are named, whatever the chunks they were filled by."""
    pool = new_pool()
    sequence = start(pool, 1, 10)
    for num_written, num_named in ((3, 0), (2, 1), (4, 2), (1, 2)):
        sequence.num_computed_tokens += num_written
        pool.cache_blocks(sequence, num_written)
        assert len(pool._by_hash) == num_named


def test_tail_is_evicted_before_head() -> None:
    """Of a freed sequence the last full block is evicted first: without the head it cannot be reused."""
    pool = new_pool(num_blocks=4)
    sequence = start(pool, 1, 12)
    compute(pool, sequence)
    table = end(pool, sequence)
    assert pool.allocate(1) == [table[2]]
    assert pool.allocate(2) == [table[1], table[0]]


def test_least_recently_used_is_evicted_first() -> None:
    """Using a cached block again saves it."""
    pool = new_pool(num_blocks=4)
    old, new = (start(pool, seq_id, BLOCK, salt=str(seq_id)) for seq_id in (1, 2))
    for sequence in (old, new):
        compute(pool, sequence)
        end(pool, sequence)
    again = start(pool, 3, BLOCK + 1, salt="1")
    assert again.num_computed_tokens == BLOCK
    end(pool, again)
    pool.allocate(2)
    found = [len(pool.find_prefix(Sequence(request(4, range(BLOCK + 1), salt=salt)))[0]) for salt in ("1", "2")]
    assert found == [1, 0]


def test_unnamed_blocks_are_reused_first_and_newest_first() -> None:
    """Blocks without reusable content are evicted before cached ones."""
    pool = new_pool()
    named, unnamed = start(pool, 1, BLOCK), start(pool, 2, 3, salt="other")
    compute(pool, named)
    end(pool, named)
    table = end(pool, unnamed)
    assert pool.allocate(1) == table


def test_evicted_block_is_not_found() -> None:
    """A block that is allocated again has lost its hash."""
    pool = new_pool(num_blocks=4)
    sequence = start(pool, 1, 12)
    compute(pool, sequence)
    end(pool, sequence)
    pool.allocate(3)
    assert pool.find_prefix(Sequence(request(2, range(12)))) == [[]]


def test_forgotten_block_is_not_found_and_reused_first() -> None:
    """An evicted free block is reused first, and the counts still add up."""
    pool = new_pool()
    sequence = start(pool, 1, 12)
    compute(pool, sequence)
    table = end(pool, sequence)
    pool.evict(sequence.block_hashes[1:])
    pool.check_integrity([])
    assert len(pool.find_prefix(Sequence(request(2, range(12))))[0]) == 1
    assert set(pool.allocate(2)) == set(table[1:])


def test_duplicate_block_stays_unnamed() -> None:
    """Two sequences that computed the same block at once: one hash, one cached block."""
    pool = new_pool()
    first, second = start(pool, 1, 5), start(pool, 2, 5)
    compute(pool, first)
    compute(pool, second)
    pool.check_integrity([first, second])
    assert start(pool, 3, 5).held.block_table[0] == first.held.block_table[0]


@pytest.mark.parametrize(("salt", "num_hit"), [("a", 8), ("b", 0), ("", 0)])
def test_other_salt_finds_nothing(salt: str, num_hit: int) -> None:
    """A tenant finds its own blocks and no other tenant's."""
    pool = new_pool()
    compute(pool, start(pool, 1, 10, salt="a"))
    assert start(pool, 2, 10, salt=salt).num_computed_tokens == num_hit


@pytest.mark.parametrize(("num_public", "num_hit"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (10, 8)])
def test_only_wholly_public_blocks_are_shared(num_public: int, num_hit: int) -> None:
    """Tenants share the full blocks inside the server's prefix; the first later one takes the salt, the rest follow."""
    pool = new_pool(num_blocks=30)
    compute(pool, start(pool, 1, 10, salt="a", num_public_tokens=num_public))
    assert start(pool, 2, 10, salt="b", num_public_tokens=num_public).num_computed_tokens == num_hit
    assert start(pool, 3, 10, salt="a", num_public_tokens=num_public).num_computed_tokens == 8


def test_salts_are_framed() -> None:
    """No way of cutting the bytes into salt and tokens gives the same name; revision and block size count too."""
    root = root_hash("r", 4)
    names = {block_hash(root, [1], salt) for salt in (None, "", "a", "aa")}
    names |= {block_hash(root, [1, 2], "a"), block_hash(root_hash("s", 4), [1], "a")}
    names |= {block_hash(root_hash("r", 8), [1], "a")}
    assert len(names) == 7


def test_release_twice_gives_nothing_back() -> None:
    """The one release is safe to call again."""
    pool = new_pool()
    sequence = start(pool, 1, 10)
    end(pool, sequence)
    pool.release(sequence)
    assert pool.num_free == 10


def test_release_while_running_is_a_mistake() -> None:
    """A running sequence cannot lose its blocks."""
    pool = new_pool()
    with pytest.raises(IntegrityError, match="while running"):
        pool.release(start(pool, 1, 10))


def test_finished_is_final() -> None:
    """No transition leaves FINISHED."""
    sequence = Sequence(request(1))
    sequence.transition(State.FINISHED)
    with pytest.raises(IntegrityError, match="finished → running"):
        sequence.transition(State.RUNNING)


def test_double_free_is_a_mistake() -> None:
    """A block without holders cannot be freed."""
    pool = new_pool()
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(IntegrityError, match="has no holder"):
        pool.free(table)


def test_null_block_cannot_be_freed() -> None:
    """It is never allocated."""
    with pytest.raises(IntegrityError, match="block 0 is freed"):
        new_pool().free([0])


@pytest.mark.parametrize("block_id", [0, 1])
def test_held_block_is_not_given_out(block_id: int) -> None:
    """However it came into the free list; the null block counts as held."""
    pool = new_pool()
    pool.allocate(1)
    pool._free.push(pool._blocks[block_id], at_front=True)
    with pytest.raises(IntegrityError, match="is allocated"):
        pool.allocate(1)


def test_more_blocks_than_there_are_is_a_mistake() -> None:
    """The caller must compare with `num_free` first."""
    with pytest.raises(IntegrityError, match="none is free"):
        new_pool().allocate(11)


def test_start_with_blocks_is_a_mistake() -> None:
    """The blocks it held would be lost."""
    pool = new_pool()
    sequence = start(pool, 1, 10)
    with pytest.raises(IntegrityError, match="holds 3 blocks"):
        pool.start(sequence, [[]])


def miscount_used(pool: BlockPool) -> None:
    pool._num_used += 1


def lose_free_block(pool: BlockPool) -> None:
    pool._free.pop_front()


def count_more_cached_than_named(pool: BlockPool) -> None:
    pool._num_free_cached += 3


def count_less_cached_than_none(pool: BlockPool) -> None:
    pool._num_free_cached -= 1


@pytest.mark.parametrize(
    "damage", [miscount_used, lose_free_block, count_more_cached_than_named, count_less_cached_than_none]
)
def test_counters_that_do_not_add_up_are_seen(damage: Callable[[BlockPool], None]) -> None:
    """Without a look at any block: every step can afford the check."""
    pool = new_pool()
    compute(pool, start(pool, 1, 10))
    pool.check_counts()
    damage(pool)
    with pytest.raises(IntegrityError, match="!= total"):
        pool.check_counts()


def test_renewed_pool_is_empty_and_continues_counting() -> None:
    """No block is held and no hash is known; counters never go back."""
    pool = new_pool(revision="r")
    compute(pool, start(pool, 1, 10))
    start(pool, 2, 10)
    new, old = pool.renewed(), pool.stats()
    stats = new.stats()
    assert (stats.used, stats.cached, stats.free) == (0, 0, old.total)
    assert (stats.prefix_queries, stats.prefix_hits) == (old.prefix_queries, old.prefix_hits) == (20, 8)
    assert start(new, 3, 10).num_computed_tokens == 0
    assert new._root == pool._root


def leak(pool: BlockPool, sequence: Sequence) -> None:
    sequence.held.block_table.pop()


def lose_reference(pool: BlockPool, sequence: Sequence) -> None:
    pool._blocks[sequence.held.block_table[0]].ref_count = 2


def miscount(pool: BlockPool, sequence: Sequence) -> None:
    pool._free.num_blocks += 1


def miscount_cached(pool: BlockPool, sequence: Sequence) -> None:
    pool._num_free_cached += 1


def rename(pool: BlockPool, sequence: Sequence) -> None:
    sequence.block_hashes[0] = b"another"


def drop_name(pool: BlockPool, sequence: Sequence) -> None:
    pool._by_hash.clear()


def compute_too_much(pool: BlockPool, sequence: Sequence) -> None:
    sequence.num_computed_tokens = 99


def write_into_named(pool: BlockPool, sequence: Sequence) -> None:
    sequence.num_computed_tokens = 2


def stop_running(pool: BlockPool, sequence: Sequence) -> None:
    sequence.state = State.WAITING


@pytest.mark.parametrize(
    "damage",
    [
        leak,
        lose_reference,
        miscount,
        miscount_cached,
        rename,
        drop_name,
        compute_too_much,
        write_into_named,
        stop_running,
    ],
)
def test_integrity_check_sees(damage: object) -> None:
    """Every kind of damage to the pool's state is found."""
    pool = new_pool()
    sequence = start(pool, 1, 10)
    compute(pool, sequence)
    pool.check_integrity([sequence])
    damage(pool, sequence)  # type: ignore[operator]
    with pytest.raises(IntegrityError):
        pool.check_integrity([sequence])


def test_eviction_is_reported() -> None:
    """`on_evict` is called when a block's content is lost for reuse."""
    forgotten: list[int] = []
    pool = new_pool(num_blocks=4, on_evict=forgotten.append)
    sequence = start(pool, 1, 9)
    compute(pool, sequence)
    table = end(pool, sequence)
    assert forgotten == [table[2]]
    pool.allocate(2)
    assert forgotten == [table[2], table[1]]
