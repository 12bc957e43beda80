"""Server-sent events: values → bytes, and back (WHATWG HTML, 9.2 Server-sent events). Pure: no I/O, no clock.

Whatever text a model generates, one event stays one event: data is JSON on one line, `event` and `id` match a narrow
pattern. (A newline in `id` or `event` forges events: CVE-2026-44214.)

`SSEDecoder` is the other end, for a server that is not ours: lines end in LF, CR or CRLF, a read may end anywhere, also
inside a code point, and nothing is held beyond `max_bytes`.
"""

from __future__ import annotations

import json
import re
from typing import Any

_EVENT = re.compile(r"[a-z][a-z_.]{0,63}", re.ASCII)
_ID = re.compile(r"[0-9A-Za-z:_-]{1,64}")
_BOM = b"\xef\xbb\xbf"
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))  # `dumps` makes its own

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


class SSEError(ValueError):
    """Bytes that are no event stream, or a line or an event over the limit."""


class SSEDecoder:
    """Fed bytes, it returns the data of the events that are whole. Comments, ids, names and retries are skipped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()  # the unfinished line
        self._data: list[str] = []  # the data lines of the unfinished event
        self._num_data_bytes = 0
        self._follows_cr = False
        self._is_first = True

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of each event that `chunk` completes. Raises SSEError."""
        if self._follows_cr and chunk.startswith(b"\n"):  # the second half of a CRLF
            chunk = chunk[1:]
        if not chunk:
            return []
        self._follows_cr = chunk.endswith(b"\r")
        *whole, rest = _lines(chunk)
        if not whole:
            self._hold(rest)
            return []
        out: list[str] = []
        self._hold(whole[0])
        self._take(bytes(self._line), out)
        self._line.clear()
        for line in whole[1:]:
            self._take(line, out)
        self._hold(rest)
        return out

    def _hold(self, part: bytes) -> None:
        if len(self._line) + len(part) > self._max_bytes:
            raise SSEError(f"a line of more than {self._max_bytes:,} bytes")
        self._line += part

    def _take(self, line: bytes, out: list[str]) -> None:
        """Take one line; an empty line ends an event."""
        if self._is_first:
            line, self._is_first = line.removeprefix(_BOM), False
        if not line:
            if self._data:
                out.append("\n".join(self._data))
                self._data, self._num_data_bytes = [], 0
            return
        name, _, value = line.partition(b":")
        if name != b"data":
            return
        self._num_data_bytes += len(line)
        if self._num_data_bytes > self._max_bytes:
            raise SSEError(f"an event of more than {self._max_bytes:,} bytes")
        try:
            self._data.append(value.removeprefix(b" ").decode())
        except UnicodeDecodeError as error:
            raise SSEError("an event that is not UTF-8") from error


def _lines(chunk: bytes) -> list[bytes]:
    """Split at LF, CR and CRLF; the last item is what follows the last line end."""
    lines = chunk.splitlines()
    return [*lines, b""] if chunk.endswith((b"\n", b"\r")) else lines
