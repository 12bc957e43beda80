"""A process that has little memory left."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HELD_BYTES = 1 << 20  # a block: larger than what the kernels need in one piece is not left free in the heap


@contextmanager
def spare_memory(num_bytes: int) -> Iterator[None]:
    """Limit this process to that much more memory than it uses now. Needs Linux.

    What earlier tests have freed stays mapped, and the limit counts what is mapped: so it is taken first.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes(), limits[1]))
    held = []
    try:
        while block := libc.malloc(_HELD_BYTES):
            held.append(block)
        resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + num_bytes, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for block in held:
            libc.free(block)


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
