"""`InFlight`: the launched steps that are not collected yet, oldest first; `halves`, to retry a step in less memory.

Knows plans and their sequences; does not interpret results. Engine thread only. A step's result counts for a sequence
only while that is where it was at the launch: a sequence that ended or was preempted takes no part in it any more.
(Idea: SGLang's overlap loop; mini-sglang's lesson that a late result must find one state machine, not three lists.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace

from streamserve.engine.drafter import Drafter, OnPass
from streamserve.engine.plan import Chunk, Draft, Flight, OnStep, Runner, StepOutOfMemory, StepPlan, StepResult
from streamserve.engine.sequence import Sequence, State

# The limit before any step time is known: compiling kernels and touching memory for the first time takes long.
FIRST_STEPS_SECONDS = 120.0
# A step is hung when it takes this many times the step-time model's prediction (and longer than `step_seconds`).
HUNG_FACTOR = 8
# Each loss of the engine in a step with a sequence multiplies the time that its next steps may take.
PATIENCE_GROWTH = 4


class RunnerFailed(Exception):
    """The runner raised: the engine is dead. Keeps its exception apart from our own code's exceptions."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Part:
    """One chunk of a launched step, and its sequence as it was then."""

    sequence: Sequence
    chunk: Chunk
    num_preemptions: int

    @property
    def is_current(self) -> bool:
        """Whether the sequence still has the blocks this chunk was written to."""
        return self.sequence.state is State.RUNNING and self.sequence.num_preemptions == self.num_preemptions


@dataclass(frozen=True, slots=True)
class Launched:
    """One step in flight."""

    plan: StepPlan
    parts: tuple[Part, ...]
    handle: object
    at: float


class InFlight:
    """A runner and its uncollected steps. `num_launched` counts all steps so far.

    `on_plan` gets each plan before it runs. `on_step` gets a `Flight` before each call of the runner (a watchdog, and
    a record of what is in flight) and when no step is in flight; `predict` returns how long a step should
    take, if that is known.
    """

    def __init__(
        self,
        runner: Runner,
        clock: Callable[[], float],
        *,
        step_seconds: float,
        predict: Callable[[StepPlan], float | None],
        on_plan: Callable[[StepPlan], None] | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.num_launched = 0
        self._runner = runner
        self._clock = clock
        self._step_seconds = step_seconds
        self._predict = predict
        self._on_plan = on_plan
        self._on_step = on_step
        self._steps: deque[Launched] = deque()
        self._collected_at = clock()
        self._most_seconds_per_token: float | None = None
        self._flight = Flight(seconds_allowed=None, stream_ids=frozenset())
        self._has_failed = False

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, chunks: tuple[Chunk, ...], sequences: Mapping[int, Sequence]) -> None:
        """Launch a step. `StepOutOfMemory` leaves everything as it was, but penalty slots, which begin afresh."""
        plan = StepPlan(step_id=self.num_launched, chunks=chunks)
        self.num_launched += 1
        at = self._clock()  # a runner without a device of its own computes in `launch`
        with self._guarding(plan, [sequences[chunk.seq_id] for chunk in chunks]):
            if self._on_plan is not None:
                self._on_plan(plan)
            try:
                handle = self._runner.launch(plan)
            except StepOutOfMemory:
                for chunk in chunks:
                    sequences[chunk.seq_id].held.is_counted = False
                raise
        parts = tuple(Part(sequence := sequences[c.seq_id], c, sequence.num_preemptions) for c in chunks)
        for part in parts:
            part.sequence.launch(len(part.chunk.token_ids), num_rows=len(part.chunk.samples))
        self._steps.append(Launched(plan, parts, handle, at))

    def draft(
        self, drafter: Drafter, drafts: tuple[Draft, ...], sequences: Mapping[int, Sequence], on_pass: OnPass
    ) -> dict[int, tuple[int, ...]]:
        """Return what a draft model proposes; its passes are watched as steps are. It may raise `StepOutOfMemory`."""

        def guard(plan: StepPlan) -> AbstractContextManager[None]:
            return self._guarding(plan, [sequences[chunk.seq_id] for chunk in plan.chunks])

        return drafter.draft(drafts, guard, on_pass)

    def pop(self) -> Launched:
        """Remove and return the oldest step; `collect` it next."""
        return self._steps.popleft()

    def collect(self, step: Launched) -> tuple[StepResult, float]:
        """Wait for a step; return its result and the seconds that it alone took.

        After `StepOutOfMemory` its launch is undone.
        """
        try:
            with self._guarding(step.plan, [part.sequence for part in step.parts]):
                result = self._runner.collect(step.handle)
        except StepOutOfMemory:
            _take_back(step)
            raise
        started_at = max(step.at, self._collected_at)
        self._collected_at = self._clock()
        seconds = self._collected_at - started_at
        self._most_seconds_per_token = max(self._most_seconds_per_token or 0.0, seconds / step.plan.num_tokens)
        return result, seconds

    def discard_all(self) -> None:
        """Wait for every step and undo its launch."""
        while self._steps:
            step = self.pop()
            with suppress(StepOutOfMemory):
                self.collect(step)
                _take_back(step)

    def rest(self) -> None:
        """Report that no call of the runner is under way. After a failed call, what was in flight stays reported."""
        if self._on_step is not None:
            streams = self._flight.stream_ids if self._has_failed else self._streams_in_flight()
            self._on_step(replace(self._flight, seconds_allowed=None, stream_ids=streams))

    def _streams_in_flight(self) -> frozenset[str]:
        return frozenset(part.sequence.request.admission.stream_id for step in self._steps for part in step.parts)

    def _seconds_allowed(self, plan: StepPlan) -> float:
        """Return when a step counts as hung: by the step-time model; until that is fitted, by the dearest token."""
        predicted, most = self._predict(plan), self._most_seconds_per_token
        if predicted is not None:
            return max(self._step_seconds, HUNG_FACTOR * predicted)
        if most is None:
            return FIRST_STEPS_SECONDS
        return min(FIRST_STEPS_SECONDS, max(self._step_seconds, HUNG_FACTOR * most * plan.num_tokens))

    @contextmanager
    def _guarding(self, plan: StepPlan, sequences: list[Sequence]) -> Iterator[None]:
        """Report a call of the runner, and mark what the runner raises."""
        if self._on_step is not None:
            num_losses = max(sequence.request.resume.num_losses for sequence in sequences)
            streams = {sequence.request.admission.stream_id for sequence in sequences}
            self._flight = Flight(
                seconds_allowed=self._seconds_allowed(plan) * PATIENCE_GROWTH**num_losses,
                stream_ids=self._streams_in_flight() | streams,
                is_trial=any(sequence.is_suspect for sequence in sequences),
            )
            self._on_step(self._flight)
        try:
            yield
        except StepOutOfMemory:
            raise
        except Exception as error:
            self._has_failed = True
            raise RunnerFailed(error) from error


