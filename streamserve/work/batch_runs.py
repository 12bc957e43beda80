"""`BatchKind`: batches as durable work. A worker claims a whole batch, checks its file, runs its rows, makes its files.

    validating   every line is checked; a wrong one fails the batch before any row has run
    in_progress  slots take the next line that has no row yet, run it, and store its end before they take another
    finalizing   rows and lines side by side, in the order of the input, are written to the output and the error file
    failed       the worker was lost too often, or the input file is gone: the files are made of what there is

What a kill cuts short is what the slots held, one row each: the next worker reads which lines have rows. Rows that wait
for one write are stored together by the next (`RowWriter`). They have an `Answers` of their own.
asyncio; the storage is read on threads, the database through the door to the ORM.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable
from typing import IO, Any

from django.utils import timezone

from streamserve.api.answers import Answers
from streamserve.api.batch.rows import answer_line
from streamserve.api.call import Caller
from streamserve.api.logs import get_logger
from streamserve.dialects.batch_lines import (
    CANCELLED,
    EXPIRED,
    Line,
    LineChecker,
    LineError,
    RowResult,
    failed_row,
    parse_line,
    read_lines,
)
from streamserve.models import ApiKey, Batch, BatchRow
from streamserve.protocol.errors import NotFound
from streamserve.rows import orm
from streamserve.work.batch_files import compose
from streamserve.work.files import Files
from streamserve.work.queue import Claim, Failed, LeaseLost, RetryPolicy, RowKind


class RowWriter:
    """One for each claim of a batch. A slot waits for its row's write, so that a kill costs it one row at most."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._waiting: list[tuple[RowResult, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def store(self, row: RowResult) -> None:
        """Return when the row is stored. Raises LeaseLost, and the database's errors."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, stored))
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
            error = await self._write_rows([row for row, _ in taken])
            for _, stored in taken:
                if not stored.done():
                    stored.set_exception(error) if error is not None else stored.set_result(None)

    async def _write_rows(self, results: list[RowResult]) -> Exception | None:
        claim = self._claim
        rows = [
            BatchRow(
                batch_id=claim.id,
                line=one.line,
                custom_id=one.custom_id,
                request_id=one.request_id,
                status_code=one.status_code,
                body=one.body.replace("\0", "\N{REPLACEMENT CHARACTER}"),  # PostgreSQL refuses NUL
            )
            for one in results
        ]
        try:
            is_held = await orm.insist(orm.write, Batch.objects.store, claim.id, claim.fence, claim.worker_id, rows)
        except Exception as error:  # each slot raises it
            return error
        return None if is_held else LeaseLost(claim.id)


log = get_logger(__name__)

NAME = "batch"
AT_ONCE = 4  # batches that a worker runs at once
# How soon a worker that runs rows sees that its batch was cancelled.
_LOOK_SECONDS = 1.0
# A batch that lost its worker so often, without a row's end in between, kills it.
_MAX_ATTEMPTS = 20
# What kills it may be the making of its files: after so many more attempts it ends without them.
_MAX_BURIALS = 20


class BatchKind(RowKind[Batch]):
    """See `Kind` in queue.py. `rows` answers the rows, `at_once` of one batch at the same time."""

    name = NAME
    model = Batch

    def __init__(self, files: Files, answers: Answers, *, at_once: int) -> None:
        super().__init__(concurrency=AT_ONCE, retry=RetryPolicy(max_attempts=_MAX_ATTEMPTS))
        self.files, self.answers, self.at_once = files, answers, at_once

    async def run(self, claim: Claim) -> None:
        await BatchRun(self, claim).run()

    async def bury(self, claim: Claim, failure: Failed) -> None:
        error = LineError(code=failure.code, message=failure.message)
        if claim.attempt > _MAX_ATTEMPTS + _MAX_BURIALS:
            await self.end_failed(claim, [error])
        else:
            await BatchRun(self, claim).bury(error)

    async def end_failed(self, claim: Claim, errors: Iterable[LineError]) -> None:
        """End the batch as failed, without files."""
        columns = {"status": "failed", "failed_at": timezone.now()}
        await self.finish(claim, "failed", **columns, errors=[dataclasses.asdict(one) for one in errors])


class BatchRun:
    """One batch in this worker, from its claim to its end."""

    def __init__(self, kind: BatchKind, claim: Claim) -> None:
        self._kind, self._claim = kind, claim
        self._row: Batch = claim.row
        self._files, self._limits = kind.files, kind.answers.limits
        self._caller = Caller(self._row.owner, self._row.tenant)
        self._taking = asyncio.Lock()  # one slot at a time takes the next line

    async def run(self) -> None:
        """Continue the batch where it is."""
        await self._check_owner()
        if self._row.status == "validating":
            await self._validate()
        if self._row.status == "in_progress":
            await self._run_rows()
        if self._row.status in ("in_progress", "cancelling", "finalizing"):
            await self._finalize()

    async def _move(self, *before: str, to: str, **columns: Any) -> None:
        """Change the status, unless the batch was cancelled meanwhile. Raises LeaseLost."""
        claim = self._claim
        moved = await orm.insist(
            orm.write, Batch.objects.move, claim.id, claim.fence, claim.worker_id, before, to, **columns
        )
        if not moved:
            await self._look()
            if self._row.status in before:
                raise LeaseLost(claim.id)
        else:
            self._row.status = to

    async def _look(self) -> str:
        """Return the batch's status. Raises LeaseLost."""
        claim = self._claim
        held = Batch.objects.held(claim.id, claim.fence, claim.worker_id)
        status = await orm.insist(orm.read, held.values_list("status", flat=True).first)
        if status is None:
            raise LeaseLost(claim.id)
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
            with file:
                for lines in read_lines(file, self._limits):
                    checker.check(lines)
                    if checker.is_hopeless:
                        return

        await asyncio.to_thread(check)
        num_rows, errors = checker.result()
        if errors:
            await self._kind.end_failed(self._claim, errors)
            self._row.status = "failed"
        else:
            await self._move("validating", to="in_progress", num_rows=num_rows)

    # Running

    async def _run_rows(self) -> None:
        """Run every line that has no row, until none is left, or the batch is cancelled or expires."""
        done = await orm.bulk(BatchRow.objects.lines_of, self._claim.id)
        writer = RowWriter(self._claim)
        lines = self._lines(done)
        seconds = (self._row.expires_at - timezone.now()).total_seconds()
        slots = [asyncio.create_task(self._slot(lines, writer)) for _ in range(self._kind.at_once)]
        working: asyncio.Future[Any] = asyncio.gather(*slots)
        looking: asyncio.Future[Any] = asyncio.create_task(self._wait_cancelled(), name=f"{self._claim.id} watch")
        try:
            await asyncio.wait({working, looking}, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
            for task in (working, looking):
                if task.done():
                    task.result()
        finally:
            for task in (looking, *slots):  # `working` has ended with its first slot that failed; the others go on
                task.cancel()
            await asyncio.gather(working, looking, *slots, return_exceptions=True)
            await lines.aclose()  # type: ignore[attr-defined]
            await writer.aclose()

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

    async def _slot(self, lines: AsyncIterator[Line], writer: RowWriter) -> None:
        """Run one line after the other."""
        while True:
            async with self._taking:
                line = await anext(lines, None)
            if line is None:
                return
            await writer.store(await answer_line(self._kind.answers, self._caller, line))

    # Finalizing

    async def _finalize(self) -> None:
        """Make the files; what was not run is in the error file with the reason."""
        await self._look()  # it may have been cancelled meanwhile
        if self._row.status == "in_progress":
            await self._move("in_progress", to="finalizing")
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
