"""`FileLog`: events in an SQLite file, shared by all processes of a machine. What is acknowledged survives kill -9.

    commit ──► a few events, no lock or disk to wait for: one transaction on the loop's thread ──► results
       └─────► queue ──► writer thread: all that is queued in one transaction ──► results, waits of this process end
    read, last_seq ──► a reader thread
    wait ──► ended here at once; one poller for all waits notices what other processes commit

Group commit without a timer: what is submitted during a transaction is in the next. Lives on one event loop, with
one writer thread and up to two reader threads; file_store.py holds what they do with the file, and what a power cut
costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from pathlib import Path
from typing import TypeVar

from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.frames import frame
from streamserve.streams.log.base import Batch, Committed, LogUnavailable, Result, Waiters
from streamserve.streams.log.file_store import Append, Drop, FileStore, Purge, Write

logger = logging.getLogger("streamserve.streams")

T = TypeVar("T")

# 100 ms are promised; half is left for a busy machine.
_POLL_SECONDS = 0.05
_SYNC_SECONDS = 1.0
_NUM_READERS = 2
# Logs deleted in one transaction of `purge`: commits of live streams wait for it.
_PURGE_BATCH = 50
# What is committed on the loop's thread: up to about a millisecond's work.
_MOST_NOW, _MOST_BYTES_NOW = 32, 32 * 1024
# When such commits have waited for longer than that, twice in a row, the disk is slow: the thread commits, for so long.
_SLOW_SECONDS, _MOST_SLOW, _SLOW_FOR_SECONDS = 0.02, 2, 5.0
_CLOSED = "The stream log is closed."


class FileLog:
    """See `EventLog`. The file and its folders are made when first used.

    `is_full_sync` has every commit wait for the disk: then a power cut loses nothing either, and a commit takes some
    milliseconds. A commit that waits longer than `busy_seconds` for other processes raises LogUnavailable.
    """

    def __init__(self, path: Path | str, *, is_full_sync: bool = False, busy_seconds: float = 5.0) -> None:
        self.place = str(path)
        self._new_store = functools.partial(FileStore, Path(path), is_full_sync=is_full_sync, busy_seconds=busy_seconds)
        self._writer = _Writer(self._new_store())
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="log-reader")
        self._local = threading.local()  # each reader thread's store
        self._reading: list[FileStore] = []  # all of those
        self._waiters = Waiters()
        self._unseen: set[str] = set()  # waited for, and not looked at by the poller yet
        self._written: set[str] = set()  # here, since the poller last looked: it need not look at these now
        self._poller: asyncio.Task[None] | None = None
        self._syncer: asyncio.Task[None] | None = None
        self._is_dirty = False  # committed, and perhaps not on the disk yet
        self._must_sync = not is_full_sync
        self._is_closed = False

    def commit(self, batches: Sequence[Batch]) -> Awaitable[list[Result]]:
        """Commit little on this thread: a write into the kernel's memory costs less than two changes of thread."""
        if self._must_sync and len(batches) <= _MOST_NOW and sum(map(_num_bytes, batches)) <= _MOST_BYTES_NOW:
            results = self._writer.do_now(list(map(_append, batches)))
            if results is not None:
                self._note(batches, results)
                return Committed(results)
        return self._commit(batches)

    async def _commit(self, batches: Sequence[Batch]) -> list[Result]:
        results = await self._writer.submit(list(map(_append, batches)))
        self._note(batches, results)
        return results

    def _note(self, batches: Sequence[Batch], results: Sequence[Result]) -> None:
        """End the waits for what is committed, and have it brought to the disk."""
        for batch, result in zip(batches, results, strict=True):
            if isinstance(result, int) and batch.log_id in self._waiters.by_log:
                self._written.add(batch.log_id)
                self._waiters.wake(batch.log_id, result)
        self._is_dirty = self._must_sync
        if self._is_dirty and not self._is_closed and (self._syncer is None or self._syncer.done()):
            self._syncer = asyncio.create_task(self._sync(), name="log sync", context=Context())

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        return await self._ask(lambda store: store.read(log_id, after, limit))

    async def last_seq(self, log_id: str) -> int:
        return (await self._ask(lambda store: store.last_seqs([log_id])))[log_id]

    async def wait(self, log_id: str, after: int) -> None:
        if self._is_closed:
            return
        self._unseen.add(log_id)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="log poller", context=Context())
        await self._waiters.wait(log_id, after)

    def wake(self, log_id: str) -> None:
        self._waiters.wake(log_id)

    async def drop(self, log_id: str) -> None:
        await self._writer.submit([Drop(log_id=log_id)])
        self._waiters.wake(log_id)

    async def purge(self, before: float) -> int:
        num_purged = 0
        while True:
            (num,) = await self._writer.submit([Purge(before=before, most=_PURGE_BATCH)])
            assert isinstance(num, int)
            if not num:
                break
            num_purged += num
        await self._ask(FileStore.compact)
        return num_purged

    async def old(self, before: float) -> Sequence[str]:
        return await self._ask(lambda store: store.old(before))

    async def check(self) -> list[str]:
        return []  # the file is as safe as `is_full_sync` makes it

    async def aclose(self) -> None:
        self._is_closed = True
        for task in (self._poller, self._syncer):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await asyncio.to_thread(self._close)
        self._waiters.wake_all()

    def _close(self) -> None:
        self._writer.close()
        self._readers.shutdown()
        for store in self._reading:
            store.close()

    async def _ask(self, job: Callable[[FileStore], T]) -> T:
        """Return the result of `job`, run on a reader thread with a store of its own."""
        if self._is_closed:
            raise LogUnavailable(_CLOSED)
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._on_reader, job)

    def _on_reader(self, job: Callable[[FileStore], T]) -> T:
        if not hasattr(self._local, "store"):
            self._local.store = self._new_store()
            self._reading.append(self._local.store)
        return job(self._local.store)

    async def _poll(self) -> None:
        """Notice what other processes have committed, for all waits; end when there are none."""
        while self._waiters.awaited():
            await asyncio.sleep(_POLL_SECONDS)
            waiting, written, self._written = set(self._waiters.awaited()), self._written, set()
            awaited = list(waiting - written)
            is_new, self._unseen = not self._unseen.isdisjoint(awaited), waiting & written
            if not awaited:
                continue
            try:
                last_seqs = await self._ask(functools.partial(_find_news, awaited, is_new))
            except LogUnavailable:
                self._waiters.wake_all()  # they read, and so find out
                continue
            if last_seqs is not None:
                for log_id in awaited:
                    self._waiters.wake(log_id, last_seqs.get(log_id))

    async def _sync(self) -> None:
        """Bring every commit to the disk within about a second."""
        while self._is_dirty:
            await asyncio.sleep(_SYNC_SECONDS)
            self._is_dirty = False
            try:
                await self._ask(FileStore.sync)
            except OSError:
                logger.exception("stream log: commits of the last second may not be on the disk")


