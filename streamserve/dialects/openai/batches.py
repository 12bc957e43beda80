"""The OpenAI files and batch APIs: forms, queries and bodies of requests, the JSON of files, batches and lists of them.

And the lines of a batch's output and error files. Shapes as the official client's types have them (openai 3.52,
`types/file_object.py`, `types/batch.py`, `pagination.py`) and as its guide shows the files. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamserve.dialects.batches import (
    PURPOSE,
    TIMES,
    BatchDialect,
    BatchRecord,
    FileRecord,
    NewBatch,
    Page,
    RowResult,
    Unrun,
)
from streamserve.dialects.fields import (
    Fields,
    Reader,
    Table,
    described,
    digits,
    integer,
    object_schema,
    one_of,
    plain_text,
    read,
    schema_of,
    text,
    wrong_value,
)
from streamserve.dialects.generate import metadata
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.sse import one_line_json

WINDOW = "24h"  # the only window that it takes
# The bounds of `expires_after` of that API: an hour, 30 days.
MIN_EXPIRES_SECONDS, MAX_EXPIRES_SECONDS = 3600, 30 * 86_400
MOST_FILES, MOST_BATCHES, FEWEST_BATCHES = 10_000, 100, 20
_ANCHOR = "created_at"
_MAX_ID_CHARS = 64


def _seconds(value: Any, param: str) -> int:
    if not str(value).isascii() or not str(value).isdigit() or len(str(value)) > 9:
        raise BadRequest(f"{param} must be a whole number.", code="invalid_type", param=param)
    return int(_lifetime(int(value), param))


_lifetime = integer(MIN_EXPIRES_SECONDS, MAX_EXPIRES_SECONDS)


@described({"type": "string", "enum": [PURPOSE]})
def _purpose(value: Any, param: str) -> str:
    if text(1, 64)(value, param) != PURPOSE:
        wrong_value(param, f"must be {PURPOSE}: files are accepted for batches only")
    return PURPOSE


UPLOAD_FIELDS: Table = Fields(
    {
        "purpose": _purpose,
        "expires_after[anchor]": one_of(_ANCHOR),
        "expires_after[seconds]": described(schema_of(_lifetime))(_seconds),
    },
    "purpose",
)


def parse_upload(fields: Mapping[str, str]) -> int | None:
    """Check the fields of an upload's form beside `file`; return after how many seconds the file expires, or None."""
    return read(fields, UPLOAD_FIELDS).get("expires_after[seconds]")


_EXPIRES: Table = Fields({"anchor": one_of(_ANCHOR), "seconds": _lifetime}, "anchor", "seconds")


@described(lambda: object_schema(_EXPIRES))
def expires_after(value: Any, param: str) -> int:
    """Read `{"anchor": "created_at", "seconds": …}`."""
    if not isinstance(value, Mapping):
        raise BadRequest(f"{param} must be an object.", code="invalid_type", param=param)
    return int(read(value, _EXPIRES, prefix=f"{param}.")["seconds"])


def page_fields(most: int) -> Table:
    """Return the readers of a list's query."""
    return {
        "limit": digits(1, most),
        "after": plain_text(0, _MAX_ID_CHARS),
        "order": one_of("asc", "desc"),
        "purpose": plain_text(0, 64),
    }


def parse_page(query: Mapping[str, str], *, most: int, usual: int) -> Page:
    """Return the part of a list that a query asks for."""
    values = read(query, page_fields(most))
    return Page(
        limit=values.get("limit", usual),
        after=values.get("after", ""),
        is_newest_first=values.get("order", "desc") == "desc",
        purpose=values.get("purpose", ""),
    )


def file_json(file: FileRecord) -> dict[str, Any]:
    """Return a file as that API shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def deleted_json(file_id: str) -> dict[str, Any]:
    """Return what the deletion of a file answers."""
    return {"id": file_id, "object": "file", "deleted": True}


def list_json(items: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a part of a list; its client asks for the next with `after`, the last id."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def body_fields(limits: Limits) -> Table:
    """Return the readers of a new batch's fields."""
    readers = {
        "input_file_id": plain_text(1, 64),
        "endpoint": text(1, 128),
        "completion_window": one_of(WINDOW),
        "metadata": _stored_metadata(limits),
        "output_expires_after": expires_after,
    }
    return Fields(readers, "completion_window", "input_file_id", "endpoint")


def parse(body: Mapping[str, Any], limits: Limits) -> NewBatch:
    """Return the batch that a body asks for. Whether file and endpoint exist is not known here."""
    values = read(body, body_fields(limits))
    return NewBatch(
        input_file_id=values["input_file_id"],
        endpoint=values["endpoint"],
        metadata=values.get("metadata"),
        expires_after=values.get("output_expires_after"),
    )


def _stored_metadata(limits: Limits) -> Reader:
    """Read metadata that is kept: a database's JSON takes no NUL."""
    sized = metadata(limits)

    @described(schema_of(sized))
    def reader(value: Any, param: str) -> dict[str, str]:
        notes: dict[str, str] = sized(value, param)
        if any("\0" in text for note in notes.items() for text in note):
            wrong_value(param, "must not have a NUL character")
        return notes

    return reader


def batch_json(batch: BatchRecord) -> dict[str, Any]:
    """Return a batch as that API shows it."""
    errors = [
        {"code": error.code, "line": error.line, "message": error.message, "param": error.param}
        for error in batch.errors
    ]
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
    return one_line_json(line).encode() + b"\n"


OPENAI = BatchDialect(name="openai", id_prefix="batch_", result_line=result_line, unrun_line=unrun_line)
