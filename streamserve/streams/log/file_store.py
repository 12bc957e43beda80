"""`FileStore`: the SQLite file of `FileLog`, for one thread of one process. Synchronous; knows no event loop.

    logs   id · log_id · fence · is_ended · touched_at      one row per log
    pages  log, last_seq · body                             one row per append: its events, each a frame

Many processes write the file, kill -9 may end any of them at any moment, and a commit must not wait for a disk. Hence:

- Write-ahead log, `synchronous=NORMAL`: a commit is a write into the kernel's memory, which survives the process. A
  power cut or kernel crash may lose what `sync` has not yet written to the disk (FileLog calls it every second), but
  never a part of an append and never the file. With `synchronous=FULL` every commit waits some milliseconds for the
  disk, and such a crash loses nothing.
- Commits and checkpoints hold the lock of a file beside it (`flock`; the kernel frees it when its holder dies).
  SQLite's own lock sleeps up to 100 ms between tries, and before 3.51.3 a checkpoint that runs with another
  connection's commit can, very rarely, corrupt the file (sqlite.org/wal.html#walresetbug). The lock excludes that.
- Python releases its interpreter lock at every row, and waits to get it back. So an append of 200 streams is a few
  statements, not 200, and a page of events is read as one row.
- `secure_delete`: deleted content is overwritten.

WAL needs shared memory: the file must be on a local disk, not on a network's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.frames import FrameCutter, FrameError, decode_event
from streamserve.streams.log.base import (
    UNFINISHED_SECONDS,
    Ended,
    Fenced,
    LogFull,
    LogLost,
    LogUnavailable,
    Result,
)
from streamserve.streams.log.file_database import FileLock, identity, open_file

_HEADS = """
SELECT json_group_array(json_array(
    log_id, id, fence, ifnull((SELECT max(last_seq) FROM pages WHERE log = logs.id), 0), is_ended, touched_at))
FROM logs WHERE log_id IN (SELECT value FROM json_each(?))
"""
_SOME_PAGES = (
    "SELECT last_seq, body FROM pages WHERE log = logs.id AND last_seq > :after ORDER BY last_seq LIMIT :limit"
)
_READ = f"""
SELECT (SELECT max(last_seq) FROM ({_SOME_PAGES})), (SELECT group_concat(hex(body), '') FROM ({_SOME_PAGES}))
FROM logs WHERE log_id = :log_id
"""

# Appends and transactions of one process between two checkpoints, each a page or two: a few MiB of write-ahead log.
_CHECKPOINT_WRITES = 4000
# The resolution of `touched_at`: most appends then write a page, and no row of `logs`.
_TOUCH_SECONDS = 60
# The rows of the largest INSERT. Smaller INSERTs have a power of two, so that few statements are compiled.
_MOST_ROWS = 256
_MOST_HEADS = 10_000
_FULL_RETRY_SECONDS = 30

_FULL = "The stream log's disk is full."
_BUSY = "The stream log is busy."
_DOWN = "The stream log cannot be read or written."


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """One `Batch`: `num_events` frames in `body`, the last of them a terminal event if `is_end`."""

    log_id: str
    fence: int
    base_seq: int | None
    body: bytes
    num_events: int
    is_end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Delete a log, if it exists."""

    log_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """Delete up to `most` logs without an append since `before`; unfinished logs, `UNFINISHED_SECONDS` earlier."""

    before: float
    most: int


Write = Append | Drop | Purge


@dataclass(slots=True)
class _Head:
    """A row of `logs`, and the last seq of its pages."""

    row_id: int
    fence: int
    last_seq: int
    is_ended: bool
    touched_at: int


