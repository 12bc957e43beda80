"""Laws of `EventBounds`: the cuts of a stream do not matter, and between events the standard's parser has none open."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from streamserve.asgi.hardening import EventBounds

LINES = st.lists(st.sampled_from([b"data: x", b"id: 1", b": ping", b"", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r"]))


def is_between(data: bytes) -> bool:
    """Return whether the bytes end between events, by a plain reading (WHATWG HTML 9.2.6)."""
    lines = re.split(rb"\r\n|\n|\r", data)
    has_open_event = lines[-1] != b"" or (len(lines) > 1 and lines[-2] != b"")
    may_want_lf = data.endswith(b"\r") and re.search(rb"\r[^\n]", data) is None
    return not has_open_event and not may_want_lf


@given(LINES, st.lists(st.integers(1, 5)))
def test_between_events_is_the_same_however_the_bytes_come(lines: list[bytes], sizes: list[int]) -> None:
    """After every piece, whatever its size, the answer is that of a plain reading."""
    data, bounds, place = b"".join(lines), EventBounds(), 0
    for size in [*sizes, len(data)]:
        bounds.feed(data[place : place + size])
        place += size
        assert bounds.is_between == is_between(data[:place]), data[:place]


@given(st.lists(st.integers(1, 50), min_size=1), st.sampled_from([b"\n", b"\r", b"\r\n"]), st.integers(1, 7))
def test_the_size_of_the_largest_event(sizes: list[int], line_end: bytes, piece: int) -> None:
    """The size of an event is its lines and the blank one, in one piece or many (without an LF that comes late)."""
    events = [b"x" * size + 2 * line_end for size in sizes]
    data = b"".join(events)
    assert EventBounds().feed(data) == max(map(len, events))
    bounds = EventBounds()
    largest = max(bounds.feed(data[place : place + piece]) for place in range(0, len(data), piece))
    assert max(sizes) <= largest <= max(map(len, events))
    assert bounds.size == 0
