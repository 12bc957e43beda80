"""Runners and clocks for tests, in place of a model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random

from streamserve.engine.plan import Chunk, Runner, Sampled, StepOutOfMemory, StepPlan, StepResult

_UNSEEN = -2
# A test that waits longer than this has failed, also on a slow and busy machine; no result depends on it.
DEADLINE_SECONDS = 60.0


class FakeClock:
    """A clock that advances only by `advance`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class WrappedRunner:
    """A runner around another; subclasses change one thing."""

    def __init__(self, runner: Runner) -> None:
        self.inner = runner
        self.block_size = runner.block_size
        self.num_blocks = runner.num_blocks
        self.vocab_size = runner.vocab_size
        self.can_overlap = runner.can_overlap
        self.windows = runner.windows
        self.is_closed = False

    def launch(self, plan: StepPlan) -> object:
        return self.inner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        return self.inner.collect(handle)

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()


class PacedRunner(WrappedRunner):
    """Takes at least a fixed time for each token, so that time per token is measurable on any machine."""

    def __init__(self, runner: Runner, *, seconds_per_token: float) -> None:
        super().__init__(runner)
        self._seconds_per_token = seconds_per_token

    def launch(self, plan: StepPlan) -> object:
        return sum(len(chunk.token_ids) for chunk in plan.chunks), self.inner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, tuple)
        num_tokens, inner = handle
        time.sleep(num_tokens * self._seconds_per_token)
        return self.inner.collect(inner)


class TurnByTurnRunner(WrappedRunner):
    """Ends a step only after a turn of the event loop: the engine's thread is never ahead of its readers."""

    def __init__(self, runner: Runner, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(runner)
        self._loop = loop

    def collect(self, handle: object) -> StepResult:
        turn = threading.Event()
        self._loop.call_soon_threadsafe(turn.set)
        if not turn.wait(DEADLINE_SECONDS):
            raise TimeoutError("the event loop does not turn")
        return self.inner.collect(handle)


class GatedRunner(WrappedRunner):
    """Records plans, and holds each step from `hold_from` on until `release`.

    A test waits for `held()`, acts while the step runs, calls `release()`, and checks `plans`.
    """

    def __init__(self, runner: Runner, *, hold_from: int = 0) -> None:
        super().__init__(runner)
        self.plans: list[StepPlan] = []
        self._num_allowed: float = hold_from
        self._num_collected = 0
        self._changed = threading.Condition()  # guards the three above

    def launch(self, plan: StepPlan) -> object:
        with self._changed:
            self.plans.append(plan)
            self._changed.notify_all()
        return self.inner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_collected < self._num_allowed, DEADLINE_SECONDS):
                raise TimeoutError(f"step {len(self.plans) - 1} was never released")
            self._num_collected += 1
        return self.inner.collect(handle)

    def release(self, num_steps: float = 1) -> None:
        """Let `num_steps` more steps end."""
        with self._changed:
            self._num_allowed = max(self._num_allowed, self._num_collected) + num_steps
            self._changed.notify_all()

    def open(self) -> None:
        """Hold no step any more."""
        self.release(float("inf"))

    async def held(self) -> StepPlan:
        """Wait until a step is held, and return its plan."""
        return await asyncio.to_thread(self._wait_until_held)

    def _wait_until_held(self) -> StepPlan:
        with self._changed:
            if not self._changed.wait_for(self._is_holding, DEADLINE_SECONDS):
                raise TimeoutError("no step came")
            return self.plans[-1]

    def _is_holding(self) -> bool:
        return len(self.plans) > self._num_collected >= self._num_allowed


class DyingRunner(WrappedRunner):
    """Raises in its n-th step, which ends the engine."""

    def __init__(self, runner: Runner, *, at_step: int) -> None:
        super().__init__(runner)
        self._at_step = at_step

    def launch(self, plan: StepPlan) -> object:
        if plan.step_id == self._at_step:
            raise RuntimeError("the device fell off the bus")
        return self.inner.launch(plan)


class SmallRunner(WrappedRunner):
    """Raises StepOutOfMemory for plans that are `too_large`, at launch or `at_collect`."""

    def __init__(self, runner: Runner, too_large: Callable[[StepPlan], bool], *, at_collect: bool = False) -> None:
        super().__init__(runner)
        self._too_large = too_large
        self._at_collect = at_collect

    def launch(self, plan: StepPlan) -> object:
        is_too_large = self._too_large(plan)
        if is_too_large and not self._at_collect:
            raise StepOutOfMemory
        return is_too_large, self.inner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, tuple)
        is_too_large, inner = handle
        result = self.inner.collect(inner)
        if is_too_large:
            raise StepOutOfMemory
        return result


