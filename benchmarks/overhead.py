"""What the engine costs beside the model: all of `EngineCore.step` but the runner's launch and collect.

    python -m benchmarks.overhead [--dtype bf16,fp32] [--rounds 5] [--profile] [--no-model]

First the share of a step at 8 streams on SmolLM2-135M's shape, with the real runner. Then milliseconds a step with 64
running sequences and a runner that costs nothing, in several kinds of work. Both in wall time and in CPU time of the
engine's thread: other programs disturb the second less. Medians over all steps of all rounds; the kinds take turns.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.support.machine import describe_machine, parser, progress
from streamserve.engine.config import EngineConfig, LatencyClass, ModelConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import Runner, Sampled, StepPlan, StepResult
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.requests import SamplingParams

GOAL_SHARE = 0.10
GOAL_MS = 1.0
# No request is refused while a queue is being measured.
PATIENT = {"chat": LatencyClass(ttft_seconds=0.5, max_queue_seconds=3600.0)}
VOCAB_SIZE = 49_152
READER_STEP = 32  # tokens between two reports of a reader's position: streams/readers.py
LONGEST_ANSWER = 1024  # more than any run here decodes


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step by both clocks: the whole step, and the runner's part."""

    wall: float
    cpu: float
    runner_wall: float
    runner_cpu: float

    @property
    def engine_wall(self) -> float:
        """Wall seconds outside the runner."""
        return self.wall - self.runner_wall

    @property
    def engine_cpu(self) -> float:
        """CPU seconds of the thread outside the runner."""
        return self.cpu - self.runner_cpu


class ClockedRunner:
    """A runner whose calls are timed."""

    can_overlap = False

    def __init__(self, runner: Runner) -> None:
        self.block_size, self.num_blocks, self.vocab_size = runner.block_size, runner.num_blocks, runner.vocab_size
        self.wall = self.cpu = 0.0
        self._runner = runner

    def launch(self, plan: StepPlan) -> object:
        """Pass on."""
        with self._clocked():
            return self._runner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        """Pass on."""
        with self._clocked():
            return self._runner.collect(handle)

    def close(self) -> None:
        """Pass on."""
        self._runner.close()

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.cpu += time.thread_time() - cpu
            self.wall += time.perf_counter() - wall


class FreeRunner:
    """A model that costs nothing: it draws a random token for each sequence."""

    block_size = 32
    vocab_size = VOCAB_SIZE
    can_overlap = False

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._rng = random.Random(0)

    def launch(self, plan: StepPlan) -> StepResult:
        """Draw."""
        wanted = (chunk.seq_id for chunk in plan.chunks if chunk.sample is not None)
        sampled = tuple(Sampled(seq_id=seq_id, token_id=self._rng.randrange(1, VOCAB_SIZE)) for seq_id in wanted)
        return StepResult(step_id=plan.step_id, sampled=sampled)

    def collect(self, handle: object) -> StepResult:
        """Hand over."""
        assert isinstance(handle, StepResult)
        return handle

    def close(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of the engine. With `answer_len`, a new sequence follows each one that ends; None: no sequence ends."""

    title: str
    num_running: int = 64
    num_waiting: int = 0
    prompt_len: int = 128
    answer_len: int | None = None
    is_read: bool = False
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.8, ignore_eos=True))


KINDS = (
    Work(title="plain decode"),
    Work(title="with readers who keep up", is_read=True),
    Work(title="context of 4,096 tokens", prompt_len=4096),
    Work(title="192 more wait", num_waiting=192, is_read=True),
    Work(title="one ends and one begins each step", answer_len=64, is_read=True),
    Work(
        title="with penalties, 1,024 tokens",
        prompt_len=1024,
        sampling=SamplingParams(temperature=0.8, presence_penalty=0.5, ignore_eos=True),
    ),
)


class Bench:
    """One core with one kind of work, stepped under the clock."""

    def __init__(self, runner: Runner, work: Work, config: EngineConfig) -> None:
        self._runner = ClockedRunner(runner)
        self._work = work
        self._core = EngineCore(self._runner, config, time.monotonic)
        self._ids = itertools.count(1)
        self._num_read: dict[int, int] = {}

    def warm_up(self) -> None:
        """Bring every sequence into the batch, at different positions of their answers if these end."""
        work, num_at_once = self._work, self._work.num_running
        for index in range(num_at_once):
            share = (index + 1) / num_at_once
            self._add(None if work.answer_len is None else max(2, int(work.answer_len * share)))
        for _ in range(LONGEST_ANSWER // 2):
            self._note(self._core.step())
            if len(self._num_read) == num_at_once and not self._core.stats.waiting:
                break
        else:
            raise RuntimeError(f"{work.title}: not all sequences fit: {self._core.stats}")
        for _ in range(work.num_waiting):
            self._add(None)
        for _ in range(4):
            self.step()

    def step(self) -> Times:
        """Run one step; the clients' work between steps is not timed."""
        self._runner.wall = self._runner.cpu = 0.0
        wall, cpu = time.perf_counter(), time.thread_time()
        updates = self._core.step()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        self._note(updates)
        return Times(wall, cpu, self._runner.wall, self._runner.cpu)

    def close(self) -> None:
        """Empty the engine; the runner stays."""
        for seq_id in list(self._num_read):
            self._core.abort(seq_id)
        self._core.step()

    def _note(self, updates: tuple[SequenceUpdate, ...]) -> None:
        for update in updates:
            if update.is_last:
                self._num_read.pop(update.seq_id, None)
                self._add(self._work.answer_len)
                continue
            num_tokens = self._num_read[update.seq_id] = self._num_read.get(update.seq_id, 0) + len(update.token_ids)
            if self._work.is_read and num_tokens % READER_STEP == 0:
                self._core.reader_at(update.seq_id, num_tokens)

    def _add(self, answer_len: int | None) -> None:
        seq_id = next(self._ids)
        rng = random.Random(seq_id)
        sampling = replace(self._work.sampling, seed=seq_id, max_tokens=answer_len or LONGEST_ANSWER)
        self._core.add(
            SequenceRequest(
                seq_id=seq_id,
                prompt_token_ids=tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(self._work.prompt_len)),
                sampling=sampling,
                arrived_at=time.monotonic(),
                tenant=f"tenant {seq_id % 8}",
                reader_tokens=0 if self._work.is_read else None,
            )
        )


