"""Laws of the SSE decoder: how reads are cut changes nothing, and what it holds has a bound."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.sse import KEEPALIVE, SSEDecoder, SSEError, frame

STREAM = (
    "\ufeffdata: a\r\n\r\n: note\nid: 7\nevent: x\ndata: é😀\ndata:b\n\n\rdata:  c\r\rretry: 1\n\ndata\n\ndata: cut"
).encode()
FOUND = ["a", "é😀\nb", " c"]


def fed(decoder: SSEDecoder, data: bytes, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [one for start, end in itertools.pairwise(edges) for one in decoder.feed(data[start:end])]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_the_cuts_of_reads_change_nothing(cuts: list[int]) -> None:
    """Line ends of all three kinds, a byte-order mark and code points may be cut anywhere."""
    assert fed(SSEDecoder(100), STREAM, cuts) == [*FOUND, ""]


def test_byte_by_byte() -> None:
    """The same with every cut."""
    assert fed(SSEDecoder(100), STREAM, list(range(len(STREAM)))) == [*FOUND, ""]


@given(texts=st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=20), max_size=8))
def test_it_reads_what_our_encoder_writes(texts: list[str]) -> None:
    """Events of protocol/sse.py with keepalives between them come back."""
    data = b"".join(frame(text, event="token", id=f"s-{number}") + KEEPALIVE for number, text in enumerate(texts))
    assert SSEDecoder(1000).feed(data + b"\n") == texts


def test_a_line_over_the_limit_is_refused_before_it_ends() -> None:
    """Nothing beyond the limit is held, in one read or in many; a line at the limit passes."""
    assert SSEDecoder(8).feed(b"data: ab\n\n") == ["ab"]
    with pytest.raises(SSEError, match="8 bytes"):
        SSEDecoder(8).feed(b"data: abc")
    decoder = SSEDecoder(8)
    assert [decoder.feed(b"x") for _ in range(8)] == [[]] * 8
    with pytest.raises(SSEError, match="a line"):
        decoder.feed(b"x")


def test_an_event_of_many_lines_has_the_same_limit() -> None:
    """Data lines without an end of the event are held together, and so bounded together."""
    decoder = SSEDecoder(64)
    assert [decoder.feed(b"data: x\n") for _ in range(9)] == [[]] * 9
    with pytest.raises(SSEError, match="an event"):
        decoder.feed(b"data: x\n")


def test_bytes_that_are_no_utf8_are_refused() -> None:
    """They are never replaced: the text would be another one."""
    with pytest.raises(SSEError, match="UTF-8"):
        SSEDecoder(64).feed(b"data: \xff\xfe\n\n")
