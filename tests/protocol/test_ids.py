"""Laws of event ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.ids import event_id, parse_event_id


@given(st.from_regex(r"[0-9A-Za-z_-]{1,40}", fullmatch=True), st.integers(0, 10**15 - 1))
def test_an_id_parses_back(log_id: str, seq: int):
    """parse(make(x)) == x."""
    assert parse_event_id(event_id(log_id, seq)) == (log_id, seq)


@pytest.mark.parametrize(
    "text", ["", "-", "abc", "abc-", "-1", "abc-x", "abc-01", "abc-1 ", "abc-1\n", "abc-٣", "a\nb-1", "abc-" + "9" * 16]
)
def test_what_is_no_id_of_ours_is_none(text: str):
    """A caller's text never raises, and is never parsed in part."""
    assert parse_event_id(text) is None


@given(st.text(max_size=80))
def test_no_text_raises(text: str):
    """Last-Event-ID may be any text."""
    parsed = parse_event_id(text)
    assert parsed is None or event_id(*parsed) == text
