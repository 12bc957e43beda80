"""Laws of the live page's shares: where an engine's time went, from counts that grow."""

from __future__ import annotations

import pytest

from streamserve.protocol.engine import EngineStats
from streamserve.web.live import Capacity


def counts(busy_seconds: float, computed: int = 0, recomputed: int = 0) -> EngineStats:
    return EngineStats(busy_seconds=busy_seconds, computed_tokens=computed, recomputed_tokens=recomputed)


def test_the_shares_are_of_the_time_between_the_points() -> None:
    """What was before the first point does not count; what was recomputed is its part of the tokens."""
    capacity = Capacity(10)
    capacity.note(counts(100.0, 5000, 4000), 7.0)
    assert capacity.shares() is None
    capacity.note(counts(106.0, 5900, 4300), 17.0)
    assert capacity.shares() == pytest.approx({"useful": 0.4, "recomputed": 0.2, "idle": 0.4})


def test_the_shares_add_up() -> None:
    """An engine that does nothing is idle, and one whose counts come late is not busier than always."""
    capacity = Capacity(10)
    capacity.note(counts(0.0), 0.0)
    capacity.note(counts(0.0), 2.0)
    assert capacity.shares() == {"useful": 0.0, "recomputed": 0.0, "idle": 1.0}
    capacity.note(counts(9.0, 10, 10), 4.0)
    assert capacity.shares() == {"useful": 0.0, "recomputed": 1.0, "idle": 0.0}


def test_only_the_last_points_count() -> None:
    """The window moves with the points."""
    capacity = Capacity(2)
    for second in range(5):
        capacity.note(counts(float(min(second, 3)), second), float(second))
    assert capacity.shares() == {"useful": 0.0, "recomputed": 0.0, "idle": 1.0}


def test_a_new_engine_begins_anew() -> None:
    """Its counts are lower than those of the one before."""
    capacity = Capacity(10)
    capacity.note(counts(50.0, 100), 0.0)
    capacity.note(counts(51.0, 200), 2.0)
    capacity.note(counts(0.5, 10), 4.0)
    assert capacity.shares() is None
    capacity.note(counts(2.5, 20), 6.0)
    assert capacity.shares() == {"useful": 1.0, "recomputed": 0.0, "idle": 0.0}
