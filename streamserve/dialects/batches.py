"""Batches as every API has them: the values of files, batches and lists, and the lines of a batch's input file. Pure.

A line is `{"custom_id": …, "method": "POST", "url": …, "body": {…}}`, read in bounded memory. Every wrong line is
reported with its number, up to `MAX_ERRORS`. Whether a body's fields are right is found when the row is run: such a row
ends in the error file. What differs between the APIs is a `BatchDialect` (openai/batches.py, anthropic/batches.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import IO, Any

from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import Usage
from streamserve.protocol.json_body import decode_json
from streamserve.protocol.limits import Limits

MAX_ERRORS = 100
MAX_CUSTOM_ID_CHARS = 256
_ENVELOPE_BYTES = 4096  # what a line may have beside its body
# How much of a file is read at once: so many lines, or bytes.
_LINES_AT_ONCE, _BYTES_AT_ONCE = 256, 256 * 1024
_BLANK = b" \t\r\n"
_MOST_LINES = 4  # times as many lines as a batch may have requests: a file of newlines alone would be read for minutes


PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"  # of files
WINDOW_SECONDS = 86_400
ENDED = ("failed", "completed", "expired", "cancelled")
TIMES = (
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
)  # fmt: skip


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
    """Which part of a list is asked for: `limit` records after the record `after`, newest first or oldest first."""

    limit: int
    after: str = ""
    is_newest_first: bool = True
    purpose: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """Something wrong with the file, or with a line of it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A request of a batch. `number` is the line's in the file, from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAnswer:
    """The answer that a row began: how it ended, and what it took."""

    stream_id: str
    model: str
    usage: Usage
    finish_reason: str
    error_code: str
    seconds: float
    ttft_seconds: float | None
    phases: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """How a row ended: the status and the JSON of its response; `answer`: None of a row that began none."""

    line: int
    custom_id: str
    request_id: str
    status_code: int
    body: str
    answer: RowAnswer | None = None

    @property
    def is_success(self) -> bool:
        """Whether the row goes to the output file."""
        return self.status_code < 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrun:
    """Why a row has no answer: its batch has `expired`, was `cancelled` or has `failed`; the code and the message."""

    status: str
    code: str
    message: str


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDialect:
    """How an API's batches look: how their ids begin, and the lines of their output and error files.

    `result_line` makes the line of a row that was run; `unrun_line` (request id, custom_id, why) the line of a row
    without an answer. An API whose results are one file `has_error_file` False.
    """

    name: str
    id_prefix: str
    result_line: Callable[[RowResult], bytes]
    unrun_line: Callable[[str, str, Unrun], bytes]
    has_error_file: bool = True


EXPIRED = Unrun(
    status="expired",
    code="batch_expired",
    message="This request was not run before the batch's completion window ended.",
)
CANCELLED = Unrun(
    status="cancelled",
    code="batch_cancelled",
    message="This request was not run before the batch was cancelled.",
)


def failed_row(code: str, message: str) -> Unrun:
    """Return why the rows without an answer have none, in a batch that failed."""
    return Unrun(status="failed", code=code, message=f"The batch failed before this request had an answer. {message}")