def _take_back(step: Launched) -> None:
    for part in step.parts:
        if part.is_current:
            part.sequence.take_back(len(part.chunk.token_ids))


def halves(chunks: tuple[Chunk, ...], block_size: int) -> tuple[tuple[Chunk, ...], ...]:
    """Split a plan's chunks into two with half the tokens each; the chunk in the middle is cut.

    plan:   [ a ][ b ][ ...... c ...... ][ d ]
    halves: [ a ][ b ][ .. c .. ] and [ .. c .. ][ d ]

    One token cannot be split: it is retried as it is. What was proposed is left out.
    """
    chunks = tuple(map(_without_proposals, chunks))
    num_left = sum(len(chunk.token_ids) for chunk in chunks) // 2
    first: list[Chunk] = []
    for index, chunk in enumerate(chunks):
        if num_left < len(chunk.token_ids):
            head, tail = _split(chunk, num_left, block_size)
            return tuple(half for half in ((*first, *head), (*tail, *chunks[index + 1 :])) if half)
        first.append(chunk)
        num_left -= len(chunk.token_ids)
    return (chunks,)


def still_ready(chunks: tuple[Chunk, ...], sequences: Mapping[int, Sequence]) -> tuple[Chunk, ...]:
    """Return the chunks that can still be computed as planned, with the values of tokens that were pending then.

    No step is in flight. The step with these chunks failed, or was put off for a suspect's: what is counted for their
    penalties may have changed.
    """
    ready = []
    for chunk in map(_without_proposals, chunks):
        sequence = sequences.get(chunk.seq_id)
        if sequence is None or not _is_ready(chunk, sequence):
            continue
        token_ids = tuple(sequence.token_ids[chunk.start : _end(chunk)])
        samples = chunk.samples and sequence.sample_specs(1)
        pairs = zip(sequence.held.tables, chunk.tables, strict=True)
        table, *others = (tuple(own[: len(table)]) for own, table in pairs)
        ready.append(
            replace(chunk, token_ids=token_ids, samples=samples, block_table=table, other_tables=tuple(others))
        )
    return tuple(ready)


def _split(chunk: Chunk, num_tokens: int, block_size: int) -> tuple[list[Chunk], list[Chunk]]:
    """Split a chunk after `num_tokens`; only the rest samples."""
    if num_tokens == 0:
        return [], [chunk]
    middle = chunk.start + num_tokens
    table, *others = (table[: -(-middle // block_size)] for table in chunk.tables)
    first = rest = None
    if chunk.scores is not None:
        first, rest = chunk.scores.within(0, middle), chunk.scores.within(middle, _end(chunk))
    head = replace(
        chunk,
        token_ids=chunk.token_ids[:num_tokens],
        block_table=table,
        other_tables=tuple(others),
        samples=(),
        scores=first,
    )
    return [head], [replace(chunk, start=middle, token_ids=chunk.token_ids[num_tokens:], scores=rest)]


def _without_proposals(chunk: Chunk) -> Chunk:
    num_known = len(chunk.token_ids) - len(chunk.proposed_ids)
    return replace(chunk, token_ids=chunk.token_ids[:num_known], samples=chunk.samples[:1])


def _is_ready(chunk: Chunk, sequence: Sequence) -> bool:
    """Whether the sequence is still where the chunk begins, in the same blocks, and its tokens are known.

    Blocks that have fallen out of a window since may be freed.
    """
    return (
        sequence.num_launched_tokens == chunk.start
        and len(sequence.token_ids) >= _end(chunk)
        and len(sequence.held.tables) == len(chunk.tables)
        and all(map(_holds, sequence.held.tables, chunk.tables))
    )


def _holds(own: list[int], table: tuple[int, ...]) -> bool:
    known = own[: len(table)]
    return len(known) == len(table) and all(one in (0, block_id) for one, block_id in zip(known, table, strict=True))


def _end(chunk: Chunk) -> int:
    return chunk.start + len(chunk.token_ids)
