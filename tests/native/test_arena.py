"""Parts of an arena are aligned and apart, and their memory lives as long as they do."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest

from streamserve.native.arena import ALIGNMENT, CHUNK_BYTES, Arena


def address(part: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(part))


def test_parts_are_aligned_and_do_not_overlap() -> None:
    """Of any size, one larger than a mapping too; each holds what was written, after the arena is gone."""
    rng = random.Random(1)
    sizes = [rng.randrange(1, 100_000) for _ in range(100)] + [CHUNK_BYTES + 1, 5, CHUNK_BYTES - 10, 64]
    arena = Arena()
    parts = [arena.take(size) for size in sizes]
    del arena
    for number, part in enumerate(parts):
        assert not any(part[:64])
        part[:] = bytes([number % 251]) * len(part)
    for number, part in enumerate(parts):
        assert (len(part), address(part) % ALIGNMENT) == (sizes[number], 0)
        assert {part[0], part[len(part) // 2], part[-1]} == {number % 251}


def test_memory_is_private_and_asks_for_huge_pages() -> None:
    """A mapping that could be shared gets none of them."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("needs Linux")
    part = Arena().take(5)
    place = address(part)
    lines = iter(smaps.read_text().splitlines())
    ranges = ((line.split()[0].split("-"), line.split()[1]) for line in lines if line[0] in "0123456789abcdef")
    permissions = next(found for (low, high), found in ranges if int(low, 16) <= place < int(high, 16))
    assert permissions == "rw-p"
    flags = next(line.split() for line in lines if line.startswith("VmFlags"))
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


def test_a_full_mapping_is_followed_by_a_new_one() -> None:
    """What does not fit into the rest of a mapping starts the next."""
    arena = Arena()
    first, second, third = (arena.take(CHUNK_BYTES // 2 + size) for size in (0, -64, 1))
    assert address(second) - address(first) == CHUNK_BYTES // 2
    third[0] = 1
    assert first[0] == second[0] == 0
