"""Laws of message batches: bodies read in pieces, what is wrong with them, counts and lines of results."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.dialects.anthropic.batches import batch_json, check_type, result_line, unrun_line, write_requests
from streamserve.dialects.batches import CANCELLED, EXPIRED, BatchRecord, RowResult
from streamserve.protocol.errors import BadRequest, StreamserveError, UnsupportedMedia
from streamserve.protocol.limits import Limits

JSON, JSONL = "application/json", "application/jsonl"
LIMITS = Limits(max_body_bytes=200_000, max_batch_lines=5)
PARAMS = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": 'Hé {[,\\"]} 🎉'}]}


def written(body: bytes, kind: str = JSON, limits: Limits = LIMITS) -> list[Any]:
    """Return the lines of the input file."""
    out = io.BytesIO()
    assert write_requests(io.BytesIO(body), check_type(kind), out, limits) == out.getvalue().count(b"\n")
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_an_unknown_field_is_named_whatever_it_is():
    """Its name can be shown: half of a surrogate pair is replaced."""
    with pytest.raises(BadRequest) as caught:
        written(rb'{"\ud83d": []}')
    assert (caught.value.code, caught.value.param) == ("unknown_field", "?")
    assert "Unknown field ?." in caught.value.message


def request(custom_id: str = "a", **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": PARAMS, **fields}


def line(custom_id: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/messages", "body": PARAMS}


def as_json(*requests: Any) -> bytes:
    return json.dumps({"requests": list(requests)}, ensure_ascii=False).encode()


def as_jsonl(*requests: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


@pytest.mark.parametrize(("kind", "body"), [(JSON, as_json), ("application/x-ndjson; charset=utf-8", as_jsonl)])
def test_requests_become_lines(kind: str, body: Callable[..., bytes]):
    """In their order, whichever form the body has."""
    assert written(body(request("a"), request("b")), kind) == [line("a"), line("b")]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=5), st.data())
def test_pieces_make_the_same_requests(texts: list[str], data: st.DataObject):
    """A body that arrives a few bytes at a time is read as a whole one is."""
    requests = [request(f"r{index}", params={"text": text}) for index, text in enumerate(texts)] or [request()]
    indent = data.draw(st.sampled_from([None, 0, 3]))
    body = json.dumps({"requests": requests}, ensure_ascii=False, indent=indent).encode()
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))

    class Slow(io.BytesIO):
        num_reads = 0

        def read(self, size: int | None = -1, /) -> bytes:
            self.num_reads += 1
            return super().read(sizes[self.num_reads % len(sizes)])

    out = io.BytesIO()
    write_requests(Slow(body), False, out, LIMITS)
    bodies = [json.loads(one)["body"] for one in out.getvalue().splitlines()]
    assert bodies == [one["params"] for one in requests]


def test_a_body_is_not_held():
    """Of a body of many requests one piece is in memory at a time: no read is larger than a request and a piece."""
    sizes = []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            sizes.append(size)
            return super().read(size)

    requests = [request(f"r{index}", params={"text": "x" * 100_000}) for index in range(40)]
    limits = Limits(max_body_bytes=200_000)
    assert write_requests(Watched(as_json(*requests)), False, io.BytesIO(), limits) == 40
    assert max(sizes) <= 2 * 200_000
    assert len(sizes) >= 20


WRONG: list[tuple[str, bytes, str, str | None]] = [
    (JSON, b"", "invalid_json", None),
    (JSON, b"[]", "invalid_json", None),
    (JSON, b"{}", "invalid_value", "requests"),
    (JSON, as_json(), "invalid_value", "requests"),
    (JSONL, b"\n \n", "invalid_value", "requests"),
    (JSON, b'{"requests": {}}', "invalid_json", None),
    (JSON, b'{"reqests": []}', "unknown_field", "reqests"),
    (JSON, as_json(request()) + b"{}", "invalid_json", None),
    (JSON, as_json(request())[:-1], "invalid_json", None),
    (JSON, as_json(request())[:-2], "invalid_json", None),
    (JSON, b'{"requests": [{"custom_id": "a"', "invalid_json", None),
    (JSON, as_json(request())[:-1] + b",}", "invalid_json", None),
    (JSON, as_json(request())[:-2] + b",]}", "invalid_json", None),
    (JSON, as_json(request()).replace(b"requests", b"\xff"), "invalid_json", None),
    (JSON, b'{"requests": [' + b"[" * 10_000, "invalid_json", None),
    (JSON, b'{"requests": [' + b"[" * 300_000, "too_many_containers", "requests[0]"),
    (JSON, as_json(request(), request("b", params={"zz": [[]] * 20_000})), "too_many_containers", "requests[1]"),
    (JSONL, as_jsonl(request(), request("b", params={"zz": [[]] * 20_000})), "too_many_containers", "requests[1]"),
    (JSON, b'{"requests": ["' + b"x" * 300_000, "line_too_large", "requests[0]"),
    (JSON, as_json(request(), 1), "invalid_json", "requests[1]"),
    (JSON, as_json(request(), {"custom_id": "b", "params": {"text": "x" * 300_000}}), "line_too_large", "requests[1]"),
    (
        JSONL,
        as_jsonl(request(), {"custom_id": "b", "params": {"text": "x" * 300_000}}),
        "line_too_large",
        "requests[1]",
    ),
    (JSONL, as_jsonl(request()) + b"{", "invalid_json", "requests[1]"),
    (JSON, as_json({"params": PARAMS}), "missing_field", "requests[0].custom_id"),
    (JSON, as_json({"custom_id": "a"}), "missing_field", "requests[0].params"),
    (JSON, as_json(request(params=[])), "invalid_type", "requests[0].params"),
    (JSON, as_json(request(param={})), "unknown_field", "requests[0].param"),
    (JSON, as_json(request("")), "invalid_value", "requests[0].custom_id"),
    (JSON, as_json(request("a" * 300)), "invalid_value", "requests[0].custom_id"),
    (JSON, as_json(request("a\0")), "invalid_value", "requests[0].custom_id"),
    (JSON, as_json(request(), request("b"), request()), "duplicate_custom_id", "requests[2].custom_id"),
    (JSON, as_json(request(params={**PARAMS, "stream": True})), "stream_not_supported", "requests[0].params.stream"),
    (JSON, as_json(*(request(str(one)) for one in range(6))), "too_many_requests", "requests"),
    (JSON, as_json(request()).replace(b'"max_tokens"', b'"model"'), "invalid_json", "requests[0]"),
]


@pytest.mark.parametrize(("kind", "body", "code", "param"), WRONG, ids=[f"{i}-{one[2]}" for i, one in enumerate(WRONG)])
def test_a_wrong_body_is_a_400(kind: str, body: bytes, code: str, param: str | None):
    """The first wrong request is named, in a sentence."""
    with pytest.raises(BadRequest) as caught:
        written(body, kind)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.message.endswith(".")


def test_another_content_type_is_refused():
    """With the types that are read."""
    with pytest.raises(UnsupportedMedia, match="application/jsonl"):
        written(as_json(request()), "text/plain")


@given(st.binary(max_size=60), st.sampled_from([JSON, JSONL]))
def test_no_bytes_raise_anything_but_ours(body: bytes, kind: str):
    """Whatever a body is."""
    try:
        written(b'{"requests": [' + body if kind == JSON else body, kind)
    except StreamserveError:
        return


TIMES = {"created_at": 0, "expires_at": 86_400}


@pytest.mark.parametrize(
    ("status", "shown", "left_as"),
    [
        ("validating", "in_progress", "processing"),
        ("in_progress", "in_progress", "processing"),
        ("finalizing", "in_progress", "processing"),
        ("cancelling", "canceling", "processing"),
        ("cancelled", "ended", "canceled"),
        ("expired", "ended", "expired"),
        ("failed", "ended", "errored"),
    ],
)
def test_states_and_counts(status: str, shown: str, left_as: str):
    """Each request is counted once, in any state."""
    times = {**TIMES, f"{status}_at": 60}
    record = BatchRecord(
        id="msgbatch_1", endpoint="/v1/messages", status=status, input_file_id="f", num_rows=9, num_completed=2,
        num_failed=1, times=times,
    )  # fmt: skip
    batch = batch_json(record)
    assert (batch["type"], batch["processing_status"], batch["results_url"]) == ("message_batch", shown, None)
    expected = {"processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0}
    expected[left_as] += 6
    assert batch["request_counts"] == expected
    assert (batch["created_at"], batch["expires_at"]) == ("1970-01-01T00:00:00Z", "1970-01-02T00:00:00Z")
    assert batch["ended_at"] == ("1970-01-01T00:01:00Z" if shown == "ended" else None)


def test_lines_of_results():
    """One line a request, whether it was answered, refused or not run."""

    def row(status_code: int, body: Any) -> RowResult:
        return RowResult(line=1, custom_id="a", request_id="req_1", status_code=status_code, body=json.dumps(body))

    error = {"type": "error", "error": {"type": "invalid_request_error", "message": "No."}}
    lines = [
        result_line(row(200, {"type": "message"})), result_line(row(400, error)),
        unrun_line("req_1", "a", CANCELLED), unrun_line("req_1", "a", EXPIRED),
    ]  # fmt: skip
    assert all(one.endswith(b"\n") and one.count(b"\n") == 1 for one in lines)
    assert [json.loads(one) for one in lines] == [
        {"custom_id": "a", "result": one}
        for one in (
            {"type": "succeeded", "message": {"type": "message"}},
            {"type": "errored", "error": error},
            {"type": "canceled"},
            {"type": "expired"},
        )
    ]
