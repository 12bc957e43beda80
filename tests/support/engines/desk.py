"""`Desk`: a scheduler and a pool without a core. Each plan counts as computed, and every token is 7."""

from __future__ import annotations

from typing import Any

from streamserve.engine.config import EngineConfig
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.plan import Chunk, StepPlan
from streamserve.engine.scheduler import Schedule, Scheduler
from streamserve.engine.sequence import Sequence, SequenceRequest, State
from streamserve.engine.step_time import StepTime, size_of

TOKEN = 7
MAX_STEPS = 10_000


class Desk:
    """Plans one step after another. With `overlap`, the step before is collected after the next one was launched."""

    def __init__(
        self, *, num_blocks: int = 65, block_size: int = 4, overlap: bool = False, now: float = 100.0, **config: Any
    ) -> None:
        self.config = EngineConfig(**{"max_num_seqs": 8, "speculation": "off", **config})
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.config, self.pool)
        self.now = now
        self.sequences: dict[int, Sequence] = {}
        self.schedules: list[Schedule] = []
        self._overlap = overlap
        self._launched: list[list[tuple[Chunk, int]]] = []

    def add(self, *requests: SequenceRequest) -> list[Sequence]:
        added = [Sequence(request) for request in requests]
        for sequence in added:
            self.sequences[sequence.seq_id] = sequence
            self.scheduler.queue.add(sequence, self.now)
        return added

    def step(self, seconds: float = 0.01) -> Schedule:
        """Let time pass, plan, and record the result of this plan, or of the one before."""
        self.now += seconds
        schedule = self.scheduler.schedule(self.now)
        self.schedules.append(schedule)
        if schedule.chunks:
            self._launch(schedule.chunks)
        while len(self._launched) > (self._overlap and bool(schedule.chunks)):
            self._collect()
        self.pool.check_integrity(self.sequences.values())
        return schedule

    def run(self) -> None:
        """Step until no work is left."""
        for _ in range(MAX_STEPS):
            if not (self.scheduler.waiting or self.scheduler.running):
                return
            self.step()
        raise AssertionError("the queue does not come to an end")

    def planned(self) -> dict[int, int]:
        """Return how many tokens of which sequence the last plan holds."""
        return {chunk.seq_id: len(chunk.token_ids) for chunk in self.schedules[-1].chunks}

    def parked(self) -> list[int]:
        return [sequence.seq_id for sequence, _ in self.schedules[-1].parked]

    def _launch(self, chunks: tuple[Chunk, ...]) -> None:
        self._launched.append([(chunk, self.sequences[chunk.seq_id].num_preemptions) for chunk in chunks])
        for chunk in chunks:
            self.sequences[chunk.seq_id].launch(len(chunk.token_ids), num_rows=len(chunk.samples))

    def _collect(self) -> None:
        for chunk, num_preemptions in self._launched.pop(0):
            sequence = self.sequences[chunk.seq_id]
            if sequence.state is State.RUNNING and sequence.num_preemptions == num_preemptions:
                sequence.mark_computed(len(chunk.token_ids))
                self.pool.cache_blocks(sequence, len(chunk.token_ids))
                self._append(sequence, chunk)

    def _append(self, sequence: Sequence, chunk: Chunk) -> None:
        if chunk.samples:
            assert chunk.samples[0].position == len(sequence.token_ids)
            sequence.token_ids.append(TOKEN)
            sequence.first_token_at = sequence.first_token_at or self.now
            sequence.reader.begin(sequence.num_output_tokens, self.now)
        if sequence.finish_reason(self.config.max_model_len or 10_000) is not None:
            self.scheduler.finish(sequence)


def plan_of(*sizes: tuple[int, int]) -> StepPlan:
    """Return a plan with chunks of (start, number of tokens)."""
    chunks = (
        Chunk(seq_id=index, start=start, token_ids=(0,) * num_tokens, block_table=())
        for index, (start, num_tokens) in enumerate(sizes)
    )
    return StepPlan(step_id=0, chunks=tuple(chunks))


def teach(step_time: StepTime, *, base: float = 0.01, per_token: float = 0.001, per_pair: float = 0.0) -> None:
    """Feed the step-time model enough steps of a machine with these costs."""
    for index in range(64):
        plan = plan_of((0, 4 ** (index % 5)), (index * 16, 1))
        tokens = plan.num_tokens
        pairs = size_of(plan.chunks)[1]
        step_time.note(plan, base + per_token * tokens + per_pair * pairs)
