"""`EventLog`: where a stream's events are kept, and the log in memory. Readers see only committed events.

Three logs: `FileLog` (file_log.py; all processes of a machine), `RedisLog` (redis_log.py; several machines) and
`MemoryLog` (one process). One test suite holds them to the same laws. asyncio; knows no engines, readers or
wires.

    StreamserveError
    └── Refused
        └── LogUnavailable 503     the log cannot be reached, read or written now
            └── LogFull 507        its disk or memory is full
    Refusal of one batch
    ├── Fenced                     a later producer has claimed the stream
    ├── Ended                      the stream has its terminal event
    ├── LogLost                    the log no longer has what it had acknowledged
    └── Rejected                   the log refuses this batch for what is in it, or in its place
"""

from __future__ import annotations

import asyncio
import secrets
import string
import time
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from streamserve.protocol.errors import Refused
from streamserve.protocol.events import Event, LoggedEvent, is_terminal
from streamserve.protocol.frames import encode_event

_LOG_ID_ALPHABET = string.ascii_lowercase + string.digits
# A log without an end is dropped only this long after its last append: its reader may be that slow, and the process
# that writes it touches it every few minutes. Logs of killed processes end through the reaper; this is the backstop.
UNFINISHED_SECONDS = 24 * 3600.0


class Refusal(Exception):
    """Why a batch was not committed although the log works."""


class Fenced(Refusal):
    """Another producer has claimed the stream; this producer must stop writing."""


class Ended(Refusal):
    """The log has its terminal event, and no event may follow it."""


class LogLost(Refusal):
    """The log no longer has what it had acknowledged: Redis restarted without persistence, or failed over."""


class Rejected(Refusal):
    """The log works and refuses this batch: the same batch again would be refused again."""


class LogUnavailable(Refused):
    """The log cannot be reached, read or written now.

    Each batch of the failed commit is in the log whole or not at all; committing the same batch again finds out.
    """

    code = "log_down"


class LogFull(LogUnavailable):
    """The log's disk or memory is full. It takes events again once there is room."""

    http_status = 507
    code = "log_full"


def new_log_id() -> str:
    """Return a random 12-character name, unique over all streams (62 bits)."""
    # Of 128 bits the remainder is as good as uniform, and one call releases the GIL once; `randbelow` draws again.
    number = secrets.randbits(128) % len(_LOG_ID_ALPHABET) ** 12
    letters = []
    for _ in range(12):
        number, index = divmod(number, len(_LOG_ID_ALPHABET))
        letters.append(_LOG_ID_ALPHABET[index])
    return "".join(letters)


@dataclass(slots=True, eq=False)
class Batch:
    """Events to be committed after event `base_seq` of a log, all or none.

    `base_seq` None is wherever the log ends: for tests and tools, since a retry of such a batch may write twice.
    A batch without events is a claim: from then on lower fences are `Fenced`, and its result is where their writing
    ended, a terminal event included. It also counts as an append for `purge`.
    """

    log_id: str
    fence: int
    base_seq: int | None
    events: Sequence[Event]
    bodies: Sequence[bytes]  # the events encoded
    is_end: bool  # the last event is terminal


def make_batch(log_id: str, fence: int, base_seq: int | None, events: Sequence[Event]) -> Batch:
    """Return a batch with its events encoded. Raises FrameError for an event that cannot be."""
    is_end = bool(events) and is_terminal(events[-1])
    return Batch(log_id, fence, base_seq, events, [encode_event(event) for event in events], is_end)


# A batch's result: the log's last seq, or why it was refused. KeyError: a claim of a log that does not exist.
Result = int | Refusal | KeyError


@dataclass(frozen=True, slots=True)
class Committed:
    """The results of a commit that is done: awaited, it returns them without a wait."""

    results: list[Result]

    def __await__(self) -> Generator[Any, None, list[Result]]:
        return self.results
        yield


class EventLog(Protocol):
    """An append-only list of events for each stream, numbered densely from 1; at most one terminal event, the last.

    Every method but `wake` may raise `LogUnavailable`. `place`: where it is, for the operator who reads our log.
    """

    place: str

    def commit(self, batches: Sequence[Batch]) -> Awaitable[list[Result]]:
        """Commit each batch, all or none of its events, and return each batch's result, in order: to be awaited.

        Where nothing was waited for it is `Committed` at once.

        Idempotent: a batch with a `base_seq` that is committed already, as the last batch and under the same fence, has
        its first result again. A batch with `base_seq` 0 makes the log. `LogLost` is the result where the log ends
        before `base_seq`. After LogUnavailable or a cancellation each batch is committed or not.
        """

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        """Return up to `limit` committed events with seq > `after`. Raises KeyError for an unknown log.

        Fewer than `limit` may come although there are more; none come only if there were none.
        """

    async def last_seq(self, log_id: str) -> int:
        """Return how many events are committed. Raises KeyError for an unknown log."""

    async def wait(self, log_id: str, after: int) -> None:
        """Return when there may be an event with seq > `after`, or the log was dropped, or `wake` was called.

        A hint: it may return early; read again. Commits of other processes are noticed within 100 ms.
        """

    def wake(self, log_id: str) -> None:
        """Have every `wait` of this process for the log return."""

    async def drop(self, log_id: str) -> None:
        """Delete the log. A later `read` raises KeyError."""

    async def purge(self, before: float) -> int:
        """Delete every finished log without an append since `before` (as `time.time()`, to the minute); count them.

        Unfinished logs go once they have had no append for `UNFINISHED_SECONDS` more.
        """

    async def old(self, before: float) -> Sequence[str]:
        """Return the logs that `purge` would delete."""

    async def check(self) -> list[str]:
        """Return what would lose acknowledged events where the log is kept, a sentence each."""

    async def aclose(self) -> None:
        """Commit what was submitted, close files, sockets and threads, and end every `wait`. Nothing may follow."""


