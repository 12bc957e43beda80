"""How much memory this machine has. No torch: the capacity command asks too."""

from __future__ import annotations

import os
from pathlib import Path


def total_memory(cgroup_limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """RAM this process may use: the machine's, or its container's limit if that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(cgroup_limit.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return physical


def available_memory() -> int:
    """Bytes that can be had without swapping: free ones and those of the page cache."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
