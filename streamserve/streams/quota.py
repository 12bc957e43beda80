"""`StreamQuota`: the bounds on a caller's concurrent streams, in all processes of the site.

Counts the streams that run or start in this process, without a gap between check and start. The streams of other
processes are read from the store, so two processes that start one at the same moment may exceed a bound by one.
asyncio. Callers are the `owner` strings of streams; those that begin with "anon:" are visitors without a login.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from typing import TYPE_CHECKING
from weakref import WeakSet

from streamserve.protocol.errors import Overloaded, QuotaExceeded, StreamserveError
from streamserve.protocol.requests import Limits
from streamserve.streams.config import JOB
from streamserve.streams.store import ANONYMOUS, Group, groups_of

if TYPE_CHECKING:
    from streamserve.streams.registry import Streams
    from streamserve.streams.stream import Stream

logger = logging.getLogger("streamserve.streams")

RETRY_AFTER = 5  # seconds: about one short answer

_Rows = Sequence[tuple[str, str]]


class StreamQuota:
    """The bounds on one owner's streams, and on those of all anonymous callers together. Lives on one event loop.

    A parked stream without a reader counts too, but is ended, oldest first, to make room for a new stream. None as
    `limits` is no bound.
    """

    def __init__(self, limits: Limits | None, streams: Streams) -> None:
        self._limits = limits
        self._streams = streams
        self._starting: Counter[str] = Counter()  # owners of streams being started
        self._evicted: WeakSet[Stream] = WeakSet()  # asked to end; during an outage of the log they still run
        self._evicting: dict[str, asyncio.Task[None]] = {}  # for streams that no process runs, by id

    @asynccontextmanager
    async def reserve(self, owner: str) -> AsyncIterator[Callable[[], None]]:
        """Count a stream while it starts. Raises QuotaExceeded (429) or Overloaded (503).

        Call the yielded function once the engine has accepted: it ends the streams that must make room, without waiting
        for their ends. It raises the same errors if readers have returned to those meanwhile.
        """
        bounds: list[tuple[Group, int, _Rows]] = []
        if self._limits is not None:
            bounds = [(group, limit_of(group, self._limits), ()) for group in groups_of(owner)]
        if self._streams.store.is_shared:
            bounds = [(group, limit, await self._streams.store.running(group)) for group, limit, _ in bounds]
        for group, limit, rows in bounds:
            self._in_excess(group, limit, rows, num_more=1)
        self._starting[owner] += 1

        def make_room() -> None:
            for group, limit, rows in bounds:
                for stream in self._in_excess(group, limit, rows):
                    self._evict(stream)

        try:
            yield make_room
        finally:
            self._starting -= Counter([owner])  # also drops zeros, so that former callers take no memory

    async def aclose(self) -> None:
        """Cancel the evictions that run."""
        evicting = list(self._evicting.values())
        for task in evicting:
            task.cancel()
        await asyncio.gather(*evicting, return_exceptions=True)

    def _in_excess(self, group: Group, limit: int, rows: _Rows, *, num_more: int = 0) -> list[Stream | str]:
        """Return what must end to keep the group's `limit`: streams of this process, ids of streams that none runs.

        `rows` are the group's unfinished streams that other processes produce, or none does. Raises if ending every
        idle stream is not enough. Takes time by the streams that run, not by those that have finished.
        """
        excess = num_more - limit
        for owner, num_starting in self._starting.items():
            if owner in group:
                excess += num_starting
        idle: list[Stream | str] = []
        ours = set(self._evicting)
        for stream in self._streams.unfinished.get(group, {}).values():
            if stream.on_disconnect == JOB:
                continue  # jobs have a limit of their own
            is_held = stream.readers.num_holding > 0 or stream.on_disconnect == "finish"
            if not stream.lease.is_elsewhere:
                ours.add(stream.id)
            if stream.is_live and (is_held or stream not in self._evicted):
                excess += 1
                if stream.state == "parked" and not is_held:
                    idle.append(stream)
        for stream_id, producer in rows:
            if stream_id not in ours:
                excess += 1
                if not producer:
                    idle.append(stream_id)
        if excess > len(idle):
            raise _refusal(group, limit)
        return idle[: max(0, excess)]

    def _evict(self, stream: Stream | str) -> None:
        if isinstance(stream, str):
            task = asyncio.get_running_loop().create_task(self._evict_released(stream), context=Context())
            self._evicting[stream] = task
            task.add_done_callback(lambda _: self._evicting.pop(stream, None))
        else:
            self._evicted.add(stream)
            stream.abandon()

    async def _evict_released(self, stream_id: str) -> None:
        """End a stream that no process runs, unless one resumed it meanwhile."""
        try:
            record = await self._streams.store.find(stream_id=stream_id)
            if record is not None and not record.producer:
                stream = await self._streams.reach(stream_id, record)
                if stream is not None:
                    self._evict(stream)
        except Exception:
            logger.exception("stream %s: ending it to make room failed", stream_id)


def limit_of(group: Group, limits: Limits) -> int:
    """Return how many concurrent streams a group may have."""
    if group == ANONYMOUS:
        return limits.max_streams_anonymous
    return limits.max_streams_per_visitor if group.name in ANONYMOUS else limits.max_streams_per_principal


def _refusal(group: Group, limit: int) -> StreamserveError:
    if group == ANONYMOUS:
        return Overloaded(
            "All places for visitors without a login are taken. Sign in, or try again shortly.",
            code="anonymous_places_taken",
            retry_after=RETRY_AFTER,
        )
    return QuotaExceeded(
        f"You have {limit} answers running, which is the limit. Stop one, or wait until one ends.",
        code="too_many_streams",
        retry_after=RETRY_AFTER,
    )
