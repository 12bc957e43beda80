"""`BatchFile`: the rows of a batch run in this process, from a file to a file. For `manage.py streamserve_batch`.

Lines are appended to the output as rows end, in that order; a kill leaves a torn line at most, which the next run cuts
off. A row whose line is in the output is not run again. asyncio; the files are this machine's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from streamserve.api.batch.rows import answer_line
from streamserve.api.call import Caller, Site
from streamserve.dialects.batch_lines import (
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
from streamserve.protocol.requests import Limits

# An answer in the output may be longer than any request.
_MAX_RESULT_BYTES = 64 * 1024 * 1024
_BEGIN = b'{"id":"batch_req_'  # of every line of an output


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

    async def run(self, site: Site, caller: Caller, *, concurrency: int, show: Callable[[Progress], None]) -> None:
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
                    row = await answer_line(site, caller, line, on_wait=self._note_wait)
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
    bounds = Limits(max_body_bytes=_MAX_RESULT_BYTES)
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
