"""Texts that a model may generate, with many strings that have a meaning in a transport or a parser."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

PIECES = (
    "\r", "\n", "\r\n", "\n\n", "\r\n\r\n", "data:", "data: ", "id:", "id: 7", "event: done", "retry: 1", ":", " ",
    "[DONE]", "\0", "\ufeff", "\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1e", "\x7f", '"', "\\", "\\u2028",
    "{}", "é", "e\u0301", "日本", "한글", "🎉", "👩‍👩‍👧", "🏳️‍🌈", "\U0010ffff", "\ufffd", "\u200f", "</script>",
)  # fmt: skip
# Never a high one before a low one: Python keeps the two apart, JSON does not.
SURROGATES = ("\ud800.", "\udfff")

# The characters that UTF-8 can carry.
texts = st.text() | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
# Lone surrogates too, which JSON can carry.
any_texts = texts | st.lists(st.sampled_from(PIECES + SURROGATES) | st.text(max_size=3), max_size=8).map("".join)


@st.composite
def cuts(draw: st.DrawFn, most: int = 12) -> list[float]:
    """Places at which bytes are cut, from 0 to 1."""
    return sorted(draw(st.lists(st.floats(0, 1), max_size=most)))


def cut_up(data: bytes, places: list[float] | None) -> list[bytes]:
    """Cut `data` at those places, or after each byte."""
    if places is None:
        return [data[index : index + 1] for index in range(len(data))]
    ends = [0, *(round(place * len(data)) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(ends)]
