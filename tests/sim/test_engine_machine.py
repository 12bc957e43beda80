"""Hypothesis chooses what happens to the engine core; the laws of README.md hold after every step."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from streamserve.protocol.requests import SamplingParams
from tests.sim.asked import STEMS, Asked, Shape
from tests.sim.conftest import StepCount
from tests.sim.simulation import Simulation

IS_SOAK = "STREAMSERVE_SOAK" in os.environ
MAX_EXAMPLES = 2_000 if IS_SOAK else 75


class EngineMachine(RuleBasedStateMachine):
    """Rules are actions of clients, operators, memory and models; each ends in a step or comes before one."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulation()

    @initialize(
        overlap=st.booleans(),
        prefix_caching=st.booleans(),
        block_size=st.sampled_from([2, 4, 8]),
        lead_tokens=st.sampled_from([4, 12, 1000]),
    )
    def start(self, block_size: int, **fields: object) -> None:
        self.sim = Simulation(Shape(num_blocks=104 // block_size, block_size=block_size, **fields))  # type: ignore[arg-type]

    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, 40),
        max_tokens=st.integers(0, 40),
        tenant=st.sampled_from(["a", "b"]),
        num_public=st.sampled_from([0, 0, 5, 8]),
        temperature=st.sampled_from([0.0, 1.0]),
        latency_class=st.sampled_from(["chat", "batch"]),
        timeout=st.sampled_from([None, None, None, 0.15625]),
        reads=st.sampled_from([None, 0.0, 0.2, 2.0]),
    )
    def ask(self, stem: tuple[int, ...], length: int, max_tokens: int, temperature: float, **fields: object) -> None:
        sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=max_tokens)
        self.sim.ask(stem[:length], sampling, **fields)  # type: ignore[arg-type]

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.sim.step()

    @precondition(lambda self: self.sim.open())
    @rule(
        index=st.integers(0, 20),
        what=st.sampled_from(["abort", "leave", "stop", "fail", "preempt"]),
        is_meanwhile=st.booleans(),
    )
    def happen(self, index: int, what: str, is_meanwhile: bool) -> None:
        one = self._pick(index)
        if is_meanwhile:
            self.sim.defer(lambda sim, asked: getattr(sim, what)(asked), one)
        else:
            getattr(self.sim, what)(one)
        self.sim.step()

    @rule(what=st.sampled_from(["pause", "resume", "crash", "corrupt", "abort_unknown"]))
    def happen_to_all(self, what: str) -> None:
        getattr(self.sim, what)()
        self.sim.step()

    @rule(num_tokens=st.integers(0, 8), num_launches=st.integers(1, 6), is_late=st.booleans())
    def tighten(self, num_tokens: int, num_launches: int, is_late: bool) -> None:
        self.sim.tighten(num_tokens, num_launches, is_late=is_late)
        self.sim.step()

    @precondition(lambda self: self.sim.open())
    @rule(index=st.integers(0, 20), rate=st.sampled_from([0.0, 0.2, 3.0]))
    def set_rate(self, index: int, rate: float) -> None:
        self.sim.set_rate(self._pick(index), rate)

    @rule(seconds=st.sampled_from([0.125, 2.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.sim.wait(seconds)

    def _pick(self, index: int) -> Asked:
        return self.sim.open()[index % len(self.sim.open())]

    def teardown(self) -> None:
        self.sim.finish()


def test_engine_machine(step_count: StepCount) -> None:
    """The laws hold after whatever hypothesis chooses."""

    class Counted(EngineMachine):
        def teardown(self) -> None:
            super().teardown()
            step_count.add("machine", self.sim)

    run_state_machine_as_test(
        Counted,
        settings=settings(
            max_examples=MAX_EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            derandomize=not IS_SOAK,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_quiet_run(overlap: bool, step_count: StepCount) -> None:
    """Without a fault every answer is whole, and no sequence parks, fails or is preempted."""
    sim = Simulation(Shape(num_blocks=200, overlap=overlap))
    for stem in STEMS:
        sim.ask(stem, SamplingParams(temperature=0.0, seed=0, max_tokens=20))
    sim.finish()
    assert [tuple(asked.shown) for asked in sim.asked] == [asked.answer for asked in sim.asked]
    assert not sim.parks
    assert not sim.errors
    step_count.add("machine", sim)
