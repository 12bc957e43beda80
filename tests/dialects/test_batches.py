"""Input files of batches: read in bounded memory, every wrong line found with its number."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from streamserve.dialects.batches import MAX_ERRORS, Line, LineChecker, LineError, parse_line, read_lines
from streamserve.protocol.limits import Limits

URL = "/v1/completions"
USUAL, SMALL = Limits(), Limits(max_body_bytes=100)
MOST = 100 + 4096  # of a line


def line(**changes: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": URL, "body": {"prompt": "x"}, **changes}).encode()


def checked(content: bytes, limits: Limits = USUAL) -> tuple[int, list[tuple[str, int | None]]]:
    """Return the number of requests, and code and line of each error."""
    checker = LineChecker(URL, limits)
    for lines in read_lines(io.BytesIO(content), limits):
        checker.check(lines)
    num, errors = checker.result()
    return num, [(one.code, one.line) for one in errors]


def test_lines_keep_their_numbers() -> None:
    """Blank ones count, and are no requests; the last one needs no newline."""
    content = b"\n" + line() + b"\r\n  \n" + line(custom_id="b")
    assert [number for lines in read_lines(io.BytesIO(content), SMALL) for number, _ in lines] == [2, 4]
    assert checked(content) == (2, [])


def test_blank_lines_come_to_an_end() -> None:
    """A file of newlines alone is not read to its end: the first blank line that is too many is a wrong line."""
    limits, content = Limits(max_batch_lines=5), io.BytesIO(line() + b"\n" * 100_000)
    assert [number for lines in read_lines(content, limits) for number, _ in lines] == [1, 21]
    assert content.tell() < 1000
    assert checked(line() + b"\n" * 100, limits) == (2, [("invalid_json_line", 21)])
    assert checked(b"\n".join([line(custom_id=str(at)) + b"\n\n" for at in range(5)]), limits) == (5, [])


@pytest.mark.parametrize("extra", [0, 1, 5000, 20_000])
def test_a_long_line_is_cut_and_the_next_is_read(extra: int) -> None:
    """No more of it than one byte over the limit is in memory."""
    content = b"x" * (MOST + extra) + b"\n" + line()
    (first, second) = [one for lines in read_lines(io.BytesIO(content), SMALL) for one in lines]
    assert len(first[1]) == MOST + 1
    assert second == (2, line())


def test_a_line_over_the_limit_has_an_error_of_its_own() -> None:
    """Not that of what is left of its JSON."""
    content = line(body={"prompt": "x" * 5000}) + b"\n" + line(custom_id="b")
    assert checked(content, SMALL) == (2, [("line_too_large", 1)])


def test_large_files_come_in_pieces() -> None:
    """A piece has 256 lines, or 256 KiB."""
    pieces = [len(lines) for lines in read_lines(io.BytesIO(line() * 1 + b"\n" + b"1\n" * 599), Limits())]
    assert pieces == [256, 256, 88]
    large = [b'"%s"\n' % (b"x" * 100_000)] * 7
    assert [len(lines) for lines in read_lines(io.BytesIO(b"".join(large)), Limits())] == [3, 3, 1]


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b'{"a": NaN}', "invalid_json_line", None),
        (b'{"custom_id": "a", "custom_id": "b"}', "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (line(body={"zz": [[]] * 20_000}), "invalid_json_line", None),
        (b'{"method": "POST"}', "missing_required_parameter", "custom_id"),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id=7), "invalid_custom_id", "custom_id"),
        (line(custom_id="x" * 257), "invalid_custom_id", "custom_id"),
        (line(custom_id="a\0"), "invalid_custom_id", "custom_id"),
        (line(method="post"), "invalid_method", "method"),
        (line(url="/v1/chat/completions"), "invalid_url", "url"),
        (line(body=[]), "invalid_body", "body"),
        (line(body={"stream": True}), "stream_not_supported", "body.stream"),
    ],
)
def test_each_fault_has_a_code(raw: bytes, code: str, param: str | None) -> None:
    """And the number of its line."""
    found = parse_line(7, raw, URL, Limits())
    assert isinstance(found, LineError)
    assert (found.code, found.param, found.line) == (code, param, 7)
    assert "The body" not in found.message


def test_a_right_line() -> None:
    """`stream: false` is what is meant anyway."""
    found = parse_line(1, line(body={"prompt": "x", "stream": False}), URL, Limits())
    assert found == Line(number=1, custom_id="a", url=URL, body={"prompt": "x", "stream": False})


def test_a_name_is_used_once() -> None:
    """The second line is wrong, and its message names the first."""
    content = b"\n".join(line(custom_id=name) for name in "abca")
    assert checked(content) == (4, [("duplicate_custom_id", 4)])


def test_too_many_errors_end_the_check() -> None:
    """The first hundred are listed."""
    num, errors = checked(b"{\n" * 1000)
    assert (len(errors), errors[-1]) == (MAX_ERRORS, ("invalid_json_line", MAX_ERRORS))
    assert num == MAX_ERRORS


@pytest.mark.parametrize(("num", "codes"), [(3, []), (4, [("too_many_requests", 4)])])
def test_so_many_requests(num: int, codes: list[Any]) -> None:
    """The limit is of requests, not of lines."""
    content = b"\n\n".join(line(custom_id=str(index)) for index in range(num))
    assert [code for code, _ in checked(content, Limits(max_batch_lines=3))[1]] == [code for code, _ in codes]


def test_an_empty_file() -> None:
    """Has no line to name."""
    assert checked(b" \n\n") == (0, [("empty_file", None)])
