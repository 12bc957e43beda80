"""Hypothesis chooses what happens to the engine core; the laws of README.md hold after every step."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.sim.simulation import STEMS, Asked, Simulation


class EngineMachine(RuleBasedStateMachine):
    """Rules are what clients, memory and models do; each ends in a step or comes before one."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulation()

    @rule(
        stem=st.integers(0, len(STEMS) - 1),
        length=st.integers(1, 40),
        max_tokens=st.integers(0, 40),
        tenant=st.sampled_from(["a", "b"]),
        num_public=st.sampled_from([0, 0, 5, 8]),
        is_greedy=st.booleans(),
        seed=st.integers(0, 1),
        latency_class=st.sampled_from(["chat", "batch"]),
        timeout=st.sampled_from([None, None, None, 0.05]),
    )
    def ask(self, **fields: object) -> None:
        self.sim.ask(**fields)  # type: ignore[arg-type]

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.sim.step()

    @precondition(lambda self: self.sim.open())
    @rule(index=st.integers(0, 20), what=st.sampled_from(["abort", "park", "stop", "fail", "preempt"]))
    def happen(self, index: int, what: str) -> None:
        one = self._pick(index)
        getattr(self.sim, what)(one)
        self.sim.step()

    @rule(seq_id=st.integers(-1, 10_000))
    def abort_unknown(self, seq_id: int) -> None:
        if seq_id not in self.sim.by_seq_id:
            self.sim.core.abort(seq_id)

    @rule(seconds=st.sampled_from([0.1, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.sim.clock.advance(seconds)

    def _pick(self, index: int) -> Asked:
        return self.sim.open()[index % len(self.sim.open())]

    def teardown(self) -> None:
        self.sim.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
