"""Laws of metrics: percentiles, and Prometheus' text format."""

import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.metrics import METRICS, Histogram, Sample, percentile, render_prometheus


def test_nothing_has_no_percentile():
    """The result is None; zero would be wrong."""
    assert percentile([], 0.5) is None


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values: list[float]):
    """Percentiles are those of `statistics.quantiles(method="inclusive")`."""
    values.sort()
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    for q, expected in zip((0.25, 0.5, 0.75), quartiles, strict=True):
        assert percentile(values, q) == pytest.approx(expected, abs=1e-6)
    assert (percentile(values, 0), percentile(values, 1)) == (values[0], values[-1])


def test_the_text_format():
    """HELP and TYPE once a metric, counters end in _total, labels are escaped, metrics keep the declared order."""
    text = render_prometheus(
        [
            Sample(name="prompt_tokens", value=12, labels={"model_name": 'a"b\\c\nd'}),
            Sample(name="num_requests_running", value=3.0),
            Sample(name="prompt_tokens", value=0.5, labels={"model_name": "e"}),
        ]
    )
    assert text == (
        "# HELP streamserve_num_requests_running Requests in the engine's running batch. Unit: requests.\n"
        "# TYPE streamserve_num_requests_running gauge\n"
        "streamserve_num_requests_running 3\n"
        "# HELP streamserve_prompt_tokens_total Prompt tokens processed. Unit: tokens.\n"
        "# TYPE streamserve_prompt_tokens_total counter\n"
        'streamserve_prompt_tokens_total{model_name="a\\"b\\\\c\\nd"} 12\n'
        'streamserve_prompt_tokens_total{model_name="e"} 0.5\n'
    )


def test_histogram_buckets_are_cumulative():
    """The last bucket is +Inf and equals the count."""
    histogram = Histogram(bounds=(0.1, 1.0), counts=(2, 1, 4), total=9.25)
    text = render_prometheus([Sample(name="time_to_first_token_seconds", value=histogram, labels={"model_name": "m"})])
    name = "streamserve_time_to_first_token_seconds"
    assert text.splitlines()[1:] == [
        f"# TYPE {name} histogram",
        f'{name}_bucket{{model_name="m",le="0.1"}} 2',
        f'{name}_bucket{{model_name="m",le="1"}} 3',
        f'{name}_bucket{{model_name="m",le="+Inf"}} 7',
        f'{name}_sum{{model_name="m"}} 9.25',
        f'{name}_count{{model_name="m"}} 7',
    ]


def test_an_undeclared_metric_cannot_be_shown():
    """A sample of a name without a declaration is an error."""
    with pytest.raises(KeyError):
        render_prometheus([Sample(name="made_up", value=1)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300, 0.1])
def test_any_number_renders(value: float):
    """A value that is no number shows as NaN, and the scrape still works."""
    assert re.search(
        r" (NaN|[+-]Inf|[0-9.e+]+)\n\Z", render_prometheus([Sample(name="tokens_per_second", value=value)])
    )


def test_declarations_are_well_formed():
    """Names fit Prometheus, kinds are known, every metric has a help text and a unit."""
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert metric.kind in ("counter", "gauge", "histogram")
        assert metric.help.endswith(".")
        assert metric.unit
