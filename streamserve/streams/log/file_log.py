"""`FileLog`: events in an SQLite file, shared by all processes of a machine. What is acknowledged outlives kill -9.

    append ──► queue ──► writer thread: all that is queued in one transaction ──► acknowledged, readers here woken
    read, last_seq ──► recent events in memory, else a reader thread
    wait ──► woken here at once; one poller for all who wait notices what other processes commit

Group commit without a timer: what was queued during a commit is the next one. Lives on one event loop, with one writer
thread and up to two for reading; file_store.py is what they do with the file, and says what a power cut costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from pathlib import Path
from typing import TypeVar

from streamserve.protocol.events import Event, LoggedEvent, is_terminal
from streamserve.protocol.frames import encode_event, frame
from streamserve.streams.log.base import (
    Answer,
    Appending,
    Commit,
    LogUnavailable,
    Place,
    Settle,
    Waiters,
    Withdraw,
)
from streamserve.streams.log.file_store import Append, Drop, FileStore, Purge, Write
from streamserve.streams.recent import RecentEvents

logger = logging.getLogger("streamserve.streams")

T = TypeVar("T")
_Commit = Commit[Write, int]

# 100 ms are promised; half is left for a busy machine.
_POLL_SECONDS = 0.05
_SYNC_SECONDS = 1.0
_NUM_READERS = 2
# Logs dropped in one transaction of `purge`: live streams' appends wait for it.
_PURGE_BATCH = 50
_CLOSED = "The stream log is closed."


class FileLog(Appending):
    """See `EventLog`. The file, and the folders on the way to it, are made when first used.

    `is_full_sync` has every commit wait for the disk: then a power cut takes nothing either, and a commit takes some
    milliseconds. `busy_seconds` is how long a commit waits for other processes before it is LogUnavailable.
    """

    def __init__(self, path: Path | str, *, is_full_sync: bool = False, busy_seconds: float = 5.0) -> None:
        self._new_store = functools.partial(FileStore, Path(path), is_full_sync=is_full_sync, busy_seconds=busy_seconds)
        self._writer = _Writer(self._new_store())
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="log-reader")
        self._local = threading.local()  # each reader thread's store
        self._reading: list[FileStore] = []  # all of those
        self._recent = RecentEvents()
        self.waiters = Waiters()
        self._unseen: set[str] = set()  # waited for, and not looked at by the poller yet
        self._written: set[str] = set()  # here, since the poller last looked: it need not look at these now
        self._poller: asyncio.Task[None] | None = None
        self._syncer: asyncio.Task[None] | None = None
        self._is_dirty = False  # committed, and perhaps not on the disk yet
        self._must_sync = not is_full_sync
        self._is_closed = False

    def submit(self, log_id: str, fence: int, events: Sequence[Event], settle: Settle) -> Withdraw:
        bodies = [encode_event(event) for event in events]
        body, is_end = b"".join(map(frame, bodies)), bool(events) and is_terminal(events[-1])

        def note(result: int | Exception) -> None:
            if isinstance(result, Exception):
                settle(result)
                return
            if events:
                self._recent.add(log_id, result, bodies)
            settle(result)
            if log_id in self.waiters:
                self._written.add(log_id)
            self.waiters.wake(log_id, result)
            self._sync_soon()

        write = Append(log_id=log_id, fence=fence, body=body, num_events=len(bodies), is_end=is_end)
        return self._writer.submit(Commit(write, note))

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        found = self._recent.read(log_id, after, limit)
        return found or await self._ask(lambda store: store.read(log_id, after, limit))

    async def last_seq(self, log_id: str) -> int:
        return (await self._ask(lambda store: store.last_seqs([log_id])))[log_id]

    async def wait(self, log_id: str, place: Place) -> None:
        if self._recent.last_seq(log_id) > place.seq or self._is_closed:
            return
        self._unseen.add(log_id)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="log poller", context=Context())
        await self.waiters.wait(log_id, place)

    async def seal(self, log_id: str) -> None:
        self.waiters.wake(log_id)

    async def drop(self, log_id: str) -> None:
        try:
            await self._commit(Drop(log_id=log_id))
        finally:
            self._recent.drop(log_id)
        self.waiters.wake(log_id)

    async def purge(self, before: float) -> int:
        num_purged = 0
        while num := await self._commit(Purge(before=before, most=_PURGE_BATCH)):
            num_purged += num
        self._recent = RecentEvents()
        await self._ask(FileStore.compact)
        return num_purged

    async def check(self) -> list[str]:
        return []  # the file is as safe as `is_full_sync` says

    async def aclose(self) -> None:
        self._is_closed = True
        for task in (self._poller, self._syncer):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._writer.hand_over()
        await asyncio.to_thread(self._close)
        self.waiters.wake_all()

    async def _commit(self, write: Write) -> int:
        answer: Answer[int] = Answer()
        return await answer.wait(self._writer.submit(Commit(write, answer.settle)))

    async def _ask(self, job: Callable[[FileStore], T]) -> T:
        """Return what `job` finds, from a reader thread with a store of its own."""
        if self._is_closed:
            raise LogUnavailable(_CLOSED)
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._on_reader, job)

    def _on_reader(self, job: Callable[[FileStore], T]) -> T:
        if not hasattr(self._local, "store"):
            self._local.store = self._new_store()
            self._reading.append(self._local.store)
        return job(self._local.store)

    async def _poll(self) -> None:
        """Notice what other processes have committed, for all who wait; ends when nobody does."""
        while self.waiters.awaited():
            await asyncio.sleep(_POLL_SECONDS)
            waiting, written, self._written = set(self.waiters.awaited()), self._written, set()
            awaited = list(waiting - written)
            is_new, self._unseen = not self._unseen.isdisjoint(awaited), waiting & written
            if not awaited:
                continue
            try:
                last_seqs = await self._ask(functools.partial(_find_news, awaited, is_new))
            except LogUnavailable:
                self.waiters.wake_all()  # they read, and so find out
                continue
            if last_seqs is not None:
                for log_id in awaited:
                    self.waiters.wake(log_id, last_seqs.get(log_id))

    def _sync_soon(self) -> None:
        self._is_dirty = self._must_sync
        if self._is_dirty and not self._is_closed and (self._syncer is None or self._syncer.done()):
            self._syncer = asyncio.create_task(self._sync(), name="log sync", context=Context())

    async def _sync(self) -> None:
        """Bring every commit to the disk within about a second."""
        while self._is_dirty:
            await asyncio.sleep(_SYNC_SECONDS)
            self._is_dirty = False
            try:
                await self._ask(FileStore.sync)
            except OSError:
                logger.exception("stream log: commits of the last second may not be on the disk")

    def _close(self) -> None:
        self._writer.close()
        self._readers.shutdown()
        for store in self._reading:
            store.close()


def _find_news(log_ids: Sequence[str], is_new: bool, store: FileStore) -> dict[str, int] | None:
    """Return the last seqs, unless nothing was committed since this store was last asked and all were seen then."""
    return store.last_seqs(log_ids) if store.has_changed() or is_new else None


class _Writer:
    """The thread that commits; started by the first commit. A daemon: dying in the middle of one costs nothing.

    The queue holds at most one commit for each task that waits for its own.
    """

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._news = threading.Condition()  # guards the queue and `_is_closed`
        self._queue: list[_Commit] = []
        self._gathered: list[_Commit] = []  # the loop's own
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._is_failing = False

    def submit(self, commit: _Commit) -> Withdraw:
        """Have it done in the next transaction, with all that is submitted before the loop's next turn."""
        if self._is_closed:
            commit.settle(LogUnavailable(_CLOSED))
        else:
            if not self._gathered:
                self._loop = asyncio.get_running_loop()
                self._loop.call_soon(self.hand_over)
            self._gathered.append(commit)
        return functools.partial(self._withdraw, commit)

    def hand_over(self) -> None:
        """Give the thread what was submitted. Waking it for each commit would have it fight this thread for the GIL."""
        if not self._gathered:
            return
        with self._news:
            self._queue += self._gathered
            self._news.notify()
        self._gathered = []
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
            self._thread.start()

    def _withdraw(self, commit: _Commit) -> bool:
        """Take it back, if its transaction has not begun."""
        with self._news:
            for waiting in (self._gathered, self._queue):
                if commit in waiting:
                    waiting.remove(commit)
                    return True
        return False

    def close(self) -> None:
        """Do what is queued, end the thread, close the file. Not on the loop."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join()
        self._store.close()

    def _run(self) -> None:
        while batch := self._take():
            results = self._transact(batch)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, batch, results)
            self._checkpoint()

    def _take(self) -> list[_Commit]:
        """Wait for commits and return them all; none when closed."""
        with self._news:
            self._news.wait_for(lambda: self._queue or self._is_closed)
            batch, self._queue = self._queue, []
        return batch

    def _transact(self, batch: list[_Commit]) -> Sequence[int | Exception]:
        try:
            results = self._store.transact([commit.write for commit in batch])
        except Exception as error:
            self._say(error)
            failure = error if isinstance(error, LogUnavailable) else LogUnavailable("The stream log has failed.")
            return [copy.copy(failure) for _ in batch]
        self._say(None)
        return results

    def _checkpoint(self) -> None:
        try:
            self._store.checkpoint()
        except Exception as error:
            self._say(error)

    def _say(self, error: Exception | None) -> None:
        """Log where trouble begins and where it ends, not every commit in between."""
        if (error is not None) != self._is_failing:
            self._is_failing = error is not None
            if error is not None:
                logger.error("stream log %s: %s", self._store.path, error.__cause__ or error, exc_info=error)
            else:
                logger.warning("stream log %s: works again", self._store.path)


def _settle(batch: Sequence[_Commit], results: Sequence[int | Exception]) -> None:
    for commit, result in zip(batch, results, strict=True):
        commit.settle(result)
