"""The one door to Django's ORM for streamserve's own short queries: `read`, `call`, `write`, `post`.

`asgiref.sync_to_async` makes a thread for each request, and `channels.db` opens and closes a connection for each call.
Here two lanes of the process do all short queries, each on one thread with connections of its own: reads do not stand
behind writes. Writes that wait together are one transaction; if one write fails, each is done again by itself.
`write_all` makes one call of what they ask of one function, which locks its rows in one order. Where rows are locked
one by one (PostgreSQL), those have a transaction of their own.

    a job ──► its lane ──► done
                │  ▲
      "locked"  └──┘  tried again, among those that came meanwhile, until its deadline
      lost connection: once more on a new connection, where nothing can have been committed
      "away", or its deadline is over ──► DatabaseUnavailable, for the whole group
      hangs in spite of that ──► DatabaseUnavailable, and another thread takes the lane

No caller waits longer than `DEADLINE_SECONDS + HANG_SECONDS`. A read whose caller has left is not begun. A write that
is posted has no caller: it is kept, and tried again until the database is back; a process that is killed loses it.

A connection is kept while it is used. CONN_MAX_AGE counts from when it was opened, as in Django; 0, Django's default,
closes it after `IDLE_SECONDS` without a query, since no request owns it. A connection that an error has broken is
closed. Inside synchronous code (`async_to_sync`, a `TestCase`) queries run on that code's own thread and connection,
which is not closed: it may be in a transaction of that code's.

Functions of the site (`of_site`), bulk work (`bulk`), and writes whose transaction calls receivers of the site
(`apart`, receivers.py) may take any time, and have threads of their own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from asgiref.sync import AsyncToSync, sync_to_async
from channels.db import database_sync_to_async
from django.db import connections, router, transaction

from streamserve.models import Stream
from streamserve.protocol.errors import DatabaseUnavailable
from streamserve.rows.trouble import Trouble, is_passing, trouble_of

logger = logging.getLogger("streamserve.web")

T = TypeVar("T")
A = TypeVar("A")

# A job that was not done by then is refused, so that its caller has the 503 within five seconds.
DEADLINE_SECONDS = 4.0
# After its deadline: a job that is still being done hangs, as on a network that swallows packets.
HANG_SECONDS = 0.75
LOCK_SECONDS = 0.5  # how long a statement waits for a lock before its job is tried again
IDLE_SECONDS = 10.0
# Writes that are kept while the database is away. A write is some hundred bytes.
MAX_POSTED = 10_000
INSIST_SECONDS = 300.0  # how long durable work waits for a database that is away
MAX_HUNG = 4  # threads of a lane that hang; beyond them every job is refused until a thread returns
SITE_THREADS, BULK_THREADS = 32, 4
RECEIVER_THREADS, REFUSAL_THREADS = 32, 2
MAX_TOLD = 1_000  # refusals that wait for their receivers
_TRUSTED_SECONDS = 1.0  # without a query: a connection that rested longer is checked before it is used
_CLOSE_SECONDS = 5.0  # a query that hangs does not hold up a server that stops
_MAX_GROUP = 64  # jobs that are taken at once
_PAUSE_SECONDS = 0.01  # between two attempts where the database does not wait for a lock by itself
_FIRST_DELAY, _MAX_DELAY = 0.5, 4.0  # between two attempts of what was posted


@dataclass(frozen=True, slots=True)
class _Part:
    """A call's part of a function that writes for several callers at once."""

    function: Callable[[Sequence[Any]], Sequence[Any]]
    argument: Any

    def __call__(self) -> Any:
        """Call it for this part alone."""
        with transaction.atomic(using=router.db_for_write(Stream), savepoint=False):
            (value,) = self.function([self.argument])
            return value


@dataclass(slots=True, eq=False)
class _Job:
    """One call. Where it `can_share`, it may share a transaction; without a `future` it was posted."""

    work: Callable[[], Any]
    future: asyncio.Future[Any] | None
    until: float  # its deadline, of the monotonic clock
    can_share: bool = False
    has_lost: bool = False  # it was tried on a connection that was lost
    thread: threading.Thread | None = None  # that has begun it
    error: BaseException | None = None  # of its last attempt


@dataclass(slots=True)
class _Outcome:
    """What became of an attempt. `can_repeat`: it cannot have been committed."""

    job: _Job
    value: Any = None
    error: BaseException | None = None
    can_repeat: bool = False