class FileStore:
    """One connection. The first call opens it, as does the first call after an error. For one thread at a time.

    If the file was removed, the next call makes a new file: what was in the old file is lost, and an append that
    continues from it is refused with LogLost.
    """

    def __init__(self, path: Path, *, is_full_sync: bool = False, busy_seconds: float = 5.0) -> None:
        self.path = path
        self._is_full_sync = is_full_sync
        self._busy_seconds = busy_seconds
        self._lock = FileLock(Path(f"{path}.lock"), busy_seconds)
        self._opened: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._version: int | None = None
        self._heads: dict[str, _Head] = {}
        self._pages: list[tuple[int, int, bytes]] = []  # of the open transaction, not inserted yet
        self._num_writes = 0
        self.needs_checkpoint = False  # `_CHECKPOINT_WRITES` were made since the last checkpoint

    # Writing

    @property
    def is_open(self) -> bool:
        """Whether the file has been opened and has not failed since."""
        return self._opened is not None

    def transact(self, writes: Sequence[Write], *, waits: bool = True) -> list[Result]:
        """Commit all `writes` in one transaction and return the result or refusal of each.

        The result of an append is its log's last seq, the result of other writes the number of deleted logs. Raises
        LogUnavailable, and then nothing is written. Without `waits` it does, too, where another process writes now.
        """
        try:
            with self._lock.held(waits=waits):
                db = self._current()
                db.execute("BEGIN IMMEDIATE")
                try:
                    known = self._heads
                    if self._note_version(db) or len(known) > _MOST_HEADS:
                        known.clear()
                    unknown = [one.log_id for one in writes if not isinstance(one, Purge) and one.log_id not in known]
                    if unknown:
                        known.update(self._find(unknown))
                    results = [self._append(one) if isinstance(one, Append) else self._delete(one) for one in writes]
                    self._insert_pages(db)
                    db.execute("COMMIT")
                except BaseException:
                    self._heads.clear()
                    self._pages.clear()
                    with contextlib.suppress(sqlite3.Error):
                        if db.in_transaction:  # some errors have rolled it back
                            db.execute("ROLLBACK")
                    raise
        except (sqlite3.Error, OSError) as error:
            raise self._unavailable(error) from error
        self._num_writes += len(writes) + 1
        self.needs_checkpoint = self._num_writes >= _CHECKPOINT_WRITES
        return results

    def _append(self, write: Append) -> Result:
        head = self._heads.get(write.log_id)
        if head is None:
            if not write.num_events:
                return KeyError(write.log_id)
            if write.base_seq:
                return LogLost(write.log_id)
            head = self._make(write)
        if write.fence < head.fence:
            return Fenced(write.log_id)
        if write.num_events:
            base_seq = head.last_seq if write.base_seq is None else write.base_seq
            if head.last_seq == base_seq + write.num_events and write.fence == head.fence:
                return head.last_seq  # a retry: the first commit succeeded, its result was lost
            if head.is_ended:
                return Ended(write.log_id)
            if head.last_seq != base_seq:
                return LogLost(write.log_id) if head.last_seq < base_seq else Fenced(write.log_id)
            head.last_seq += write.num_events
            self._pages.append((head.row_id, head.last_seq, write.body))
        now = int(time.time())
        if write.fence > head.fence or write.is_end or now >= head.touched_at + _TOUCH_SECONDS:
            head.fence, head.is_ended, head.touched_at = write.fence, head.is_ended or write.is_end, now
            self._db().execute(
                "UPDATE logs SET fence = ?, is_ended = ?, touched_at = ? WHERE id = ?",
                (head.fence, head.is_ended, head.touched_at, head.row_id),
            )
        return head.last_seq

    def _make(self, write: Append) -> _Head:
        now = int(time.time())
        row = self._db().execute(
            "INSERT INTO logs (log_id, fence, is_ended, touched_at) VALUES (?, ?, 0, ?)",
            (write.log_id, write.fence, now),
        )
        assert row.lastrowid is not None
        head = self._heads[write.log_id] = _Head(row.lastrowid, write.fence, 0, False, now)
        return head

    def _delete(self, write: Drop | Purge) -> int:
        self._insert_pages(self._db())
        return self._drop(write.log_id) if isinstance(write, Drop) else self._purge(write)

    def _insert_pages(self, db: sqlite3.Connection) -> None:
        while rows := self._pages[:_MOST_ROWS]:
            num_rows = 1 << (len(rows).bit_length() - 1)
            values = [value for row in rows[:num_rows] for value in row]
            db.execute(f"INSERT INTO pages VALUES {', '.join(['(?, ?, ?)'] * num_rows)}", values)
            del self._pages[:num_rows]

    def _drop(self, log_id: str) -> int:
        head = self._heads.pop(log_id, None)
        if head is None:
            return 0
        self._db().execute("DELETE FROM pages WHERE log = ?", (head.row_id,))
        self._db().execute("DELETE FROM logs WHERE id = ?", (head.row_id,))
        return 1

    def _purge(self, write: Purge) -> int:
        log_ids = self._old(write.before, write.most)
        self._heads.update(self._find(log_ids))
        return sum(self._drop(log_id) for log_id in log_ids)

    def _old(self, before: float, most: int) -> list[str]:
        query = "SELECT log_id FROM logs WHERE touched_at < CASE WHEN is_ended THEN ? ELSE ? END LIMIT ?"
        since = (before, before - UNFINISHED_SECONDS, most)
        return [log_id for (log_id,) in self._db().execute(query, since).fetchall()]

    # Reading

    def old(self, before: float) -> list[str]:
        """Return the logs that a `Purge` without a bound would delete."""
        with self._errors():
            return self._old(before, -1)  # SQLite: a negative limit is none

    def read(self, log_id: str, after: int, limit: int) -> list[LoggedEvent]:
        """Return up to `limit` events that follow `after`. Raises KeyError for an unknown log."""
        try:
            db = self._current()
            row = db.execute(_READ, {"log_id": log_id, "after": after, "limit": limit}).fetchone()
        except (sqlite3.Error, OSError) as error:
            raise self._unavailable(error) from error
        if row is None:
            raise KeyError(log_id)
        last_seq, pages = row
        payloads = FrameCutter().feed(bytes.fromhex(pages)) if pages else []
        first_seq = (last_seq or after) - len(payloads) + 1
        if first_seq > after + 1:
            raise FrameError(f"log {log_id}: events {after + 1} to {first_seq - 1} are missing")
        start = after + 1 - first_seq  # the first page may begin with events that `after` covers
        wanted = enumerate(payloads[start : start + limit], after + 1)
        return [LoggedEvent(seq=seq, event=decode_event(payload)) for seq, payload in wanted]

    def last_seqs(self, log_ids: Iterable[str]) -> dict[str, int]:
        """Return the last seq of each of these logs that exists."""
        with self._errors():
            self._current()
            return {log_id: head.last_seq for log_id, head in self._find(log_ids).items()}

    def has_changed(self) -> bool:
        """Return whether another connection has committed since the previous call."""
        with self._errors():
            return self._note_version(self._current())

    # Upkeep

    def checkpoint(self) -> None:
        """Move commits from the write-ahead log to the file. Due while `needs_checkpoint`."""
        with self._errors(), self._lock.held():
            self._db().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._num_writes, self.needs_checkpoint = 0, False

    def compact(self) -> None:
        """Free unused pages, and empty the write-ahead log, so that dropped events are nowhere on the disk."""
        with self._errors(), self._lock.held():
            self._db().executescript("PRAGMA incremental_vacuum")  # `execute` would free one page only
            self._db().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def sync(self) -> None:
        """Write what was committed to the disk. Holds no lock, so commits continue. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            # Not the database file: closing a second descriptor of it would release SQLite's locks (POSIX).
            fd = os.open(f"{self.path}-wal", os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Close the file, under the lock if possible: the last connection that closes makes a checkpoint."""
        with contextlib.suppress(OSError), self._lock.held():
            self._forget()
        self._forget()
        self._lock.close()

    # The connection

    def _note_version(self, db: sqlite3.Connection) -> bool:
        """Return whether another connection has committed since the previous call. None can during a transaction."""
        known, self._version = self._version, db.execute("PRAGMA data_version").fetchone()[0]
        return self._version != known

    def _find(self, log_ids: Iterable[str]) -> dict[str, _Head]:
        found = self._db().execute(_HEADS, (json.dumps(list(log_ids)),)).fetchone()[0]
        return {
            log_id: _Head(row_id, fence, last_seq, bool(is_ended), touched_at)
            for log_id, row_id, fence, last_seq, is_ended, touched_at in json.loads(found)
        }

    def _current(self) -> sqlite3.Connection:
        """Return the connection to the file that has the path now."""
        if self._opened is not None and identity(self.path) != self._identity:
            self._forget()
        return self._db()

    def _db(self) -> sqlite3.Connection:
        return self._opened or self._open()

    def _open(self) -> sqlite3.Connection:
        self._opened = open_file(
            self.path, self._lock, is_full_sync=self._is_full_sync, busy_seconds=self._busy_seconds
        )
        self._identity = identity(self.path)
        return self._opened

    def _forget(self) -> None:
        self._heads.clear()
        self._version = None
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise LogUnavailable for errors of the file or its disk."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: sqlite3.Error | OSError) -> LogUnavailable:
        """Return what an error of the file or its disk becomes. After most of SQLite's the file is reopened."""
        if isinstance(error, sqlite3.Error):
            kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if kind not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY):
                self.close()
            return _unavailable(kind)
        if isinstance(error, TimeoutError):
            return _unavailable(sqlite3.SQLITE_BUSY)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return _unavailable(sqlite3.SQLITE_FULL if is_full else sqlite3.SQLITE_IOERR)


def _unavailable(kind: int) -> LogUnavailable:
    if kind == sqlite3.SQLITE_FULL:
        return LogFull(_FULL, retry_after=_FULL_RETRY_SECONDS)
    return LogUnavailable(_BUSY if kind == sqlite3.SQLITE_BUSY else _DOWN)
