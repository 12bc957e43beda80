"""Laws of a reader's pace: what is measured, what is not, and how long a reader can go on."""

from __future__ import annotations

import math
import random

import pytest

from streamserve.engine.policy.pace import MAX_PACE, ReaderPace


class World:
    """A reader that reads `pace` tokens a second of what it is given, and reports each `step` tokens."""

    def __init__(self, pace: float, step: int = 5, assumed: float = 20.0) -> None:
        self.reader = ReaderPace(0, assumed)
        self.now, self.num_tokens, self.read = 100.0, 1, 0.0
        self._pace, self._step = pace, step
        self.reader.begin(1, self.now)

    def run(self, seconds: float, per_second: float) -> None:
        """Let the engine give so many tokens a second."""
        given = 0.0
        for _ in range(int(seconds * 50)):
            self.now += 0.02
            given += per_second * 0.02
            self.num_tokens, given = self.num_tokens + int(given), given - int(given)
            self.read = min(float(self.num_tokens), self.read + self._pace * 0.02)
            known = self.reader.num_read or 0
            if int(self.read) - known >= self._step:
                self.reader.report(int(self.read), self.num_tokens, self.now)


@pytest.mark.parametrize("pace", [5.0, 10.0, 20.0, 30.0, 60.0])
@pytest.mark.parametrize("step", [5, 32])
def test_a_reader_that_never_waits_is_measured(pace: float, step: int) -> None:
    """Within a tenth, whatever pace was assumed."""
    world = World(pace, step)
    world.run(40.0, 200.0)
    assert world.reader.pace == pytest.approx(pace, rel=0.15)


@pytest.mark.parametrize("pace", [10.0, 20.0, 30.0])
def test_a_starved_reader_does_not_seem_slow(pace: float) -> None:
    """The engine gives 4 tokens a second, for a minute: the pace stays what was measured before."""
    world = World(pace)
    world.run(20.0, 100.0)
    world.run(1.0 + (world.num_tokens - world.read) / pace, 0.0)
    before = world.reader.pace
    assert before == pytest.approx(pace, rel=0.1)
    for _ in range(30):
        world.run(2.0, 4.0)
        assert world.reader.pace >= before * 0.999
    assert world.reader.ahead_seconds(world.num_tokens, world.now) < 1.0


def test_starved_from_the_start_it_has_the_pace_of_its_class() -> None:
    """Nothing was measured, and nothing is made up from what the engine gave."""
    world = World(20.0)
    world.run(60.0, 3.0)
    assert world.reader.pace == 20.0


def test_a_faster_reader_is_found_though_it_waits() -> None:
    """The rate between two reports is a lower bound of the pace, also where the reader waited."""
    world = World(30.0, assumed=10.0)
    world.run(30.0, 31.0)
    assert world.reader.pace == pytest.approx(30.0, rel=0.15)


def test_ahead_is_what_is_unread_less_what_was_read_since() -> None:
    """30 tokens are unread at 10 a second: 3 s at the report, 2 s a second later, and less than none in the end."""
    reader = ReaderPace(0, 10.0)
    reader.begin(1, 100.0)
    reader.report(20, 50, 102.0)
    assert [reader.ahead_seconds(50, 102.0 + late) for late in (0.0, 1.0, 3.0)] == [3.0, 2.0, 0.0]
    assert reader.ahead_seconds(50, 110.0) < 0


def test_hunger_grows_by_a_second_a_second_where_nothing_is_unread() -> None:
    """Then the reader waits, and for that long it has been waiting."""
    reader = ReaderPace(0)
    reader.begin(1, 100.0)
    reader.report(1, 1, 100.5)
    assert [reader.ahead_seconds(1, now) for now in (100.5, 101.5, 110.5)] == [0.0, -1.0, -10.0]


def test_a_silent_reader_has_read_no_more_than_a_report_has() -> None:
    """It would have reported 32 tokens; and yet it is never taken to be ahead for ever."""
    reader = ReaderPace(0)
    reader.begin(1, 100.0)
    assert reader.ahead_seconds(100, 110.0) == pytest.approx((100 - 32) / 20)
    assert reader.ahead_seconds(100, 201.0) < 0


def test_an_away_reader_is_never_hungry() -> None:
    """And the time that it is away says nothing of its pace."""
    reader = ReaderPace(0, 20.0)
    reader.begin(1, 100.0)
    reader.report(10, 60, 100.5)
    reader.report(10, 60, 100.5, is_away=True)
    assert reader.ahead_seconds(60, 400.0) == math.inf
    reader.report(12, 60, 400.0)
    assert reader.pace == 20.0
    assert reader.ahead_seconds(60, 400.0) == pytest.approx(48 / 20)


def test_without_a_reader_it_is_never_ahead() -> None:
    """It lags behind a reader at its class's pace, or is level with it: the longest neglected goes first."""
    reader = ReaderPace(None, 10.0)
    assert reader.ahead_seconds(0, 100.0) == 0.0
    reader.begin(1, 100.0)
    assert [reader.ahead_seconds(num, 101.0) for num in (1, 6, 100)] == [-1.0, -0.5, 0.0]


def test_a_position_may_move_back() -> None:
    """The furthest reader has left: the position is another one's, and no pace follows from that."""
    reader = ReaderPace(0, 20.0)
    reader.begin(1, 100.0)
    reader.report(50, 60, 101.0)
    pace = reader.pace
    reader.report(10, 60, 101.5)
    assert (reader.num_read, reader.pace) == (10, pace)
    assert reader.ahead_seconds(60, 101.5) == pytest.approx(50 / pace)


def test_a_pace_has_bounds() -> None:
    """Reports that come in a heap do not make a pace without end."""
    rng, reader = random.Random(1), ReaderPace(0, 20.0)
    reader.begin(1, 100.0)
    num_read, now = 0, 100.0
    for _ in range(200):
        now, num_read = now + rng.choice((0.0, 0.001, 0.01)), num_read + rng.randint(1, 32)
        reader.report(num_read, num_read, now)
    assert reader.pace <= MAX_PACE
