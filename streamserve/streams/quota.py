"""`StreamQuota`: the bounds on a caller's concurrent streams, in all processes of the site, and the queue before them.

Counts the streams that run or start in this process, without a gap between check and start. The streams of other
processes are read from the store, so two processes that each start a stream at the same moment may exceed a bound by
one. A request beyond its caller's places waits in the caller's own queue in this process, in order of arrival; callers
take turns, the caller with the fewest streams first. asyncio. Callers are the `place_of` of admissions; those that
begin with "anon:" are visitors without a login.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from streamserve.protocol.errors import BadRequest, EngineUnavailable, Overloaded, QuotaExceeded, Refused
from streamserve.protocol.limits import Limits
from streamserve.streams.config import JOB
from streamserve.streams.store import ANONYMOUS, Group, groups_of

if TYPE_CHECKING:
    from streamserve.streams.store import Record, StreamStore
    from streamserve.streams.stream import Stream

logger = logging.getLogger("streamserve.streams")

# How long an answer takes, before any answer has ended.
_FIRST_GUESS = 5.0
# Weight of the answer that ended last in the mean duration: about the last ten count.
_NEWEST = 0.1
# While a request waits, places that other processes free, and streams that lose their readers, are looked for so often;
# less often where the look itself takes long.
_POLL_SECONDS, _POLL_FACTOR = 0.25, 10.0

_Rows = Sequence[tuple[str, str]]


@dataclass(slots=True)
class Places:
    """The places of streams that one request begins, all or none: the first of them takes all. Close it afterwards."""

    num: int = 1  # of the streams that have not begun
    num_held: int = 0
    bounds: tuple[_Bound, ...] = ()
    give_back: Callable[[int], None] = lambda num: None

    def close(self) -> None:
        """Give back what no stream has taken. Idempotent."""
        num, self.num_held = self.num_held, 0
        self.give_back(num)


@dataclass(frozen=True, slots=True)
class _Bound:
    """How many streams a group may have. `rows`: its streams that other processes produce, or none does."""

    group: Group
    limit: int
    rows: _Rows


def _future() -> asyncio.Future[tuple[_Bound, ...]]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for `num` places."""

    num: int
    since: float
    bounds: asyncio.Future[tuple[_Bound, ...]] = field(default_factory=_future)

    @property
    def has_places(self) -> bool:
        """Whether they are counted for it."""
        return self.bounds.done() and not self.bounds.cancelled() and self.bounds.exception() is None


class _Full(Exception):
    """Ending every idle stream is not enough to keep this bound."""

    def __init__(self, bound: _Bound) -> None:
        super().__init__(bound)
        self.bound = bound


class OpenStreams(Protocol):
    """What the quota counts, and ends where a stream must make room: `Streams`."""

    store: StreamStore
    unfinished: dict[Group, dict[str, Stream]]  # by group and id, oldest first

    async def reach(self, stream_id: str, record: Record | None = None) -> Stream | None:
        """Return the stream of that id, in any process. Raises LogUnavailable."""


