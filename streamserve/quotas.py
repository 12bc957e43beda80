"""How many streams a caller may have at once. Counts what runs and what is about to: no gap between check and start."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from streamserve.auth import Principal
from streamserve.protocol.errors import Overloaded, QuotaExceeded
from streamserve.protocol.limits import Limits
from streamserve.streams.directory import Streams

RETRY_AFTER = 5  # seconds: about one short answer
ANONYMOUS = "anon:"


class StreamQuota:
    """Concurrent streams per principal, and of all anonymous callers together. Lives on one event loop.

    A parked stream takes a place too, but gives way: the oldest one ends when somebody needs its place.
    """

    def __init__(self, limits: Limits, streams: Streams) -> None:
        self._limits = limits
        self._streams = streams
        self._starting: Counter[str] = Counter()  # owners of streams being started

    @asynccontextmanager
    async def place_for(self, principal: Principal) -> AsyncIterator[None]:
        """Hold a place while a stream is being started. Raises QuotaExceeded (429) or Overloaded (503)."""
        await self._make_room(principal)
        self._starting[principal.owner] += 1
        try:
            yield
        finally:
            self._starting -= Counter([principal.owner])  # zeros go too: callers who left take no memory

    async def _make_room(self, principal: Principal) -> None:
        own = self._limits.max_streams_per_principal
        if not await self._has_room(lambda owner: owner == principal.owner, own):
            raise QuotaExceeded(
                f"You have {own} answers running, which is the limit. Stop one, or wait until one ends.",
                code="too_many_streams",
                retry_after=RETRY_AFTER,
            )
        anonymous = self._limits.max_streams_anonymous
        if principal.kind == "anonymous" and not await self._has_room(_is_anonymous, anonymous):
            raise Overloaded(
                "All places for visitors without a login are taken. Sign in, or try again shortly.",
                code="anonymous_places_taken",
                retry_after=RETRY_AFTER,
            )

    async def _has_room(self, counts: Callable[[str], bool], limit: int) -> bool:
        """Tell whether one more fits among the owners that count, after ending parked streams if that helps."""
        while True:
            live = [stream for stream in self._streams.all() if stream.is_live and counts(stream.owner)]
            starting = sum(number for owner, number in self._starting.items() if counts(owner))
            if len(live) + starting < limit:
                return True
            parked = next((stream for stream in live if stream.state == "parked"), None)
            if parked is None:
                return False
            await parked.stop(None)


def _is_anonymous(owner: str) -> bool:
    return owner.startswith(ANONYMOUS)
