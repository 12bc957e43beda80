"""Laws of patience: sequences wait through a burst, and not in a standing queue."""

from __future__ import annotations

import pytest

from streamserve.engine.config import CLASSES
from streamserve.engine.patience import Patience


def chat(patience: Patience, now: float, *, is_empty: bool = False) -> float:
    return patience.seconds("chat", now, is_empty=is_empty)


def test_a_burst_is_waited_for() -> None:
    """Until as long as a chat may wait after its queue was empty: a later one has what is left of that."""
    patience = Patience(CLASSES)
    assert chat(patience, 100.0, is_empty=True) == 30.0
    assert chat(patience, 101.0) == 29.0
    assert chat(patience, 127.0) == 3.0
    assert chat(patience, 129.0) == 2.5


def test_a_standing_queue_is_not_waited_for() -> None:
    """A queue that was never empty in that time gives each the time of a still useful answer: its budget and 2 s."""
    patience = Patience(CLASSES)
    chat(patience, 100.0, is_empty=True)
    assert chat(patience, 130.1) == 2.5
    assert chat(patience, 200.0) == 2.5
    assert chat(patience, 201.0, is_empty=True) == 30.0


@pytest.mark.parametrize(("name", "burst", "standing"), [("completion", 15.0, 2.2), ("document", 120.0, 5.0)])
def test_each_class_has_its_own(name: str, burst: float, standing: float) -> None:
    """Another class's queue changes nothing."""
    patience = Patience(CLASSES)
    assert patience.seconds(name, 0.0, is_empty=True) == burst
    chat(patience, 100.0, is_empty=True)
    assert patience.seconds(name, 121.0, is_empty=False) == standing


def test_batch_waits_for_ever() -> None:
    """However long its queue stands."""
    patience = Patience(CLASSES)
    assert patience.seconds("batch", 0.0, is_empty=True) == float("inf")
    assert patience.seconds("batch", 1e6, is_empty=False) == float("inf")


def test_refusals_do_not_make_a_burst() -> None:
    """A queue that refusals have emptied still counts as standing; half a minute after the last one it does not."""
    patience = Patience(CLASSES)
    chat(patience, 0.0, is_empty=True)
    patience.note_refusal("chat", 50.0)
    assert chat(patience, 80.0, is_empty=True) == 2.5
    assert chat(patience, 80.1, is_empty=True) == 30.0
