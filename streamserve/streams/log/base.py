"""`EventLog`: where a stream's events are kept, and the one in memory. Readers see only committed events.

Three of them: `FileLog` (file_log.py; all processes of a machine), `RedisLog` (redis_log.py; several machines) and
`MemoryLog` (one process); `SpareLog` (spare_log.py) stands in for one of the first two while that is full or away. One
test suite holds them to the same laws. asyncio; knows nothing of engines, readers or wires.

    StreamserveError
    └── Refused
        └── LogUnavailable 503     the log cannot be reached, read or written now
            ├── LogFull 507        its disk or memory is full
            └── LogLost 503        it no longer has what it had acknowledged
    Exception
    ├── Fenced                     a later producer has claimed the stream
    │   └── Forked                 and what this process has shown since is not in the log
    └── Ended                      the stream has its terminal event
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

from streamserve.protocol.errors import Refused
from streamserve.protocol.events import TERMINALS, Event, LoggedEvent

W = TypeVar("W")
R = TypeVar("R")

Settle = Callable[[int | Exception], None]
Withdraw = Callable[[], bool]

_LOG_ID_ALPHABET = string.ascii_lowercase + string.digits


class Fenced(Exception):
    """Another producer has claimed the stream; this one must end."""


class Forked(Fenced):
    """Another producer has claimed the stream, and what was shown here while the log was away will never be in it."""


class Ended(Exception):
    """The log has its terminal event, and nothing may follow one."""


class LogUnavailable(Refused):
    """The log cannot be reached, read or written now.

    What was being appended is in the log or is not, whole; the next `append` or `last_seq` says which.
    """

    code = "log_down"


class LogFull(LogUnavailable):
    """The log's disk or memory is full. It takes events again once there is room."""

    http_status = 507
    code = "log_full"


class LogLost(LogUnavailable):
    """The log no longer has what it had acknowledged: Redis was restarted without persistence, or evicted it."""

    code = "log_lost"


def new_log_id() -> str:
    """Return a random 12-character name, unique over all streams (62 bits)."""
    number = secrets.randbelow(len(_LOG_ID_ALPHABET) ** 12)
    letters = []
    for _ in range(12):
        number, index = divmod(number, len(_LOG_ID_ALPHABET))
        letters.append(_LOG_ID_ALPHABET[index])
    return "".join(letters)


@dataclass(slots=True)
class Place:
    """Where somebody is who waits for a log: not to be woken for events up to `seq`."""

    seq: int


class EventLog(Protocol):
    """An append-only list of events for each stream, numbered densely from 1; at most one terminal event, the last.

    Every call may raise `LogUnavailable`.
    """

    def submit(self, log_id: str, fence: int, events: Sequence[Event], settle: Settle) -> Withdraw:
        """Do `append` without waiting for it. What is returned takes it back and tells whether it could.

        Unless it was taken back, `settle` is given the last seq, or what `append` raises: once, perhaps before this
        returns, and before who waits for the events is woken. It must not raise. In the order submitted.
        """

    async def append(self, log_id: str, fence: int, events: Sequence[Event]) -> int:
        """Commit `events`, all or none, and return the log's last seq.

        Raises `Fenced` when a later fence has written, `Ended` after a terminal event. The first events make the log.
        No events are a claim: from then on earlier fences are `Fenced`, and what is returned is where their writing
        ended, a terminal event included; KeyError when there is no such log.

        Cancelled before its commit began, nothing is written. Cancelled during it, `CancelledError` comes after the
        commit: then only `last_seq` knows.
        """

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        """Return up to `limit` committed events with seq > `after`. Raises KeyError for an unknown log.

        Fewer than `limit` may come although there are more; none come only if there were none.
        """

    async def last_seq(self, log_id: str) -> int:
        """Return how many events are committed. Raises KeyError for an unknown log."""

    async def wait(self, log_id: str, place: Place) -> None:
        """Return when there may be an event with seq > `place.seq`, or the log was sealed or dropped.

        A hint: it may return early; read again. What other processes append is noticed within 100 ms. The place may be
        moved on meanwhile, by who has the events before.
        """

    async def seal(self, log_id: str) -> None:
        """Say that this process appends no more, and wake who waits here."""

    async def drop(self, log_id: str) -> None:
        """Forget the log. A later `read` raises KeyError."""

    async def purge(self, before: float) -> int:
        """Drop every log that nothing was appended to since `before` (as `time.time()`, to the minute); count them."""

    async def aclose(self) -> None:
        """Commit what was appended, let go of files, sockets and threads, and wake who waits. Nothing may follow."""


class DurableLog(EventLog, Protocol):
    """One that keeps events outside this process, and lets others wake who waits for them here."""

    waiters: Waiters

    async def check(self) -> list[str]:
        """Return what is wrong with how its place keeps things, a sentence each. Raises LogUnavailable."""


