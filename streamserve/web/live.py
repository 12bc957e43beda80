"""`LiveDelivery`: the live page's metrics as one `figures` event each second. A `Body`, like a stream's Delivery.

Runs on the event loop; holds no database connection between two events. Streams of this process are shown with live
metrics, streams of other processes with the columns of their rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from channels.db import database_sync_to_async
from django.utils import timezone

from streamserve.api.metrics import live_metrics
from streamserve.models import Stream as StreamRow
from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, frame, one_line_json
from streamserve.streams.reader.delivery import NO_FLOW, Flow
from streamserve.web.site import DjangoSite

EVERY_SECONDS = 1.0
MAX_ROWS = 200  # of other processes' streams; the admin's list of streams shows all
LIFE_SECONDS = 300.0  # then the page reconnects, and its permission is checked again


@dataclass(frozen=True, slots=True)
class _Source:
    """The id of this delivery in log lines."""

    id: str = "live-page"


class LiveDelivery:
    """Sends metrics until the reader leaves, for `LIFE_SECONDS` at most."""

    stream = _Source()

    def __init__(
        self, metrics: Callable[[], Awaitable[dict[str, Any]]], *, every_seconds: float = EVERY_SECONDS
    ) -> None:
        self._metrics = metrics
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
            yield frame(one_line_json(await self._metrics()), event="figures")
            await asyncio.sleep(self._every_seconds)

    def cut_off(self) -> None:
        """Close. The page reconnects by itself, so there are no last bytes."""
        self.close()

    def close(self) -> None:
        """End after the next event. Idempotent."""
        self._is_closed = True


async def site_metrics(site: DjangoSite) -> dict[str, Any]:
    """Return the metrics of this process, and the streams that other processes of the site run."""
    metrics = live_metrics(site.clients, site.streams)
    if site.settings.log == "memory":
        return metrics
    ours = {stream.id for stream in site.streams.all() if not stream.lease.is_elsewhere}
    others = StreamRow.objects.unfinished().exclude(pk__in=ours).order_by("created_at")[:MAX_ROWS]
    rows = await database_sync_to_async(lambda: list(others))()
    metrics["streams"] += [_row_metrics(row) for row in rows]
    return metrics


def _row_metrics(row: StreamRow) -> dict[str, Any]:
    return {
        "id": row.pk,
        "model": row.model,
        "state": "running" if row.producer else "parked",
        "owner": row.owner,
        "age_seconds": round((timezone.now() - row.created_at).total_seconds(), 1),
        "transport": "another process" if row.producer else "",
    }
