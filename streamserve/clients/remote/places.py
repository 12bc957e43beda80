"""`Places`: the requests that may run at a server elsewhere at once, and the order of those that wait for a place.

Tenants take turns, and each tenant's requests go in the order of arrival: a tenant's flood delays its own requests.
Knows tenants by name, no requests. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque

from streamserve.protocol.errors import Overloaded


class Places:
    """`num_free` of the places; `max_waiting` bounds the requests that wait for a place."""

    def __init__(self, num_places: int, max_waiting: int) -> None:
        self.num_free = num_places
        self._num_places = num_places
        self._max_waiting = max_waiting
        # Of the tenants that have some, in the order of their turns. Invariant: none wait while places are free.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def num_taken(self) -> int:
        """Requests that have a place."""
        return self._num_places - self.num_free

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return sum(map(len, self._waiting.values()))

    def num_ahead(self, tenant: str) -> int:
        """Return how many waiting requests come before a new one of `tenant`: its own, and so many of each other."""
        num_own = len(self._waiting.get(tenant, ()))
        others = (len(waiting) for name, waiting in self._waiting.items() if name != tenant)
        return num_own + sum(min(number, num_own + 1) for number in others)

    def check_room(self, tenant: str) -> None:
        """Raise Overloaded if too many requests wait already.

        A full queue still takes a request of a tenant with less than its share of it, which no other can fill: with n
        tenants at most 1 + ln n times `max_waiting` wait.
        """
        num_own, num_tenants = len(self._waiting.get(tenant, ())) + 1, len(self._waiting.keys() | {tenant})
        if not self.num_free and self.num_waiting >= self._max_waiting and num_own > self._max_waiting // num_tenants:
            raise Overloaded(f"{self.num_waiting:,} answers are waiting already. Try again later.", retry_after=5)

    async def take(self, tenant: str, seconds: float) -> None:
        """Wait for a place, which `release` gives back. Raises TimeoutError after `seconds`."""
        if self.num_free:
            self.num_free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            async with asyncio.timeout(seconds):
                await place
        except BaseException:
            if place.cancelled():
                self._drop(tenant, place)
            else:  # it came at the same moment
                self.release()
            raise

    def release(self) -> None:
        """Give a place to the first request of the tenant whose turn it is; without any it is free."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            waiting = self._waiting.pop(tenant)
            place = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting  # at the end
            if not place.cancelled():
                place.set_result(None)
                return
        self.num_free += 1

    def _drop(self, tenant: str, place: asyncio.Future[None]) -> None:
        """Remove a request that waits no longer, unless its turn has come already."""
        waiting = self._waiting.get(tenant, deque())
        if place in waiting:
            waiting.remove(place)
            if not waiting:
                del self._waiting[tenant]
