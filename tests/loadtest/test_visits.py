"""Laws of the readers that are drawn."""

from __future__ import annotations

from collections import Counter

import pytest

from streamserve.engine.config import LatencyClass
from streamserve.loadtest.visits import LONGEST_ANSWER, LONGEST_PROMPT, MIX, PACES, draw_number, draw_visits


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("number", "seconds"), [(1, 10.0), (7, 3.0), (400, 100.0)])
def test_a_number_of_visits_is_drawn_exactly(seed: int, number: int, seconds: float) -> None:
    """As many as asked for, in the order of their numbers, within the time."""
    visits = draw_number(seed, number, seconds)
    assert [visit.number for visit in visits] == list(range(number))
    arrivals = [visit.arrives_at for visit in visits]
    assert arrivals == sorted(arrivals)
    assert 0 < arrivals[0] <= arrivals[-1] < seconds


def test_the_same_seed_draws_the_same_readers_at_any_rate() -> None:
    """Lengths, paces and classes; only their arrivals differ."""
    slow, fast = draw_number(3, 50, 100.0), draw_number(3, 50, 10.0)
    assert [(one.pace, one.prompt_len, one.answer_len) for one in slow] == [
        (one.pace, one.prompt_len, one.answer_len) for one in fast
    ]
    assert draw_visits(3, 0.5, 50.0)[:10] == draw_visits(3, 0.5, 100.0)[:10]


def test_lengths_and_classes_are_those_of_the_mix() -> None:
    """Within the bounds, and by the shares; a class alone is all there is."""
    visits = draw_number(1, 2000, 1000.0)
    counts = Counter(visit.latency_class for visit in visits)
    for name, (share, _, _) in MIX.items():
        assert abs(counts[name] / 2000 - share) < 0.05, "4 standard deviations"
    assert {visit.pace for visit in visits} == set(PACES)
    assert all(8 <= visit.prompt_len <= LONGEST_PROMPT and 8 <= visit.answer_len <= LONGEST_ANSWER for visit in visits)
    assert {visit.latency_class for visit in draw_number(1, 50, 10.0, mix={"chat": MIX["chat"]})} == {"chat"}


def test_the_budget_of_the_first_token_is_the_sites() -> None:
    """A site's own CLASSES decide when a first token is late."""
    [visit] = draw_number(1, 1, 1.0, mix={"chat": MIX["chat"]}, classes={"chat": LatencyClass(ttft_seconds=7.0)})
    assert visit.first_due_at == visit.arrives_at + 7.0