class FaultyRunner(WrappedRunner):
    """Fails the chunks for which `is_faulty(step_id, seq_id)`; the rest is computed."""

    def __init__(self, runner: Runner, is_faulty: Callable[[int, int], bool]) -> None:
        super().__init__(runner)
        self._is_faulty = is_faulty

    def launch(self, plan: StepPlan) -> object:
        return plan, self.inner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, tuple)
        plan, inner = handle
        good = {one.seq_id: one for one in self.inner.collect(inner).sampled}
        return StepResult(step_id=plan.step_id, sampled=tuple(self._answers(plan, good)))

    def _answers(self, plan: StepPlan, good: dict[int, Sampled]) -> Iterable[Sampled]:
        for chunk in plan.chunks:
            if self._is_faulty(plan.step_id, chunk.seq_id):
                yield Sampled(seq_id=chunk.seq_id, error="numerical_error")
            elif chunk.seq_id in good:
                yield good[chunk.seq_id]


class ProposingRunner(WrappedRunner):
    """Proposes what `known` texts of tokens have next, now and then wrongly, and keeps any number of what was right.

    `num_kept`: how many tokens the chunks with several rows gave, by number.
    """

    def __init__(self, runner: Runner, known: Iterable[Sequence[int]], seed: int = 0) -> None:
        super().__init__(runner)
        self.num_kept: Counter[int] = Counter()
        self.num_wrong = 0
        self._known = [tuple(one) for one in known]
        self._random = Random(seed)
        self._ids: dict[int, list[int]] = {}  # of each sequence, as far as the runner has seen it from its beginning

    def launch(self, plan: StepPlan) -> object:
        return plan, self.inner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, tuple)
        plan, result = handle[0], self.inner.collect(handle[1])
        chunks = {chunk.seq_id: chunk for chunk in plan.chunks}
        for chunk in plan.chunks:
            ids = self._ids.setdefault(chunk.seq_id, [])
            ids += [_UNSEEN] * (chunk.start - len(ids))  # it began in cached blocks
            ids[chunk.start :] = chunk.token_ids[: len(chunk.token_ids) - len(chunk.proposed_ids)]
        sampled = tuple(self._keep(chunks[one.seq_id], one) for one in result.sampled)
        return replace(result, sampled=sampled)

    def _keep(self, chunk: Chunk, one: Sampled) -> Sampled:
        number = len(one.token_ids)
        if len(chunk.samples) > 1:
            self.num_wrong += number < len(chunk.samples)
            number = self._random.randint(0, number) if self._random.random() < 0.3 else number
            self.num_kept[number] += 1
        kept = one.token_ids[:number]
        ids = self._ids[chunk.seq_id]
        ids += kept
        return replace(one, token_ids=kept, logprobs=one.logprobs[:number], proposed_ids=self._propose(tuple(ids)))

    def _propose(self, before: tuple[int, ...]) -> tuple[int, ...]:
        for one in self._known:
            if one[: len(before)] == before:
                proposed = list(one[len(before) : len(before) + self._random.randint(1, 5)])
                if proposed and self._random.random() < 0.3:
                    place = self._random.randrange(len(proposed))
                    proposed[place] = (proposed[place] + 1) % self.vocab_size
                return tuple(proposed)
        return ()


class GuessingRunner(WrappedRunner):
    """A draft model that draws what the model will, and proposes another token in a share of cases.

    `first[seq_id, position]` is what it drew first in a step for a sequence: after nothing but known tokens.
    """

    def __init__(self, runner: Runner, share_wrong: float, seed: int = 0) -> None:
        super().__init__(runner)
        self.first: dict[tuple[int, int], int] = {}
        self.passes: list[StepPlan] = []
        self._share_wrong = share_wrong
        self._random = Random(seed)
        self._newest: dict[int, tuple[int, int]] = {}  # of each sequence: the position and the token proposed last

    def launch(self, plan: StepPlan) -> object:
        self.passes.append(plan)
        return plan, self.inner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, tuple)
        plan, result = handle[0], self.inner.collect(handle[1])
        chunks = {chunk.seq_id: chunk for chunk in plan.chunks}
        return replace(result, sampled=tuple(self._guess(chunks[one.seq_id], one) for one in result.sampled))

    def _guess(self, chunk: Chunk, one: Sampled) -> Sampled:
        position, token_id = chunk.samples[0].position, one.token_ids[0]
        if (chunk.start, chunk.token_ids[0]) != self._newest.get(one.seq_id):
            self.first[one.seq_id, position] = token_id
        if self._random.random() < self._share_wrong:
            token_id = (token_id + 1) % self.vocab_size
        self._newest[one.seq_id] = position, token_id
        return replace(one, token_ids=(token_id,))
