"""Long random runs of the engine core. A test's name holds its seed; `SIM_SEED=n` repeats one, `SIM_SEEDS=n` runs n."""

from __future__ import annotations

import os
import random

import pytest

from tests.sim.simulation import STEMS, Simulation

NUM_EVENTS = 250
SEEDS = [int(os.environ["SIM_SEED"])] if "SIM_SEED" in os.environ else range(int(os.environ.get("SIM_SEEDS", "20")))


def run(seed: int) -> Simulation:
    """Random events, more steps than anything else, then the end."""
    rng, sim = random.Random(seed), Simulation()
    for _ in range(NUM_EVENTS):
        event(rng, sim)
        sim.step()
    sim.finish()
    return sim


def event(rng: random.Random, sim: Simulation) -> None:
    if rng.random() < 0.15:
        sim.ask(
            rng.randrange(len(STEMS)),
            rng.randint(1, 40),
            rng.randint(0, 40),
            tenant=rng.choice("ab"),
            num_public=rng.choice([0, 0, 8, 9]),
            is_greedy=rng.random() < 0.5,
            seed=rng.randrange(3),
            latency_class=rng.choice(["chat", "document"]),
            timeout=rng.choice([None] * 9 + [0.3]),
        )
    elif sim.open() and rng.random() < 0.15:
        what = rng.choice([sim.abort, sim.park, sim.park, sim.stop, sim.fail, sim.preempt, sim.preempt])
        what(rng.choice(sim.open()))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_run(seed: int) -> None:
    """The laws hold after every step of a random run, and everything ends."""
    run(seed)


def test_runs_repeat() -> None:
    """The same seed makes the same plans: nothing in the core depends on time, hashes of objects, or chance."""
    assert run(1).plans == run(1).plans
