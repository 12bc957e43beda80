"""`Reaper`: end streams whose process has died or whose reader did not return in time, and drop old logs and rows.

Every process of a site runs a reaper, as one task on its serving loop, with one query a round; leases ensure that a
stream is ended once. The time between two rounds is a quarter of the resume window, 30 s at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from streamserve.api.logs import get_logger
from streamserve.api.usage import Used
from streamserve.conf import SiteConfig
from streamserve.models import Conversation, Job, Message, Thread, Watch
from streamserve.models import Stream as StreamRow
from streamserve.rows import orm, rates, usage
from streamserve.rows.answer_messages import LOST, AnswerMessages, keep_needed_logs, write_end
from streamserve.rows.conversation_store import UNDO_SECONDS, drop_conversations
from streamserve.rows.queries import delete_in_parts
from streamserve.rows.receivers import finish_stream
from streamserve.streams.config import JOB, StreamConfig
from streamserve.streams.lease.liveness import Liveness, host_of
from streamserve.streams.log.base import Refusal, append
from streamserve.streams.registry import Streams

log = get_logger(__name__)

EVERY_SECONDS = 30.0
PURGE_EVERY_SECONDS = 300.0
# Without Redis a process of another host cannot be checked: its streams are ended after a day.
FOREIGN_SECONDS = 86_400.0
# The log stores the time of its last write to the minute.
_PURGE_MARGIN_SECONDS = 60.0


def purge_before(settings: StreamConfig, now: float) -> float:
    """Return the time before which a log must have been written last to be dropped. Logs in use are touched."""
    return now - max(settings.retention_seconds, settings.resume_window_seconds + _PURGE_MARGIN_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAges:
    """How many days rows are kept: finished streams, watches, jobs, unused conversations. 0: for ever."""

    streams_days: float = 0.0
    watches_days: float = 0.0
    jobs_days: float = 0.0
    conversations_days: float = 0.0

    def old(self, settings: StreamConfig, now: datetime) -> tuple[QuerySet[Any], ...]:
        """Return the older rows of streams, watches, jobs and conversations.

        A row stays for as long as its log may be replayed, a stream's row until its answer's message is written. Of
        deleted conversations these are older whose deletion can no longer be undone.
        """
        replayed = datetime.fromtimestamp(purge_before(settings, now.timestamp()), UTC)
        streams, watches, jobs = StreamRow.objects.none(), Watch.objects.none(), Job.objects.none()
        conversations = Conversation.objects.deleted_before(now - timedelta(seconds=UNDO_SECONDS))
        if self.streams_days:
            streams = StreamRow.objects.finished_before(min(replayed, now - timedelta(days=self.streams_days)))
            streams = streams.exclude(pk__in=Message.objects.running().streams())
        if self.watches_days:
            watches = Watch.objects.ended_before(now - timedelta(days=self.watches_days))
        if self.jobs_days:
            jobs = Job.objects.finished_before(min(replayed, now - timedelta(days=self.jobs_days)))
        if self.conversations_days:
            conversations |= Conversation.objects.unused_since(now - timedelta(days=self.conversations_days))
        return streams, watches, jobs, conversations

    def drop_old(self, settings: StreamConfig, now: datetime) -> tuple[int, ...]:
        """Delete them; return how many of each. Threads whose stream can no longer be replayed go, too."""
        rates.drop_old()
        delete_in_parts(
            Thread.objects.unused_since(datetime.fromtimestamp(purge_before(settings, now.timestamp()), UTC))
        )
        *others, conversations = self.old(settings, now)
        return *map(delete_in_parts, others), drop_conversations(conversations)


def row_ages(settings: SiteConfig) -> RowAges:
    """Return how long rows are kept."""
    return RowAges(
        streams_days=settings.keep_streams_days,
        watches_days=settings.keep_watches_days,
        jobs_days=settings.keep_jobs_days,
        conversations_days=settings.keep_conversations_days,
    )


class Sweeper:
    """What there is in place of a reaper where the log is in memory: it drops old rows, fails lost answers, and
    writes the usage of refused requests and of embeddings.

    No process sees the streams of another there, so that an answer counts as lost after a day. `aclose()` ends its
    task.
    """

    def __init__(self, streams: Streams, ages: RowAges) -> None:
        self._streams, self._ages = streams, ages
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="row sweeper", context=Context())

    async def aclose(self) -> None:
        """Cancel the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PURGE_EVERY_SECONDS)
            try:
                await self.round()
            except Exception:
                log.exception("row_sweeper_failed")  # the next round tries again

    async def round(self) -> None:
        """Drop what is old, fail what is lost, and write the usage that was counted in memory."""
        await orm.call(usage.write_noted)
        lost = Message.objects.running().filter(created_at__lt=timezone.now() - timedelta(seconds=FOREIGN_SECONDS))
        for stream_id in await orm.read(lambda: list(lost.streams())):
            if stream_id is not None and self._streams.find(stream_id) is None:
                await orm.write(write_end, stream_id, (), LOST)
        await orm.bulk(self._ages.drop_old, self._streams.settings, timezone.now())


