"""Laws of patience: sequences wait through a burst, and not in a standing overload."""

from __future__ import annotations

import pytest

from streamserve.engine.config import CLASSES
from streamserve.engine.policy.backlog import Patience


def standing_since(at: float) -> Patience:
    """Requests that are in time have always been waiting since then."""
    patience = Patience(CLASSES).noted(at, has_in_time=False)
    return patience.noted(at + 1.0, has_in_time=True)


def test_a_burst_is_waited_for() -> None:
    """A chat may wait for half a minute as long as the overload has not stood for four times two seconds."""
    patience = standing_since(100.0)
    assert [patience.seconds("chat", now) for now in (100.0, 107.9)] == [30.0, 30.0]


def test_a_standing_queue_is_not_waited_for() -> None:
    """Then each has the time of a still useful answer; a moment without a queue makes the next requests a burst."""
    patience = standing_since(100.0)
    assert patience.seconds("chat", 108.1) == pytest.approx(2.1)
    patience = patience.noted(200.0, has_in_time=False)
    assert patience.seconds("chat", 201.0) == 30.0


@pytest.mark.parametrize(("name", "burst", "standing"), [("completion", 15.0, 1.8), ("document", 120.0, 4.6)])
def test_each_class_has_its_own(name: str, burst: float, standing: float) -> None:
    """The overload is the engine's; how long that lets a request wait is its class's."""
    patience = standing_since(100.0)
    assert patience.seconds(name, 101.0) == burst
    assert patience.seconds(name, 121.0) == pytest.approx(standing)


def test_batch_waits_for_ever() -> None:
    """However long the overload stands."""
    patience = standing_since(100.0)
    assert patience.seconds("batch", 1e6) == float("inf")


def test_refusals_do_not_make_a_burst() -> None:
    """A queue that is empty because requests were refused still counts; six seconds after the last one it does not."""
    patience = standing_since(100.0).refused(150.0).noted(156.0, has_in_time=False)
    assert patience.seconds("chat", 156.0) == pytest.approx(2.1)
    patience = patience.noted(156.1, has_in_time=False)
    assert patience.seconds("chat", 156.1) == 30.0


def test_an_idle_engine_remembers_no_overload() -> None:
    """The first request in a long time finds an empty queue."""
    patience = standing_since(100.0).noted(900.0, has_in_time=False)
    assert not patience.is_standing("chat", 900.0)
