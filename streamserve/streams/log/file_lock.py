"""`FileLock`: one holder among all processes of a machine; the kernel frees it when its holder dies, kill -9 included.

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
    """`flock` on a file of its own, which stays: removing it would part those who wait from those who come."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._fd: int | None = None
        self._is_held = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; inside itself it does nothing. Raises TimeoutError after `seconds` of waiting, or OSError."""
        if self._is_held:
            yield
            return
        fd = self._take()
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _take(self) -> int:
        """Poll: `flock` itself would wait without end for a holder that somebody has stopped."""
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up_at = time.monotonic() + self._seconds
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._fd
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    raise TimeoutError(f"{self._path} is held by another process") from None
            time.sleep(_POLL_SECONDS)
