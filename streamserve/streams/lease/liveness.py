"""`Liveness`: which of this host's workers are alive, by a locked file for each. For several hosts: redis_liveness.py.

    <folder>/<worker id>.lock     held (flock) for as long as the worker lives; the kernel frees it when it dies
    <folder>/host                 a random number: it names the host, which is all who use this folder

A worker id is `<host>-<random>`, and never used again. Locks say nothing about the workers of another host, so those
are never taken for dead. An id without a host is one of the release before, and judged as one of this host.
Unix; blocking, but never for long: a lock is asked for without waiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from pathlib import Path

_ID_BYTES = 8
_HOST_DIGITS = 8


def host_of(worker_id: str) -> str:
    """Return the host in a worker id; "" if it names none."""
    host, dash, _ = worker_id.partition("-")
    return host if dash else ""


def own_host(folder: Path) -> str:
    """Return the short name of the host whose processes use `folder`, which is made if it is not there.

    Neither host name nor machine id counts: containers that share the folder may differ in both. The file's inode does:
    a folder that was copied to another machine has the number of the first.
    """
    path = folder / "host"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unnamed = folder / f"{secrets.token_hex(_ID_BYTES)}.new"
        unnamed.write_text(secrets.token_hex(_ID_BYTES))
        with contextlib.suppress(FileExistsError):  # another process was quicker
            os.link(unnamed, path)
        unnamed.unlink()
    identity = f"{path.read_text()}:{path.stat().st_ino}"
    return hashlib.sha256(identity.encode()).hexdigest()[:_HOST_DIGITS]


class Liveness:
    """This process as a worker, under a new id, and the other workers of `folder`, which is made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.host = own_host(folder)
        self.own_id = f"{self.host}-{secrets.token_hex(_ID_BYTES)}"
        self._fd = self._lock_own()

    def is_alive(self, worker_id: str) -> bool:
        """Return False if that worker is known to be dead."""
        return worker_id == self.own_id or not self.can_judge(worker_id) or bool(self._is_locked(worker_id))

    def can_judge(self, worker_id: str) -> bool:
        """Return whether it can be known that this worker is dead."""
        return host_of(worker_id) in ("", self.host)

    def tidy(self) -> None:
        """Remove the files of dead workers: one without a file is dead too."""
        for path in self._folder.glob("*.lock"):
            if not self._is_locked(path.stem):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release this worker's lock."""
        self._path(self.own_id).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _is_locked(self, worker_id: str) -> bool | None:
        """Return whether that worker holds its file; None if it has none here."""
        try:
            fd = os.open(self._path(worker_id), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that ask at once do not see each other's lock
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _lock_own(self) -> int:
        """Make our file. It gets its name only once it is locked, so that it is never seen without its lock."""
        unnamed = self._folder / f"{self.own_id}.new"
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        unnamed.rename(self._path(self.own_id))
        return fd

    def _path(self, worker_id: str) -> Path:
        return self._folder / f"{worker_id}.lock"
