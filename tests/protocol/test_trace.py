"""Laws of `traceparent`: W3C Trace Context, 3.2.2; a header that is not valid is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.requests import NO_CALLER, GenerateRequest, decode_request, encode_request
from streamserve.protocol.trace import Trace, parse, read_trace

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE_ID}-{SPAN_ID}-01"


def test_a_header_is_read() -> None:
    """Its ids, its flag, and the state beside it; it is written as it came."""
    trace = read_trace({"traceparent": VALID, "tracestate": "vendor=1"})
    assert trace == Trace(trace_id=TRACE_ID, span_id=SPAN_ID, flags=1, state="vendor=1")
    assert trace.headers == {"traceparent": VALID, "tracestate": "vendor=1"}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        VALID.upper(),
        VALID[:-1],
        VALID + "0",
        VALID + "-00",
        VALID + ",",
        f"{VALID},{VALID}",
        VALID.replace("-", "_"),
        "ff" + VALID[2:],
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[:-1]}g-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-0x",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
        f"00-{TRACE_ID}-{SPAN_ID}-٠١",
        f"01{VALID[2:]}x",
        "00-" + "a" * 1_000_000,
    ],
)
def test_a_header_that_is_not_valid_is_none(header: str) -> None:
    """Whatever is wrong with it, the request is one without a trace."""
    assert read_trace({"traceparent": header, "tracestate": "vendor=1"}) is None


@pytest.mark.parametrize("header", ["cc" + VALID[2:], f"cc{VALID[2:]}-what.the.future.brings"])
def test_a_newer_version_is_read_as_the_first(header: str) -> None:
    """ "Implementations MUST parse the first fields of a higher version", and go on with version 00."""
    trace = parse(header)
    assert trace is not None
    assert trace.header == VALID


def test_unknown_flags_go_no_further() -> None:
    """Of the flags "sampled" and "random" are known."""
    assert [parse(VALID[:-2] + flags).flags for flags in ("00", "01", "02", "03", "ff")] == [0, 1, 2, 3, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize("state", ["", "x" * 513, "a=ü", "a=1\r\nset-cookie: b=1", "a=\x00"])
def test_a_wrong_state_is_dropped_alone(state: str) -> None:
    """The trace is read without it: nothing but a line of ASCII goes into a request to another server."""
    trace = parse(VALID, state)
    assert trace is not None
    assert trace.headers == {"traceparent": VALID}


@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", fullmatch=True))
def test_any_text_is_read_or_none(header: str) -> None:
    """No header raises, and what is read is written as a header that reads the same."""
    trace = parse(header)
    if trace is not None:
        assert parse(trace.header) == trace


def test_a_row_keeps_the_trace() -> None:
    """Another process continues in it; a row without is as it was before, and a wrong value is none."""
    request, trace = GenerateRequest(model="m", prompt="p"), parse(VALID)
    plain = encode_request(request, NO_CALLER)
    assert "trace" not in plain
    for kept, expected in ((plain, None), ({**plain, "trace": VALID}, trace), ({**plain, "trace": "wrong"}, None)):
        assert decode_request(kept, NO_CALLER)[1].trace == expected
