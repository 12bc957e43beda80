"""The real `EngineCore` with simulated readers and a simulated clock: the time of a step comes from a fitted model.

`streams.parking.Parking` itself decides when a parked answer is requested again, and readers report their position as
often as `streams.readers.ReaderLag` does. Not simulated: transport, tokenizers, the client's bounds on the queue.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.readers import LONGEST_ANSWER, Reading, Visit
from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import Runner, Sampled, StepPlan, StepResult
from streamserve.engine.sequence import SequenceRequest
from streamserve.engine.step_time import size_of
from streamserve.protocol.requests import SamplingParams
from streamserve.streams.parking import Parking

_EOS = 0
# As in streams/readers.py: a position is reported in these steps, the second one when all is read.
_REPORT_STEP, _REPORT_STEP_WHEN_READ = 32, 8


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, linear in five sizes: 1, its sequences, its tokens, the positions that each sequence has, and
    the pairs of a token and a position. On a CPU a decode costs much more than a token of prefill.
    """

    weights: tuple[float, ...]

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds of a step."""
        return sum(weight * size for weight, size in zip(self.weights, sizes_of(plan), strict=True))

    def __str__(self) -> str:
        base, chunk, token, position, pair = (weight * 1e6 for weight in self.weights)
        return (
            f"{base / 1e3:.1f} ms + {chunk:.0f} us a sequence + {token:.0f} us a token"
            f" + {position:.2f} us a position + {pair * 1e3:.0f} ns a pair"
        )

    @classmethod
    def parse(cls, text: str) -> StepCost:
        """Parse five numbers: milliseconds, microseconds (three times), nanoseconds."""
        scales = (1e-3, 1e-6, 1e-6, 1e-6, 1e-9)
        return cls(tuple(float(part) * scale for part, scale in zip(text.split(","), scales, strict=True)))


def sizes_of(plan: StepPlan) -> tuple[float, ...]:
    """Return the sizes of a step that its time depends on."""
    tokens, pairs = size_of(plan.chunks)
    positions = sum(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)
    return 1.0, len(plan.chunks), tokens, positions, pairs


class _Watched:
    """A runner that notes each step's size and its CPU time in this thread. Closing it leaves the runner open."""

    can_overlap = False

    def __init__(self, runner: Runner) -> None:
        self.num_blocks, self.block_size, self.vocab_size = runner.num_blocks, runner.block_size, runner.vocab_size
        self.steps: list[tuple[tuple[float, ...], float]] = []
        self._runner = runner

    def launch(self, plan: StepPlan) -> StepPlan:
        """Nothing happens before `collect`."""
        return plan

    def collect(self, handle: object) -> StepResult:
        """Launch and collect."""
        assert isinstance(handle, StepPlan)
        started_at = time.thread_time()
        result = self._runner.collect(self._runner.launch(handle))
        self.steps.append((sizes_of(handle), time.thread_time() - started_at))
        return result

    def close(self) -> None:
        """The runner is the caller's."""


