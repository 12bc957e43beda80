"""Random requests at a pure core: the clock advances by what a step costs, and everything is counted in steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.echo import EchoRunner
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import StepPlan, StepResult
from streamserve.engine.sequence import SequenceRequest
from tests.support.engines.cores import request, sampling
from tests.support.engines.runners import FakeClock, WrappedRunner

# The cost of a step, as with a small model on a processor of 2 cores.
BASE_SECONDS, SECONDS_PER_TOKEN = 0.02, 0.0005


class TimedRunner(WrappedRunner):
    """Advances the clock by what a step costs."""

    def __init__(self, clock: FakeClock, num_blocks: int, block_size: int) -> None:
        super().__init__(EchoRunner(num_blocks=num_blocks, block_size=block_size))
        self._clock = clock

    def launch(self, plan: StepPlan) -> object:
        return plan, self.inner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, tuple)
        plan, inner = handle
        self._clock.advance(BASE_SECONDS + SECONDS_PER_TOKEN * plan.num_tokens)
        return self.inner.collect(inner)


@dataclass
class Life:
    """One request: its arrival, the step of its first token and its end, counted in steps."""

    request: SequenceRequest
    came_at_step: int
    is_admitted: bool = False
    first_token_at_step: int | None = None
    end: str | None = None


class Crowd:
    """A core and its requests. `on_admitted` is called, in order, when a step first holds a request."""

    def __init__(self, *, num_blocks: int = 513, block_size: int = 16, seed: int = 0, **config: Any) -> None:
        self.clock = FakeClock()
        self.config = EngineConfig(block_size=block_size, **config)
        runner = TimedRunner(self.clock, num_blocks, block_size)
        self.core = EngineCore(runner, self.config, self.clock, on_plan=self._see)
        self.rng = random.Random(seed)
        self.lives: dict[int, Life] = {}
        self.num_steps = 0
        self._next_arrival = self.clock.now
        self.on_admitted: Callable[[Life], None] = lambda life: None

    def add(self, prompt_len: int, max_tokens: int, **fields: Any) -> Life:
        """Add a request with a prompt of its own, arriving now or at `arrived_at` during the last step."""
        fields.setdefault("arrived_at", self.clock.now)
        seq_id = len(self.lives)
        prompt = [seq_id % 251, seq_id // 251 % 251, *(self.rng.randrange(128) for _ in range(prompt_len - 2))]
        how = sampling(max_tokens=max_tokens, ignore_eos=True)
        asked = request(seq_id, prompt, sampling=how, **fields)
        self.lives[seq_id] = life = Life(asked, self.num_steps)
        self.core.add(asked)
        return life

    def late_arrivals(self, per_second: float) -> Iterator[float]:
        """Yield random arrival times up to now. Call it after each step."""
        while self._next_arrival <= self.clock.now:
            yield self._next_arrival
            self._next_arrival += self.rng.expovariate(per_second)

    def step(self) -> None:
        """Run one step; an idle engine waits a little."""
        if not self.core.has_work:
            self.clock.advance(BASE_SECONDS)
            return
        self.num_steps += 1
        for update in self.core.step():
            self._note(update)

    def _see(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            life = self.lives[chunk.seq_id]
            if not life.is_admitted:
                life.is_admitted = True
                self.on_admitted(life)

    def _note(self, update: SequenceUpdate) -> None:
        life = self.lives[update.seq_id]
        if update.token_ids and life.first_token_at_step is None:
            life.first_token_at_step = self.num_steps
        if update.is_last:
            life.end = update.finish_reason or update.error
