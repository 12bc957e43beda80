"""Laws of parking: for each reason, when the engine is asked again and whether readers hear of it."""

from __future__ import annotations

import pytest

from streamserve.protocol.errors import EngineUnavailable, Overloaded
from streamserve.protocol.park import Park
from streamserve.streams.parking import NO_READER, Parking

LEAD = Park(reason="lead", resume_at_lead=100)
AHEAD = Park(reason="ahead", resume_seconds=10.0)
PAUSED, LOST = Park(reason="paused"), Park(reason="lost")


def parked(park: Park, now: float = 0.0) -> Parking:
    parking = Parking()
    parking.begin(park, 5, now)
    return parking


@pytest.mark.parametrize("park", [LEAD, NO_READER])
def test_a_reader_far_behind_is_waited_for(park: Park) -> None:
    """However long it takes; the engine is asked once no more than the limit is unread."""
    parking = parked(park)
    assert parking.seconds_left(park.resume_at_lead + 1, now=1e9) is None
    assert parking.seconds_left(park.resume_at_lead, now=0.0) == 0


def test_who_is_ahead_waits_unless_starved() -> None:
    """Its time passes, or the reader has nothing left to read."""
    parking = parked(AHEAD, now=100.0)
    assert parking.seconds_left(40, now=104.0) == 6.0
    assert parking.seconds_left(0, now=104.0) == 0
    assert parking.seconds_left(40, now=110.0) == 0


@pytest.mark.parametrize("park", [PAUSED, LOST])
def test_a_missing_engine_is_asked_at_once_then_ever_less_often(park: Park) -> None:
    """Until the answer grows again; what is unread does not matter."""
    parking = Parking()
    waits = []
    for _ in range(4):
        parking.begin(park, 5, 0.0)
        waits.append(parking.seconds_left(10**6, now=0.0))
        parking.end()
    assert waits == [0.0, 0.1, 0.2, 0.4]
    parking.begin(park, 6, 0.0)
    assert parking.seconds_left(10**6, now=0.0) == 0


def test_a_full_engine_is_asked_when_it_says() -> None:
    """And an engine that is coming up sooner than it says, but not again and again."""
    full, loading = parked(LEAD), parked(LEAD)
    full.refuse(Overloaded("full", retry_after=30), 0.0)
    assert full.seconds_left(0, now=0.0) == 30.0
    waits = []
    for _ in range(8):
        loading.refuse(EngineUnavailable("loading", retry_after=2), 0.0)
        waits.append(loading.seconds_left(0, now=0.0))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]


def test_who_comes_does_not_wait_out_a_refusal() -> None:
    """But what is no refusal is waited for."""
    refused, ahead = parked(LEAD), parked(AHEAD)
    refused.refuse(Overloaded("full", retry_after=30), 0.0)
    refused.skip_delay()
    ahead.skip_delay()
    assert refused.seconds_left(0, now=0.0) == 0
    assert ahead.seconds_left(40, now=0.0) == 10.0


def test_refusals_are_counted_from_the_first() -> None:
    """A new park starts anew."""
    parking = parked(LEAD)
    refused = Overloaded("full")
    assert [parking.refuse(refused, now) for now in (10.0, 15.0)] == [0.0, 5.0]
    parking.end()
    parking.begin(LEAD, 9, 20.0)
    assert parking.refuse(refused, 21.0) == 0.0


def test_an_answer_that_loses_its_engine_five_times_is_given_up() -> None:
    """Without a new token in between, whatever else parks it in between."""
    parking = Parking()
    for _ in range(4):
        parking.begin(LOST, 5, 0.0)
        parking.begin(NO_READER, 5, 0.0)
        assert not parking.is_hopeless
    parking.begin(LOST, 5, 0.0)
    assert parking.is_hopeless
    parking.begin(LOST, 6, 0.0)
    assert not parking.is_hopeless


@pytest.mark.parametrize(("park", "is_told"), [(LEAD, False), (AHEAD, False), (NO_READER, True)])
def test_what_the_reader_cannot_notice_is_not_told(park: Park, is_told: bool) -> None:
    """Only who left, or was told that it waits, hears that it goes on."""
    parking = parked(park)
    assert parking.end() is is_told
    parking.begin(park, 5, 0.0)
    parking.has_shown_waiting = True
    assert parking.end()
    assert (parking.reason, parking.num_parks) == (None, 2)
