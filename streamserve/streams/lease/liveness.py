"""`Liveness`: which processes of this host are alive, by one locked file each. `RedisLiveness`: of several hosts.

    <folder>/<process id>.lock    held (flock) while the process lives; the kernel frees it at its death
    <folder>/host                 a random number that identifies the host: all processes that use this folder

A process id is `<host>-<random>`, and never used again. The locks of another host cannot be seen, so its processes
never count as dead.
Unix; calls block briefly: no lock is waited for.

    {prefix}:worker:<process id>     a key in Redis for each process; expires after 3 s, renewed each second

A thread renews the key, so that a busy event loop does not count as a dead process. The same pipeline reads the keys of
the processes that `is_alive` was called for; `is_alive` itself returns the last result. During an outage of Redis, and
for 3 s after it, no other process becomes dead. A wrong result costs a pause but loses nothing, because the log refuses
a producer that lost the fence. The file lock is held too: a process of this host is dead as soon as it has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from pathlib import Path

from streamserve.streams.log.redis_calls import connect_blocking

_ID_BYTES = 8
_HOST_DIGITS = 8


def host_of(process_id: str) -> str:
    """Return the host in a process id; "" of a row that no process produces."""
    return process_id.partition("-")[0]


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
    """This process under a new id, and the other processes of `folder`, which is created if needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.host = own_host(folder)
        self.own_id = f"{self.host}-{secrets.token_hex(_ID_BYTES)}"
        self._fd: int | None = self._create_lock()

    def is_alive(self, process_id: str) -> bool:
        """Return False if that process is known to be dead."""
        return process_id == self.own_id or not self.can_judge(process_id) or bool(self._is_locked(process_id))

    def can_judge(self, process_id: str) -> bool:
        """Return whether the death of this process can be detected."""
        return host_of(process_id) == self.host

    def lives_here(self, process_id: str) -> bool:
        """Return whether that process is of this host, and lives."""
        return bool(self._is_locked(process_id))

    def tidy(self) -> None:
        """Remove the files of dead processes; make the file of this process anew if it was removed.

        A process without a file counts as dead.
        """
        if self._fd is not None and self._is_locked(self.own_id) is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            removed, self._fd = self._fd, self._create_lock()
            os.close(removed)
        for path in self._folder.glob("*.lock"):
            if not self._is_locked(path.stem):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock of this process and remove its file. Idempotent: the number may be another file's by now."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        self._path(self.own_id).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(fd)

    def _is_locked(self, process_id: str) -> bool | None:
        """Return whether that process holds its lock; None if it has no file."""
        try:
            fd = os.open(self._path(process_id), os.O_RDONLY | os.O_CLOEXEC)
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
        """Create the file of this process and lock it before it gets its name, so that no check finds it unlocked."""
        unnamed = self._folder / f"{self.own_id}.new"
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        unnamed.rename(self._path(self.own_id))
        return fd

    def _path(self, process_id: str) -> Path:
        return self._folder / f"{process_id}.lock"


logger = logging.getLogger("streamserve.streams")

LIFE_SECONDS = 3.0
_BEATS = 3  # in that time, so that one beat may fail


class RedisLiveness(Liveness):
    """A `Liveness` for all hosts that share the Redis at `url`."""

    def __init__(
        self, folder: Path, url: str, *, prefix: str = "streamserve", life_seconds: float = LIFE_SECONDS
    ) -> None:
        super().__init__(folder)
        self._life_seconds, self._beat_seconds = life_seconds, life_seconds / _BEATS
        self._client = connect_blocking(url, self._beat_seconds)
        self._prefix = prefix
        self._lock = threading.Lock()  # guards the two below; never held during a call to Redis
        self._grace: dict[str, float] = {}  # watched processes → until when a missing key is not death
        self._dead: set[str] = set()
        # Used by the thread alone; times are monotonic.
        self._beat_at = 0.0  # when Redis last answered; 0 during an outage
        self._sure_at = 0.0  # when a missing key begins to mean death
        self._is_closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._beat_always, name="liveness", daemon=True)
        self._thread.start()

    def is_alive(self, process_id: str) -> bool:
        if process_id == self.own_id:
            return True
        if self._is_locked(process_id) is False:
            return False
        with self._lock:
            if process_id not in self._grace:
                self._grace[process_id] = time.monotonic() + self._life_seconds  # its first beat may not have arrived
                self._wake.set()
            return process_id not in self._dead

    def can_judge(self, process_id: str) -> bool:
        return True

    def tidy(self) -> None:
        """Stop watching the dead processes. A later `is_alive` is False again after a few seconds."""
        super().tidy()
        with self._lock:
            for process_id in self._dead:
                del self._grace[process_id]
            self._dead.clear()

    def close(self) -> None:
        self._is_closing = True
        self._wake.set()
        self._thread.join(self._life_seconds)
        super().close()

    def _beat_always(self) -> None:
        while True:
            self._wake.clear()
            if self._is_closing:
                break
            try:
                self._beat()
            except Exception as error:  # the edge of a thread, which must survive any error of redis-py
                self._note_outage(error)
            self._wake.wait(self._beat_seconds)
        with contextlib.suppress(Exception):  # the key expires within 3 s in any case
            self._client.delete(self._key(self.own_id))
        self._client.close()

    def _beat(self) -> None:
        """Renew the key of this process, and read the keys of those it watches."""
        with self._lock:
            watched = list(self._grace)
        read_at = time.monotonic()
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(self._key(self.own_id), "1", px=int(self._life_seconds * 1000))
        pipeline.mget([self._key(process_id) for process_id in (self.own_id, *watched)])
        _, (_, *found) = pipeline.execute()
        if read_at - self._beat_at > self._life_seconds:
            # After an outage of Redis or a pause of this process, other processes get time to renew their keys.
            self._sure_at = read_at + self._life_seconds
        self._beat_at = read_at
        with self._lock:
            for process_id, exists in zip(watched, found, strict=True):
                self._update(process_id, exists is not None, read_at)

    def _update(self, process_id: str, exists: bool, read_at: float) -> None:
        if process_id not in self._grace:
            return
        if exists:
            self._grace[process_id] = 0.0
            self._dead.discard(process_id)
        elif read_at >= max(self._grace[process_id], self._sure_at):
            self._dead.add(process_id)

    def _note_outage(self, error: Exception) -> None:
        if self._beat_at:
            logger.warning("liveness: the processes of other hosts cannot be checked: %s", error)
        self._beat_at = 0.0

    def _key(self, process_id: str) -> str:
        return f"{self._prefix}:worker:{process_id}"
