"""Answers with their ratings as a file, CSV or JSON lines: streamed, some rows at a time, of a list of any length.

A cell of CSV that a spreadsheet would run as a formula begins with an apostrophe (OWASP, "CSV Injection").
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse

from streamserve.models import Message
from streamserve.rows import orm
from streamserve.rows.owners import names_of

FORMS: Mapping[str, str] = MappingProxyType({"csv": "CSV", "jsonl": "JSON lines"})
ROWS_AT_ONCE = 200
_TYPES = {"csv": "text/csv; charset=utf-8", "jsonl": "application/x-ndjson; charset=utf-8"}
_FORMULAS = ("=", "+", "-", "@")
COLUMNS = (
    "rated",
    "rating",
    "comment",
    "question",
    "answer",
    "model",
    "owner",
    "name",
    "result",
    "prompt_tokens",
    "completion_tokens",
    "created",
    "conversation",
    "message",
    "stream",
)


def exported(request: HttpRequest, rows: QuerySet[Message], key: str, form: str) -> HttpResponseBase:
    """Return the rows as a download, in the order of `key`, a column of times, the newest first."""
    next_page = partial(_page, rows.order_by(f"-{key}", "-id"), key)
    write = _csv_lines if form == "csv" else _json_lines
    first = "".join(_csv_lines([dict(zip(COLUMNS, COLUMNS, strict=True))])) if form == "csv" else ""
    # An ASGI server would collect all of a synchronous iterator before it sends any of it.
    pages = _later(next_page, write, first) if hasattr(request, "scope") else _now(next_page, write, first)
    response = StreamingHttpResponse(pages, content_type=_TYPES[form])
    response["Content-Disposition"] = f'attachment; filename="answers.{form}"'
    response["Cache-Control"] = "no-store"
    return response


def _now(next_page: Callable[[Any], list[Message]], write: Callable[[Any], str], first: str) -> Iterator[str]:
    yield first
    last = None
    while page := next_page(last):
        yield write(_dicts(page))
        last = page[-1]


async def _later(
    next_page: Callable[[Any], list[Message]], write: Callable[[Any], str], first: str
) -> AsyncIterator[str]:
    yield first
    last = None
    while page := await orm.bulk(next_page, last):
        yield write(await orm.bulk(_dicts, page))
        last = page[-1]


def _page(rows: QuerySet[Message], key: str, last: Message | None) -> list[Message]:
    """Return the next rows, after `last`."""
    if last is not None:
        when = getattr(last, key)
        rows = rows.filter(Q(**{f"{key}__lt": when}) | Q(**{key: when, "id__lt": last.pk}))
    return list(rows.defer(None).select_related("conversation", "parent")[:ROWS_AT_ONCE])


def _dicts(rows: list[Message]) -> list[dict[str, Any]]:
    names = names_of(row.conversation.owner for row in rows)
    return [_dict(row, names[row.conversation.owner].name) for row in rows]


def _dict(row: Message, name: str) -> dict[str, Any]:
    is_question = row.role == "user"
    values = (
        row.rated_at and row.rated_at.isoformat(timespec="seconds"),
        None if row.rating is None else str(row.get_rating_display()),
        row.comment,
        row.text if is_question else _question_of(row),
        "" if is_question else row.text,
        row.model,
        row.conversation.owner,
        name,
        row.error_code or row.finish_reason or row.state,
        row.prompt_tokens,
        row.completion_tokens,
        row.created_at.isoformat(timespec="seconds"),
        row.conversation_id,
        row.pk,
        row.stream_id,
    )
    return dict(zip(COLUMNS, values, strict=True))


def _question_of(answer: Message) -> str:
    """Return the text of the question; "" of an answer that goes on with another."""
    parent = answer.parent
    return parent.text if parent is not None and parent.role == "user" else ""


def _json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def _csv_lines(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows([in_cell(value) for value in row.values()] for row in rows)
    return out.getvalue()


def in_cell(value: Any) -> Any:
    """Return a value that no spreadsheet takes for a formula."""
    if not isinstance(value, str):
        return "" if value is None else value
    text = value.replace("\0", "")
    return f"'{text}" if text.lstrip().startswith(_FORMULAS) or text[:1] in ("\t", "\r") else text