def _num_waits() -> int | None:
    """Return how often this thread has waited for anything; None where the system does not count that."""
    who = getattr(resource, "RUSAGE_THREAD", None)  # Linux
    return None if who is None else resource.getrusage(who).ru_nvcsw


def _append(batch: Batch) -> Write:
    return Append(
        log_id=batch.log_id,
        fence=batch.fence,
        base_seq=batch.base_seq,
        body=b"".join(map(frame, batch.bodies)),
        num_events=len(batch.bodies),
        is_end=batch.is_end,
    )


def _num_bytes(batch: Batch) -> int:
    return sum(map(len, batch.bodies))


def _find_news(log_ids: Sequence[str], is_new: bool, store: FileStore) -> dict[str, int] | None:
    """Return the last seqs, unless nothing was committed since this store was last asked and all were seen then."""
    return store.last_seqs(log_ids) if store.has_changed() or is_new else None


_Job = tuple[list[Write], "asyncio.Future[list[Result]]"]


class _Writer:
    """The thread that commits; started by the first commit. A daemon: dying in the middle of a commit costs nothing.

    The queue holds one job for each task that waits for its own: `LogWriter`'s, and claims.
    """

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._news = threading.Condition()  # guards the queue and the three flags
        self._queue: list[_Job] = []
        self._is_closed = False
        self._is_working = False  # the thread uses the store
        self._must_checkpoint = False
        self._num_slow, self._slow_until = 0, 0.0
        self._thread: threading.Thread | None = None
        self._is_failing = False

    async def submit(self, writes: list[Write]) -> list[Result]:
        """Do `writes` in one transaction, with all that is queued, and return their results."""
        future: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
        with self._news:
            if self._is_closed:
                raise LogUnavailable(_CLOSED)
            self._queue.append((writes, future))
            self._news.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
            self._thread.start()
        return await future

    def do_now(self, writes: list[Write]) -> list[Result] | None:
        """Do `writes` in one transaction on this thread, which must be the loop's; None if something is waited for.

        After None nothing is written. A failure is one: the thread tries again, and notes why.
        """
        began, num_waits = time.monotonic(), _num_waits()
        with self._news:
            is_free = not (self._queue or self._is_working or self._is_closed)
            if not is_free or not self._store.is_open or num_waits is None or began < self._slow_until:
                return None
            # Invariant: the thread uses the store while `_is_working` only, and sets that while it holds the lock.
            try:
                results = self._store.transact(writes, waits=False)
            except Exception:
                results = None
            if self._store.needs_checkpoint:
                self._must_checkpoint = True
                self._news.notify()
        now = time.monotonic()
        is_slow = now - began > _SLOW_SECONDS and _num_waits() != num_waits  # else another process had the core
        self._num_slow = self._num_slow + 1 if is_slow else 0
        if self._num_slow >= _MOST_SLOW:
            self._slow_until = now + _SLOW_FOR_SECONDS
        return results

    def close(self) -> None:
        """Do what is queued, end the thread, close the file. Not on the loop."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join()
        self._store.close()

    def _run(self) -> None:
        while True:
            with self._news:
                self._is_working = False
                while not (self._queue or self._must_checkpoint or self._is_closed):
                    self._news.wait()
                self._is_working, self._must_checkpoint = True, False
                jobs, self._queue = self._queue, []
                if not jobs and self._is_closed:
                    return
            if jobs:
                results = self._transact([write for writes, _ in jobs for write in writes])
                with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
                    jobs[0][1].get_loop().call_soon_threadsafe(_resolve, jobs, results)
            if self._store.needs_checkpoint:
                try:
                    self._store.checkpoint()
                except Exception as error:
                    self._note(error)

    def _transact(self, writes: list[Write]) -> Sequence[Result] | LogUnavailable:
        try:
            results = self._store.transact(writes)
        except Exception as error:
            self._note(error)
            return error if isinstance(error, LogUnavailable) else LogUnavailable("The stream log has failed.")
        if self._is_failing:
            self._note(None)
        return results

    def _note(self, error: Exception | None) -> None:
        """Log where trouble begins and where it ends, not every commit in between."""
        if (error is not None) != self._is_failing:
            self._is_failing = error is not None
            if error is not None:
                logger.error("stream log %s: %s", self._store.path, error.__cause__ or error, exc_info=error)
            else:
                logger.warning("stream log %s: works again", self._store.path)


def _resolve(jobs: Sequence[_Job], results: Sequence[Result] | LogUnavailable) -> None:
    """Hand each job its own results. On the loop."""
    start = 0
    for writes, future in jobs:
        end = start + len(writes)
        if not future.done():  # cancelled
            if isinstance(results, LogUnavailable):
                future.set_exception(copy.copy(results))
            else:
                future.set_result(list(results[start:end]))
        start = end
