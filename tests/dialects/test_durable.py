"""The Durable Streams view of a log: offsets that sort, items that are the same however they are read, the frames."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.dialects.durable import LogEncoder, cursor_at, etag_of, item_of, offset_of, parse
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import GoingAway, LoggedEvent, is_terminal
from tests.support.bodies.random_logs import random_answer
from tests.support.checks.durable_checks import items_of
from tests.support.checks.stream_checks import parse_sse


@dataclass
class End:
    """A log's name and its last event."""

    log_id: str
    last_seq: int


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_offsets_sort_as_texts(a: int, b: int) -> None:
    """The order of two offsets is the order of their events, and parsing one gives its event."""
    first, second = offset_of("abc123", a), offset_of("abc123", b)
    assert (first < second) is (a < b)
    assert not set(first) & set(",&=?/ ")
    read = parse({"offset": first})
    assert (read.log_id, read.seq) == ("abc123", a)


@given(st.text().filter(lambda text: text not in ("-1", "now")))
def test_any_other_text_is_no_offset(text: str) -> None:
    """What is neither an offset of ours nor -1 or now is refused, or names an event."""
    with suppress(BadRequest):
        read = parse({"offset": text})
        assert offset_of(read.log_id, read.seq or 0) == text


@pytest.mark.parametrize(
    ("query", "param"),
    [({"live": "sse"}, "offset"), ({"live": "yes", "offset": "-1"}, "live"), ({"cursor": "a"}, "cursor")],
)
def test_a_wrong_query_names_its_parameter(query: dict[str, str], param: str) -> None:
    """A live read without an offset, an unknown mode, a cursor that is none."""
    with pytest.raises(BadRequest) as refused:
        parse(query)
    assert refused.value.param == param


def test_a_cursor_never_goes_back() -> None:
    """A reader that sends a cursor gets a higher one, also from a clock that has been set back."""
    now = time.time()
    first = int(cursor_at(now, 0))
    assert int(cursor_at(now, first)) > first
    assert int(cursor_at(now - 10_000, first)) > first
    assert int(cursor_at(now + 40, first)) == first + 2


def test_a_tag_is_another_once_the_stream_is_closed() -> None:
    """The same items have another tag when nothing can follow them."""
    assert etag_of("a", 0, 4, is_closed=True) != etag_of("a", 0, 4, is_closed=False)


@pytest.mark.parametrize("seed", range(20))
def test_every_cut_is_a_place_to_read_on(seed: int) -> None:
    """Frames of any size give each item once, each data event has its control event, and the last one closes."""
    answer = random_answer(seed)
    log = [LoggedEvent(seq, logged.event) for seq, logged in enumerate(answer.log, 1)]
    items = [json.loads(item_of(logged)) for logged in log]
    is_over = is_terminal(log[-1].event)
    for cut in range(len(log) + 1):
        encoder = LogEncoder(End(answer.log_id, len(log)), cut, "5")
        split = (cut + len(log)) // 2
        body = encoder.encode_all(log[cut:split]) + encoder.encode_all(log[split:])
        shown = [(frame.event, frame.data) for frame in parse_sse(body)]
        found = items_of(shown, is_whole=is_over and cut < len(log))
        assert [item.seq for item in found] == [item["seq"] for item in items[cut:]]
        assert [item.data for item in found] == [item["data"] for item in items[cut:]]
        if cut == len(log):
            assert items_of([(one.event, one.data) for one in parse_sse(encoder.first_bytes)], is_whole=False) == []


def test_a_notice_that_is_in_no_log_is_not_shown() -> None:
    """Seq 0 has no offset, and a server that goes down sends no last word: the reader connects again."""
    encoder = LogEncoder(End("a", 3), 0, "5")
    logged = random_answer(1).log[0]
    assert encoder.encode(LoggedEvent(0, logged.event)) == b""
    assert encoder.going_away(GoingAway(stream_id="0" * 32, seq=2, retry_ms=500)) == b""