class Waiters:
    """Who of this process waits for which log. One event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[None], Place]] = {}

    async def wait(self, log_id: str, place: Place) -> None:
        """Return when the log is woken without a seq, or with one that is higher than the place's."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(log_id, {})[future] = place
        try:
            await future
        finally:
            self._forget(log_id, future)

    def wake(self, log_id: str, last_seq: int | None = None) -> None:
        """Wake who waits for an event up to `last_seq`; without one, all who wait for that log."""
        waiting = self._waiting.get(log_id)
        if waiting is None:
            return
        for future, place in waiting.items():
            if (last_seq is None or last_seq > place.seq) and not future.done():
                future.set_result(None)

    def wake_all(self) -> None:
        """Wake everyone."""
        for log_id in self.awaited():
            self.wake(log_id)

    def awaited(self) -> list[str]:
        """Return the logs that somebody waits for."""
        return list(self._waiting)

    def __contains__(self, log_id: str) -> bool:
        return log_id in self._waiting

    def _forget(self, log_id: str, future: asyncio.Future[None]) -> None:
        futures = self._waiting.get(log_id)
        if futures is not None:
            futures.pop(future, None)
            if not futures:
                del self._waiting[log_id]


@dataclass(slots=True, eq=False)
class Commit(Generic[W, R]):
    """Something a durable log is to do in its next transaction. One event loop.

    The log calls `settle` once, in bounded time, unless it is withdrawn.
    """

    write: W
    settle: Callable[[R | Exception], None]


class Answer(Generic[R]):
    """What is settled, and the task that waits for it. One event loop."""

    def __init__(self) -> None:
        self._result: list[R | Exception] = []  # holds one once there is one
        self._news = asyncio.get_running_loop().create_future()

    def settle(self, result: R | Exception) -> None:
        """Tell the result, or what is to be raised."""
        self._result.append(result)
        if not self._news.done():
            self._news.set_result(None)

    async def wait(self, withdraw: Withdraw) -> R:
        """Wait for the result, cancelled or not, as `EventLog.append` promises. `withdraw` tells whether it could."""
        try:
            await self._news
        except asyncio.CancelledError:
            if not withdraw():
                await self._outlast()
            raise
        (result,) = self._result
        if isinstance(result, Exception):
            raise result
        return result

    async def _outlast(self) -> None:
        while not self._result:
            self._news = asyncio.get_running_loop().create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await self._news


def too_late() -> bool:
    """Withdraw nothing: it has been settled."""
    return False


class Appending:
    """`append`, for logs that have `submit`."""

    async def append(self: EventLog, log_id: str, fence: int, events: Sequence[Event]) -> int:
        answer: Answer[int] = Answer()
        return await answer.wait(self.submit(log_id, fence, events, answer.settle))


@dataclass(slots=True)
class _Kept:
    """One log in memory."""

    events: list[Event]
    fence: int
    touched_at: float


class MemoryLog(Appending):
    """Events in this process's memory: for tests and single-process sites; gone with the process."""

    def __init__(self) -> None:
        self._logs: dict[str, _Kept] = {}
        self._waiters = Waiters()

    def submit(self, log_id: str, fence: int, events: Sequence[Event], settle: Settle) -> Withdraw:
        kept = self._logs.get(log_id)
        if kept is None:
            if not events:
                settle(KeyError(log_id))
                return too_late
            kept = self._logs[log_id] = _Kept([], fence, 0.0)
        if fence < kept.fence:
            settle(Fenced(log_id))
        elif events and kept.events and isinstance(kept.events[-1], TERMINALS):
            settle(Ended(log_id))
        else:
            kept.fence, kept.touched_at = fence, time.time()
            kept.events += events
            last_seq = len(kept.events)
            settle(last_seq)
            self._waiters.wake(log_id, last_seq)
        return too_late

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        return list(map(LoggedEvent, count(after + 1), self._logs[log_id].events[after : after + limit]))

    async def last_seq(self, log_id: str) -> int:
        return len(self._logs[log_id].events)

    async def wait(self, log_id: str, place: Place) -> None:
        if log_id in self._logs and len(self._logs[log_id].events) <= place.seq:
            await self._waiters.wait(log_id, place)

    async def seal(self, log_id: str) -> None:
        self._waiters.wake(log_id)

    async def drop(self, log_id: str) -> None:
        self._logs.pop(log_id, None)
        self._waiters.wake(log_id)

    async def purge(self, before: float) -> int:
        old = [log_id for log_id, kept in self._logs.items() if kept.touched_at < before]
        for log_id in old:
            await self.drop(log_id)
        return len(old)

    async def aclose(self) -> None:
        self._waiters.wake_all()
