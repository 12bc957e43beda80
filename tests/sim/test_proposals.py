"""Random runs in which tokens are proposed; `PROPOSALS_SEED=n` repeats one run."""

from __future__ import annotations

import os

import pytest

from tests.sim.proposals import RandomRun

ONE_SEED = os.environ.get("PROPOSALS_SEED")
NUM_SEEDS = 60


@pytest.mark.parametrize("seed", range(NUM_SEEDS) if ONE_SEED is None else [int(ONE_SEED)])
def test_random_runs(seed: int) -> None:
    """Answers are those of one token a step, and the books are right after each step."""
    for has_draft in (False, True):
        run = RandomRun(seed, has_draft=has_draft)
        run.play()
        run.check()


@pytest.mark.skipif(ONE_SEED is not None, reason="PROPOSALS_SEED asks for one run")
def test_everything_happens() -> None:
    """Tokens prove right and wrong, of a draft model too; answers park and are preempted, engines are lost."""
    accepted = proposed = parks = preemptions = short = crashes = drafted = accepted_drafts = 0
    for seed in range(24):
        run = RandomRun(seed, has_draft=seed % 2 == 0)
        run.play()
        stats = run.drive.core.stats
        accepted += sum(stats.accepted_tokens.values())
        proposed += sum(stats.proposed_tokens.values())
        parks, preemptions, short = parks + stats.parks, preemptions + stats.preemptions, short + stats.out_of_memory
        crashes, drafted = crashes + run.num_crashes, drafted + run.num_drafted
        accepted_drafts += sum(stats.accepted_drafts.values())
    assert 50 < accepted < proposed
    assert 50 < accepted_drafts < accepted
    assert drafted > 50
    assert min(parks, preemptions, short, crashes) > 0
