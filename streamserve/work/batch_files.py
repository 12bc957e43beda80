"""`compose`: a batch's output and error files, out of its input file and its rows. In bounded memory, on a thread.

Both are read in the order of the input. Each line of the input ends in exactly one of the files: its row decides in
which, and without a row it has no answer.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any

from streamserve.api.call import Caller
from streamserve.dialects.anthropic.batches import ANTHROPIC
from streamserve.dialects.batches import (
    OUTPUT_PURPOSE,
    BatchDialect,
    FileRecord,
    Line,
    RowResult,
    Unrun,
    parse_line,
    read_lines,
)
from streamserve.dialects.openai.batches import OPENAI
from streamserve.models import Batch, BatchRow, StoredFile
from streamserve.protocol.limits import Limits
from streamserve.rows import orm
from streamserve.rows.queries import delete_in_parts
from streamserve.rows.work import BatchQuerySet
from streamserve.work.files import Files
from streamserve.work.queue import Claim, LeaseLost

_ROWS_AT_ONCE = 100
_DIALECTS = {dialect.name: dialect for dialect in (OPENAI, ANTHROPIC)}  # by `Batch.api`


async def compose(files: Files, limits: Limits, batch: Batch, file: IO[bytes] | None, why: Unrun) -> Composed:
    """Store the files of a batch, not shown yet. `why` is the reason of the rows that have no answer.

    Closes the input `file`; without it, as it is gone, the files have only the rows that have ended.
    """
    dialect = _DIALECTS[batch.api]
    with file or nullcontext(), ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        errors = stack.enter_context(tempfile.TemporaryFile()) if dialect.has_error_file else output
        num_unrun = await orm.bulk(_write, batch, file, output, errors, dialect, why, limits)
        names = [(output, "output")] + ([(errors, "error")] if errors is not output else [])
        stored = [await _store(files, batch, content, name) for content, name in names]
    return Composed(stored[0], stored[1] if len(stored) > 1 else None, num_unrun)


def _write(
    batch: Batch,
    file: IO[bytes] | None,
    output: IO[bytes],
    errors: IO[bytes],
    dialect: BatchDialect,
    why: Unrun,
    limits: Limits,
) -> int:
    """Write both files; return how many rows have no answer."""
    ended = _ended_rows(batch.pk)
    row = next(ended, None)
    num_unrun = 0

    def write_row(row: RowResult) -> None:
        (output if row.is_success else errors).write(dialect.result_line(row))

    for number, raw in chain.from_iterable(read_lines(file, limits) if file is not None else ()):
        if row is not None and row.line == number:
            write_row(row)
            row = next(ended, None)
        elif isinstance(line := parse_line(number, raw, batch.endpoint, limits), Line):
            # A batch that is cancelled while its file is checked may have wrong lines; they have no id.
            errors.write(dialect.unrun_line(_request_id(batch.pk, number), line.custom_id, why))
            num_unrun += 1
    while row is not None:
        write_row(row)
        row = next(ended, None)
    return num_unrun


def _ended_rows(batch_id: str) -> Iterator[RowResult]:
    line = 0
    while rows := BatchRow.objects.after(batch_id, line, _ROWS_AT_ONCE):
        for row in rows:
            yield RowResult(
                line=row.line,
                custom_id=row.custom_id,
                request_id=row.request_id,
                status_code=row.status_code,
                body=row.body,
            )
        line = rows[-1].line


def _request_id(batch_id: str, number: int) -> str:
    return f"req_{hashlib.sha256(f'{batch_id} {number}'.encode()).hexdigest()[:24]}"


async def _store(files: Files, batch: Batch, content: IO[bytes], name: str) -> FileRecord | None:
    """Store a file that has lines; it is shown when the batch has ended."""
    num_bytes = content.seek(0, os.SEEK_END)
    if not num_bytes:
        return None
    content.seek(0)
    return await files.store(
        content,
        Caller(batch.owner, batch.tenant),
        filename=f"{batch.pk}_{name}.jsonl",
        purpose=OUTPUT_PURPOSE,
        num_bytes=num_bytes,
        expires_seconds=batch.output_expires_seconds,
        is_output=True,
    )


@dataclass(frozen=True, slots=True)
class Composed:
    """The files of a batch, stored; `num_unrun` rows have no answer."""

    output: FileRecord | None
    errors: FileRecord | None
    num_unrun: int

    async def finish(self, claim: Claim[Batch], status: str, **columns: Any) -> None:
        """End the batch, and show its files. Raises LeaseLost; then the purge drops them."""
        output_id, error_id = ("" if file is None else file.id for file in (self.output, self.errors))

        def finish(held: BatchQuerySet) -> None:
            if not held.end(status, output_file_id=output_id, error_file_id=error_id, **columns):
                raise LeaseLost(claim.id)
            StoredFile.objects.filter(pk__in=(output_id, error_id)).update(is_ready=True)

        await claim.transact(finish)
        await orm.bulk(delete_in_parts, BatchRow.objects.filter(batch_id=claim.id))