class StreamQuota:
    """The bounds on one owner's streams, and on those of all anonymous callers together. Lives on one event loop.

    A parked stream without a reader counts too, but is ended, oldest first, to make room for a new stream. None as
    `limits` is no bound.
    """

    def __init__(self, limits: Limits | None, streams: OpenStreams) -> None:
        self._limits = limits
        self._streams = streams
        self._starting: Counter[str] = Counter()  # owners of streams being started
        self._evicted: WeakSet[Stream] = WeakSet()  # asked to end; during an outage of the log they still run
        self._evicting: dict[str, asyncio.Task[None]] = {}  # for streams that no process runs, by id
        self._waiting: dict[str, deque[_Waiter]] = {}  # of callers that have some, in order of arrival
        self._serving: asyncio.Task[None] | None = None  # while requests wait
        self._news = asyncio.Event()  # a place may be free, or another request waits
        self._is_closed = False
        self._answer_seconds: float | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def reserve(
        self, owner: str, seconds: float = 0.0, places: Places | None = None
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Count a stream while it starts; wait for its place so long. Raises QuotaExceeded (429) or Overloaded (503).

        `places`: of several streams that begin together. Await the yielded function once the engine has accepted: it
        ends the streams that must make room, without waiting for their ends. It raises the same errors if readers have
        returned to those meanwhile.
        """
        places = places or Places()
        if not places.num_held:
            places.bounds = await self._take(owner, places.num, seconds)
            places.num_held, places.give_back = places.num, lambda num: self._give_back(owner, num)

        async def make_room() -> None:
            with self._refusing(owner):
                try:
                    self._make_room(places.bounds)
                except _Full:  # its rows are old, where the engine has loaded meanwhile
                    places.bounds = await self._bounds(owner, {})
                    self._make_room(places.bounds)

        try:
            yield make_room
        finally:
            places.num -= 1
            if places.num_held:
                places.num_held -= 1
                self._give_back(owner, 1)

    def note_end(self, stream: Stream) -> None:
        """A stream has ended, or has left this process."""
        timings = stream.transcript.timings
        accepted_at, ended_at = timings.accepted_at, timings.ended_at
        if accepted_at is not None and ended_at is not None and stream.on_disconnect != JOB:
            seconds, known = ended_at - accepted_at, self._answer_seconds
            self._answer_seconds = seconds if known is None else known + _NEWEST * (seconds - known)
        self._news.set()

    def close_queue(self) -> None:
        """Refuse the requests that wait, and let no more wait: the server shuts down, another process takes them."""
        self._is_closed = True
        for queue in self._waiting.values():
            for waiter in queue:
                if not waiter.bounds.done():
                    waiter.bounds.set_exception(EngineUnavailable("The server is restarting. Send it again."))

    async def aclose(self) -> None:
        """Refuse what waits, and cancel the evictions that run."""
        self.close_queue()
        ending = [*self._evicting.values(), *([] if self._serving is None else [self._serving])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    # Places

    async def _take(self, owner: str, num: int, seconds: float) -> tuple[_Bound, ...]:
        """Count `num` streams that start, once there is room for all; return the bounds that were kept."""
        if self._limits is None:
            self._starting[owner] += num
            return ()
        limit = min(limit for _, limit in self._limits_of(owner))
        if num > 1 and limit < num:
            message = f"This request begins {num} answers, and you may have {limit} at a time. Send fewer prompts."
            raise BadRequest(message, code="too_many_prompts", param="prompt")
        with self._refusing(owner):
            bounds = await self._bounds(owner, {})
            is_behind = any(name in bound.group for bound in bounds for name in self._waiting)
            may_wait = seconds > 0 and limit > 0 and not self._is_closed and self._may_wait(owner)
            if not (is_behind and may_wait):
                try:
                    return self._enter(owner, num, bounds)
                except _Full:
                    if not may_wait:
                        raise
            return await self._wait(owner, num, seconds)

    async def _bounds(self, owner: str, known: dict[Group, _Rows]) -> tuple[_Bound, ...]:
        """Return the caller's bounds. `known` are rows that have just been read, and gets what is read here."""
        out = []
        for group, limit in self._limits_of(owner):
            if group not in known:
                known[group] = await self._streams.store.running(group) if self._streams.store.is_shared else ()
            out.append(_Bound(group, limit, known[group]))
        return tuple(out)

    def _limits_of(self, owner: str) -> Iterator[tuple[Group, int]]:
        """Yield how many concurrent streams each group of the caller may have."""
        limits = self._limits
        assert limits is not None
        for group in groups_of(owner):
            if group == ANONYMOUS:
                yield group, limits.max_streams_anonymous
            elif not group.is_prefix:
                yield group, limits.max_streams_per_visitor if owner in ANONYMOUS else limits.max_streams_per_principal
            elif limits.max_streams_per_address:
                yield group, limits.max_streams_per_address

    def _enter(self, owner: str, num: int, bounds: tuple[_Bound, ...]) -> tuple[_Bound, ...]:
        """Count `num` streams that start, or raise _Full."""
        for bound in bounds:
            self._in_excess(bound, num_more=num)
        self._starting[owner] += num
        return bounds

    def _give_back(self, owner: str, num: int) -> None:
        self._starting -= Counter({owner: num})  # also drops zeros, so that former callers take no memory
        self._news.set()

    def _in_excess(self, bound: _Bound, *, num_more: int = 0) -> list[Stream | str]:
        """Return what must end to keep the bound: streams of this process, ids of streams that none runs.

        Raises _Full if ending every idle stream is not enough. Takes time by the streams that run, not by those that
        have finished.
        """
        excess = num_more - bound.limit
        for owner, num_starting in self._starting.items():
            if owner in bound.group:
                excess += num_starting
        idle: list[Stream | str] = []
        ours = set(self._evicting)
        for stream in self._streams.unfinished.get(bound.group, {}).values():
            if stream.on_disconnect == JOB:
                continue  # jobs have a limit of their own
            is_held = stream.readers.num_holding > 0 or stream.on_disconnect == "finish"
            if not stream.lease.is_elsewhere:
                ours.add(stream.id)
            if stream.is_live and (is_held or stream not in self._evicted):
                excess += 1
                if stream.state == "parked" and not is_held and not stream.awaits_first_reader:
                    idle.append(stream)
        for stream_id, producer in bound.rows:
            if stream_id not in ours:
                excess += 1
                if not producer:
                    idle.append(stream_id)
        if excess > len(idle):
            raise _Full(bound)
        return idle[: max(0, excess)]

    def _make_room(self, bounds: Sequence[_Bound]) -> None:
        for bound in bounds:
            for stream in self._in_excess(bound):
                self._evict(stream)

    def _evict(self, stream: Stream | str) -> None:
        if isinstance(stream, str):
            task = asyncio.get_running_loop().create_task(self._evict_released(stream), context=Context())
            self._evicting[stream] = task
            task.add_done_callback(lambda _: self._evicting.pop(stream, None))
        else:
            self._evicted.add(stream)
            stream.abandon()

    async def _evict_released(self, stream_id: str) -> None:
        """End a stream that no process runs, unless a process resumed it meanwhile."""
        try:
            record = await self._streams.store.find(stream_id=stream_id)
            if record is not None and not record.producer:
                stream = await self._streams.reach(stream_id, record)
                if stream is not None:
                    self._evict(stream)
        except Exception:
            logger.exception("stream %s: ending it to make room failed", stream_id)

    # The queue

    async def _wait(self, owner: str, num: int, seconds: float) -> tuple[_Bound, ...]:
        """Wait in the caller's queue for `num` places; raise _Full after `seconds`."""
        waiter = _Waiter(num, time.monotonic())
        self._waiting.setdefault(owner, deque()).append(waiter)
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve(), name="quota", context=Context())
        self._news.set()
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                return await waiter.bounds
        except BaseException as error:
            if waiter.has_places:  # they came at the same moment
                if isinstance(error, TimeoutError):
                    return waiter.bounds.result()
                self._give_back(owner, num)
            elif isinstance(error, TimeoutError):
                return self._enter(owner, num, await self._bounds(owner, {}))
            raise
        finally:
            self._leave(owner, waiter)

    def _leave(self, owner: str, waiter: _Waiter) -> None:
        queue = self._waiting.get(owner, deque())
        with suppress(ValueError):
            queue.remove(waiter)
        if not queue:
            self._waiting.pop(owner, None)
        self._news.set()

    def _may_wait(self, owner: str) -> bool:
        """Whether another request may wait. A full queue of visitors has a share for each address, which no other can
        fill.

        Of each visitor where the site bounds no address, or none is known.
        """
        assert self._limits is not None
        most, limits = self._limits.max_queued_per_principal, self._limits
        is_full = len(self._waiting.get(owner, ())) >= most
        if owner not in ANONYMOUS or is_full:
            return not is_full
        waiting: Counter[Group] = Counter()
        for name, queue in self._waiting.items():
            if name in ANONYMOUS:
                waiting[self._origin(name)] += len(queue)
        mine = self._origin(owner)
        share = limits.max_queued_anonymous // len(waiting.keys() | {mine})
        return waiting.total() < limits.max_queued_anonymous or waiting[mine] < share

    def _origin(self, visitor: str) -> Group:
        """Return the largest group of the visitor that has a limit of its own: its address's, or itself."""
        return [group for group, _ in self._limits_of(visitor) if group != ANONYMOUS][-1]

    async def _serve(self) -> None:
        """Give out places while requests wait."""
        try:
            while self._waiting:
                self._news.clear()
                began_at = time.monotonic()
                try:
                    await self._give_out()
                except Exception:  # the edge of the task
                    logger.exception("giving out places failed")
                pause = max(_POLL_SECONDS, _POLL_FACTOR * (time.monotonic() - began_at))
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._news.wait()
        finally:
            self._serving = None

    async def _give_out(self) -> None:
        """Give free places to the first of each queue, as long as there are some; the caller with the fewest first."""
        full: list[Group] = []  # of more than one caller
        known: dict[Group, _Rows] = {}
        turns = list(map(self._turn_of, self._waiting))
        heapify(turns)
        while turns:
            _, _, owner = heappop(turns)
            if owner not in self._waiting or any(owner in group for group in full):
                continue
            waiter = self._waiting[owner][0]
            try:
                bounds = await self._bounds(owner, known)
                if not waiter.bounds.done():
                    waiter.bounds.set_result(self._enter(owner, waiter.num, bounds))
            except _Full as reason:
                if reason.bound.group.is_prefix:
                    full.append(reason.bound.group)
                continue
            except Exception as error:  # of the store: it is the request's own
                if not waiter.bounds.done():
                    waiter.bounds.set_exception(error)
            queue = self._waiting.get(owner)
            if queue and queue[0] is waiter:
                queue.popleft()
                if not queue:
                    del self._waiting[owner]
            if owner in self._waiting:
                heappush(turns, self._turn_of(owner))

    def _turn_of(self, owner: str) -> tuple[int, float, str]:
        """Return what orders the callers that wait: how many streams they have, and since when they wait."""
        return self._num_of(owner), self._waiting[owner][0].since, owner

    def _num_of(self, owner: str) -> int:
        return len(self._streams.unfinished.get(Group(owner), ())) + self._starting[owner]

    # Refusals

    @contextmanager
    def _refusing(self, owner: str) -> Iterator[None]:
        """Raise the caller's refusal for _Full."""
        try:
            yield
        except _Full as reason:
            raise self._refusal(owner, reason.bound) from None

    def _refusal(self, owner: str, bound: _Bound) -> Refused:
        retry_after = math.ceil(self._seconds_until(bound, 1 + len(self._waiting.get(owner, ()))))
        if bound.group == ANONYMOUS:
            return Overloaded(
                "All places for visitors without a login are taken. Sign in, or try again shortly.",
                code="anonymous_places_taken",
                retry_after=retry_after,
            )
        who = "The visitors at your address" if bound.group.is_prefix else "You"
        return QuotaExceeded(
            f"{who} have {bound.limit} answers running, which is the limit. Stop one of them, or wait until one ends.",
            code="too_many_streams",
            retry_after=retry_after,
        )

    def _seconds_until(self, bound: _Bound, number: int) -> float:
        """Return when so many places have come free: each when its answer has run for as long as recent answers did.

        An answer that has run for longer is taken to need a quarter of its time again.
        """
        now = time.monotonic()
        mine = self._streams.unfinished.get(bound.group, {})
        ran = [now - (one.transcript.timings.accepted_at or now) for one in mine.values() if one.is_live]
        seconds = self._answer_seconds
        if seconds is None:
            seconds = max(ran, default=0.0) or _FIRST_GUESS
        left = sorted(max(seconds - one, seconds / 4) for one in ran)
        left += [seconds] * (max(1, bound.limit) - len(left))
        rounds, index = divmod(number - 1, len(left))
        return left[index] + rounds * seconds
