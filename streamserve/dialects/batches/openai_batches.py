"""The OpenAI batch API: the body that creates one, the JSON of one, and the lines of its output and error files. Pure.

Shapes as the official client's types have them (openai 3.52, `types/batch.py`) and as its guide shows the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamserve.dialects.batches.lines import LineError, RowResult, Unrun
from streamserve.dialects.batches.openai_files import expires_after
from streamserve.dialects.fields import Reader, one_of, plain_text, read, required, text, wrong_value
from streamserve.dialects.generate import metadata
from streamserve.protocol.limits import Limits

WINDOW, WINDOW_SECONDS = "24h", 86_400
STATUSES = (
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
)  # fmt: skip
ENDED = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a body asks for. `expires_after` is of the output files, in seconds; None keeps the site's own time."""

    input_file_id: str
    endpoint: str
    metadata: Mapping[str, str] | None = None
    expires_after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch. `times` are seconds of the epoch, under the names of the API: created_at, in_progress_at, …"""

    id: str
    endpoint: str
    status: str
    input_file_id: str
    output_file_id: str = ""
    error_file_id: str = ""
    num_rows: int = 0
    num_completed: int = 0
    num_failed: int = 0
    metadata: Mapping[str, str] | None = None
    errors: tuple[LineError, ...] = ()
    times: Mapping[str, int | None] = field(default_factory=dict)


TIMES = (
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
)  # fmt: skip


def parse(body: Mapping[str, Any], limits: Limits) -> NewBatch:
    """Return the batch that a body asks for. Whether file and endpoint exist is not known here."""
    table: dict[str, Reader] = {
        "input_file_id": plain_text(1, 64),
        "endpoint": text(1, 128),
        "completion_window": one_of(WINDOW),
        "metadata": _stored_metadata(limits),
        "output_expires_after": expires_after,
    }
    values = read(body, table)
    required(values, "completion_window")
    return NewBatch(
        input_file_id=required(values, "input_file_id"),
        endpoint=required(values, "endpoint"),
        metadata=values.get("metadata"),
        expires_after=values.get("output_expires_after"),
    )


def _stored_metadata(limits: Limits) -> Reader:
    """Read metadata that is kept: a database's JSON takes no NUL."""
    sized = metadata(limits)

    def reader(value: Any, param: str) -> dict[str, str]:
        notes: dict[str, str] = sized(value, param)
        if any("\0" in text for note in notes.items() for text in note):
            wrong_value(param, "must not have a NUL character")
        return notes

    return reader


def batch_json(batch: BatchRecord) -> dict[str, Any]:
    """Return a batch as that API shows it."""
    errors = [{"code": one.code, "line": one.line, "message": one.message, "param": one.param} for one in batch.errors]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        **{name: batch.times.get(name) for name in TIMES},
        "request_counts": {"total": batch.num_rows, "completed": batch.num_completed, "failed": batch.num_failed},
        "metadata": dict(batch.metadata) if batch.metadata is not None else None,
    }


def result_line(row: RowResult) -> bytes:
    """Return the line of a row that was run, for the output or the error file."""
    response = {"status_code": row.status_code, "request_id": row.request_id, "body": json.loads(row.body)}
    return _line(row.request_id, row.custom_id, response, None)


def unrun_line(request_id: str, custom_id: str, why: Unrun) -> bytes:
    """Return the line of the error file for a row that has no answer."""
    return _line(request_id, custom_id, None, {"code": why.code, "message": why.message})


def _line(request_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    line = {"id": f"batch_{request_id}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
