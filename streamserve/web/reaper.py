"""`Reaper`: what nobody else sees to. Streams whose process has died or that nobody comes back to end; old logs go.

Every process of a site does it, in one task on its serving loop, with one query a round; claims make sure that each
stream is ended once. Rounds come often enough for the resume window, and every 30 s at the latest.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import Context
from datetime import timedelta

import structlog
from channels.db import database_sync_to_async
from django.utils import timezone

from streamserve.models import Stream as StreamRow
from streamserve.streams.config import StreamConfig
from streamserve.streams.lease.liveness import Workers
from streamserve.streams.log.base import Refusal, append
from streamserve.streams.registry import Streams

log = structlog.get_logger("streamserve")

EVERY_SECONDS = 30.0
PURGE_EVERY_SECONDS = 300.0
# The log notes to the minute when it was last written.
_PURGE_MARGIN_SECONDS = 60.0


def purge_before(settings: StreamConfig, now: float) -> float:
    """Return the time such that no log which nobody wrote since is needed: unfinished ones are touched in between."""
    return now - max(settings.retention_seconds, settings.resume_window_seconds + _PURGE_MARGIN_SECONDS)


class Reaper:
    """Of one process. `aclose()` ends its task."""

    def __init__(self, streams: Streams, workers: Workers) -> None:
        self._streams, self._workers = streams, workers
        self._window = timedelta(seconds=streams.settings.resume_window_seconds)
        self._every_seconds = min(EVERY_SECONDS, max(1.0, streams.settings.resume_window_seconds / 4))
        self._purge_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="stream sweep", context=Context())

    async def aclose(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.round()
            except Exception:
                # Database or log may be away for a while; the next round does what this one could not.
                log.exception("stream_sweep_failed")
            await asyncio.sleep(self._every_seconds)

    async def round(self) -> None:
        """Look once."""
        for row in await database_sync_to_async(lambda: list(StreamRow.objects.unfinished()))():
            try:
                await self._see_to(row)
            except Exception:
                # One log that cannot be read must not keep the others waiting.
                log.exception("stream_sweep_failed", stream_id=row.pk)
        await asyncio.to_thread(self._workers.tidy)
        if time.monotonic() >= self._purge_at:
            self._purge_at = time.monotonic() + PURGE_EVERY_SECONDS
            await self._purge()

    async def _see_to(self, row: StreamRow) -> None:
        """End the stream if its time is over; let go of it in the name of a process that has died."""
        if row.producer == self._workers.own_id and self._streams.find(row.pk) is not None:
            return
        if row.producer != self._workers.own_id and row.producer and self._workers.is_alive(row.producer):
            return
        is_due = row.on_disconnect != "park"
        if row.producer:
            await database_sync_to_async(StreamRow.objects.release)(row.pk, row.fence, row.producer)
        elif row.released_at is None or row.released_at + self._window <= timezone.now():
            is_due = True
        if is_due:
            await self._end(row)

    async def _end(self, row: StreamRow) -> None:
        """Have it claimed and ended here; or made, if it is one that goes on without readers."""
        stream = await self._streams.reach(row.pk)
        if stream is not None:
            stream.abandon()
        elif await database_sync_to_async(StreamRow.objects.finish)(row.pk, error_code="producer_lost"):
            log.warning("stream_log_lost", stream_id=row.pk, log_id=row.log_id)

    async def _purge(self) -> None:
        """Delete old logs, but for those that are written or read here: touching them keeps them."""
        streams, now = self._streams, time.time()
        for stream in streams.all():
            if stream.lease.is_held if stream.terminal is None else stream.readers.num_attached:
                try:
                    await append(streams.log, stream.log_id, stream.lease.fence, [])
                except (Refusal, KeyError):
                    log.info("stream_log_not_kept", stream_id=stream.id)
        num_dropped = await streams.log.purge(purge_before(streams.settings, now))
        if num_dropped:
            log.info("stream_logs_purged", num=num_dropped)
