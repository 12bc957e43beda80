"""Laws of figures that add up: several processes are one sum, and what was gained in a while is a difference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.figures import Figures, Past, pack, pack_past, unpack, unpack_past
from streamserve.protocol.measures import E2E, Buckets
from streamserve.protocol.metrics import Sample

counts = st.lists(st.tuples(st.sampled_from(["stop", "length"]), st.integers(0, 9)), max_size=6)
times = st.lists(st.floats(1e-4, 900.0), max_size=20)


def figures(ends: list[tuple[str, int]] = [], seconds: list[float] = [], **gauges: float) -> Figures:  # noqa: B006
    """Answers by their finish reason, how long they took, and gauges of the model."""
    buckets = Buckets()
    for one in seconds:
        buckets.observe(one)
    out = Figures([Sample(name=E2E, value=buckets.histogram(), labels={"model_name": "m"})])
    out.add(
        Sample(name="request_success", value=num, labels={"model_name": "m", "finished_reason": end})
        for end, num in ends
    )
    out.add(Sample(name=name, value=value, labels={"model_name": "m"}) for name, value in gauges.items())
    return out


@given(counts, times, counts, times)
def test_processes_add_up_and_a_while_is_a_difference(
    ends: list[tuple[str, int]], seconds: list[float], more: list[tuple[str, int]], later: list[float]
) -> None:
    """The sum of two processes is both; without the first it is the second, and what is packed is what was."""
    before, gained = figures(ends, seconds), figures(more, later)
    both = Figures(before)
    both.add(gained)
    assert both.total("request_success") == sum(num for _, num in [*ends, *more])
    assert both.histogram(E2E, model_name="m").counts == figures([], [*seconds, *later]).histogram(E2E).counts
    since = both.since(before)
    for end in ("stop", "length"):
        wanted = gained.total("request_success", finished_reason=end)
        assert since.total("request_success", finished_reason=end) == wanted
    assert since.histogram(E2E).counts == gained.histogram(E2E).counts
    assert unpack(pack(both)).has_same(both)


def test_gauges_join_by_what_they_are() -> None:
    """Numbers of things add up; of times, shares and yes or no the largest counts; none outlives its process."""
    joined = figures(streams_active=2, kv_cache_usage_perc=0.2, queue_seconds=3, engine_ready=1)
    joined.add(figures(streams_active=5, kv_cache_usage_perc=0.6, queue_seconds=1, engine_ready=0))
    names = ("streams_active", "kv_cache_usage_perc", "queue_seconds", "engine_ready")
    assert [joined.total(name) for name in names] == [7, 0.6, 3, 1]
    assert [joined.counted().total(name) for name in names] == [0, 0, 0, 0]


def test_marks_are_of_the_minutes_that_changed_something() -> None:
    """A moment without a mark is the mark before it; what is older than the window is kept once, as its beginning."""
    past = Past()
    assert past.at(100).total("request_success") == 0
    assert past.mark(100, figures([("stop", 1)]))
    assert not past.mark(100, figures([("stop", 2)]))
    assert past.mark(103, figures([("stop", 2)]))
    assert not past.mark(104, figures([("stop", 2)]))
    assert [past.at(minute).total("request_success") for minute in (99, 100, 102, 103, 140)] == [0, 1, 1, 2, 2]
    assert past.mark(140, figures([("stop", 3)]))
    assert sorted(past.marks) == [103, 140]
    again = unpack_past(pack_past(past))
    assert {minute: mark.total("request_success") for minute, mark in again.marks.items()} == {103: 2, 140: 3}


@pytest.mark.parametrize("data", [b"", b"\x93", b"{}", b"\x81\xa6format\x09"])
def test_what_cannot_be_read_counts_nothing(data: bytes) -> None:
    """A file of another release, or half a file, is no figures."""
    assert list(unpack(data)) == []
    assert list(unpack_past(data).ended) == []