class Reaper:
    """Each process has one. `aclose()` ends its task."""

    def __init__(
        self,
        streams: Streams,
        liveness: Liveness,
        ages: RowAges = RowAges(),
        purges: Sequence[Callable[[], Awaitable[object]]] = (),
    ) -> None:
        self._ages, self._purges = ages, purges
        self._messages = AnswerMessages(streams.log)
        self._streams, self._liveness = streams, liveness
        self._window = timedelta(seconds=streams.settings.resume_window_seconds)
        self._every_seconds = min(EVERY_SECONDS, max(1.0, streams.settings.resume_window_seconds / 4))
        self._purge_at = 0.0
        self._foreign_hosts: set[str] = set()  # logged, once each
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="stream reaper", context=Context())

    async def aclose(self) -> None:
        """Cancel the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.round()
            except Exception:
                # Database or log may be down for a while; the next round tries again.
                log.exception("stream_reaper_failed")
            await asyncio.sleep(self._every_seconds)

    async def round(self) -> None:
        """Check every unfinished stream once; purge if it is time."""
        for row in await orm.read(lambda: list(StreamRow.objects.unfinished().exclude(on_disconnect=JOB))):
            try:
                await self._check(row)
            except Exception:
                # A log that cannot be read does not hold up the other streams.
                log.exception("stream_reaper_failed", stream_id=row.pk)
        await self._messages.write_left()
        await orm.call(usage.write_noted)
        await asyncio.to_thread(self._liveness.tidy)
        if time.monotonic() >= self._purge_at:
            self._purge_at = time.monotonic() + PURGE_EVERY_SECONDS
            await self._purge()

    async def _check(self, row: StreamRow) -> None:
        """Release the stream if its process has died; end it if its resume window is over."""
        if row.producer and not self._liveness.can_judge(row.producer):
            await self._check_foreign(row)
            return
        is_own = row.producer == self._liveness.own_id
        if is_own and self._streams.find(row.pk) is not None:
            return
        if row.producer and not is_own and self._liveness.is_alive(row.producer):
            return
        is_due = row.on_disconnect != "park"
        if row.producer:
            if not await orm.write(StreamRow.objects.release, row.pk, row.fence, row.producer):
                return  # another process has released or claimed it
        elif not is_due:
            is_due = row.released_at is None or row.released_at + self._window <= timezone.now()
            if not is_due:
                return
        stream = await self._streams.reach(row.pk)  # if its log has a terminal event, this records it
        if stream is None:
            if is_due and await self._fail(row) > 0:
                log.warning("stream_log_lost", stream_id=row.pk, log_id=row.log_id)
        elif is_due:
            stream.abandon()  # resumes it instead if on_disconnect is "finish"

    async def _check_foreign(self, row: StreamRow) -> None:
        """Leave the stream to its host for a day; log the host once."""
        host = host_of(row.producer)
        if host not in self._foreign_hosts:
            self._foreign_hosts.add(host)
            log.warning("stream_hosts_without_redis", host=host, stream_id=row.pk)
        if row.created_at + timedelta(seconds=FOREIGN_SECONDS) <= timezone.now():
            await self._fail(row)

    async def _fail(self, row: StreamRow) -> int:
        """End a stream whose events are gone; 0 if its end is written already."""
        whose, kind = usage.whose_is(row.owner, row.tenant, row.counted_as), usage.kind_of(row.on_disconnect)
        lost = usage.Entry(whose=whose, model=row.model, kind=kind, used=Used(requests=1, errors=1))
        return await finish_stream(row.pk, used=lost, error_code=LOST)

    async def _purge(self) -> None:
        """Touch the logs that are written or read here, then drop old logs."""
        streams = self._streams
        for stream in streams.all():
            if stream.lease.is_held if stream.terminal is None else stream.readers.num_attached:
                try:
                    await append(streams.log, stream.log_id, stream.lease.fence, [])
                except (Refusal, KeyError):
                    log.info("stream_log_not_kept", stream_id=stream.id)
        await keep_needed_logs(streams.log)
        num_dropped = await streams.log.purge(purge_before(streams.settings, time.time()))
        if num_dropped:
            log.info("stream_logs_purged", num=num_dropped)
        # Bulk work: the first time there may be millions.
        dropped = await orm.bulk(self._ages.drop_old, streams.settings, timezone.now())
        if any(dropped):
            names = ("streams", "watches", "jobs", "conversations")
            log.info("rows_dropped", **dict(zip(names, dropped, strict=True)))
        for purge in self._purges:  # of files
            await purge()