def main() -> None:
    """Measure the share, then the milliseconds."""
    options = parse_options()
    print(describe_machine())
    if not options.no_model:
        for name in options.dtype.split(","):
            measure_share(name, options)
    measure_many(options)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--dtype", default="bf16,fp32", help="of the model in the first part")
    options.add_argument("--streams", type=int, default=8, help="in the first part")
    options.add_argument("--running", type=int, default=64, help="in the second part")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=200, help="of a round in the second part")
    options.add_argument("--model-steps", type=int, default=24, help="of a round in the first part")
    options.add_argument("--threads", type=int, default=None, help="of the model; default: torch's")
    options.add_argument("--profile", action="store_true", help="profile the second part")
    options.add_argument("--no-model", action="store_true", help="the second part alone: no torch")
    return options.parse_args()


def measure_share(name: str, options: argparse.Namespace) -> None:
    """Print what part of a step is not the model's."""
    import torch

    from benchmarks.engine import DTYPES, build_model
    from streamserve.engine.model.runner import load_runner

    if options.threads:
        torch.set_num_threads(options.threads)
    config = EngineConfig(num_blocks=1024, prefill_chunk=2048, max_num_batched_tokens=8192, overlap=False)
    with tempfile.TemporaryDirectory() as folder:
        progress(f"building and loading the model in {name}")
        build_model(Path(folder), DTYPES[name])
        runner = load_runner(ModelConfig(alias="bench", path=folder, dtype=DTYPES[name], device="cpu"), config)
        work = Work(title=f"{options.streams} streams", num_running=options.streams, is_read=True)
        times: list[Times] = []
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            bench = Bench(runner, work, config)
            bench.warm_up()
            times += [bench.step() for _ in range(options.model_steps)]
            bench.close()
        runner.close()
    print(f"\nSmolLM2-135M's shape, {name}, {torch.get_num_threads()} threads, {len(times)} steps, ms a step")
    print(f"{'':12}{'step':>10}{'runner':>10}{'engine':>10}{'share':>9}   goal <= {GOAL_SHARE:.0%}")
    rows = (
        ("wall", lambda t: t.wall, lambda t: t.runner_wall, lambda t: t.engine_wall),
        ("thread CPU", lambda t: t.cpu, lambda t: t.runner_cpu, lambda t: t.engine_cpu),
    )
    for title, whole, inside, outside in rows:
        share = statistics.median(outside(one) / whole(one) for one in times)
        columns = "".join(f"{_ms(times, pick):10.2f}" for pick in (whole, inside, outside))
        print(f"{title:12}{columns}{share:9.1%}", flush=True)


def measure_many(options: argparse.Namespace) -> None:
    """Print what a step costs without a model, for each kind of work."""
    works = [replace(work, num_running=options.running) for work in KINDS]
    times: dict[str, list[Times]] = {work.title: [] for work in works}
    for number in range(options.rounds):
        progress(f"round {number + 1} of {options.rounds}, {len(works)} kinds of work")
        for work in works:
            times[work.title] += _steps(work, options.steps)
    print(f"\n{options.running} running, no model, {options.rounds * options.steps} steps each, ms a step")
    print(f"{'':36}{'wall':>9}{'thread CPU':>12}{'95th':>9}   goal <= {GOAL_MS:g}")
    for title, seen in times.items():
        late = statistics.quantiles((one.engine_cpu for one in seen), n=20)[-1] * 1000
        wall, cpu = _ms(seen, lambda t: t.engine_wall), _ms(seen, lambda t: t.engine_cpu)
        print(f"{title:36}{wall:9.3f}{cpu:12.3f}{late:9.3f}", flush=True)
    if options.profile:
        for work in works:
            profile = cProfile.Profile()
            _steps(work, options.steps, profile)
            print(f"\n{work.title}: own time by function, {options.steps} steps")
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)


def _steps(work: Work, num_steps: int, profile: cProfile.Profile | None = None) -> list[Times]:
    num_tokens = work.prompt_len + (work.answer_len or LONGEST_ANSWER)
    num_blocks = 64 + (work.num_running + work.num_waiting) * -(-num_tokens // FreeRunner.block_size)
    config = EngineConfig(
        num_blocks=num_blocks,
        max_num_seqs=work.num_running,
        max_num_batched_tokens=16_384,
        prefill_chunk=16_384,
        max_model_len=work.prompt_len + LONGEST_ANSWER,
        classes=PATIENT,
        overlap=False,
    )
    bench = Bench(FreeRunner(num_blocks), work, config)
    bench.warm_up()
    if profile is None:
        return [bench.step() for _ in range(num_steps)]
    return profile.runcall(lambda: [bench.step() for _ in range(num_steps)])


def _sized(work: Work, num_running: int) -> Work:
    return replace(work, num_running=num_running)


def _ms(times: list[Times], pick: Callable[[Times], float]) -> float:
    return statistics.median(map(pick, times)) * 1000


if __name__ == "__main__":
    main()
