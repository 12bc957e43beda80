"""Laws of an engine's history: a bounded ring of points by the engine's clock, and what is computed from it."""

from __future__ import annotations

import msgspec
import pytest

from streamserve.protocol.engine import EngineStats
from streamserve.protocol.history import NUM_POINTS, POINT_SECONDS, History, Point, load, shares


def at(slot: float, **counts: float) -> Point:
    """A point at the beginning of a slot, or within it."""
    return Point(at=slot * POINT_SECONDS, **counts)  # type: ignore[arg-type]


def test_in_a_slot_the_last_look_counts() -> None:
    """However often the engine reports, there is one point for each slot."""
    history = History()
    for slot, running in ((7.0, 1), (7.4, 2), (7.9, 3), (8.1, 4)):
        history.note(at(slot, running=running))
    assert [point.running for point in history.points()] == [3, 4]


def test_a_history_is_bounded() -> None:
    """The oldest point goes; time that was not seen counts too."""
    history = History()
    for slot in range(3 * NUM_POINTS):
        history.note(at(slot))
    assert len(history.points()) == NUM_POINTS
    assert history.points()[0].slot == 2 * NUM_POINTS
    history.note(at(4 * NUM_POINTS - 2))
    assert [point.slot for point in history.points()] == [3 * NUM_POINTS - 1, 4 * NUM_POINTS - 2]


def test_processes_that_see_the_same_reports_have_the_same_points() -> None:
    """Also a process that comes later, and is given what was there before; in any order of both."""
    engine, early, late = History(), History(), History()
    for second in range(60):
        point = at(second / POINT_SECONDS, running=second)
        engine.note(point)
        early.note(point)
        if second == 30:
            late.note(point)
            late.merge(engine.points())
        elif second > 30:
            late.note(point)
    assert engine.points() == early.points() == late.points()
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(engine.points()), type=tuple[Point, ...])
    assert History(sent).points() == engine.points()


def test_after_a_clock_that_goes_back_the_future_is_forgotten() -> None:
    """Else nothing would be kept until the clock has caught up."""
    history = History(at(slot, running=slot) for slot in range(100, 110))
    history.note(at(104.5, running=7))
    assert [(point.slot, point.running) for point in history.points()][-2:] == [(103, 103), (104, 7)]


def test_the_shares_are_of_the_time_between_the_points() -> None:
    """What was before the first point does not count; what was recomputed is its part of the tokens."""
    first = at(1, busy_seconds=100.0, computed_tokens=5000, recomputed_tokens=4000)
    assert shares([first]) is None
    points = [first, at(3, busy_seconds=106.0, computed_tokens=5900, recomputed_tokens=4300)]
    assert shares(points) == pytest.approx({"useful": 0.4, "recomputed": 0.2, "idle": 0.4})


def test_the_shares_add_up() -> None:
    """An engine that does nothing is idle, and an engine whose counts come late is not busier than always."""
    assert shares([at(1), at(2)]) == {"useful": 0.0, "recomputed": 0.0, "idle": 1.0}
    late = at(2, busy_seconds=99.0, computed_tokens=10, recomputed_tokens=10)
    assert shares([at(1), late]) == {"useful": 0.0, "recomputed": 1.0, "idle": 0.0}


def test_a_new_engine_begins_anew() -> None:
    """Its counts are lower than those of the engine before."""
    points = [at(1, busy_seconds=50.0, computed_tokens=100), at(2, busy_seconds=51.0, computed_tokens=200)]
    points.append(at(3, busy_seconds=0.5, computed_tokens=10))
    assert shares(points) is None
    points.append(at(4, busy_seconds=0.5 + POINT_SECONDS, computed_tokens=20))
    assert shares(points) == {"useful": 1.0, "recomputed": 0.0, "idle": 0.0}


def test_the_load_is_what_is_read_by_what_a_second_of_work_gives() -> None:
    """Of the last minute; an engine that hardly works could give more, and nothing is known of it."""
    begin, later = at(0, busy_seconds=0.0), at(1, busy_seconds=4.0, generation_tokens=400, readers_pace=140.0)
    assert load([begin, later]) == pytest.approx(1.4)
    assert load([begin, at(1, busy_seconds=0.1, generation_tokens=40, readers_pace=20.0)]) is None
    assert load([later]) is None
    assert load([begin, at(1, busy_seconds=4.0)]) is None
    long_ago, before = at(-100), at(0, generation_tokens=1_000_000)
    now = at(1, busy_seconds=5.0, generation_tokens=1_000_500, readers_pace=50.0)
    assert load([long_ago, before, now]) == pytest.approx(0.5)


def test_a_point_has_the_reports_counts_and_its_time() -> None:
    """The time of an engine process's report is the engine's; a report without a time is of now."""
    stats = EngineStats(running=3, readers_late=1, classes={"chat": {"ttft_p95": 0.2}, "batch": {"num_answers": 0}})
    point = stats.point(50.0)
    assert (point.at, point.running, point.readers_late, point.ttft_p95) == (50.0, 3, 1, {"chat": 0.2})
    assert EngineStats(reported_at=40.0).point(50.0).at == 40.0
