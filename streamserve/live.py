"""`LiveDelivery`: the live page's figures as one `figures` event each second. Speaks like a stream's Delivery.

Framework-free but for where the figures come from; runs on the event loop; holds no database connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, frame, one_line_json

EVERY_SECONDS = 1.0
LIFE_SECONDS = 300.0  # then the page connects again, and its rights are looked at again


@dataclass(frozen=True, slots=True)
class _Source:
    """What log lines call this delivery."""

    id: str = "live-page"


class LiveDelivery:
    """Figures until the reader leaves, at most `LIFE_SECONDS`."""

    stream = _Source()

    def __init__(self, figures: Callable[[], dict[str, Any]], *, every_seconds: float = EVERY_SECONDS) -> None:
        self._figures = figures
        self._every_seconds = every_seconds
        self._is_closed = False

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the response must say, in ASGI form."""
        return [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"cache-control", b"no-cache, no-transform"),
            (b"x-accel-buffering", b"no"),
            (b"content-encoding", b"identity"),
        ]

    async def run(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send everything, waiting for `send` each time."""
        async for data in self:
            await send(data)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield FIRST_BYTES
        ends_at = asyncio.get_running_loop().time() + LIFE_SECONDS
        while not self._is_closed and asyncio.get_running_loop().time() < ends_at:
            yield frame(one_line_json(self._figures()), event="figures")
            await asyncio.sleep(self._every_seconds)

    def close(self) -> None:
        """End after the next figures. Idempotent."""
        self._is_closed = True