def fit_step_cost(runner: Runner, vocab_size: int, num_steps: int = 160) -> tuple[StepCost, float]:
    """Run steps of many sizes through the engine; return the fitted cost and its median relative error.

    The runner must compute on the thread that calls it.
    """
    watched = _Watched(runner)
    unbounded = {"itl_target_seconds": 60.0, "max_step_seconds": 60.0, "prefill_chunk": 2048}
    config = EngineConfig(num_blocks=runner.num_blocks, overlap=False, **unbounded)
    core = EngineCore(watched, config, time.monotonic)
    rng, number = random.Random(0), 0
    while len(watched.steps) < num_steps:
        most = (2, 8, 24, 60)[4 * len(watched.steps) // num_steps]
        known = core.stats().running + core.stats().waiting
        for _ in range(min(4, most - known)):
            number += 1
            core.add(_random_request(rng, number, vocab_size))
        core.step()
    return _fit(watched.steps[num_steps // 20 :])


def _random_request(rng: random.Random, number: int, vocab_size: int) -> SequenceRequest:
    prompt = tuple(rng.randrange(3, vocab_size) for _ in range(rng.choice((20, 60, 150, 400, 1000))))
    sampling = SamplingParams(temperature=0.8, seed=number, max_tokens=rng.choice((5, 20, 80)), ignore_eos=True)
    return SequenceRequest(
        seq_id=number,
        prompt_token_ids=prompt,
        sampling=sampling,
        arrived_at=time.monotonic(),
        latency_class="batch",
    )


def _fit(steps: list[tuple[tuple[float, ...], float]]) -> tuple[StepCost, float]:
    """Fit non-negative weights by least squares of the relative error."""
    import numpy as np

    sizes = np.array([size for size, _ in steps])
    seconds = np.array([one for _, one in steps])
    used = list(range(sizes.shape[1]))
    while True:
        solution = np.linalg.lstsq(sizes[:, used] / seconds[:, None], np.ones(len(steps)), rcond=None)[0]
        if solution.min() >= 0:
            break
        del used[int(solution.argmin())]
    weights = [0.0] * sizes.shape[1]
    for index, weight in zip(used, solution, strict=True):
        weights[index] = float(weight)
    error = float(np.median(np.abs(sizes @ np.array(weights) / seconds - 1)))
    return StepCost(tuple(weights)), error


class Clock:
    """The time of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ModelledRunner:
    """Advances the clock by the cost of each step, and ends each answer at its visit's length."""

    block_size = 32
    vocab_size = 50_000
    can_overlap = False

    def __init__(self, cost: StepCost, clock: Clock, num_blocks: int, visits: Sequence[Visit]) -> None:
        self.num_blocks = num_blocks
        self.num_computed = 0
        self._cost = cost
        self._clock = clock
        self._last_positions = {visit.number: visit.prompt_len + visit.answer_len - 1 for visit in visits}

    def launch(self, plan: StepPlan) -> StepPlan:
        """Nothing happens before `collect`."""
        return plan

    def collect(self, handle: object) -> StepResult:
        """Advance the clock and sample."""
        assert isinstance(handle, StepPlan)
        self._clock.now += self._cost.seconds(handle)
        self.num_computed += handle.num_tokens
        wanted = [(chunk.seq_id, chunk.sample) for chunk in handle.chunks if chunk.sample is not None]
        ends = {seq_id: spec.position >= self._last_positions[spec.seed] for seq_id, spec in wanted}
        sampled = tuple(Sampled(seq_id=seq_id, token_id=_EOS if is_end else 7) for seq_id, is_end in ends.items())
        return StepResult(step_id=handle.step_id, sampled=sampled)

    def close(self) -> None:
        """Nothing to free."""


class _Stream:
    """One reader's answer: in the engine (`seq_id`), parked, or finished."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.reading = Reading(visit)
        self.parking = Parking()
        self.token_ids: list[int] = []
        self.seq_id: int | None = None
        self.first_token_at: float | None = None
        self.position = 0  # tokens that the reader is known to have
        self.reported = 0
        self.prompt = tuple(random.Random(visit.number).randrange(1, 50_000) for _ in range(visit.prompt_len))

    @property
    def num_unread(self) -> int:
        return len(self.token_ids) - self.position

    def is_news(self) -> bool:
        moved = self.position - self.reported
        return moved >= _REPORT_STEP or (moved >= _REPORT_STEP_WHEN_READ and not self.num_unread)


class Simulation:
    """One engine, one workload. `acks`: a reader's position is what it has "read", or all it has "received"."""

    def __init__(self, cost: StepCost, config: EngineConfig, visits: Sequence[Visit], *, acks: str = "read") -> None:
        assert config.num_blocks is not None
        self.clock = Clock()
        self.runner = ModelledRunner(cost, self.clock, config.num_blocks, visits)
        self.core = EngineCore(self.runner, replace(config, overlap=False), self.clock)
        self.readings: list[Reading] = []
        self.parks: dict[str, int] = {}
        self._reads = acks == "read"
        self._coming = sorted(visits, key=lambda visit: visit.arrives_at, reverse=True)
        self._running: dict[int, _Stream] = {}
        self._parked: list[_Stream] = []
        self._num_ids = 0

    def run(self, until: float = math.inf) -> list[Reading]:
        """Run until `until` and return the reading of each reader that has arrived."""
        while (self._coming or self._running or self._parked) and self.clock.now < until:
            self._let_in()
            self._move_readers()
            self._ask_again()
            if self.core.has_work:
                for update in self.core.step():
                    self._take(update)
            else:
                self.clock.now = max(self._next_event(), self.clock.now + 1e-6)
        return self.readings

    def _let_in(self) -> None:
        while self._coming and self._coming[-1].arrives_at <= self.clock.now:
            stream = _Stream(self._coming.pop())
            self.readings.append(stream.reading)
            self._ask(stream)

    def _ask(self, stream: _Stream) -> None:
        self._num_ids += 1
        stream.seq_id, visit = self._num_ids, stream.visit
        stream.reported = stream.position
        self._running[stream.seq_id] = stream
        request = SequenceRequest(
            seq_id=stream.seq_id,
            prompt_token_ids=stream.prompt,
            output_token_ids=tuple(stream.token_ids),
            sampling=SamplingParams(seed=visit.number, max_tokens=LONGEST_ANSWER),
            eos_token_ids=frozenset({_EOS}),
            arrived_at=visit.arrives_at,
            latency_class=visit.latency_class,
            tenant=visit.tenant,
            reader_tokens=stream.position,
            first_token_at=stream.first_token_at,
        )
        self.core.add(request)

    def _move_readers(self) -> None:
        for stream in (*self._running.values(), *self._parked):
            position = stream.reading.num_read(self.clock.now, stream.position) if self._reads else None
            stream.position = len(stream.token_ids) if position is None else position
            if stream.seq_id is not None and stream.is_news():
                stream.reported = stream.position
                self.core.reader_at(stream.seq_id, stream.position)

    def _ask_again(self) -> None:
        ready = [one for one in self._parked if one.parking.seconds_left(one.num_unread, self.clock.now) == 0]
        for stream in ready:
            self._parked.remove(stream)
            stream.parking.end()
            self._ask(stream)

    def _take(self, update: SequenceUpdate) -> None:
        stream = self._running[update.seq_id]
        if update.token_ids:
            stream.token_ids += update.token_ids
            stream.first_token_at = update.first_token_at
            stream.reading.take(update.at)
        if not update.is_last:
            return
        del self._running[update.seq_id]
        stream.seq_id = None
        stream.reading.is_whole = update.finish_reason is not None
        if update.park is not None:
            self.parks[update.park.reason] = self.parks.get(update.park.reason, 0) + 1
            stream.parking.begin(update.park, len(stream.token_ids), self.clock.now)
            self._parked.append(stream)

    def _next_event(self) -> float:
        """Return when an idle engine has work again: the next visit, or a parked answer that is requested again."""
        times = [self._coming[-1].arrives_at] if self._coming else []
        for stream in self._parked:
            left = stream.parking.seconds_left(stream.num_unread, self.clock.now)
            read_at = stream.reading.read_at[min(stream.position, len(stream.token_ids) - 1)]
            times.append(self.clock.now + left if left is not None else read_at)
            if stream.num_unread:
                times.append(read_at)
        return min(times)

    @property
    def num_parks(self) -> int:
        """How often the engine parked a sequence."""
        return sum(self.parks.values())
