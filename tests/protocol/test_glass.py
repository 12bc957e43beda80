"""Laws of the reader's times: their order, what they add up to with the server's, and the hop that is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.glass import ReaderTimes, disorder, hops, observed, parting
from streamserve.protocol.measures import OF_READERS

TIMES = ReaderTimes(
    headers=0.4,
    first_byte=0.4,
    first_delta=0.7,
    first_paint=0.75,
    ended=2.5,
    last_paint=2.6,
    gap_p95=0.2,
    paint_gap_p95=0.21,
    render=0.1,
    reconnects=1,
)
PHASES = {"network_in": 0.3, "queue": 0.1, "prefill": 0.2, "generation": 1.5}
seconds = st.floats(0.0, 100.0)


def test_the_hops_add_up_to_what_the_reader_saw() -> None:
    """The first token to its paint, the answer to its last paint; what two clocks have measured is left out."""
    found = hops(0.3, PHASES, TIMES)
    assert found["first"] == {"server": 0.3, "network": 0.4, "render": 0.05}
    assert found["whole"] == {"queue": 0.1, "prefill": 0.2, "generation": 1.5, "network": 0.7, "render": 0.1}
    assert sum(found["first"].values()) == pytest.approx(0.75)
    assert sum(found["whole"].values()) == pytest.approx(2.6)


@given(seconds, seconds, seconds, seconds)
def test_they_add_up_whatever_was_measured(server: float, network: float, first: float, rest: float) -> None:
    """The sum is the last paint, to the rounding."""
    came = server + network
    times = ReaderTimes(headers=0.0, first_delta=came, first_paint=came + first, ended=came, last_paint=came + rest)
    found = hops(server, {"prefill": server}, times)
    assert sum(found["first"].values()) == pytest.approx(came + first, abs=0.001)
    assert sum(found["whole"].values()) == pytest.approx(came + rest, abs=0.001)


def test_a_tab_in_the_background_has_no_rendering() -> None:
    """It painted nothing, so the hops add up to what came."""
    found = hops(0.3, PHASES, replace(TIMES, first_paint=None, last_paint=None, hidden=True))
    assert found["first"] == {"server": 0.3, "network": 0.4}
    assert sum(found["whole"].values()) == pytest.approx(2.5)


def test_a_reader_that_came_later_is_not_joined() -> None:
    """Its time is shorter than the server's by more than rounding: it is no reader of the whole answer."""
    assert hops(0.9, {"generation": 9.0}, TIMES) == {}
    assert hops(None, None, TIMES) == {}


def test_nothing_came_before_it_was_sent() -> None:
    """What was sent while the page rendered is rendering from then on: the sum stays what was seen."""
    found = hops(0.72, {"generation": 2.55}, TIMES)
    assert found["first"] == {"server": 0.72, "network": 0.0, "render": 0.03}
    assert found["whole"] == {"generation": 2.55, "network": 0.0, "render": 0.05}


@pytest.mark.parametrize(
    ("wrong", "pair"),
    [
        ({"first_byte": 0.1}, ("first_byte", "headers")),
        ({"first_delta": 0.1}, ("first_delta", "first_byte")),
        ({"first_paint": 0.1}, ("first_paint", "first_delta")),
        ({"ended": 0.1}, ("ended", "first_delta")),
        ({"last_paint": 1.0}, ("last_paint", "ended")),
        ({"gap_p95": 9.0}, ("last_paint", "gap_p95")),
        ({"render": 9.0}, ("last_paint", "render")),
    ],
)
def test_moments_have_an_order(wrong: dict[str, float], pair: tuple[str, str]) -> None:
    """None comes before what it follows from, and no part is longer than the whole."""
    assert disorder(TIMES) is None
    assert disorder(ReaderTimes(headers=0.1)) is None
    assert disorder(replace(TIMES, **wrong)) == pair


def test_a_report_is_kept_and_read_again() -> None:
    """What is not known takes no room, and a field of another release is left out."""
    kept = replace(TIMES, first_paint=None).as_json()
    assert "first_paint" not in kept
    assert ReaderTimes.of_json({**kept, "of_the_future": 1}) == replace(TIMES, first_paint=None)


def test_what_is_observed_has_the_names_of_the_metrics() -> None:
    """All five of a whole report; without the server's time no network."""
    assert observed(0.3, TIMES).keys() == set(OF_READERS)
    assert observed(None, TIMES).keys() == set(OF_READERS) - {"reader_network_seconds"}
    assert observed(0.3, ReaderTimes(headers=0.1)) == {}


@pytest.mark.parametrize(
    ("server", "network", "render", "hop"),
    [
        (0.3, 0.02, 0.01, ""),
        (0.3, 0.8, 0.1, "network"),
        (0.3, 0.1, 0.8, "render"),
        (10.0, 0.8, 0.1, ""),  # it is not there that ten seconds go
        (0.3, None, 0.8, "render"),
        (None, 0.8, 0.8, ""),
        (0.3, None, None, ""),
    ],
)
def test_the_hop_is_named_where_the_times_part(
    server: float | None, network: float | None, render: float | None, hop: str
) -> None:
    """The larger of the two, where it is much beside the server's own time; always with a sentence."""
    found = parting(server, network, render)
    assert found.hop == hop
    assert found.words.endswith((".", "page."))
