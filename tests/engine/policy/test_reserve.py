"""What is kept free for answers that run: enough for the time when they hold most memory."""

from __future__ import annotations

import random

import pytest

from streamserve.engine.policy.reserve import _peak
from tests.support.engines.cores import request, sampling
from tests.support.engines.desk import Desk


@pytest.mark.parametrize("seed", range(20))
def test_peak_is_the_most_that_is_held_at_any_time(seed: int) -> None:
    """As counted step by step: each grows by one until it ends, and gives back what it held and has grown."""
    rng = random.Random(seed)
    parts = [(float(rng.randint(0, 12)), rng.randint(1, 20)) for _ in range(rng.randint(1, 8))]
    held = [0]
    for now in range(1, 13):
        growing = sum(now for growth, _ in parts if growth >= now)
        held.append(growing - sum(own for growth, own in parts if growth < now))
    assert _peak(parts) == max(held)


def test_no_more_than_the_sum_is_kept() -> None:
    """Those that end at once leave their blocks to the others; without growth nothing is kept."""
    assert _peak([(1.0, 10), (8.0, 10)]) == 2.0
    assert _peak([(0.0, 10), (0.0, 10)]) == 0.0


def test_a_sequence_starts_in_the_blocks_that_others_will_give_back() -> None:
    """Ten short answers are about to end: a long one need not find room for its whole growth beside theirs."""
    desk = Desk(num_blocks=61, max_num_seqs=16, block_size=4)
    desk.add(*(request(i, range(12), salt=str(i), sampling=sampling(max_tokens=6)) for i in range(1, 11)))
    desk.step()
    desk.add(request(20, range(12), salt="20", sampling=sampling(max_tokens=100)))
    desk.step()
    assert 20 in desk.planned()
    desk.run()
    assert desk.scheduler.num_preemptions == 0
