"""Where memory is short, a kernel raises `MemoryError`; where a slot or block is wrong, `IndexError`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

from streamserve.engine.model.kernels import Kernels  # noqa: E402  (after the skip)
from streamserve.engine.model.linear.native import pack  # noqa: E402
from streamserve.native.library import Library  # noqa: E402
from tests.support.memory import spare_memory  # noqa: E402

SPARE_BYTES = 40 << 20
BLOCK_SIZE = 16
_M_MMAP_THRESHOLD = -3  # malloc.h


def large_linear(library: Library) -> Callable[[], Any]:
    """Inputs of 2 bytes a number that are 4 bytes each in scratch memory: 64 MB."""
    linear = pack(library, torch.ones(1, 512, dtype=torch.float16), None)
    inputs = torch.ones(1 << 15, 512, dtype=torch.float16)
    return lambda: linear(inputs)


def large_draw(library: Library) -> Callable[[], Any]:
    """A row of 64 MB for each thread."""
    logits = torch.zeros(2, 1 << 24)
    return lambda: Kernels(library).draw(logits, [(1.0, 1.0, 0.0)] * 2, [(0, 1, 2)] * 2)


def large_attention(library: Library) -> Callable[[], Any]:
    """Contexts of ten parts, whose results take 100 MB. All blocks are one."""
    num_rows, num_heads, dim, length = 300, 64, 128, 5000
    pool, query = torch.ones(1, BLOCK_SIZE, dim), torch.ones(num_heads, 1, dim).expand(-1, num_rows, -1)
    tables, positions = torch.zeros(num_rows, 313, dtype=torch.int64), torch.full((num_rows,), length - 1)
    return lambda: Kernels(library).attend_decodes(query, pool, pool, positions, tables, BLOCK_SIZE, scaling=1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only there a process can be held to so much memory")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("make", [large_linear, large_draw, large_attention])
def test_too_little_memory(library: Library, make: Callable[[Library], Callable[[], Any]], num_threads: int) -> None:
    """The process lives, and what fits is computed afterwards."""
    call, before = make(library), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        library.team_size(num_threads)  # the pool's threads are there
        with spare_memory(SPARE_BYTES):
            for _ in range(2):
                with pytest.raises(MemoryError, match="ss_"):
                    call()
        assert Kernels(library).draw(torch.eye(3), [(0.0, 1.0, 0.0)] * 3, [(0, 1, 2)] * 3)[0].tolist() == [0, 1, 2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only there a process can be held to so much memory")
def test_what_earlier_tests_have_freed_is_not_spare() -> None:
    """A heap with room for 200 MB gives no more than was spared."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    assert libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # from the heap; by itself it grows to this too
    freed, kept = [libc.malloc(20 << 20) for _ in range(10)], libc.malloc(20 << 20)
    for block in freed:
        libc.free(block)
    try:
        with spare_memory(SPARE_BYTES):
            assert libc.malloc(100 << 20) is None
    finally:
        libc.free(kept)


@pytest.mark.parametrize("slot", [-1, 40, 1 << 40])
def test_a_slot_beyond_the_pool(library: Library, slot: int) -> None:
    """Nothing is written."""
    pool = torch.zeros(2, 40, 8)
    with pytest.raises(IndexError):
        Kernels(library).write_slots(pool, torch.tensor([3, slot]), torch.ones(2, 2, 8))
    assert not pool.any()


@pytest.mark.parametrize(("block", "position"), [(-1, 20), (3, 20), (1 << 40, 20), (1, 32), (1, -1)])
def test_a_block_beyond_the_pool(library: Library, block: int, position: int) -> None:
    """Neither the block nor a position without one is read."""
    pool, tables = torch.zeros(1, 3 * BLOCK_SIZE, 8), torch.tensor([[1, block]])
    with pytest.raises(IndexError):
        Kernels(library).attend_decodes(
            torch.ones(2, 1, 8), pool, pool, torch.tensor([position]), tables, BLOCK_SIZE, scaling=1.0
        )
