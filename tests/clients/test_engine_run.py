"""Laws of parking: for each reason, when the engine is asked again and whether readers get a status."""

from __future__ import annotations

import pytest

from streamserve.clients.engine_run import NO_READER, Parking
from streamserve.protocol.engine import SUSPECT_LOSSES, Park
from streamserve.protocol.errors import CannotContinue, EngineUnavailable, Overloaded, Refused
from streamserve.protocol.events import Status

LEAD = Park(reason="lead", resume_at_lead=100)
AHEAD = Park(reason="ahead", resume_seconds=10.0)
PAUSED, LOST = Park(reason="paused"), Park(reason="lost")
BESIDE = Park(reason="lost", is_counted=False)
ALONE = Park(reason="lost", was_alone=True)


def parked(park: Park, now: float = 0.0) -> Parking:
    parking = Parking()
    parking.begin(park, 5, now)
    return parking


@pytest.mark.parametrize("park", [LEAD, NO_READER])
def test_a_reader_far_behind_is_waited_for(park: Park) -> None:
    """The engine is asked again once no more than the limit is unread, however long that takes."""
    parking = parked(park)
    assert parking.seconds_left(park.resume_at_lead + 1, now=1e9) is None
    assert parking.seconds_left(park.resume_at_lead, now=0.0) == 0


def test_a_reader_that_is_ahead_waits_unless_starved() -> None:
    """A reader that is ahead waits until its time passes or it has nothing left to read."""
    parking = parked(AHEAD, now=100.0)
    assert parking.seconds_left(40, now=104.0) == 6.0
    assert parking.seconds_left(0, now=104.0) == 0
    assert parking.seconds_left(40, now=110.0) == 0


@pytest.mark.parametrize("park", [PAUSED, LOST])
def test_a_missing_engine_is_asked_at_once_then_ever_less_often(park: Park) -> None:
    """A missing engine is asked again at once, then ever less often until the answer grows, whatever is unread."""
    parking = Parking()
    waits = []
    for _ in range(4):
        parking.begin(park, 5, 0.0)
        waits.append(parking.seconds_left(10**6, now=0.0))
        parking.end()
    assert waits == [0.0, 0.1, 0.2, 0.4]
    parking.begin(park, 6, 0.0)
    assert parking.seconds_left(10**6, now=0.0) == 0


def test_refusals_while_an_engine_loads_delay_no_later_park_for_long() -> None:
    """An engine that refuses twenty times until it is loaded, and then is lost, is asked again within two seconds."""
    parking = parked(LOST)
    for _ in range(20):
        parking.refuse(EngineUnavailable("loading", retry_after=2), 0.0, 600.0)
    parking.end()
    parking.begin(LOST, 5, 0.0)
    left = parking.seconds_left(10**6, now=0.0)
    assert left is not None
    assert left <= 2.0


def test_a_full_engine_is_asked_at_its_own_time() -> None:
    """A full engine is asked at its own time, and one that is coming up sooner than that, but not again and again."""
    full, loading = parked(LEAD), parked(LEAD)
    full.refuse(Overloaded("full", retry_after=30), 0.0, 600.0)
    assert full.seconds_left(0, now=0.0) == 30.0
    waits = []
    for _ in range(8):
        loading.refuse(EngineUnavailable("loading", retry_after=2), 0.0, 600.0)
        waits.append(loading.seconds_left(0, now=0.0))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]


def test_a_new_reader_ends_the_wait_after_a_refusal() -> None:
    """A returning reader ends the wait after a refusal, but no other wait."""
    refused, ahead = parked(LEAD), parked(AHEAD)
    refused.refuse(Overloaded("full", retry_after=30), 0.0, 600.0)
    refused.skip_delay()
    ahead.skip_delay()
    assert refused.seconds_left(0, now=0.0) == 0
    assert ahead.seconds_left(40, now=0.0) == 10.0