def read_lines(file: IO[bytes], limits: Limits) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the numbered lines that are not blank, some at a time. A line over the limit is cut one byte above it.

    A blank line after very many lines is yielded too, as a wrong line, and ends the file: blanks take time as well.
    """
    most, most_lines = limits.max_body_bytes + _ENVELOPE_BYTES, _MOST_LINES * limits.max_batch_lines
    number = num_bytes = 0
    lines: list[tuple[int, bytes]] = []
    while raw := file.readline(most + 1):
        number += 1
        rest = raw
        while len(rest) > most and not rest.endswith(b"\n"):
            rest = file.readline(most + 1)
        is_blank = not raw.strip(_BLANK)
        if is_blank and number > most_lines:
            lines.append((number, raw))
            break
        if not is_blank:
            lines.append((number, raw))
            num_bytes += len(raw)
        if len(lines) >= _LINES_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
            yield lines
            lines, num_bytes = [], 0
    if lines:
        yield lines


def parse_line(number: int, raw: bytes, endpoint: str, limits: Limits) -> Line | LineError:
    """Return the request in a line, or what is wrong with it."""
    if len(raw) > limits.max_body_bytes + _ENVELOPE_BYTES:
        return LineError(code="line_too_large", message=_too_long(limits), line=number)
    bounds = replace(limits, max_body_bytes=limits.max_body_bytes + _ENVELOPE_BYTES)
    try:
        found = decode_json(raw, bounds)
    except StreamserveError as error:
        message = error.message.replace("The body", "The line").replace(" (line 1, column", " (column")
        return LineError(code="invalid_json_line", message=message, line=number)
    wrong = _wrong(found, endpoint)
    if wrong is not None:
        return replace(wrong, line=number)
    return Line(number=number, custom_id=found["custom_id"], url=found["url"], body=found["body"])


def _too_long(limits: Limits) -> str:
    return f"The line is longer than {limits.max_body_bytes + _ENVELOPE_BYTES:,} bytes, the limit of one request."


def _wrong(line: dict[str, Any], endpoint: str) -> LineError | None:
    """Return the first thing that is wrong with a line that is a JSON object."""
    for name in ("custom_id", "method", "url", "body"):
        if name not in line:
            return LineError(code="missing_required_parameter", message=f"The line has no {name}.", param=name)
    custom_id = line["custom_id"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS or "\0" in custom_id:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        return LineError(code="invalid_custom_id", message=message, param="custom_id")
    if line["method"] != "POST":
        return LineError(code="invalid_method", message="method must be POST.", param="method")
    if line["url"] != endpoint:
        message = f"url must be {endpoint}, the endpoint of the batch."
        return LineError(code="invalid_url", message=message, param="url")
    if not isinstance(line["body"], dict):
        return LineError(code="invalid_body", message="body must be an object.", param="body")
    if line["body"].get("stream"):
        message = "A batch collects whole answers: leave stream out."
        return LineError(code="stream_not_supported", message=message, param="body.stream")
    return None


class LineChecker:
    """Checks a whole file, line by line. Holds a digest of each custom_id, 16 bytes, and no line."""

    def __init__(self, endpoint: str, limits: Limits) -> None:
        self._endpoint, self._limits = endpoint, limits
        self._first_lines: dict[bytes, int] = {}
        self.num_lines = 0
        self.errors: list[LineError] = []

    @property
    def is_hopeless(self) -> bool:
        """Whether the rest of the file need not be read."""
        return len(self.errors) >= MAX_ERRORS or self.num_lines > self._limits.max_batch_lines

    def check(self, lines: list[tuple[int, bytes]]) -> None:
        """Take the next lines."""
        for number, raw in lines:
            if self.is_hopeless:
                return
            self.num_lines += 1
            if self.num_lines > self._limits.max_batch_lines:
                message = f"The file has more than {self._limits.max_batch_lines:,} requests. Split it into several."
                self.errors.insert(0, LineError(code="too_many_requests", message=message, line=number))
            else:
                self._check(number, raw)

    def _check(self, number: int, raw: bytes) -> None:
        line = parse_line(number, raw, self._endpoint, self._limits)
        if isinstance(line, LineError):
            self.errors.append(line)
            return
        first = self._first_lines.setdefault(digest_of(line.custom_id), number)
        if first != number:
            message = f"Line {first} already has the custom_id {line.custom_id[:64]!r}."
            self.errors.append(LineError(code="duplicate_custom_id", message=message, line=number, param="custom_id"))

    def result(self) -> tuple[int, tuple[LineError, ...]]:
        """Return the number of requests, and what is wrong with the file."""
        if not self.num_lines:
            self.errors.append(LineError(code="empty_file", message="The file has no requests: every line is empty."))
        return self.num_lines, tuple(self.errors[:MAX_ERRORS])


def digest_of(custom_id: str) -> bytes:
    """Return 16 bytes that stand for a custom_id."""
    return hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).digest()[:16]
