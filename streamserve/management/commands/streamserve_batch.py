"""`manage.py streamserve_batch IN OUT`: run the requests of a JSONL file, in this process, by the site's engine.

The files are those of the batch API (docs/batches.md); no row of the database and no worker is needed. Run again, it
asks only what the output lacks. Progress goes to stderr. It ends with 1 where rows failed.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, TextIO

from django.core.management.base import BaseCommand, CommandError

from streamserve.api.batch.rows import check_endpoint
from streamserve.api.call import Caller
from streamserve.conf import get_settings
from streamserve.protocol.errors import StreamserveError
from streamserve.web import site
from streamserve.web.cli.batch_file import BatchFile, Progress

_MOST_SHOWN = 10  # errors of the input
_MAX_TENANT_CHARS = 59  # what a column of owners takes after "site:"
# Between two lines of progress: on a terminal, where the line is written over; in a log.
_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 10.0


class Command(BaseCommand):
    """Runs a batch from a file to a file."""

    help = (
        "Run the requests of a JSONL file, in the format of OpenAI's batch API, by the site's engine. Rows whose "
        "answer is in OUT are not run again, so an interrupted run continues. Ends with 1 where rows failed."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("source", metavar="IN", type=Path, help="a custom_id, method, url and body in each line")
        parser.add_argument("output", metavar="OUT", type=Path, help="answers, appended in the order in which rows end")
        parser.add_argument("--errors", type=Path, help="where rows go that failed; default: OUT with .errors.jsonl")
        parser.add_argument("--concurrency", type=int, help='rows at once; default: BATCHES["CONCURRENCY"]')
        parser.add_argument("--endpoint", default="", help="what all lines ask; default: the url of the first line")
        parser.add_argument("--tenant", default="batch", help="whose prefix cache and share of the engine it uses")
        parser.add_argument("--restart", action="store_true", help="empty OUT first, and run every row")

    def handle(self, *args: Any, **options: Any) -> None:
        settings = get_settings()
        source, output = options["source"], options["output"]
        errors = options["errors"] or output.with_suffix(".errors.jsonl")
        concurrency = settings.batches.concurrency if options["concurrency"] is None else options["concurrency"]
        if not 1 <= concurrency <= 1024:
            raise CommandError(f"--concurrency is {concurrency}; it takes 1 to 1024.")
        if not source.is_file():
            raise CommandError(f"There is no file {source}.")
        if len({path.resolve() for path in (source, output, errors)}) < 3:
            raise CommandError("IN, OUT and --errors must be three files.")
        if not 0 < len(options["tenant"]) <= _MAX_TENANT_CHARS:
            raise CommandError(f"--tenant takes 1 to {_MAX_TENANT_CHARS} characters.")
        batch = BatchFile(source, output, errors, settings.limits)
        try:
            if options["restart"]:
                output.unlink(missing_ok=True)
            self._check(batch, options["endpoint"])
            self._run(batch, Caller(f"site:{options['tenant']}"), concurrency)
        except StreamserveError as error:
            raise CommandError(error.message) from None
        except OSError as error:
            raise CommandError(f"{error.filename}: {error.strerror}." if error.filename else str(error)) from None
        num_failed = batch.progress.num_failed
        if num_failed:
            raise CommandError(f"{num_failed:,} {'row' if num_failed == 1 else 'rows'} failed: see {errors}.")
        errors.unlink(missing_ok=True)

    def _run(self, batch: BatchFile, caller: Caller, concurrency: int) -> None:
        bar = _Bar(sys.stderr)
        try:
            asyncio.run(_run(batch, caller, concurrency, bar))
        except KeyboardInterrupt:
            bar.close(batch.progress)
            raise CommandError("Interrupted. Run the same command again to continue.", returncode=130) from None
        finally:
            bar.close(batch.progress)

    def _check(self, batch: BatchFile, endpoint: str) -> None:
        """Refuse an input with wrong lines, before any row is run."""
        errors = batch.check(endpoint)
        for one in errors[:_MOST_SHOWN]:
            self.stderr.write(f"{'' if one.line is None else f'line {one.line}: '}{one.message} ({one.code})")
        if errors:
            more = f" {len(errors) - _MOST_SHOWN} more." if len(errors) > _MOST_SHOWN else ""
            raise CommandError(f"The file is wrong, and no row was run.{more}")


async def _run(batch: BatchFile, caller: Caller, concurrency: int, bar: _Bar) -> None:
    try:
        rows = site.get_site().row_site
        check_endpoint(batch.endpoint, rows)
        await batch.run(rows, caller, concurrency=concurrency, show=bar.show)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        await site.reset()


class _Bar:
    """The progress in one line of a terminal; elsewhere a line now and then."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._is_terminal = out, out.isatty()
        self._shown_at = time.monotonic()
        self._is_closed = False

    def show(self, progress: Progress) -> None:
        """Show the progress, if it is time."""
        now = time.monotonic()
        if now - self._shown_at >= (_TERMINAL_SECONDS if self._is_terminal else _LOG_SECONDS):
            self._shown_at = now
            self._write(progress, "" if self._is_terminal else "\n")

    def close(self, progress: Progress) -> None:
        """Show the last state, and end the line. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._write(progress, "\n")

    def _write(self, progress: Progress, end: str) -> None:
        line = progress.line(time.monotonic())
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            line = f"\r{line[:width]:<{width}}"
        self._out.write(line + end)
        self._out.flush()