def test_refusals_are_counted_from_the_first() -> None:
    """It is asked again until it has refused for as long as the answer may wait; a new park counts anew."""
    parking = parked(LEAD)
    refused = Overloaded("full")
    assert [parking.refuse(refused, now, 6.0) for now in (10.0, 15.0, 16.1)] == [True, True, False]
    parking.end()
    parking.begin(LEAD, 9, 20.0)
    assert parking.refuse(refused, 21.0, 6.0)


def test_an_answer_that_was_never_taken_waits_after_a_refusal() -> None:
    """It has no park yet, and asks a full engine at its own time too."""
    parking = Parking()
    assert parking.seconds_left(0, now=0.0) == 0.0
    assert parking.refuse(Overloaded("full", retry_after=3), 0.0, 60.0)
    assert parking.seconds_left(0, now=1.0) == 2.0


@pytest.mark.parametrize(
    "final", [CannotContinue("cut off"), EngineUnavailable("failed repeatedly", code="engine_died")]
)
def test_a_final_refusal_is_not_waited_for(final: Refused) -> None:
    """Asking again would give the same refusal, or harm the next engine."""
    assert not parked(LOST).refuse(final, 0.0, 600.0)


def test_readers_see_each_status_once_in_a_park() -> None:
    """A park that readers notice, then an engine that loads, then one that is full: two statuses."""
    parking = parked(LOST)
    loading = EngineUnavailable("model chat is loading", code="engine_loading")
    news = [parking.news(), parking.news(loading), parking.news(loading), parking.news(Overloaded("full"))]
    assert [[one.status for one in statuses] for statuses in news] == [["waiting"], ["loading"], [], []]
    parking.end()
    parking.begin(LEAD, 9, 20.0)
    assert parking.news() == []
    assert parking.news(Overloaded("full")) == [Status(status="waiting", message="full")]


def test_an_answer_that_loses_its_engine_five_times_is_given_up() -> None:
    """An answer that loses its engine five times without a new token is given up, whatever else parks it meanwhile."""
    parking = Parking()
    for _ in range(4):
        parking.begin(LOST, 5, 0.0)
        parking.begin(NO_READER, 5, 0.0)
        assert not parking.losses.is_hopeless
    parking.begin(LOST, 5, 0.0)
    assert parking.losses.is_hopeless
    parking.begin(LOST, 6, 0.0)
    assert not parking.losses.is_hopeless


@pytest.mark.parametrize(("park", "is_shown"), [(LEAD, False), (AHEAD, False), (NO_READER, True)])
def test_an_unseen_park_shows_no_status(park: Park, is_shown: bool) -> None:
    """Only a reader that left or got a `waiting` status gets a `resumed` status."""
    parking = parked(park)
    assert parking.end() is is_shown
    parking.begin(park, 5, 0.0)
    parking.shown.add("waiting")
    assert parking.end()
    assert (parking.reason, parking.num_parks) == (None, 2)


def test_an_engine_lost_in_another_answers_step_is_not_counted() -> None:
    """However often: the answer is no suspect, and is not given up."""
    parking = Parking()
    for _ in range(20):
        parking.begin(BESIDE, 5, 0.0)
        assert (parking.losses.num_losses, parking.losses.is_hopeless) == (0, False)


def test_a_suspect_that_loses_an_engine_alone_is_given_up() -> None:
    """Twice among others or alone, which proves nothing; then alone as a suspect, which does."""
    parking = Parking()
    for park in (ALONE, BESIDE, LOST):
        parking.begin(park, 5, 0.0)
        assert not parking.losses.is_hopeless
    assert parking.losses.num_losses == SUSPECT_LOSSES
    parking.begin(ALONE, 5, 0.0)
    assert parking.losses.is_hopeless


def test_a_token_ends_the_suspicion() -> None:
    """What was computed alone and did no harm is an answer like any other."""
    parking = Parking()
    for park in (LOST, LOST):
        parking.begin(park, 5, 0.0)
    parking.begin(ALONE, 6, 0.0)
    assert (parking.losses.num_losses, parking.losses.is_hopeless) == (1, False)
