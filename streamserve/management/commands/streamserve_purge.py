"""`manage.py streamserve_purge`: drop the event logs of streams that ended longer ago than RETENTION_SECONDS.

Rows of streams and watches go too, when KEEP_STREAMS_DAYS and KEEP_WATCHES_DAYS are over, and what batches have left.
Web processes do the same every few minutes; the command is for stopped sites and for a dry run.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from asgiref.sync import async_to_sync
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from streamserve.conf import get_settings
from streamserve.models import Stream
from streamserve.streams.log.base import EventLog, LogUnavailable
from streamserve.web.batches.files import SiteFiles
from streamserve.web.rows.reaper import purge_before
from streamserve.web.site import log_for, row_ages


class Command(BaseCommand):
    """Purges, or counts with --dry-run."""

    help = "Delete the logs of streams that ended longer ago than RETENTION_SECONDS, and rows older than KEEP_..._DAYS."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--dry-run", action="store_true", help="count the logs that would be deleted, and delete nothing"
        )

    def handle(self, *args: Any, dry_run: bool, **options: Any) -> None:
        settings = get_settings()
        if settings.log == "memory":
            raise CommandError('Logs are in the memory of web processes (LOG is "memory"): they go by themselves.')
        before = purge_before(settings.streams, time.time())
        until = datetime.fromtimestamp(before, UTC)
        try:
            if dry_run:
                old = Stream.objects.finished_before(until).values_list("log_id", flat=True)
                num = asyncio.run(_count(list(old)))
                self.stdout.write(f"Would delete {num} logs of streams that ended before {until:%Y-%m-%d %H:%M} UTC.")
            else:
                num = asyncio.run(_purge(before))
                self.stdout.write(f"Deleted {num} logs that were last written before {until:%Y-%m-%d %H:%M} UTC.")
                rows = row_ages(settings).drop_old(settings.streams, timezone.now())
                self.stdout.write(f"Deleted {rows[0]} rows of streams, {rows[1]} of watches and {rows[2]} of jobs.")
                num_files, num_batches = async_to_sync(SiteFiles(settings).purge)()
                self.stdout.write(f"Deleted {num_files} files of batches and {num_batches} batches.")
        except LogUnavailable as error:
            raise CommandError(error.message) from error


async def _purge(before: float) -> int:
    log = log_for(get_settings())
    try:
        return await log.purge(before)
    finally:
        await log.aclose()


async def _count(log_ids: list[str]) -> int:
    log = log_for(get_settings())
    try:
        return sum([await _exists(log, log_id) for log_id in log_ids])
    finally:
        await log.aclose()


async def _exists(log: EventLog, log_id: str) -> bool:
    try:
        await log.last_seq(log_id)
    except KeyError:
        return False
    return True
