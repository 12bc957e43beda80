"""`LiveDelivery`: the live page's figures as one `figures` event each second. A `Body`, as a stream's Delivery is.

Runs on the event loop; holds no database connection between two events. Streams of this process are shown with their
live figures, those of other processes with what their rows say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from channels.db import database_sync_to_async
from django.utils import timezone

from streamserve.api.metrics import live_figures
from streamserve.models import Stream as StreamRow
from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, frame, one_line_json
from streamserve.streams.reader.delivery import NO_FLOW, Flow
from streamserve.web.site import Runtime

Figures = Callable[[], Awaitable[dict[str, Any]]]

EVERY_SECONDS = 1.0
MAX_ROWS = 200  # of other processes' streams; the admin's list of streams has them all
LIFE_SECONDS = 300.0  # then the page connects again, and its permission is checked again


@dataclass(frozen=True, slots=True)
class _Source:
    """What log lines call this delivery."""

    id: str = "live-page"


class LiveDelivery:
    """Figures until the reader leaves, at most `LIFE_SECONDS`."""

    stream = _Source()

    def __init__(
        self, figures: Callable[[], Awaitable[dict[str, Any]]], *, every_seconds: float = EVERY_SECONDS
    ) -> None:
        self._figures = figures
        self._every_seconds = every_seconds
        self._is_closed = False

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, in ASGI form."""
        return [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"cache-control", b"no-cache, no-transform"),
            (b"x-accel-buffering", b"no"),
            (b"content-encoding", b"identity"),
        ]

    async def run(self, send: Callable[[bytes], Awaitable[None]], flow: Flow = NO_FLOW) -> None:
        """Send everything, waiting for `send` each time."""
        async for data in self:
            await send(data)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield FIRST_BYTES
        ends_at = asyncio.get_running_loop().time() + LIFE_SECONDS
        while not self._is_closed and asyncio.get_running_loop().time() < ends_at:
            yield frame(one_line_json(await self._figures()), event="figures")
            await asyncio.sleep(self._every_seconds)

    def cut_off(self) -> None:
        """Close. The page connects again by itself, so there are no last bytes."""
        self.close()

    def close(self) -> None:
        """End after the next figures. Idempotent."""
        self._is_closed = True


async def site_figures(runtime: Runtime) -> dict[str, Any]:
    """Return the figures of this process, and the streams that other processes of the site run."""
    figures = live_figures(runtime.clients, runtime.streams)
    if runtime.settings.log == "memory":
        return figures
    ours = {stream.id for stream in runtime.streams.all() if not stream.lease.is_elsewhere}
    others = StreamRow.objects.unfinished().exclude(pk__in=ours).order_by("created_at")[:MAX_ROWS]
    rows = await database_sync_to_async(lambda: list(others))()
    figures["streams"] += [_row_figures(row) for row in rows]
    return figures


def _row_figures(row: StreamRow) -> dict[str, Any]:
    return {
        "id": row.pk,
        "model": row.model,
        "state": "running" if row.producer else "parked",
        "owner": row.owner,
        "age_seconds": round((timezone.now() - row.created_at).total_seconds(), 1),
        "transport": "another process" if row.producer else "",
    }
