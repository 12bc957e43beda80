"""`call` and `write`: Django's ORM for the event loop, on one thread that keeps its connections.

`asgiref.sync_to_async` makes a thread for each request, and `channels.db` opens and closes a connection for each call.
Here one thread of the process does all of streamserve's queries. Writes that wait together are one transaction; if one
of them fails, each is done again by itself.

A connection is kept while it is used. CONN_MAX_AGE counts from when it was opened, as in Django; 0, Django's default,
closes it after `IDLE_SECONDS` without a query, since no request owns it. One that an error has broken is closed.
Inside synchronous code (`async_to_sync`, a `TestCase`) queries run on that code's own thread and connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from asgiref.sync import AsyncToSync
from channels.db import database_sync_to_async
from django.db import connections, router, transaction

from streamserve.models import Stream

logger = logging.getLogger("streamserve.web")

T = TypeVar("T")

IDLE_SECONDS = 10.0
_TRUSTED_SECONDS = 1.0  # without a query: a connection that rested longer is checked before it is used
_CLOSE_SECONDS = 5.0  # a query that hangs on a lock does not hold up a server that stops
_MAX_GROUP = 64  # jobs that are taken at once


@dataclass(frozen=True, slots=True)
class _Job:
    """One call. One that `is_write` may share a transaction with others; without a `future` no caller waits."""

    work: Callable[[], Any]
    future: asyncio.Future[Any] | None
    is_write: bool


_Answer = tuple[asyncio.Future[Any], Any, BaseException | None]


class OrmThread:
    """The thread. It is started by its first job and ends with the process, or by `close`."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards `_thread`
        self.num_transactions = 0  # of writes

    async def run(self, work: Callable[[], T], *, is_write: bool) -> T:
        """Return the result of `work`. A caller that is cancelled does not wait for it; the work is done."""
        if getattr(AsyncToSync.executors, "current", None) is not None:
            return cast(T, await database_sync_to_async(work)())
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(work, future, is_write))
        if self._thread is None:
            self._start()
        return await future

    def post(self, work: Callable[[], Any]) -> None:
        """Have a write done later; an error is logged."""
        self._jobs.put(_Job(work, None, is_write=True))
        if self._thread is None:
            self._start()

    def close(self) -> None:
        """End the thread and close its connections. The next job starts another. Waits some seconds for jobs."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
        if thread is not None:
            thread.join(_CLOSE_SECONDS)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="streamserve orm", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        """Do what is asked, and bring the results to their loops, with one wake of each."""
        while jobs := self._next_jobs():
            done = [(job, *_result_of(job.work)) for job in jobs if not job.is_write]
            writes = [job for job in jobs if job.is_write]
            if writes:
                done += self._written(writes)
            by_loop: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
            for job, value, error in done:
                if job.future is not None:
                    by_loop.setdefault(job.future.get_loop(), []).append((job.future, value, error))
                elif error is not None:
                    logger.error("a write that was posted failed", exc_info=error)
            for loop, results in by_loop.items():
                with suppress(RuntimeError):  # the loop is closed: no caller waits
                    loop.call_soon_threadsafe(_set_results, results)
        _tidy(lambda connection: connection.close())

    def _next_jobs(self) -> list[_Job]:
        """Return every job that waits, at least one; [] ends the thread."""
        jobs: list[_Job | None] = []
        began = time.monotonic()
        try:
            jobs.append(self._jobs.get(timeout=self._idle_seconds))
        except queue.Empty:
            _tidy(_close_unowned)
            jobs.append(self._jobs.get())
        is_rested = time.monotonic() - began > _TRUSTED_SECONDS
        with suppress(queue.Empty):
            while jobs[-1] is not None and len(jobs) < _MAX_GROUP:
                jobs.append(self._jobs.get_nowait())
        if jobs[-1] is None and len(jobs) > 1:
            self._jobs.put(None)  # its turn comes after the jobs before it
        _tidy(partial(_close_unfit, is_rested=is_rested))
        return [job for job in jobs if job is not None]

    def _written(self, jobs: list[_Job]) -> list[tuple[_Job, Any, BaseException | None]]:
        """Do the writes in one transaction; each in its own if that fails."""
        self.num_transactions += 1
        if len(jobs) > 1:
            try:
                with transaction.atomic(using=router.db_for_write(Stream)):
                    return [(job, job.work(), None) for job in jobs]
            except Exception as error:  # of one of them, whose caller gets it below
                self.num_transactions += len(jobs)
                logger.info("%d writes are done again one by one: %s", len(jobs), error)
                _tidy(partial(_close_unfit, is_rested=True))  # perhaps the server has closed the connection
        return [(job, *_result_of(job.work)) for job in jobs]


def _result_of(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # the edge of a thread: the caller raises it
        return None, error


def _set_results(results: list[_Answer]) -> None:
    for future, value, error in results:
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)


def _tidy(close: Callable[[Any], None]) -> None:
    """Call `close` with each connection of this thread. An error there must not end the thread."""
    for connection in connections.all(initialized_only=True):
        try:
            close(connection)
        except Exception:
            logger.exception("a database connection was not closed")


def _close_unowned(connection: Any) -> None:
    if connection.settings_dict["CONN_MAX_AGE"] == 0:
        connection.close()


def _close_unfit(connection: Any, *, is_rested: bool) -> None:
    """Close what an error has broken, CONN_MAX_AGE has outlived, or the server has closed during a rest."""
    if connection.settings_dict["CONN_MAX_AGE"] == 0:
        connection.close_at = None
        if is_rested and connection.connection is not None and not connection.is_usable():
            connection.close()
    connection.close_if_unusable_or_obsolete()


_thread = OrmThread()  # of the process, as its connections are


def _before_fork() -> None:
    """Finish what waits: a child must not inherit an open connection, least of all one inside a transaction."""
    _thread.close()


def _after_fork() -> None:
    """Begin anew in the child, which does not have its parent's thread."""
    global _thread
    _thread = OrmThread()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


async def call(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `work(*args, **kwargs)`, done on the ORM thread."""
    return await _thread.run(lambda: work(*args, **kwargs), is_write=False)


async def write(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The same for one statement that may share its transaction with others that wait."""
    return await _thread.run(lambda: work(*args, **kwargs), is_write=True)


def post(work: Callable[[], Any]) -> None:
    """Have a write done later. No caller waits for it, so that it delays no answer."""
    _thread.post(work)


def close() -> None:
    """Close the kept connections; the next call opens them again."""
    _thread.close()
