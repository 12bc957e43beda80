"""`Overload`: an `AdmissionControl` and an `EngineCore` on one fake clock, and more requests than they can answer.

Each step costs 10 ms and each of its tokens 1 ms. Requests that are refused do not come back.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from streamserve.clients.thread.admission import AdmissionControl
from streamserve.clients.timings import RecentTimes
from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import Sampled, StepPlan, StepResult
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.errors import Overloaded
from streamserve.protocol.requests import Admission
from tests.support.engines.cores import sampling
from tests.support.engines.runners import FakeClock

STEP_SECONDS = 0.01
TOKEN_SECONDS = 0.001
# Prompt and mean answer of each class, in tokens.
SIZES = {"chat": (100, 100), "completion": (60, 16), "document": (1000, 150), "batch": (200, 100)}


class PricedRunner:
    """Advances the clock by a step's price; every token is 7."""

    block_size = 32
    vocab_size = 50_000
    can_overlap = False
    windows = (None,)

    def __init__(self, clock: FakeClock, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._clock = clock

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, StepPlan)
        self._clock.advance(STEP_SECONDS + TOKEN_SECONDS * handle.num_tokens)
        sampled = (Sampled(seq_id=one.seq_id, token_ids=(7,)) for one in handle.chunks if one.samples)
        return StepResult(step_id=handle.step_id, sampled=tuple(sampled))

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Outcome:
    """How one request ended. `retry_after`: it was refused at once; `error`: after it was accepted."""

    latency_class: str
    asked_at: float
    scheduled_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None
    retry_after: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        assert self.first_at is not None
        return self.first_at - self.asked_at


@dataclass
class Overload:
    """One engine and its admission control."""

    config: EngineConfig = field(default_factory=lambda: EngineConfig(max_num_seqs=8, speculation="off"))
    num_blocks: int = 2000
    seed: int = 1

    def __post_init__(self) -> None:
        self.clock = FakeClock(0.0)
        self.core = EngineCore(PricedRunner(self.clock, self.num_blocks), self.config, self.clock)
        self.times = RecentTimes(self.clock)
        self.admission = AdmissionControl(self.config, self.times, self.clock)
        self.outcomes: list[Outcome] = []
        self._rng = random.Random(self.seed)
        self._open: dict[int, Outcome] = {}

    def ask(self, latency_class: str, prompt: tuple[int, ...] | None = None, tenant: str = "") -> Outcome:
        """Submit a request of the class, with a new prompt if none is given; admission may refuse it."""
        outcome = Outcome(latency_class, self.clock())
        self.outcomes.append(outcome)
        seq_id, (num_prompt, num_answer) = len(self.outcomes), SIZES[latency_class]
        try:
            with self.admission.reserve(self.core, 1, latency_class, tenant):
                pass
            num_tokens = len(prompt) if prompt else num_prompt
            _, queue_seconds = self.admission.check_wait(self.core, latency_class, tenant=tenant, num_tokens=num_tokens)
        except Overloaded as refused:
            outcome.retry_after = refused.retry_after
            return outcome
        prompt = prompt or tuple(self._rng.randrange(50_000) for _ in range(num_prompt))
        request = SequenceRequest(
            seq_id=seq_id,
            prompt_token_ids=prompt,
            sampling=sampling(max_tokens=max(1, int(self._rng.expovariate(1 / num_answer)))),
            admission=Admission(owner=tenant, tenant=tenant, arrived_at=self.clock()),
            latency_class=latency_class,
            queue_seconds=queue_seconds,
        )
        self._open[seq_id] = outcome
        self.core.add(request)
        return outcome

    def run(self, per_second: float, seconds: float, mix: dict[str, float]) -> None:
        """Submit so many requests a second, at random, for so long."""
        end, due = self.clock() + seconds, self.clock()
        names, weights = list(mix), list(mix.values())
        while self.clock() < end:
            while due <= self.clock():
                self.ask(self._rng.choices(names, weights)[0])
                due += self._rng.expovariate(per_second)
            if self.core.has_work:
                self.step()
            else:
                self.clock.advance(due - self.clock())

    def drain(self) -> None:
        """Step until all requests have ended."""
        while self.core.has_work:
            self.step()

    def step(self) -> None:
        for update in self.core.step():
            self._take(update)

    def counts(self) -> Counter[str]:
        """Return how requests ended: refused (at admission), an error code (later), or answered."""
        return Counter("refused" if one.retry_after else one.error or "answered" for one in self.outcomes)

    def _take(self, update: SequenceUpdate) -> None:
        outcome = self._open[update.seq_id]
        outcome.scheduled_at, outcome.first_at = update.scheduled_at, update.first_token_at
        if not update.is_last:
            return
        del self._open[update.seq_id]
        outcome.ended_at, outcome.error = update.at, update.error
        if outcome.scheduled_at is not None:
            first = update.first_token_at or update.at
            breakdown = {
                "prefill": first - outcome.scheduled_at,
                "decode": update.at - first,
                "queue": 0.0,
                "ttft": 0.0,
            }
            self.times.note_finished({**breakdown, "itl_p50": 0.0, "itl_p95": 0.0})
