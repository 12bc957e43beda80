"""Small scope, exhaustively: every order of a few acts, in an engine with room for hardly more than one sequence."""

from __future__ import annotations

from itertools import product

import pytest

from streamserve.protocol.requests import SamplingParams
from tests.sim.asked import STEMS, Shape
from tests.sim.conftest import StepCount
from tests.sim.simulation import Simulation

ACTS = "abslp"
DEPTH = 5
# Public for its first two tokens only: two tenants meet in the cache, and must not share it.
NUM_PUBLIC = 2


def act(sim: Simulation, name: str) -> None:
    """`a`, `b`: that tenant asks; `s`: the oldest is aborted; `l`: the newest leaves and comes back; `p`: preempt."""
    if name in "ab":
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=4, ignore_eos=True)
        sim.ask(STEMS[0][:5], sampling, tenant=name, num_public=NUM_PUBLIC, reads=1.0)
    elif sim.open():
        acts = {"s": lambda: sim.abort(sim.open()[0]), "l": lambda: sim.leave(sim.open()[-1], 1)}
        acts.get(name, lambda: sim.preempt(sim.open()[0]))()


@pytest.mark.parametrize("first", "ab")
@pytest.mark.parametrize("overlap", [False, True])
def test_every_order(overlap: bool, first: str, step_count: StepCount) -> None:
    """With a step after each act, the laws hold, and all answers end."""
    for names in product(ACTS, repeat=DEPTH - 1):
        sim = Simulation(Shape(num_blocks=7, block_size=2, budget=4, max_num_seqs=2, lead_tokens=3, overlap=overlap))
        for name in (first, *names):
            act(sim, name)
            sim.step()
        sim.finish()
        step_count.add("small", sim)