@dataclass(slots=True, eq=False)
class _Posted:
    """What was posted to a lane and is not done: `jobs` are those that its thread has taken, oldest first.

    `num` counts those that wait for the thread too; the lane's lock guards it. All else is the serving thread's.
    """

    num: int = 0
    jobs: deque[_Job] = field(default_factory=deque)
    retry_at: float = 0.0
    delay: float = _FIRST_DELAY

    def is_due(self, now: float) -> bool:
        """Whether there are jobs to be tried now."""
        return bool(self.jobs) and now >= self.retry_at

    def take_oldest(self) -> list[_Job]:
        """Take a group of jobs."""
        return [self.jobs.popleft() for _ in range(min(len(self.jobs), _MAX_GROUP))]

    def put_back(self, jobs: list[_Job]) -> None:
        """Keep jobs that could not be done, before all that is posted later, and try them again after a while."""
        self.jobs.extendleft(reversed(jobs))
        now = time.monotonic()
        if self.is_due(now):
            self.retry_at, self.delay = now + self.delay, min(2 * self.delay, _MAX_DELAY)


class Lane:
    """A thread that does jobs one group after the other. It starts with its first job, and ends by `end`.

    A lane for reads takes one job at a time, so that a thread that hangs takes no other job along. Any thread may call
    `put` and `post`; `run` is of event loops.
    """

    def __init__(
        self,
        name: str,
        *,
        is_for_reads: bool = False,
        idle_seconds: float = IDLE_SECONDS,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._name, self._idle_seconds, self._deadline_seconds = name, idle_seconds, deadline_seconds
        self._is_for_reads, self._max_group = is_for_reads, 1 if is_for_reads else _MAX_GROUP
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards `_thread`, `_hung`, `_left` and `_posted.num`
        self._thread: threading.Thread | None = None  # that serves
        self._hung: set[threading.Thread] = set()
        self._left: WeakSet[threading.Thread] = WeakSet()  # hung when the lane ended
        self._began_at = math.inf  # the attempt that is being made
        self._posted = _Posted()
        self.trouble: Trouble | None = None  # the database's, as the last job found it
        self.num_transactions = 0  # of writes

    async def run(self, work: Callable[[], T], *, can_share: bool = False) -> T:
        """Return the result of `work`. Raises DatabaseUnavailable, and what `work` raises.

        A caller that is cancelled takes along a read that has not begun; a write is done.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        job = _Job(work, future, time.monotonic() + self._deadline_seconds, can_share)
        self.put(job)
        timer = loop.call_later(self._deadline_seconds + HANG_SECONDS, self._give_up, job, context=Context())
        try:
            return await future
        finally:
            timer.cancel()

    def put(self, job: _Job) -> None:
        """Have a job done. Raises DatabaseUnavailable where every thread of the lane hangs."""
        if self._thread is None:
            with self._lock:
                self._start()
                if self._thread is None and job.future is not None:
                    raise _refusal(Trouble.SLOW)
        self._jobs.put(job)

    def post(self, work: Callable[[], Any]) -> None:
        """Have a write done as soon as the database can; an error of its own is logged."""
        with self._lock:
            is_full = self._posted.num >= MAX_POSTED
            self._posted.num += not is_full
        if is_full:
            logger.error("a write that was posted is dropped: %d wait for the database already", MAX_POSTED)
        else:
            self.put(_Job(work, None, math.inf, can_share=True))

    def end(self) -> threading.Thread | None:
        """Have the thread end when it has done what waits; return it. What hangs is left behind."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._left |= self._hung
            self._hung = set()
            if thread is not None:
                self._jobs.put(None)
        return thread

    def _start(self) -> None:
        """Start a thread if none serves and not too many hang. Under the lock."""
        if self._thread is None and len(self._hung) < MAX_HUNG:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def _give_up(self, job: _Job) -> None:
        """Refuse a job that has had no answer. If the thread hangs, another takes the lane. On the event loop."""
        assert job.future is not None
        if job.future.done():
            return
        with self._lock:
            thread = self._thread
            hangs = self._began_at + self._deadline_seconds < time.monotonic()
            if thread is not None and (thread is job.thread or hangs):
                self._hung.add(thread)
                self._thread, self._began_at = None, math.inf
                self._start()
        self._note(Trouble.SLOW)
        job.future.set_exception(_refusal(Trouble.SLOW))

    # On the thread

    def _serve(self) -> None:
        """Do what is asked until the lane ends, or another thread serves it."""
        while self._is_serving():
            jobs = self._next_jobs()
            if jobs is None:
                self._flush()
                break
            self._do(jobs)
        _tidy(lambda connection: connection.close())

    def _is_serving(self) -> bool:
        """Return whether this thread serves on. A thread that hung takes the lane again if no other thread has."""
        me = threading.current_thread()
        with self._lock:
            if me in self._hung:
                self._hung.discard(me)
                if self._thread is not None:
                    return False
                self._thread = me
            return me not in self._left

    def _next_jobs(self) -> list[_Job] | None:
        """Return jobs that wait, with what was posted if it is due; None when the lane has ended."""
        began, jobs, posted = time.monotonic(), list[_Job](), self._posted
        patience = max(0.0, posted.retry_at - began) if posted.jobs else self._idle_seconds
        is_over = self._take(jobs, patience)
        if not (is_over or jobs or posted.jobs):
            _tidy(_close_unowned)
            is_over = self._take(jobs, None)
        if is_over and not jobs:
            return None
        if is_over:
            self._jobs.put(None)  # its turn comes after the jobs before it
        if posted.is_due(time.monotonic()):
            jobs[:0] = posted.take_oldest()
        _tidy(partial(_close_unfit, is_rested=time.monotonic() - began > _TRUSTED_SECONDS))
        return jobs

    def _take(self, jobs: list[_Job], seconds: float | None) -> bool:
        """Take a group of jobs, and what was posted between them; return whether the lane's end was reached."""
        with suppress(queue.Empty):
            job = self._jobs.get(timeout=seconds)
            while job is not None:
                (self._posted.jobs if job.future is None else jobs).append(job)
                if len(jobs) == self._max_group:
                    return False
                job = self._jobs.get_nowait()
            return True
        return False

    def _flush(self) -> None:
        """Try what was posted a last time."""
        posted = self._posted
        while num := len(posted.jobs):
            self._do(posted.take_oldest())
            if len(posted.jobs) == num:
                logger.error("%d writes that were posted are lost: the database takes none", num)
                posted.jobs.clear()
                with self._lock:
                    posted.num -= num

    def _do(self, jobs: list[_Job]) -> None:
        """Do a group: first what can share a transaction, and then each other job."""
        _set_bounds()
        for group in _transactions_of([job for job in jobs if job.can_share]):
            begun = [job for job in group if self._begins(job)]
            if begun:
                self._settle(self._together(begun))
        for job in jobs:
            if not job.can_share and self._begins(job):
                self._settle([self._alone(job)])

    def _begins(self, job: _Job) -> bool:
        """Return whether to do a job now. It is refused if its deadline is over; a read without a caller is dropped."""
        job.thread = threading.current_thread()
        if time.monotonic() < job.until:
            return not (self._is_for_reads and job.future is not None and job.future.done())
        trouble = trouble_of(job.error) or self.trouble or Trouble.SLOW
        self._note(trouble, job.error)
        self._settle([_Outcome(job, error=_refusal(trouble, job.error))])
        return False

    def _together(self, jobs: list[_Job]) -> list[_Outcome]:
        """Do writes in one transaction. If a write fails, each is done by itself; in trouble, none."""
        self.num_transactions += 1
        alias = router.db_for_write(Stream)
        values: list[Any] | None = None
        self._began_at = time.monotonic()
        try:
            with _transaction(alias, is_group=len(jobs) > 1 or isinstance(jobs[0].work, _Part)):
                values = _values_of(jobs)
            return [_Outcome(job, value) for job, value in zip(jobs, values, strict=True)]
        except Exception as error:
            trouble = trouble_of(error)
            is_of_all = trouble is not None and not (trouble is Trouble.LOCKED and _locks_rows(alias))
            if len(jobs) == 1 or is_of_all:
                is_undone = values is None and (len(jobs) > 1 or _locks_rows(alias))  # no COMMIT was sent
                return [_Outcome(job, error=error, can_repeat=is_undone) for job in jobs]
            self.num_transactions += len(jobs)
            logger.info("%d writes are done again one by one: %s", len(jobs), error)
        _tidy(partial(_close_unfit, is_rested=True))  # perhaps the server has closed the connection
        return [self._alone(job) for job in jobs if self._begins(job)]

    def _alone(self, job: _Job) -> _Outcome:
        """Do one job by itself."""
        alias = router.db_for_write(Stream)
        self._began_at = time.monotonic()
        try:
            if self._is_for_reads:
                return _Outcome(job, job.work())
            with _transaction(alias, is_group=False):
                return _Outcome(job, job.work())
        except BaseException as error:  # the edge of a thread: the caller raises it
            return _Outcome(job, error=error, can_repeat=self._is_for_reads)

    def _settle(self, outcomes: list[_Outcome]) -> None:
        """Bring the results to their loops, with one wake of each; what the database may take later is tried again."""
        self._began_at = math.inf
        by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
        kept: list[_Job] = []
        for outcome in outcomes:
            job, error = outcome.job, outcome.error
            trouble = trouble_of(error)
            if trouble is not None and self._can_wait(outcome, trouble):
                job.error = error
                kept.append(job)
                continue
            if trouble is not None:
                self._note(trouble, error)
                outcome.error = _refusal(trouble, error)
            elif not isinstance(error, DatabaseUnavailable):
                self._note(None)
            if job.future is not None:
                by_loop.setdefault(job.future.get_loop(), []).append(outcome)
                continue
            with self._lock:
                self._posted.num -= 1
            if error is not None:
                logger.error("a write that was posted failed", exc_info=error)
        for loop, settled in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(_set_results, settled)
        if kept:
            self._keep(kept)

    def _can_wait(self, outcome: _Outcome, trouble: Trouble) -> bool:
        """Return whether to try a job in trouble again: a posted job is; other jobs until their deadlines."""
        job = outcome.job
        if job.future is None:
            if trouble is not Trouble.LOCKED:
                self._note(trouble, outcome.error)
            return True
        if trouble is Trouble.LOST and outcome.can_repeat and not job.has_lost:
            job.has_lost = True
            return True
        return trouble is Trouble.LOCKED and time.monotonic() < job.until

    def _keep(self, jobs: list[_Job]) -> None:
        """Put jobs back: among those that wait, or what was posted before all that is posted later."""
        self._posted.put_back([job for job in jobs if job.future is None])
        for job in jobs:
            if job.future is not None:
                # A lock of its rows must not fail the other jobs again.
                job.can_share = job.can_share and not _locks_rows(router.db_for_write(Stream))
                self._jobs.put(job)
        time.sleep(_PAUSE_SECONDS)  # not every lock is waited for

    def _note(self, trouble: Trouble | None, cause: BaseException | None = None) -> None:
        """Remember what a job has found; log it when that changes."""
        before, self.trouble = self.trouble, Trouble.AWAY if trouble is Trouble.LOST else trouble
        if trouble is None:
            self._posted.delay = _FIRST_DELAY
            if before is not None:
                logger.warning("the site's database is back (%s)", self._name)
        elif before is None:
            logger.error("the site's database cannot be used (%s): %s", self._name, cause or trouble.message)


def _transactions_of(jobs: list[_Job]) -> list[list[_Job]]:
    """Return the jobs by transaction: where a lock is of some rows, jobs of one function apart from others."""
    if not jobs or not _locks_rows(router.db_for_write(Stream)):
        return [jobs]
    groups: dict[Any, list[_Job]] = {}
    for job in jobs:
        groups.setdefault(job.work.function if isinstance(job.work, _Part) else None, []).append(job)
    return list(groups.values())


def _values_of(jobs: list[_Job]) -> list[Any]:
    """Do the jobs, in the order in which they came; those of one function are one call, with the first of them."""
    values: list[Any] = []
    called: dict[Any, Iterator[Any]] = {}
    for job in jobs:
        if not isinstance(job.work, _Part):
            values.append(job.work())
            continue
        function = job.work.function
        if function not in called:
            parts = [one.work for one in jobs if isinstance(one.work, _Part)]
            called[function] = iter(function([part.argument for part in parts if part.function == function]))
        values.append(next(called[function]))
    return values


def _refusal(trouble: Trouble, cause: BaseException | None = None) -> DatabaseUnavailable:
    error = DatabaseUnavailable(trouble.message)
    error.__cause__ = cause
    return error


def _set_results(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        future = outcome.job.future
        assert future is not None
        if not future.done():
            if outcome.error is None:
                future.set_result(outcome.value)
            else:
                future.set_exception(outcome.error)


@contextmanager
def _transaction(alias: str, *, is_group: bool) -> Iterator[None]:
    """A transaction for a group of writes. On PostgreSQL for every write: there it has the time to wait for a lock.

    That is not set for the connection, whose session another program may get from a pooler.
    """
    if not (is_group or _locks_rows(alias)):
        yield
        return
    with transaction.atomic(using=alias):
        if _locks_rows(alias):
            with connections[alias].cursor() as cursor:
                cursor.execute(f"SET LOCAL lock_timeout = {round(LOCK_SECONDS * 1000)}")
        yield


def _locks_rows(alias: str) -> bool:
    """Return whether a lock is of some rows; SQLite's is of the whole database."""
    return connections[alias].vendor == "postgresql"


def _set_bounds() -> None:
    """Bound how long a connection that this thread opens next may wait, for a lock or for its server."""
    for alias in {router.db_for_read(Stream), router.db_for_write(Stream)}:
        connection = connections[alias]
        if connection.connection is None:
            connection.settings_dict = _bounded(connections.settings[alias], connection.vendor)


def _bounded(settings: Mapping[str, Any], vendor: str) -> dict[str, Any]:
    """Return a database's settings with these bounds; an option of the site's is kept where it is tighter."""
    options = dict(settings.get("OPTIONS", {}))
    if vendor == "sqlite":
        options["timeout"] = min(LOCK_SECONDS, options.get("timeout", LOCK_SECONDS))
    elif vendor == "postgresql":
        options = {**_LIBPQ, **options}
    return {**settings, "OPTIONS": options}


# Of libpq (PostgreSQL's manual, 34.1.2): a network that swallows packets is noticed within some seconds.
_LIBPQ = {
    "connect_timeout": 3,
    "keepalives_idle": 3,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 5000,
}


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


class Door:
    """The lanes of a process, and the threads of what is no short query."""

    def __init__(self, *, idle_seconds: float = IDLE_SECONDS, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        lane = partial(Lane, idle_seconds=idle_seconds, deadline_seconds=deadline_seconds)
        self.reads, self.writes = lane("streamserve orm reads", is_for_reads=True), lane("streamserve orm")
        self.site_threads = ThreadPoolExecutor(SITE_THREADS, thread_name_prefix="streamserve site")
        self.bulk_threads = ThreadPoolExecutor(BULK_THREADS, thread_name_prefix="streamserve bulk")
        self.receiver_threads = ThreadPoolExecutor(RECEIVER_THREADS, thread_name_prefix="streamserve receivers")
        self.refusal_threads = ThreadPoolExecutor(REFUSAL_THREADS, thread_name_prefix="streamserve refusals")
        self.room_to_tell = threading.BoundedSemaphore(MAX_TOLD)

    @property
    def trouble(self) -> Trouble | None:
        """The database's, as the last jobs found it."""
        return self.writes.trouble or self.reads.trouble

    def close(self) -> None:
        """End the threads and close their connections; the next job starts new threads. Waits some seconds for jobs."""
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in [lane.end() for lane in (self.reads, self.writes)]:
            if thread is not None:
                thread.join(max(0.0, until - time.monotonic()))


_door = Door()  # of the process, as its connections are


def _before_fork() -> None:
    """Finish what waits: a child must not inherit an open connection, least of all inside a transaction."""
    close()


def _after_fork() -> None:
    """Begin anew in the child, which does not have its parent's threads."""
    global _door
    _door = Door()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _is_inside_sync() -> bool:
    return getattr(AsyncToSync.executors, "current", None) is not None


async def read(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `work(*args, **kwargs)`, a query that changes nothing. Raises DatabaseUnavailable."""
    return await _run(_door.reads, partial(work, *args, **kwargs))


async def write(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The same for one statement that may share its transaction with other waiting statements."""
    return await _run(_door.writes, partial(work, *args, **kwargs), can_share=True)


async def write_all(function: Callable[[Sequence[A]], Sequence[T | Exception]], argument: A) -> T:
    """Return what `function([argument])` returns for it, called in a transaction, for all arguments that wait at once.

    An exception that it returns for an argument is raised for that caller, and undoes nothing: what it raises undoes
    the transaction, and each argument has a call and a transaction of its own. It is a function of a module, and locks
    rows that others lock too in one order, whatever the order of its arguments.
    """
    value = await _run(_door.writes, _Part(function, argument), can_share=True)
    if isinstance(value, Exception):
        raise value
    return value  # type: ignore[no-any-return]


async def call(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The same for anything that changes something, in transactions of its own."""
    return await _run(_door.writes, partial(work, *args, **kwargs))


async def _run(lane: Lane, work: Callable[[], T], *, can_share: bool = False) -> T:
    if _is_inside_sync():
        result: T = await sync_to_async(work)()
        return result
    return await lane.run(work, can_share=can_share)


async def insist(ask: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """Return `await ask(*args, **kwargs)`; while the database is away ask again, for `INSIST_SECONDS`.

    For durable work, which would be done again if its result could not be written. The change must be guarded, as it
    may be asked for twice.
    """
    until, delay = time.monotonic() + INSIST_SECONDS, _FIRST_DELAY
    while True:
        try:
            return await ask(*args, **kwargs)
        except DatabaseUnavailable:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(delay)
        delay = min(2 * delay, _MAX_DELAY)


def post(work: Callable[[], Any]) -> None:
    """Have a write done later: no caller waits for it, and it is kept while the database is away.

    It must do no harm if it is done twice. Up to `MAX_POSTED` are kept; `close` tries them a last time.
    """
    _door.writes.post(work)


async def of_site(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run a function of the site, which may take any time, on one of `SITE_THREADS` threads of their own."""
    return await _elsewhere(_door.site_threads, function, *args, **kwargs)


def site_threads() -> ThreadPoolExecutor:
    """Return the threads of the site's functions."""
    return _door.site_threads


async def bulk(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run work on many rows, on one of `BULK_THREADS` threads of their own, with the site's own timeouts."""
    return await _elsewhere(_door.bulk_threads, work, *args, **kwargs)


async def _elsewhere(threads: ThreadPoolExecutor, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    if _is_inside_sync():
        return await sync_to_async(work)(*args, **kwargs)
    result: T = await database_sync_to_async(work, thread_sensitive=False, executor=threads)(*args, **kwargs)
    return result


async def apart(work: Callable[[], T]) -> T:
    """Return `work()`, done in a transaction of its own on one of `RECEIVER_THREADS` threads: it calls receivers.

    With the guards of a lane, whose other writes do not wait for it. Where the database is locked or lost, the whole
    of it is done again, until its deadline. Raises DatabaseUnavailable, and what `work` raises.
    """
    if _is_inside_sync():
        result: T = await sync_to_async(_atomically)(work)
        return result
    # Without a context: an async receiver gets a loop of its own, not this one.
    return await asyncio.get_running_loop().run_in_executor(_door.receiver_threads, _insistently, work)


def _atomically(work: Callable[[], T]) -> T:
    with transaction.atomic(using=router.db_for_write(Stream)):
        return work()


def _insistently(work: Callable[[], T]) -> T:
    """Do `work` in a transaction; again where nothing can have been committed. On a thread of receivers."""
    until, is_over = time.monotonic() + DEADLINE_SECONDS, False
    while True:
        _tidy(partial(_close_unfit, is_rested=True))
        _set_bounds()
        alias, committed, is_done = router.db_for_write(Stream), threading.Event(), False
        try:
            with _transaction(alias, is_group=True):
                transaction.on_commit(committed.set, using=alias)
                value = work()
                is_done = True
            return value
        except Exception as error:
            if committed.is_set():
                logger.exception("a function that a receiver gave to on_commit failed; the transaction is committed")
                return value
            if not is_passing(error):
                raise
            trouble = trouble_of(error) or Trouble.LOCKED
            is_over = is_over or time.monotonic() >= until
            if is_over or (is_done and trouble is not Trouble.LOCKED):
                raise _refusal(trouble, error) from error
            is_over = trouble is not Trouble.LOCKED  # once more on a new connection
        finally:
            _tidy(_close_unowned)
        time.sleep(_PAUSE_SECONDS)


def tell(call: Callable[[], None]) -> None:
    """Have `call`, which calls receivers in no transaction, done on a thread. Beyond `MAX_TOLD` it is dropped."""
    door = _door
    if not door.room_to_tell.acquire(blocking=False):
        logger.error("a signal is not sent: %d wait for their receivers already", MAX_TOLD)
        return

    def work() -> None:
        try:
            call()
        finally:
            door.room_to_tell.release()
            _tidy(_close_unowned)

    door.refusal_threads.submit(work)


def trouble() -> Trouble | None:
    """Return what is wrong with the database, as the last jobs found it."""
    return _door.trouble


def close() -> None:
    """Do what waits, and close the kept connections; what comes meanwhile is done through another door."""
    global _door
    before, _door = _door, Door()
    before.close()
