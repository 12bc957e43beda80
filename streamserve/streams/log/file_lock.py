"""`FileLock`: a lock between the processes of a machine. The kernel frees it when its holder dies, also by kill -9.

Synchronous; used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_SECONDS = 0.0005


class FileLock:
    """A `flock` on its own file. The file is never removed: waiters would hold a lock that new processes do not see."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._fd: int | None = None
        self._is_held = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; reentrant. Raises TimeoutError after `seconds` of waiting, or OSError."""
        if self._is_held:
            yield
            return
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fd, give_up_at = self._fd, time.monotonic() + self._seconds
        while True:  # a blocking `flock` would wait for ever on a holder that is stopped (SIGSTOP)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    raise TimeoutError(f"{self._path} is held by another process") from None
            time.sleep(_POLL_SECONDS)
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
