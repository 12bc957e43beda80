"""Message batches: the requests of a body → lines of an input file; the JSON of a batch, and the lines of its results.

    {"requests": [{"custom_id": …, "params": {…}}, …]}      or, as JSONL, one `{"custom_id": …, "params": {…}}` a line

Bodies may be far larger than memory should hold, so they are read a piece at a time, and a request is checked and
written before the next is read. Whether its `params` are right is found when it is run, as in the public API.
Shapes as the official client's types have them (anthropic 2.12, `types/messages/`). Pure but for the given files.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import IO, Any

from streamserve.dialects.anthropic.message import error_json
from streamserve.dialects.batches import (
    ENDED,
    MAX_CUSTOM_ID_CHARS,
    BatchDialect,
    BatchRecord,
    RowResult,
    Unrun,
    digest_of,
    read_lines,
)
from streamserve.dialects.fields import Fields, Table, any_object, list_of, object_of, read, text
from streamserve.protocol.errors import BadRequest, ErrorBody, StreamserveError, UnsupportedMedia
from streamserve.protocol.json_body import decode_json, too_many_containers
from streamserve.protocol.limits import Limits
from streamserve.protocol.sse import one_line_json

ENDPOINT = "/v1/messages"  # of every request
_JSON = "application/json"
_JSONL = ("application/jsonl", "application/x-jsonl", "application/x-ndjson", "application/x-jsonlines")
_PIECE_BYTES = 64 * 1024
_ENVELOPE_BYTES = 4096  # what a request may have beside its params
_BLANK = " \t\r\n"
_DECODER = json.JSONDecoder()
# The next bracket outside of strings.
_BRACKET = re.compile(r'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+([\[\]{}])', re.DOTALL)
_REQUEST: Table = Fields({"custom_id": text(1, MAX_CUSTOM_ID_CHARS), "params": any_object}, *("custom_id", "params"))


def body_fields(limits: Limits) -> Table:
    """Return the readers of a body, which is read as it arrives."""
    return Fields({"requests": list_of(object_of(_REQUEST), low=1, high=limits.max_batch_lines)}, "requests")


_TIMES_OF_END = ("completed_at", "expired_at", "cancelled_at", "failed_at")


def check_type(content_type: str) -> bool:
    """Return whether a body of that type has a request a line. Raises UnsupportedMedia."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (_JSON, *_JSONL):
        message = f"Send JSON with 'Content-Type: {_JSON}', or one request a line with '{_JSONL[0]}'."
        raise UnsupportedMedia(message, param="Content-Type")
    return kind != _JSON


def write_requests(body: IO[bytes], is_lines: bool, out: IO[bytes], limits: Limits) -> int:
    """Write the requests in `body` as lines of an input file; return how many. Raises BadRequest."""
    seen: set[bytes] = set()
    for raw in _lines(body, limits) if is_lines else _elements(body, limits):
        index = len(seen)
        if index >= limits.max_batch_lines:
            message = f"requests has more than {limits.max_batch_lines:,} items, the limit. Make several batches."
            raise BadRequest(message, code="too_many_requests", param="requests")
        out.write(_line_of(raw, f"requests[{index}]", seen, limits))
    if not seen:
        raise BadRequest("requests must not be empty.", code="invalid_value", param="requests")
    return len(seen)


