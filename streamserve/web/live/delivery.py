"""`LiveDelivery`: the events of one viewer of the live page. Event loop only; holds no database connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES
from streamserve.streams.reader.channel import nothing
from streamserve.streams.reader.delivery import Closing
from streamserve.web.live.metrics import EVERY_SECONDS, LiveMetrics

LIFE_SECONDS = 300.0  # then the page reconnects, and its permission is checked again


@dataclass(frozen=True, slots=True)
class _Source:
    """The id of this delivery in log lines."""

    id: str = "live-page"


class LiveDelivery(Closing):
    """Sends a viewer the metrics until it leaves, for `LIFE_SECONDS` at most. A `Body`, like a stream's Delivery."""

    stream = _Source()

    def __init__(self, live: LiveMetrics, *, every_seconds: float = EVERY_SECONDS) -> None:
        self._live = live
        self._every_seconds = every_seconds

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, in ASGI form."""
        return [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"cache-control", b"no-cache, no-transform"),
            (b"x-accel-buffering", b"no"),
            (b"content-encoding", b"identity"),
        ]

    async def run(self, send: Callable[[bytes], Awaitable[None]], num_untaken: Callable[[], int] = nothing) -> None:
        """Send everything, waiting for `send` each time."""
        async for data in self:
            await send(data)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield FIRST_BYTES
        ends_at = asyncio.get_running_loop().time() + LIFE_SECONDS
        yield (await self._live.latest()).whole
        while not self.is_closed and asyncio.get_running_loop().time() < ends_at:
            await asyncio.sleep(self._every_seconds)
            yield (await self._live.latest()).next

    def cut_off(self) -> None:
        """Close. The page reconnects by itself, so there are no last bytes."""
        self.close()
