"""Laws of fixed buckets: they count every value once, agree with sorted lists, and drop old values."""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.measures import (
    BOUNDS,
    E2E,
    FIRST_PAINT,
    ITL,
    READER_TTFT,
    Buckets,
    ModelMeasures,
    Timings,
)
from streamserve.protocol.metrics import Sample, percentile, render_prometheus

times = st.lists(st.floats(1e-4, 900.0), min_size=1, max_size=60)


def buckets_of(values: list[float]) -> Buckets:
    out = Buckets()
    for value in values:
        out.observe(value)
    return out


def test_bounds_rise_by_a_quarter_at_most() -> None:
    """That is how far a percentile can be off."""
    assert all(1 < high / low <= 1.34 for low, high in pairwise(BOUNDS))
    assert (BOUNDS[0], BOUNDS[-1]) == (0.0001, 850.0)


@given(times, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_a_percentile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    """It lies between the bounds around the value with that rank, so it is never off by more than one bucket."""
    found = buckets_of(values).quantile(share)
    assert found is not None
    rank = max(1, -(-share * len(values) // 1))
    index = bisect_left(BOUNDS, sorted(values)[int(rank) - 1])
    low = BOUNDS[index - 1] if index else 0.0
    assert low <= found <= (BOUNDS[index] if index < len(BOUNDS) else low)


def test_a_percentile_is_close_on_many_values() -> None:
    """With a thousand even values it is within 5 % of the list's."""
    values = [number / 1000 for number in range(10, 1010)]
    for share in (0.5, 0.95):
        assert buckets_of(values).quantile(share) == pytest.approx(percentile(values, share), rel=0.05)


@given(times, times)
def test_buckets_add_up(some: list[float], more: list[float]) -> None:
    """Those of two processes are those of both; what came later is the difference."""
    both, before = buckets_of(some), buckets_of(some).histogram()
    both.add(buckets_of(more))
    assert both.counts == buckets_of([*some, *more]).counts
    since = both.histogram() - before
    assert since.counts == tuple(buckets_of(more).counts)
    assert (before + since).counts == tuple(both.counts)
    assert since.total == pytest.approx(sum(more), abs=1e-6)


@given(times)
def test_the_shown_histogram_loses_nothing(values: list[float]) -> None:
    """Half as many buckets hold the same values, each below its bound."""
    histogram = buckets_of(values).histogram()
    text = render_prometheus([Sample(name=E2E, value=histogram, labels={"model_name": "m"})])
    shown = {float(bound): int(count) for bound, count in re.findall(r'le="(.*?)"} (\d+)', text)}
    assert len(shown) == len(BOUNDS) // 2 + 1
    assert shown == {bound: sum(value <= bound for value in values) for bound in shown}


def test_tokens_that_come_together_share_their_gap() -> None:
    """Four tokens in one event after 0.48 s are four gaps of 0.12 s; an event without a token is none."""
    timings = Timings(0.0)
    timings.accept(0.0)
    timings.note(1.0)
    timings.note(1.48, num_tokens=4)
    timings.note(1.6, num_tokens=0)
    timings.note(1.7)
    assert timings.gaps.counts == buckets_of([0.12, 0.12, 0.12, 0.12, 0.22]).counts
    assert timings.gaps.total == pytest.approx(0.7)


def test_nothing_has_no_percentile() -> None:
    """The result is None; zero would be wrong."""
    assert Buckets().quantile(0.5) is None


def test_an_answer_is_counted_by_its_end() -> None:
    """A done by its finish reason, an error by its code; times that are not known are not counted."""
    model = ModelMeasures()
    model.note("stop", is_error=False, latency=2.0, breakdown={"ttft": 0.5}, gaps=buckets_of([0.1, 0.1]))
    model.note("timeout", is_error=True, latency=9.0, breakdown={}, gaps=Buckets())
    assert (dict(model.finished), dict(model.failed)) == ({"stop": 1}, {"timeout": 1})
    num = {name: sum(buckets.counts) for name, buckets in model.buckets.items()}
    assert (num[E2E], num[ITL], num["time_to_first_token_seconds"]) == (2, 2, 1)
    assert num["request_queue_time_seconds"] == 0


def test_a_reader_is_counted_by_what_it_reports() -> None:
    """Its times that are known, its reconnects, and whether its gaps kept the budget of its class."""
    model = ModelMeasures()
    model.note_reader({READER_TTFT: 0.5}, 2)
    model.note_gaps("chat", is_kept=False)
    values = {sample.name: sample.value for sample in model.samples("m")}
    assert (values["reader_reports"], values["reader_reconnects"], values["reader_gap_budget"]) == (1, 2, 1)
    assert (sum(model.buckets[READER_TTFT].counts), sum(model.buckets[FIRST_PAINT].counts)) == (1, 0)
