"""`Workers`: who of this machine's processes is alive, by a locked file for each. For several: redis_workers.py.

    <folder>/<worker id>.lock     held (flock) for as long as the worker lives; the kernel frees it when it dies

Unix; blocking, but never for long: a lock is asked for without waiting. Ids are never used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

_ID_BYTES = 8


class Workers:
    """This process as a worker, under a new id, and the others of `folder`, which is made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self.own_id = secrets.token_hex(_ID_BYTES)
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = self._lock_own()

    def is_alive(self, worker_id: str) -> bool:
        """Tell whether that worker runs."""
        return worker_id == self.own_id or bool(self._is_locked(worker_id))

    def tidy(self) -> None:
        """Remove the files of the dead: who has none is dead too."""
        for path in self._folder.glob("*.lock"):
            if not self._is_locked(path.stem):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Be dead, for others."""
        self._path(self.own_id).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _is_locked(self, worker_id: str) -> bool | None:
        """Tell whether that worker holds its file; None if it has none here."""
        try:
            fd = os.open(self._path(worker_id), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that ask at once both hear the truth
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _lock_own(self) -> int:
        """Make our file; it gets its name only once it is locked, so that nobody takes us for dead."""
        unnamed = self._folder / f"{self.own_id}.new"
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        unnamed.rename(self._path(self.own_id))
        return fd

    def _path(self, worker_id: str) -> Path:
        return self._folder / f"{worker_id}.lock"
