"""A file of weights as memory: pages of the system's cache, which all processes of a host share and no load copies.

Only in huge pages. The kernel maps them where the file system caches files in large parts (ext4 and XFS of late), and
the file was written in parts of 2 MB, or is read through such a map; elsewhere a step would take longer with pages of
4 KB (docs/log.md), and the caller reads the file into an arena.

A page that cannot be read ends the process with SIGBUS: a broken disk, or a file that was cut in place while it is
mapped. So all pages are read here, where the system reports that instead. A file that another takes the place of, or
that is removed, stays whole for those who map it.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

HUGE_PAGE = 2 << 20
LEAST_HUGE = 0.9  # of the file's whole pages
_MADV_HUGEPAGE, _MADV_POPULATE_READ = 14, 22  # of Linux
_MAPPED = re.compile(r"FilePmdMapped:\s+(\d+) kB")


def map_file(descriptor: int, num_bytes: int) -> torch.Tensor | None:
    """Return the bytes of a file; None where they are not mapped in huge pages, or cannot be read.

    The tensor is not to be written to. It keeps the map, not the descriptor.
    """
    if num_bytes < HUGE_PAGE:
        return None
    try:
        advise = ctypes.CDLL(None).madvise
        found = torch.from_file(f"/proc/self/fd/{descriptor}", shared=False, size=num_bytes, dtype=torch.uint8)
    except (AttributeError, OSError, RuntimeError):  # not Linux; the file is shorter
        return None
    begin = ctypes.c_void_p(found.data_ptr())
    advise(begin, ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
    is_read = advise(begin, ctypes.c_size_t(num_bytes), _MADV_POPULATE_READ) == 0
    whole = num_bytes // HUGE_PAGE * HUGE_PAGE
    return found if is_read and _huge_bytes(found.data_ptr()) >= LEAST_HUGE * whole else None


def _huge_bytes(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Return how much of the map that begins at an address is in huge pages."""
    try:
        lines = iter(smaps.read_text().splitlines())
    except OSError:
        return 0
    begin = f"{address:x}-"
    if not any(line.startswith(begin) for line in lines):
        return 0
    return next((int(size[1]) * 1024 for line in lines if (size := _MAPPED.match(line))), 0)
