"""Server-sent events: values → bytes (WHATWG HTML, 9.2 Server-sent events). Pure: no I/O, no clock.

Whatever text a model generates, one event stays one event: data is JSON on one line, `event` and `id` match a narrow
pattern. (A newline in `id` or `event` forges events: CVE-2026-44214.)
"""

from __future__ import annotations

import json
import re
from typing import Any

_EVENT = re.compile(r"[a-z_]{1,32}")
_ID = re.compile(r"[0-9A-Za-z:_-]{1,64}")
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))  # `dumps` makes one per call

_quote = json.encoder.encode_basestring

# Line ends for `str.splitlines` and for JavaScript before 2019, but not for SSE. Some readers split at them.
_EXOTIC_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def one_line_json(value: Any) -> str:
    """Return `value` as compact JSON without line breaks of any kind, always encodable as UTF-8."""
    text = _JSON.encode(value)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate; ASCII JSON can carry it
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.translate(_EXOTIC_LINE_BREAKS)


def one_line_json_string(text: str) -> str:
    """Return `one_line_json(text)`, faster."""
    quoted = _quote(text)
    return quoted if quoted.isascii() else one_line_json(text)


def frame(data: str, *, event: str | None = None, id: str | None = None, retry_ms: int | None = None) -> bytes:
    """Return one event. `data` is one line: `one_line_json`, or a word such as `[DONE]`."""
    if "\n" in data or "\r" in data:
        raise ValueError("SSE data must be one line")
    event_line = "" if event is None else f"event: {_matched(_EVENT, event)}\n"
    id_line = "" if id is None else f"id: {_matched(_ID, id)}\n"
    retry_line = "" if retry_ms is None else f"retry: {retry_ms:d}\n"
    return f"{event_line}{id_line}{retry_line}data: {data}\n\n".encode()


def numbered_head(event: str, id_prefix: str) -> str:
    """Return the beginning of a frame of this event, up to the number that ends its id."""
    if _EVENT.fullmatch(event) is None or _ID.fullmatch(id_prefix) is None:
        raise ValueError(f"{event[:32]!r} or {id_prefix[:64]!r} cannot stand on an SSE line")
    return f"event: {event}\nid: {id_prefix}"


def comment(text: str) -> bytes:
    """Return a comment, which readers ignore. It flushes response heads and keeps idle connections open.

    It is one line without a blank line after it: some decoders (openai 3.52, httpx-sse 0.4.3) dispatch at every blank
    line once they have seen an `id:`, and the openai client then fails to parse the data of an event that has none.
    """
    if "\n" in text or "\r" in text:
        raise ValueError("an SSE comment must be one line")
    return f": {text}\n".encode()


def _matched(pattern: re.Pattern[str], text: str) -> str:
    if pattern.fullmatch(text) is None:
        raise ValueError(f"{text[:64]!r} cannot stand on an SSE line")
    return text


FIRST_BYTES = comment("ok") + b"\n"
KEEPALIVE = comment("keepalive")
CONTENT_TYPE = "text/event-stream; charset=utf-8"
