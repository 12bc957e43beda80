"""The SQLite file of `FileLog`: `open_file` connects to it and makes it first, if needed; `FileLock` excludes other
processes.

What is in the tables, and why the file is set like this: file_store.py. Synchronous; used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from streamserve.streams.log.base import LogUnavailable

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x53744C67  # "StLg", for `file` and similar tools
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE logs (
    id INTEGER PRIMARY KEY,
    log_id TEXT NOT NULL UNIQUE,
    fence INTEGER NOT NULL,
    is_ended INTEGER NOT NULL,
    touched_at INTEGER NOT NULL
);
CREATE TABLE pages (
    log INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (log, last_seq)
) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""

# Each stream writes its own database page: small pages keep a commit of 200 streams small.
_PAGE_BYTES = 1024
# A backstop, in pages, for what killed processes left in the write-ahead log.
_AUTO_CHECKPOINT_PAGES = 32_000
# The cache of a connection: recent events are in `Recent`, not read here. SQLite's default is 2 MiB.
_CACHE_KIB = 512


def open_file(path: Path, lock: FileLock, *, is_full_sync: bool, busy_seconds: float) -> sqlite3.Connection:
    """Open the file. Only its creation needs the lock, so that readers can open it while the lock is held."""
    if not path.exists():
        with lock.held():
            if not path.exists():  # a descriptor of an existing file must not be closed, see `FileStore.sync`
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    try:
        if _version(db) == 0:
            with lock.held():
                _make_tables(db)
        if (version := _version(db)) != SCHEMA_VERSION:
            raise LogUnavailable(f"The stream log has version {version}; this release knows {SCHEMA_VERSION}.")
        _set(db, "synchronous", "FULL" if is_full_sync else "NORMAL")
        _set(db, "secure_delete", "ON")
        _set(db, "wal_autocheckpoint", _AUTO_CHECKPOINT_PAGES)
        _set(db, "cache_size", -_CACHE_KIB)
    except BaseException:
        db.close()
        raise
    return db


def identity(file: Path | int) -> tuple[int, int] | None:
    """Return the device and inode of a file: another file of the same name has others. None if there is no file."""
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(file)
        return status.st_dev, status.st_ino
    return None


def _make_tables(db: sqlite3.Connection) -> None:
    if _version(db) == 0:
        _set(db, "page_size", _PAGE_BYTES)
        _set(db, "auto_vacuum", "INCREMENTAL")
        _set(db, "journal_mode", "WAL")
        db.executescript(_SCHEMA)


def _set(db: sqlite3.Connection, name: str, value: object) -> None:
    db.execute(f"PRAGMA {name} = {value}").fetchall()


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


_POLL_SECONDS = 0.0005


class FileLock:
    """A `flock` on its own file, which the kernel frees when its holder dies, also by kill -9.

    It is never removed here: waiters would hold a lock that new processes do not see. If it was removed by other means,
    with its folder perhaps, it is made anew.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._fd: int | None = None
        self._is_held = False

    @contextlib.contextmanager
    def held(self, *, waits: bool = True) -> Iterator[None]:
        """Hold the lock; reentrant. Raises TimeoutError after `seconds`, at once unless it `waits`, and OSError."""
        if self._is_held:
            yield
            return
        give_up_at = time.monotonic() + self._seconds
        while True:  # a blocking `flock` would wait for ever on a holder that is stopped (SIGSTOP)
            fd = self._fd = self._open() if self._fd is None else self._fd
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if identity(self._path) == identity(fd):
                    break
                self.close()
                continue
            except BlockingIOError:
                if not waits or time.monotonic() >= give_up_at:
                    raise TimeoutError(f"{self._path} is held by another process") from None
            time.sleep(_POLL_SECONDS)
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            fcntl.flock(fd, fcntl.LOCK_UN)

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
