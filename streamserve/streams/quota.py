"""How many streams a caller may have at once, in all processes of the site.

Counts what runs here and what is about to: no gap between check and start. What other processes run is asked for: two
that start at the same moment may let one too many in. asyncio. Callers are the `owner` strings of streams; those that
begin with "anon:" are visitors without a login.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from streamserve.protocol.errors import Overloaded, QuotaExceeded
from streamserve.protocol.limits import Limits
from streamserve.streams.registry import Streams

RETRY_AFTER = 5  # seconds: about one short answer


@dataclass(frozen=True, slots=True)
class Group:
    """Who shares a limit: one owner, or all whose names begin like that."""

    name: str
    is_prefix: bool = False

    def __contains__(self, owner: str) -> bool:
        return owner.startswith(self.name) if self.is_prefix else owner == self.name


ANONYMOUS = Group("anon:", is_prefix=True)

# The group's unfinished streams in all processes, oldest first: (id, producer), "" where no process runs it.
Running = Callable[[Group], Awaitable[Iterable[tuple[str, str]]]]


class StreamQuota:
    """Concurrent streams per owner, and of all anonymous callers together. Lives on one event loop.

    A parked stream takes a place too, but gives way: the oldest one ends when somebody needs its place. `running`:
    asks for what other processes run too.
    """

    def __init__(self, limits: Limits, streams: Streams, *, running: Running | None = None) -> None:
        self._limits = limits
        self._streams = streams
        self._running = running
        self._starting: Counter[str] = Counter()  # owners of streams being started

    @asynccontextmanager
    async def place_for(self, owner: str) -> AsyncIterator[None]:
        """Hold a place while a stream is being started. Raises QuotaExceeded (429) or Overloaded (503)."""
        await self._make_room(owner)
        self._starting[owner] += 1
        try:
            yield
        finally:
            self._starting -= Counter([owner])  # zeros go too: callers who left take no memory

    async def _make_room(self, owner: str) -> None:
        own = self._limits.max_streams_per_principal
        if not await self._has_room(Group(owner), own):
            raise QuotaExceeded(
                f"You have {own} answers running, which is the limit. Stop one, or wait until one ends.",
                code="too_many_streams",
                retry_after=RETRY_AFTER,
            )
        anonymous = self._limits.max_streams_anonymous
        if owner in ANONYMOUS and not await self._has_room(ANONYMOUS, anonymous):
            raise Overloaded(
                "All places for visitors without a login are taken. Sign in, or try again shortly.",
                code="anonymous_places_taken",
                retry_after=RETRY_AFTER,
            )

    async def _has_room(self, group: Group, limit: int) -> bool:
        """Tell whether one more fits into the group, after ending parked streams if that helps."""
        elsewhere = await self._elsewhere(group)
        while True:
            live = [stream for stream in self._streams.all() if stream.is_live and stream.owner in group]
            starting = sum(number for owner, number in self._starting.items() if owner in group)
            if len(live) + starting + len(elsewhere) < limit:
                return True
            parked = next((stream for stream in live if stream.state == "parked"), None)
            if parked is not None:
                await parked.stop(None)
            elif not await self._end_released(elsewhere):
                return False

    async def _elsewhere(self, group: Group) -> dict[str, str]:
        """Return the group's streams that this process does not run: their producers by id, oldest first."""
        if self._running is None:
            return {}
        rows = await self._running(group)
        ours = {stream.id for stream in self._streams.all() if not stream.lease.is_elsewhere}
        return {stream_id: producer for stream_id, producer in rows if stream_id not in ours}

    async def _end_released(self, elsewhere: dict[str, str]) -> bool:
        """End the oldest stream that no process runs, and take it out; False if there is none."""
        stream_id = next((stream_id for stream_id, producer in elsewhere.items() if not producer), None)
        if stream_id is None:
            return False
        del elsewhere[stream_id]
        stream = await self._streams.reach(stream_id)
        if stream is not None:
            await stream.stop(None)
        return True
