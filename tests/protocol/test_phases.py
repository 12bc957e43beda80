"""Laws of an answer's phases: they add up, whatever happened, and no clock is believed that cannot be right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.measures import (
    FIRST_TOKEN,
    PARKED,
    Arrival,
    Timings,
    cut_to,
    network_seconds,
    parts_of,
)

SECONDS = st.floats(0, 100)
NOW = 1_763_852_400.5


@given(st.lists(st.tuples(st.sampled_from(["token", FIRST_TOKEN, PARKED]), SECONDS)), SECONDS, SECONDS, SECONDS)
def test_they_add_up_to_the_latency(moves: list[tuple[str, float]], auth: float, intake: float, rest: float) -> None:
    """Tokens, parks and readmissions in any order: every second is in one phase."""
    timings = Timings(0.0)
    timings.started_at = Arrival(50.0, admitted_at=50.0 + auth, network_seconds=0.25)
    now = 50.0 + auth + intake
    timings.accept(now)
    for what, seconds in moves:
        now += seconds
        timings.note(now) if what == "token" else timings.enter(what, now)
    now += rest
    phases = timings.phases(now)
    assert phases.pop("network_in") == 0.25
    assert sum(phases.values()) == pytest.approx(now - 50.0)
    assert all(seconds > 0.0 for seconds in phases.values())


@given(st.dictionaries(st.sampled_from(["queue", "prefill", "generation", "other"]), SECONDS), SECONDS)
def test_what_an_engine_measured_is_cut_to_the_time_there_was(parts: dict[str, float], seconds: float) -> None:
    """Two processes overlap by what a message takes: nothing is counted twice, and what is left is `other`."""
    cut = cut_to(parts, seconds)
    assert sum(cut.values()) == pytest.approx(seconds)
    assert all(0.0 <= cut[name] <= parts[name] for name in parts if name != "other")


def test_the_engine_s_parts_stand_in_an_answer_without_a_park() -> None:
    """Queue, prefill, first decode and generation are the engine's; the messages and the log are `other`."""
    timings = Timings(10.0)
    timings.accept(11.0)
    timings.note(15.0)
    parts = parts_of({"queue": 1.0, "prefill": 2.0, "decode": 4.0, "first_decode": 0.5, "ttft": 3.0})
    wanted = {"intake": 1.0, "queue": 1.0, "prefill": 2.0, "first_decode": 0.5, "generation": 3.5, "other": 1.0}
    assert timings.phases(19.0, parts) == wanted
    timings.enter(PARKED, 19.0)  # those of one run are not those of the answer
    assert timings.phases(20.0, parts) == {"intake": 1.0, "first_token": 4.0, "generation": 4.0, "parked": 1.0}


def test_what_another_process_saw_is_other() -> None:
    """A stream that was restored here knows when its request arrived, and no more."""
    timings = Timings(10.0)
    timings.enter(PARKED, 30.0)
    timings.enter(FIRST_TOKEN, 31.0)
    assert timings.phases(32.0) == {"parked": 1.0, "first_token": 1.0, "other": 20.0}


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("t=1763852400.25", 0.25),
        ("1763852400.25", 0.25),
        ("t=1763852400250", 0.25),
        ("1763852400250000", 0.25),
        ("1763852400.5", 0.0),
        ("1763852401", None),  # its clock is ahead
        ("1763852300", None),  # or far behind
        ("", None),
        ("soon", None),
        ("-1763852400", None),
        ("99999999999999999", None),
    ],
)
def test_when_the_client_sent_it(header: str, seconds: float | None) -> None:
    """Seconds, milliseconds or microseconds; what no network takes is left out."""
    found = network_seconds(header, NOW)
    assert found == (None if seconds is None else pytest.approx(seconds, abs=1e-6))
