"""A process that has little memory left."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def spare_memory(num_bytes: int) -> Iterator[None]:
    """Limit this process to that much more memory than it has now. Needs Linux."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
