"""`manage.py streamserve_purge`: drop the event logs of streams that ended longer ago than RETENTION_SECONDS.

Rows of streams and watches go too, when KEEP_STREAMS_DAYS and KEEP_WATCHES_DAYS are over, and what batches have left.
Web processes do the same every few minutes; the command is for stopped sites and for a dry run.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from asgiref.sync import async_to_sync
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from streamserve.conf import get_settings
from streamserve.models import Attachment
from streamserve.rows import orm
from streamserve.rows.answer_messages import AnswerMessages, keep_needed_logs, needed_logs
from streamserve.rows.reaper import purge_before, row_ages
from streamserve.streams.log.base import LogUnavailable
from streamserve.web.resources import log_for
from streamserve.work.attachments import Attachments
from streamserve.work.files import Files


class Command(BaseCommand):
    """Purges, or counts with --dry-run."""

    help = "Delete the logs of streams that ended longer ago than RETENTION_SECONDS, and rows older than KEEP_..._DAYS."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="count what would be deleted, and delete nothing")

    def handle(self, *args: Any, dry_run: bool, **options: Any) -> None:
        settings = get_settings()
        if settings.log == "memory":
            raise CommandError('Logs are in the memory of web processes (LOG is "memory"): they go by themselves.')
        before = purge_before(settings.streams, time.time())
        until = datetime.fromtimestamp(before, UTC)
        ages, files, attachments = row_ages(settings), Files(settings), Attachments(settings)
        try:
            if dry_run:
                num_logs = async_to_sync(_count)(before)
                rows = tuple(old.count() for old in ages.old(settings.streams, timezone.now()))
                num_files, num_batches = (old.count() for old in files.old())
                num_attachments = Attachment.objects.unused().count()
            else:
                num_logs = async_to_sync(_purge)(before)
                rows = ages.drop_old(settings.streams, timezone.now())
                num_files, num_batches = async_to_sync(files.purge)()
                num_attachments = async_to_sync(attachments.purge)()
        except LogUnavailable as error:
            raise CommandError(f"{error.message} It is {log_for(settings).place}.") from error
        done = "Would delete" if dry_run else "Deleted"
        self.stdout.write(f"{done} {num_logs} logs that were last written before {until:%Y-%m-%d %H:%M} UTC.")
        self.stdout.write(f"{done} {rows[0]} rows of streams, {rows[1]} of watches and {rows[2]} of jobs.")
        self.stdout.write(f"{done} {rows[3]} conversations.")
        self.stdout.write(f"{done} {num_files} files of batches and {num_batches} batches.")
        self.stdout.write(f"{done} {num_attachments} attachments that no question has.")


async def _purge(before: float) -> int:
    log = log_for(get_settings())
    try:
        await AnswerMessages(log).write_left()
        await keep_needed_logs(log)
        return await log.purge(before)
    finally:
        await log.aclose()


async def _count(before: float) -> int:
    """Return how many logs `_purge` would delete."""
    log = log_for(get_settings())
    try:
        needed = {log_id for log_id, _ in await orm.read(needed_logs)}
        return len(set(await log.old(before)) - needed)
    finally:
        await log.aclose()
