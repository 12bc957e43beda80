"""The step cost of a real model on this machine: steps of many sizes through the engine, and a linear fit.

Every other step fits the cost, and the others say how far off it is.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.qoe.machines import StepCost
from benchmarks.support.machine import progress
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.plan import Runner, StepPlan, StepResult
from streamserve.engine.sequence import SequenceRequest
from streamserve.engine.step_time import size_of
from streamserve.protocol.requests import Admission, SamplingParams

NUM_BLOCKS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted cost; the median and the 90th percentile of the relative error, of steps that it was not fitted to."""

    cost: StepCost
    num_steps: int
    error_p50: float
    error_p90: float


def fit_model(folder: Path, dtype: str, num_steps: int) -> Fit:
    """Measure a model on one thread, in CPU time of that thread."""
    import torch

    from streamserve.engine.model.load.start import load_runner

    progress(f"fitting the step time to {folder.name}")
    torch.set_num_threads(1)
    model = ModelConfig(alias="fitted", path=str(folder), dtype=dtype, device="cpu", num_threads=1)
    runner = load_runner(model, EngineConfig(num_blocks=NUM_BLOCKS))
    try:
        return fit_step_cost(runner, num_steps)
    finally:
        runner.close()


class _Watched:
    """A runner that notes each step's size and its CPU time in this thread. Closing it leaves the runner open."""

    can_overlap = False
    windows = (None,)

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
        self.steps.append((_sizes_of(handle), time.thread_time() - started_at))
        return result

    def close(self) -> None:
        """The runner is the caller's."""


def _sizes_of(plan: StepPlan) -> tuple[float, ...]:
    """Return the sizes of a step that its time depends on, as in `StepCost`."""
    tokens, pairs = size_of(plan.chunks)
    positions = sum(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)
    return 1.0, len(plan.chunks), tokens, positions, pairs


def fit_step_cost(runner: Runner, num_steps: int) -> Fit:
    """Run steps of many sizes through the engine and fit their times.

    The runner must compute on the thread that calls it.
    """
    watched = _Watched(runner)
    unbounded = {"itl_target_seconds": 60.0, "max_step_seconds": 60.0, "prefill_chunk": 2048}
    config = EngineConfig(num_blocks=runner.num_blocks, overlap=False, **unbounded)
    core = EngineCore(watched, config, time.monotonic)
    rng, number = random.Random(0), 0
    while len(watched.steps) < num_steps:
        most = (2, 8, 24, 60)[4 * len(watched.steps) // num_steps]
        known = core.stats.running + core.stats.waiting
        for _ in range(min(4, most - known)):
            number += 1
            core.add(_random_request(rng, number, runner.vocab_size))
        core.step()
    return _fit(watched.steps[num_steps // 20 :])


def _random_request(rng: random.Random, number: int, vocab_size: int) -> SequenceRequest:
    prompt = tuple(rng.randrange(3, vocab_size) for _ in range(rng.choice((20, 60, 150, 400, 1000))))
    sampling = SamplingParams(temperature=0.8, seed=number, max_tokens=rng.choice((5, 20, 80)), ignore_eos=True)
    return SequenceRequest(
        seq_id=number,
        prompt_token_ids=prompt,
        sampling=sampling,
        admission=Admission(owner="", tenant="", arrived_at=time.monotonic()),
        latency_class="batch",
    )


def _fit(steps: list[tuple[tuple[float, ...], float]]) -> Fit:
    """Fit non-negative weights by least squares of the relative error."""
    import numpy as np

    sizes, seconds = np.array([size for size, _ in steps]), np.array([one for _, one in steps])
    fitted, checked = slice(0, None, 2), slice(1, None, 2)
    used = list(range(sizes.shape[1]))
    while True:
        relative = sizes[fitted][:, used] / seconds[fitted][:, None]
        solution = np.linalg.lstsq(relative, np.ones(len(relative)), rcond=None)[0]
        if solution.min() >= 0:
            break
        del used[int(solution.argmin())]
    weights = [0.0] * sizes.shape[1]
    for index, weight in zip(used, solution, strict=True):
        weights[index] = float(weight)
    errors = np.abs(sizes[checked] @ np.array(weights) / seconds[checked] - 1)
    return Fit(
        cost=StepCost(*weights),
        num_steps=len(steps),
        error_p50=float(np.median(errors)),
        error_p90=float(np.percentile(errors, 90)),
    )
