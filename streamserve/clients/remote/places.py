"""`Places`: the requests that wait for a place at one of a model's upstreams, and their order.

Tenants take turns, and each tenant's requests go in the order of arrival: a tenant's flood delays its own requests.
Which upstream a request gets is its own `pick`. Knows tenants by name, no requests. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from streamserve.protocol.errors import Overloaded

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    pick: Callable[[], T | None]
    place: asyncio.Future[T]


class Places(Generic[T]):
    """`max_waiting` bounds the requests that wait. A `pick` takes a place and returns where, None while all are full.

    `may_pick` tells whether any could have another result than None.
    """

    def __init__(self, max_waiting: int, *, may_pick: Callable[[], bool], give_back: Callable[[T], None]) -> None:
        self._max_waiting = max_waiting
        self._may_pick, self._give_back = may_pick, give_back
        # Of the tenants that have some, in the order of their turns.
        self._waiting: dict[str, deque[_Waiter[T]]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return sum(map(len, self._waiting.values()))

    def num_ahead(self, tenant: str) -> int:
        """Return how many waiting requests come before a new one of `tenant`: its own, and so many of each other."""
        num_own = len(self._waiting.get(tenant, ()))
        others = (len(waiting) for name, waiting in self._waiting.items() if name != tenant)
        return num_own + sum(min(number, num_own + 1) for number in others)

    def check_room(self, tenant: str, retry_after: int) -> None:
        """Raise Overloaded if too many requests wait already.

        A full queue still takes a request of a tenant with less than its share of it, which no other can fill: with n
        tenants at most 1 + ln n times `max_waiting` wait.
        """
        num_own, num_tenants = len(self._waiting.get(tenant, ())) + 1, len(self._waiting.keys() | {tenant})
        if self.num_waiting >= self._max_waiting and num_own > self._max_waiting // num_tenants:
            message = f"{self.num_waiting:,} answers are waiting already. Try again later."
            raise Overloaded(message, retry_after=retry_after)

    async def take(self, tenant: str, seconds: float, pick: Callable[[], T | None]) -> T:
        """Return what `pick` has taken, now or in turn. Raises TimeoutError after `seconds`, and what `pick` raises."""
        self.turn()
        if not self._waiting and (taken := pick()) is not None:
            return taken
        waiter: _Waiter[T] = _Waiter(pick, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiter)
        self.turn()
        try:
            async with asyncio.timeout(seconds):
                taken = await waiter.place
        except BaseException:
            place = waiter.place
            if not place.done() or place.cancelled():
                self._drop(tenant, waiter)
            elif place.exception() is None:  # it came at the same moment
                self._give_back(place.result())
            raise
        return taken

    def turn(self) -> None:
        """Give places to those that wait, as long as there are some: called after each change that may free one."""
        while self._may_pick() and any(self._serve(tenant) for tenant in list(self._waiting)):
            pass

    def _serve(self, tenant: str) -> bool:
        """Serve the first request of a tenant that can be served; return whether there was one."""
        waiting = self._waiting[tenant]
        for waiter in list(waiting):
            if waiter.place.done():
                continue  # it is cancelled, and drops itself
            try:
                taken = waiter.pick()
            except Exception as error:  # given to the request
                waiter.place.set_exception(error)
            else:
                if taken is None:
                    continue
                waiter.place.set_result(taken)
            self._drop(tenant, waiter)
            if tenant in self._waiting:
                self._waiting[tenant] = self._waiting.pop(tenant)  # at the end
            return True
        return False

    def _drop(self, tenant: str, waiter: _Waiter[T]) -> None:
        """Remove a request that waits no longer."""
        waiting = self._waiting.get(tenant, deque())
        if waiter in waiting:
            waiting.remove(waiter)
            if not waiting:
                del self._waiting[tenant]