async def commit_one(log: EventLog, batch: Batch) -> int:
    """Commit one batch and return the log's last seq. Raises its refusal, KeyError or LogUnavailable."""
    (result,) = await log.commit([batch])
    if isinstance(result, Exception):
        raise result
    return result


async def append(log: EventLog, log_id: str, fence: int, events: Sequence[Event]) -> int:
    """Commit `events` wherever the log ends; no events are a claim. Raises as `commit_one` does."""
    return await commit_one(log, make_batch(log_id, fence, None, events))


class Waiters:
    """The `wait` calls of this process, by log: each future, and the seq it waits behind. One event loop."""

    def __init__(self) -> None:
        self.by_log: dict[str, dict[asyncio.Future[None], int]] = {}

    async def wait(self, log_id: str, after: int) -> None:
        """Return when the log is woken without a seq, or with a seq above `after`."""
        future = asyncio.get_running_loop().create_future()
        self.by_log.setdefault(log_id, {})[future] = after
        try:
            await future
        finally:
            futures = self.by_log.get(log_id)
            if futures is not None:
                futures.pop(future, None)
                if not futures:
                    del self.by_log[log_id]

    def wake(self, log_id: str, last_seq: int | None = None) -> None:
        """End the waits for an event up to `last_seq`; without `last_seq`, all waits for that log."""
        for future, after in self.by_log.get(log_id, {}).items():
            if (last_seq is None or last_seq > after) and not future.done():
                future.set_result(None)

    def wake_all(self) -> None:
        """End every wait."""
        for log_id in self.awaited():
            self.wake(log_id)

    def awaited(self) -> list[str]:
        """Return the logs with a wait."""
        return list(self.by_log)


@dataclass(slots=True)
class _Kept:
    """One log in memory."""

    events: list[Event]
    fence: int
    touched_at: float


class MemoryLog:
    """Events in this process's memory: for tests and single-process sites; gone with the process."""

    place = "in memory"

    def __init__(self) -> None:
        self._logs: dict[str, _Kept] = {}
        self._waiters = Waiters()

    def commit(self, batches: Sequence[Batch]) -> Committed:
        return Committed([self._commit(batch) for batch in batches])

    def _commit(self, batch: Batch) -> Result:
        kept = self._logs.get(batch.log_id)
        num_new = len(batch.events)
        if kept is None:
            if not num_new:
                return KeyError(batch.log_id)
            if batch.base_seq:
                return LogLost(batch.log_id)
            kept = self._logs[batch.log_id] = _Kept([], batch.fence, 0.0)
        last_seq = len(kept.events)
        if batch.fence < kept.fence:
            return Fenced(batch.log_id)
        if num_new:
            if batch.base_seq is not None and last_seq == batch.base_seq + num_new and batch.fence == kept.fence:
                return last_seq
            if last_seq and is_terminal(kept.events[-1]):
                return Ended(batch.log_id)
            if batch.base_seq is not None and last_seq != batch.base_seq:
                return LogLost(batch.log_id) if last_seq < batch.base_seq else Fenced(batch.log_id)
        kept.fence, kept.touched_at = batch.fence, time.time()
        kept.events += batch.events
        self._waiters.wake(batch.log_id, last_seq + num_new)
        return last_seq + num_new

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        return list(map(LoggedEvent, count(after + 1), self._logs[log_id].events[after : after + limit]))

    async def last_seq(self, log_id: str) -> int:
        return len(self._logs[log_id].events)

    async def wait(self, log_id: str, after: int) -> None:
        if log_id in self._logs and len(self._logs[log_id].events) <= after:
            await self._waiters.wait(log_id, after)

    def wake(self, log_id: str) -> None:
        self._waiters.wake(log_id)

    async def drop(self, log_id: str) -> None:
        self._logs.pop(log_id, None)
        self._waiters.wake(log_id)

    async def purge(self, before: float) -> int:
        old = await self.old(before)
        for log_id in old:
            await self.drop(log_id)
        return len(old)

    async def old(self, before: float) -> Sequence[str]:
        return [log_id for log_id, kept in self._logs.items() if kept.touched_at < _deadline(kept, before)]

    async def check(self) -> list[str]:
        return []

    async def aclose(self) -> None:
        self._waiters.wake_all()


def _deadline(kept: _Kept, before: float) -> float:
    is_ended = bool(kept.events) and is_terminal(kept.events[-1])
    return before if is_ended else before - UNFINISHED_SECONDS
