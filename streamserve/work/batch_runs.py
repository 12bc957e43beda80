"""`BatchRun`: batches as a kind of work. A worker claims a whole batch: it checks the file, runs rows, makes files.

    validating   every line is checked; a wrong line fails the batch before any row has run
    in_progress  slots take the next line that has no row yet, run it, and store its end before they take another
    finalizing   rows and lines side by side, in the order of the input, are written to the output and the error file
    failed       the worker was lost too often, or the input file is gone: the files are made of what there is

What a kill cuts short is what the slots held, a row each: the next worker reads which lines have rows. Rows that wait
for one write are stored together by the next (`RowWriter`): without that a row costs a quarter more of the processor.
Rows have an `Answers` of their own. asyncio; the storage is read on threads, the database through the door to the ORM.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import IO, Any

from django.utils import timezone

from streamserve.api.answers import Answers
from streamserve.api.batch.rows import answer_line
from streamserve.api.call import Caller
from streamserve.api.logs import get_logger
from streamserve.conf import get_settings
from streamserve.dialects.batches import (
    CANCELLED,
    EXPIRED,
    Line,
    LineChecker,
    LineError,
    RowAnswer,
    RowResult,
    failed_row,
    parse_line,
    read_lines,
)
from streamserve.models import ApiKey, Batch, BatchRow
from streamserve.protocol.errors import NotFound
from streamserve.protocol.requests import Admission
from streamserve.protocol.trace import parse
from streamserve.rows import orm, rates, usage
from streamserve.rows.receivers import tell_rows, together, written
from streamserve.signals import answer_finished
from streamserve.work.batch_files import compose
from streamserve.work.files import Files
from streamserve.work.queue import BATCHES, Claim, Failed, Kind, LeaseLost, RetryPolicy

log = get_logger(__name__)

AT_ONCE = 4  # batches that a worker runs at once
# How soon a worker that runs rows sees that its batch was cancelled.
_LOOK_SECONDS = 1.0
# A batch that lost its worker so often, without a row's end in between, kills it.
_MAX_ATTEMPTS = 20
# What kills it may be the making of its files: after so many more attempts it ends without them.
_MAX_BURIALS = 20


class RowWriter:
    """Stores rows of a claimed batch. A slot waits for its row's write; rows that wait for one write share the next."""

    def __init__(self, claim: Claim[Batch]) -> None:
        self._claim = claim
        self._waiting: list[tuple[BatchRow, RowAnswer | None, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def store(self, result: RowResult) -> None:
        """Return when the row is stored. Raises LeaseLost, and the database's errors."""
        row = BatchRow(
            batch_id=self._claim.id,
            line=result.line,
            custom_id=result.custom_id,
            request_id=result.request_id,
            status_code=result.status_code,
            body=result.body.replace("\0", "\N{REPLACEMENT CHARACTER}"),  # PostgreSQL refuses NUL
        )
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, result.answer, stored))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write(), name=f"{self._claim.id} rows")
        await stored

    async def aclose(self) -> None:
        """Finish the writes that are under way: a row that has ended is not run again."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            error = await self._write_rows([(row, answer) for row, answer, _ in taken])
            for *_, stored in taken:
                if not stored.done():
                    stored.set_exception(error) if error is not None else stored.set_result(None)

    async def _write_rows(self, ended: list[tuple[BatchRow, RowAnswer | None]]) -> Exception | None:
        rows, batch = [row for row, _ in ended], self._claim.row
        tell = partial(tell_rows, ended, batch.owner, batch.tenant)
        answers = [answer for _, answer in ended if answer is not None]
        admission = Admission(owner=batch.owner, tenant=batch.tenant)
        used = together(
            rates.counting_rows(answers, admission), partial(usage.add_rows, answers, batch.owner, batch.tenant)
        )
        try:
            await self._claim.write(
                lambda held: held.store(rows),
                ask=lambda write: written(answer_finished, BatchRow, write, tell, also=used),
            )
        except Exception as error:  # each slot raises it
            return error
        return None


class BatchRun:
    """One batch in this worker, from its claim to its end. `at_once` rows run at the same time, answered by `rows`."""

    def __init__(self, claim: Claim[Batch], files: Files, rows: Answers, at_once: int) -> None:
        self._claim, self._row = claim, claim.row
        self._files, self._rows, self._limits, self._at_once = files, rows, rows.limits, at_once
        self._caller = Caller(self._row.owner, self._row.tenant)
        trace = parse(self._row.traceparent)
        self._origin = None if trace is None else dataclasses.replace(trace, begins_anew=True)
        self._taking = asyncio.Lock()  # one slot at a time takes the next line
        self._writer = RowWriter(claim)

    async def run(self) -> None:
        """Continue the batch where it is."""
        await self._check_owner()
        if self._row.status == "validating":
            await self._validate()
        if self._row.status == "in_progress":
            await self._run_rows()
        if self._row.status in ("in_progress", "cancelling", "finalizing"):
            await self._finalize()

    async def _move(self, to: str, **columns: Any) -> None:
        """Change the status, unless the batch was cancelled meanwhile. Raises LeaseLost."""
        try:
            await self._claim.write(lambda held: held.move(to, **columns))
            self._row.status = to
        except LeaseLost:
            await self._look()

    async def _look(self) -> str:
        """Return the batch's status. Raises LeaseLost."""
        status = await orm.insist(orm.read, self._claim.held().values_list("status", flat=True).first)
        if status is None:
            raise LeaseLost(self._claim.id)
        self._row.status = status
        return str(status)

    async def _check_owner(self) -> None:
        """Cancel the batch if its owner's key or account is no longer active: its rows would be refused as requests."""
        if await orm.insist(orm.read, ApiKey.objects.owners_without_permission, [self._row.owner]):
            if await orm.insist(orm.write, Batch.objects.cancel, self._claim.id):
                log.warning("batch_permission_lost", batch_id=self._claim.id, owner=self._row.owner)
            await self._look()

    async def _open(self) -> IO[bytes]:
        try:
            return await self._files.open(self._row.tenant, self._row.input_file_id)
        except NotFound as error:
            raise Failed("The input file is gone.", code="input_file_not_found", is_retryable=False) from error

    # Validating

    async def _validate(self) -> None:
        """Check every line of the file, on a thread."""
        file = await self._open()
        checker = LineChecker(self._row.endpoint, self._limits)

        def check() -> None:
            for lines in read_lines(file, self._limits):
                checker.check(lines)
                if checker.is_hopeless:
                    return

        with file:
            await asyncio.to_thread(check)
        num_rows, errors = checker.result()
        if errors:
            await end_failed(self._claim, errors)
            self._row.status = "failed"
        else:
            await self._move("in_progress", num_rows=num_rows)

    # Running

    async def _run_rows(self) -> None:
        """Run every line that has no row, until none is left, or the batch is cancelled or expires."""
        done = await orm.bulk(BatchRow.objects.lines_of, self._claim.id)
        lines = self._lines(done)
        seconds = (self._row.expires_at - timezone.now()).total_seconds()
        slots = [asyncio.create_task(self._slot(lines)) for _ in range(self._at_once)]
        working: asyncio.Future[Any] = asyncio.gather(*slots)
        looking: asyncio.Future[Any] = asyncio.create_task(self._wait_cancelled(), name=f"{self._claim.id} watch")
        try:
            await asyncio.wait({working, looking}, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
            for task in (working, looking):
                if task.done():
                    task.result()
        finally:
            for task in (looking, *slots):  # `working` has ended with its first slot that failed; the others still run
                task.cancel()
            await asyncio.gather(working, looking, *slots, return_exceptions=True)
            await lines.aclose()  # type: ignore[attr-defined]
            await self._writer.aclose()

    async def _wait_cancelled(self) -> None:
        while await self._look() == "in_progress":  # another process cancels
            await self._check_owner()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _lines(self, done: set[int]) -> AsyncIterator[Line]:
        """Yield the lines that have no row."""
        file = await self._open()
        try:
            pieces = read_lines(file, self._limits)
            while piece := await asyncio.to_thread(next, pieces, None):
                for number, raw in piece:
                    if number not in done:
                        line = parse_line(number, raw, self._row.endpoint, self._limits)
                        assert isinstance(line, Line)  # it was checked
                        yield line
        finally:
            file.close()

    async def _slot(self, lines: AsyncIterator[Line]) -> None:
        """Run one line after the other. Each row is stored before the next line is taken."""
        while True:
            async with self._taking:
                line = await anext(lines, None)
            if line is None:
                return
            await self._wait_for_room()
            result = await answer_line(self._rows, self._caller, line, origin=self._origin)
            await self._writer.store(result)

    async def _wait_for_room(self) -> None:
        """Wait while the owner's work has used its limits over time."""
        admission = Admission(owner=self._row.owner, tenant=self._row.tenant)
        while get_settings().rates:
            seconds = await orm.insist(orm.read, rates.seconds_until_room, admission)
            if seconds <= 0:
                return
            await asyncio.sleep(min(seconds, _LOOK_SECONDS))

    # Finalizing

    async def _finalize(self) -> None:
        """Make the files; what was not run is in the error file with the reason."""
        await self._look()  # it may have been cancelled meanwhile
        if self._row.status == "in_progress":
            await self._move("finalizing")
        is_cancelled = self._row.status == "cancelling"
        made = await compose(
            self._files, self._limits, self._row, await self._open(), CANCELLED if is_cancelled else EXPIRED
        )
        status = "cancelled" if is_cancelled else "expired" if made.num_unrun else "completed"
        await made.finish(self._claim, status)

    async def bury(self, error: LineError) -> None:
        """End the batch as failed: what has ended is in its files, and so is every row without an answer."""
        try:
            file = await self._open()
        except Failed:  # the file is gone: its other rows have no name any more
            file = None
        made = await compose(self._files, self._limits, self._row, file, failed_row(error.code, error.message))
        await made.finish(self._claim, "failed", errors=[dataclasses.asdict(error)])


async def end_failed(claim: Claim[Batch], errors: Iterable[LineError]) -> None:
    """End a batch as failed, without files."""
    found = [dataclasses.asdict(error) for error in errors]
    await claim.write(lambda held: held.end("failed", errors=found))


def batch_kind(files: Files, rows: Answers, *, at_once: int) -> Kind[Batch]:
    """Return batches as a kind of work. `rows` answers their rows, `at_once` of one batch at the same time."""

    async def run(claim: Claim[Batch]) -> None:
        await BatchRun(claim, files, rows, at_once).run()

    async def bury(claim: Claim[Batch], failure: Failed) -> None:
        error = LineError(code=failure.code, message=failure.message)
        if claim.attempt > _MAX_ATTEMPTS + _MAX_BURIALS:
            await end_failed(claim, [error])
        else:
            await BatchRun(claim, files, rows, at_once).bury(error)

    retry = RetryPolicy(max_attempts=_MAX_ATTEMPTS)
    return Kind(name=BATCHES, model=Batch, run=run, bury=bury, concurrency=AT_ONCE, retry=retry)
