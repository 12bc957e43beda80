"""`manage.py streamserve_batch IN OUT`: run the requests of a JSONL file, in this process, by the site's engine.

The files are the batch API's (docs/batches.md); no row of the database and no worker is needed. Run again, it
asks only what the output lacks. Progress goes to stderr. It ends with 1 where rows failed.

`BatchFile` runs the rows. Lines are appended to the output as rows end, in that order; a kill leaves a torn line at
most, which the next run cuts off. A row whose line is in the output is not run again. asyncio.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

from django.core.management.base import BaseCommand, CommandError

from streamserve.api.answers import Answers
from streamserve.api.batch.rows import answer_line, check_endpoint
from streamserve.api.call import Caller
from streamserve.conf import get_settings
from streamserve.dialects.batches import (
    Line,
    LineChecker,
    LineError,
    RowResult,
    digest_of,
    parse_line,
    read_lines,
)
from streamserve.dialects.openai.batches import result_line
from streamserve.protocol.errors import BadRequest, StreamserveError
from streamserve.protocol.json_body import decode_json
from streamserve.protocol.limits import Limits
from streamserve.web import site

_MOST_SHOWN = 10  # errors of the input
_MAX_TENANT_CHARS = 59  # what a column of owners takes after "site:"
# An answer in the output may be longer than any request.
_MAX_RESULT_BYTES = 64 * 1024 * 1024
_BEGIN = b'{"id":"batch_req_'  # of every line of an output
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
        for error in errors[:_MOST_SHOWN]:
            self.stderr.write(f"{'' if error.line is None else f'line {error.line}: '}{error.message} ({error.code})")
        if errors:
            more = f" {len(errors) - _MOST_SHOWN} more." if len(errors) > _MOST_SHOWN else ""
            raise CommandError(f"The file is wrong, and no row was run.{more}")


async def _run(batch: BatchFile, caller: Caller, concurrency: int, bar: _Bar) -> None:
    try:
        rows = site.get_site().work.rows
        await check_endpoint(batch.endpoint, rows, caller)
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


@dataclass(slots=True)
class Progress:
    """Counts of rows. `num_before` were in the output already; `waiting` is why a row waits."""

    num_rows: int = 0
    num_before: int = 0
    num_done: int = 0
    num_failed: int = 0
    waiting: str = ""
    began_at: float = field(default_factory=time.monotonic)

    def line(self, now: float) -> str:
        """Return " 87 % 4,350/5,000  31/s  2 failed  21 s left"."""
        num_ended = self.num_before + self.num_done + self.num_failed
        num_here, seconds = self.num_done + self.num_failed, max(1e-3, now - self.began_at)
        parts = [f"{num_ended / max(1, self.num_rows):4.0%}  {num_ended:,}/{self.num_rows:,}"]
        if num_here:
            parts.append(f"{num_here / seconds:,.1f}/s")
            parts.append(f"{(self.num_rows - num_ended) * seconds / num_here:,.0f} s left")
        if self.num_failed:
            parts.append(f"{self.num_failed:,} failed")
        if self.waiting:
            parts.append(f"waiting: {self.waiting}")
        return "  ".join(parts)


class BatchFile:
    """One run of the command. `check` before `run`."""

    def __init__(self, source: Path, output: Path, errors: Path, limits: Limits) -> None:
        self._source, self._output, self._errors = source, output, errors
        self._limits = limits
        self._endpoint = ""
        self._done: set[bytes] = set()
        self.progress = Progress()

    def check(self, endpoint: str) -> tuple[LineError, ...]:
        """Check every line of the input, and read which rows the output has. Blocks.

        `endpoint` "" is the url of the first line.
        """
        with self._source.open("rb") as file:
            self._endpoint = endpoint or _first_url(file, self._limits)
            file.seek(0)
            checker = LineChecker(self._endpoint, self._limits)
            names: set[bytes] = set()
            for lines in read_lines(file, self._limits):
                checker.check(lines)
                found = (parse_line(number, raw, self._endpoint, self._limits) for number, raw in lines)
                names.update(digest_of(line.custom_id) for line in found if isinstance(line, Line))
        self.progress.num_rows, errors = checker.result()
        self._done = _ended(self._output) & names
        self.progress.num_before = len(self._done)
        return errors

    @property
    def endpoint(self) -> str:
        """What the rows ask."""
        return self._endpoint

    async def run(
        self, answers: Answers, caller: Caller, *, concurrency: int, show: Callable[[Progress], None]
    ) -> None:
        """Run the rows that the output lacks. Cancelled, it ends those that run; what has ended is written."""
        taking = asyncio.Lock()
        lines = self._lines()
        with self._output.open("ab") as output, self._errors.open("wb") as errors:

            async def slot() -> None:
                while True:
                    async with taking:
                        line = await anext(lines, None)
                    if line is None:
                        return
                    row = await answer_line(answers, caller, line, on_wait=self._note_wait)
                    self._write(row, output if row.is_success else errors)
                    show(self.progress)

            async with asyncio.TaskGroup() as slots:
                for _ in range(concurrency):
                    slots.create_task(slot())

    def _note_wait(self, message: str) -> None:
        self.progress.waiting = message

    def _write(self, row: RowResult, file: IO[bytes]) -> None:
        file.write(result_line(row))
        file.flush()
        self.progress.waiting = ""
        if row.is_success:
            self.progress.num_done += 1
        else:
            self.progress.num_failed += 1

    async def _lines(self) -> AsyncIterator[Line]:
        with self._source.open("rb") as file:
            for piece in read_lines(file, self._limits):
                for number, raw in piece:
                    line = parse_line(number, raw, self._endpoint, self._limits)
                    assert isinstance(line, Line)  # it was checked
                    if digest_of(line.custom_id) not in self._done:
                        yield line


def _first_url(file: IO[bytes], limits: Limits) -> str:
    for lines in read_lines(file, limits):
        try:
            url = decode_json(lines[0][1], limits).get("url")
        except StreamserveError:
            return ""
        return url if isinstance(url, str) else ""
    return ""


def _foreign(output: Path) -> BadRequest:
    return BadRequest(f"{output} is no output of this command. Name another file, or use --restart.")


def _ended(output: Path) -> set[bytes]:
    """Return digests of the names in the output; cut off a last line that is torn. Raises BadRequest."""
    done: set[bytes] = set()
    if not output.exists():
        return done
    bounds = Limits(max_body_bytes=_MAX_RESULT_BYTES, max_json_containers=_MAX_RESULT_BYTES)
    whole = 0
    with output.open("r+b") as file:
        while (raw := file.readline(_MAX_RESULT_BYTES)).endswith(b"\n"):
            whole += len(raw)
            try:
                name = decode_json(raw, bounds).get("custom_id")
            except StreamserveError:
                name = None
            if not isinstance(name, str):
                raise _foreign(output)
            done.add(digest_of(name))
        if raw[: len(_BEGIN)] != _BEGIN[: len(raw)]:  # what is not torn off here is another's
            raise _foreign(output)
        file.truncate(whole)
    return done
