"""The OpenAI files API: forms and queries of requests, and the JSON of a file and of a list. Pure.

Shapes as the official client's types have them (openai 3.52, `types/file_object.py`, `pagination.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.fields import Reader, integer, one_of, plain_text, read, text
from streamserve.protocol.errors import BadRequest

PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
# The bounds of `expires_after` of that API: an hour, 30 days.
MIN_EXPIRES_SECONDS, MAX_EXPIRES_SECONDS = 3600, 30 * 86_400
MOST_FILES, MOST_BATCHES, FEWEST_BATCHES = 10_000, 100, 20
_ANCHOR = "created_at"
_MAX_ID_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A stored file. Times are seconds of the epoch."""

    id: str
    filename: str
    num_bytes: int
    purpose: str
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which part of a list is asked for: `limit` records after the one of that id, newest first or oldest first."""

    limit: int
    after: str = ""
    is_newest_first: bool = True
    purpose: str = ""


def parse_upload(fields: Mapping[str, str]) -> int | None:
    """Check the fields of an upload's form beside `file`; return after how many seconds the file expires, or None."""
    table: dict[str, Reader] = {
        "purpose": text(1, 64),
        "expires_after[anchor]": one_of(_ANCHOR),
        "expires_after[seconds]": _seconds,
    }
    values = read(fields, table)
    if "purpose" not in values:
        raise BadRequest(f"purpose is missing. Send purpose={PURPOSE}.", code="missing_field", param="purpose")
    if values["purpose"] != PURPOSE:
        message = f"Files are accepted for batches only: send purpose={PURPOSE}."
        raise BadRequest(message, code="invalid_value", param="purpose")
    return values.get("expires_after[seconds]")


def expires_after(value: Any, param: str) -> int:
    """Read `{"anchor": "created_at", "seconds": …}`."""
    table = {"anchor": one_of(_ANCHOR), "seconds": integer(MIN_EXPIRES_SECONDS, MAX_EXPIRES_SECONDS)}
    if not isinstance(value, Mapping):
        raise BadRequest(f"{param} must be an object.", code="invalid_type", param=param)
    values = read(value, table, prefix=f"{param}.")
    if set(values) != set(table):
        raise BadRequest(f"{param} needs anchor and seconds.", code="missing_field", param=param)
    return int(values["seconds"])


def _seconds(value: Any, param: str) -> int:
    if not str(value).isascii() or not str(value).isdigit() or len(str(value)) > 9:
        raise BadRequest(f"{param} must be a whole number.", code="invalid_type", param=param)
    return int(integer(MIN_EXPIRES_SECONDS, MAX_EXPIRES_SECONDS)(int(value), param))


def parse_page(query: Mapping[str, str], *, most: int, usual: int) -> Page:
    """Return the part of a list that a query asks for."""
    table: dict[str, Reader] = {
        "limit": text(1, 6),
        "after": plain_text(0, _MAX_ID_CHARS),
        "order": one_of("asc", "desc"),
        "purpose": plain_text(0, 64),
    }
    values = read(query, table)
    raw = values.get("limit", str(usual))
    if not (raw.isascii() and raw.isdigit() and 1 <= int(raw) <= most):
        raise BadRequest(f"limit must be between 1 and {most}.", code="invalid_value", param="limit")
    return Page(
        limit=int(raw),
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
