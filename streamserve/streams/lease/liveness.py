"""`Liveness`: which workers of this host are alive, by one locked file each. For several hosts: redis_liveness.py.

    <folder>/<worker id>.lock     held (flock) while the worker lives; the kernel frees it at its death
    <folder>/host                 a random number that identifies the host: all processes that use this folder

A worker id is `<host>-<random>`, and never used again. The locks of another host cannot be seen, so its workers never
count as dead. An id without a host is from the previous release, and counts as one of this host.
Unix; calls block briefly: no lock is waited for.
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
    """Return the host in a worker id; "" if it has none."""
    host, dash, _ = worker_id.partition("-")
    return host if dash else ""


def own_host(folder: Path) -> str:
    """Return the short name of the host whose processes use `folder`, which is created if needed.

    Containers that share the folder may differ in host name and machine id, so neither is used. The file's inode is
    part of the name, because a folder copied to another machine keeps the number.
    """
    path = folder / "host"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unnamed = folder / f"{secrets.token_hex(_ID_BYTES)}.new"
        unnamed.write_text(secrets.token_hex(_ID_BYTES))
        with contextlib.suppress(FileExistsError):  # another process created it first
            os.link(unnamed, path)
        unnamed.unlink()
    identity = f"{path.read_text()}:{path.stat().st_ino}"
    return hashlib.sha256(identity.encode()).hexdigest()[:_HOST_DIGITS]


class Liveness:
    """This process as a worker with a new id, and the other workers of `folder`, which is created if needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.host = own_host(folder)
        self.own_id = f"{self.host}-{secrets.token_hex(_ID_BYTES)}"
        self._fd: int | None = self._create_lock()

    def is_alive(self, worker_id: str) -> bool:
        """Return False if that worker is known to be dead."""
        return worker_id == self.own_id or not self.can_judge(worker_id) or bool(self._is_locked(worker_id))

    def can_judge(self, worker_id: str) -> bool:
        """Return whether the death of this worker can be detected."""
        return host_of(worker_id) in ("", self.host)

    def tidy(self) -> None:
        """Remove the files of dead workers. A worker without a file counts as dead."""
        for path in self._folder.glob("*.lock"):
            if not self._is_locked(path.stem):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release this worker's lock and remove its file. Idempotent: the number may be another file's by now."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        self._path(self.own_id).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(fd)

    def _is_locked(self, worker_id: str) -> bool | None:
        """Return whether that worker holds its lock; None if it has no file."""
        try:
            fd = os.open(self._path(worker_id), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: concurrent checks do not see each other
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _create_lock(self) -> int:
        """Create this worker's file and lock it before it gets its name, so that no check finds it unlocked."""
        unnamed = self._folder / f"{self.own_id}.new"
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        unnamed.rename(self._path(self.own_id))
        return fd

    def _path(self, worker_id: str) -> Path:
        return self._folder / f"{worker_id}.lock"