def _line_of(raw: bytes, param: str, seen: set[bytes], limits: Limits) -> bytes:
    """Return a request as a line, after a check of everything but its params. `seen` are digests of custom_ids."""
    most = limits.max_body_bytes + _ENVELOPE_BYTES
    if len(raw) > most:
        raise _too_large(param, limits)
    try:
        fields = decode_json(raw, replace(limits, max_body_bytes=most))
    except StreamserveError as error:
        code = error.code if isinstance(error, BadRequest) else "invalid_json"
        raise BadRequest(error.message.replace("The body", param), code=code, param=param) from error
    values = read(fields, _REQUEST, prefix=param + ".")
    custom_id, params = values["custom_id"], values["params"]
    where = f"{param}.custom_id"
    if "\0" in custom_id:
        raise BadRequest(f"{where} has a NUL character.", code="invalid_value", param=where)
    digest = digest_of(custom_id)
    if digest in seen:
        raise BadRequest(f"{where} is used by another request.", code="duplicate_custom_id", param=where)
    if params.get("stream"):
        where = f"{param}.params.stream"
        message = f"{where}: a batch collects whole messages. Leave it out."
        raise BadRequest(message, code="stream_not_supported", param=where)
    seen.add(digest)
    line = one_line_json({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": params}).encode() + b"\n"
    if len(line) > most:  # a line break that is no ASCII is longer escaped
        raise _too_large(param, limits)
    return line


def _too_large(param: str, limits: Limits) -> BadRequest:
    message = f"{param} is longer than {limits.max_body_bytes + _ENVELOPE_BYTES:,} bytes, the limit of one request."
    return BadRequest(message, code="line_too_large", param=param)


def _lines(body: IO[bytes], limits: Limits) -> Iterator[bytes]:
    for lines in read_lines(body, limits):
        yield from (raw for _, raw in lines)


def _elements(body: IO[bytes], limits: Limits) -> Iterator[bytes]:
    """Yield the JSON of each item of `requests`, the only field."""
    reader = _Reader(body, limits)
    reader.take("{")
    if reader.next() != "}":
        name = str(json.loads(reader.value("The body")))[:48].encode("utf-8", "replace").decode()
        if name != "requests":
            message = f"Unknown field {name}. A body has requests, and nothing else."
            raise BadRequest(message, code="unknown_field", param=name)
        reader.take(":")
        yield from _items(reader)
    reader.take("}")
    reader.take("")


def _items(reader: _Reader) -> Iterator[bytes]:
    reader.take("[")
    index = 0
    while reader.next() != "]":
        if index:
            reader.take(",")
            reader.next()
        yield reader.value(f"requests[{index}]")
        index += 1
    reader.take("]")


class _Reader:
    """The JSON of a file, a value at a time."""

    def __init__(self, file: IO[bytes], limits: Limits) -> None:
        self._file, self._limits = file, limits
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at = "", 0  # what is not taken yet begins at `_at`
        self._is_whole = False

    def next(self) -> str:
        """Return the next character that is not blank, "" at the end. Takes the blanks."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def take(self, wanted: str) -> None:
        """Take a character, "" for the end. Raises BadRequest for another character."""
        if self.next() != wanted:
            found = self.next()
            message = (
                f"The body is not the JSON of requests: {wanted or 'its end'} is expected, not {found or 'its end'}."
            )
            raise BadRequest(message, code="invalid_json")
        self._at += len(wanted)

    def value(self, param: str) -> bytes:
        """Take one value; return its JSON. Raises BadRequest for no JSON, for too long a value and too many containers.

        Of an array or object only the end is sought: what is inside is parsed once, when it is whole.
        """
        end = self._end_of_container(param) if self.next() in ("[", "{") else self._end_of_scalar(param)
        raw, self._at = self._text[self._at : end], end
        return raw.encode("utf-8", "surrogatepass")

    def _end_of_container(self, param: str) -> int:
        at, depth, num_opened = self._at, 0, 0
        while True:
            bracket = _BRACKET.match(self._text, at)
            if bracket is None:
                at -= self._at
                self._read_more(param)
                at += self._at
                continue
            at = bracket.end()
            is_opening = bracket[1] in "[{"
            num_opened += is_opening
            depth += 1 if is_opening else -1
            if num_opened > self._limits.max_json_containers:
                raise too_many_containers(param, self._limits, param)
            if not depth:
                return at

    def _end_of_scalar(self, param: str) -> int:
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
            except ValueError:
                end = 0
            if end and (end < len(self._text) or self._is_whole):
                return end
            self._read_more(param)

    def _read_more(self, param: str) -> None:
        """Read on. Raises BadRequest for a value that is too long, and at the end of the body."""
        if len(self._text) - self._at > self._limits.max_body_bytes + _ENVELOPE_BYTES:
            raise _too_large(param, self._limits)
        if not self._read():
            raise BadRequest(f"{param} is no JSON, or not whole.", code="invalid_json")

    def _read(self) -> bool:
        """Read on, as much again as is not taken yet; return whether there was more."""
        rest = self._text[self._at :]
        raw = self._file.read(max(_PIECE_BYTES, len(rest)))
        try:
            self._text, self._at = rest + self._decode(raw, final=not raw), 0
        except UnicodeDecodeError:
            raise BadRequest("The body is not UTF-8.", code="invalid_json") from None
        self._is_whole = not raw
        return bool(raw)


def batch_json(batch: BatchRecord) -> dict[str, Any]:
    """Return a batch as that API shows it. Its counts grow while it runs; their sum is the number of its requests."""
    has_ended = batch.status in ENDED
    num_left = batch.num_rows - batch.num_completed - batch.num_failed
    left_as = {"cancelled": "canceled", "expired": "expired", "failed": "errored"}.get(batch.status, "processing")
    counts = {
        "processing": 0,
        "succeeded": batch.num_completed,
        "errored": batch.num_failed,
        "canceled": 0,
        "expired": 0,
    }
    counts[left_as] += num_left
    path = f"/v1/messages/batches/{batch.id}"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": counts,
        "created_at": _time(batch.times.get("created_at")),
        "expires_at": _time(batch.times.get("expires_at")),
        "ended_at": _time(next((batch.times[name] for name in _TIMES_OF_END if batch.times.get(name)), None)),
        "cancel_initiated_at": _time(batch.times.get("cancelling_at")),
        "archived_at": None,
        "results_url": f"{path}/results" if batch.output_file_id else None,
    }


def deleted_json(batch_id: str) -> dict[str, Any]:
    """Return what the deletion of a batch answers."""
    return {"id": batch_id, "type": "message_batch_deleted"}


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def result_line(row: RowResult) -> bytes:
    """Return the line of a request that was run."""
    body = json.loads(row.body)
    return _result(row.custom_id, {"type": "succeeded", "message": body} if row.is_success else _errored(body))


def _errored(body: dict[str, Any]) -> dict[str, Any]:
    return {"type": "errored", "error": body}


def unrun_line(request_id: str, custom_id: str, why: Unrun) -> bytes:
    """Return the line of a request that has no answer."""
    if why.status == "failed":
        body = ErrorBody(code=why.code, message=why.message, request_id=request_id)
        return _result(custom_id, _errored(error_json(body)))
    return _result(custom_id, {"type": "canceled" if why.status == "cancelled" else why.status})


def _result(custom_id: str, result: dict[str, Any]) -> bytes:
    line = {"custom_id": custom_id, "result": result}
    return one_line_json(line).encode() + b"\n"


ANTHROPIC = BatchDialect(
    name="anthropic", id_prefix="msgbatch_", result_line=result_line, unrun_line=unrun_line, has_error_file=False
)
