"""One fixed scenario, and every fault at every step of it: covers what random runs may miss."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamserve.protocol.requests import SamplingParams
from tests.sim.asked import STEMS, Asked, Shape
from tests.sim.conftest import StepCount
from tests.sim.simulation import Simulation

NUM_STEPS = 40
# `make test` begins at every sixth step; the proofs begin at each of the others.
EVERY = 6

FAULTS: dict[str, Callable[[Simulation, Asked], None]] = {
    "abort": lambda sim, asked: sim.abort(asked),
    "leave": lambda sim, asked: sim.leave(asked, 2),
    "stop": lambda sim, asked: sim.stop(asked),
    "fail": lambda sim, asked: sim.fail(asked),
    "preempt": lambda sim, asked: sim.preempt(asked),
    "out of memory": lambda sim, asked: sim.tighten(3, 1, is_late=False),
    "out of memory, late": lambda sim, asked: sim.tighten(3, 2, is_late=True),
    "no memory at all": lambda sim, asked: sim.tighten(0, 6, is_late=False),
    "pause": lambda sim, asked: sim.pause(),
    "corrupt": lambda sim, asked: sim.corrupt(),
    "crash": lambda sim, asked: sim.crash(),
}


def scenario(overlap: bool) -> Simulation:
    """Four sequences that share prefixes, in too little memory, one of them read slowly."""
    sim = Simulation(Shape(num_blocks=20, overlap=overlap, lead_tokens=8))
    for index, stem in enumerate(STEMS):
        sampling = SamplingParams(temperature=float(index % 2), seed=index, max_tokens=18, ignore_eos=True)
        sim.ask(stem[:20], sampling, tenant="ab"[index % 2], num_public=8, reads=0.3 if index == 1 else None)
    return sim


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.proof) for first in range(1, EVERY))])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_at_every_step(name: str, overlap: bool, first: int, step_count: StepCount) -> None:
    """Before and during step i, for every sixth i from `first`: the laws hold, and all answers end."""
    for step in range(first, NUM_STEPS, EVERY):
        for is_meanwhile in (False, True):
            sim = scenario(overlap)
            for _ in range(step):
                sim.step()
            for asked in sim.open()[step % 4 :][:1]:
                if is_meanwhile:
                    sim.deferred.append(
                        lambda sim=sim, asked=asked: FAULTS[name](sim, asked) if asked.is_open else None
                    )
                else:
                    FAULTS[name](sim, asked)
            sim.step()
            sim.finish()
            step_count.add("every fault", sim)
