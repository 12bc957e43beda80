"""`Simulation`: a core, what was asked of it, what it may do, and the laws that hold after every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore, SequenceUpdate
from streamserve.engine.echo import EchoRunner
from streamserve.engine.plan import StepPlan
from streamserve.engine.scheduler import order_key
from streamserve.engine.sequence import Sequence, SequenceRequest, State
from streamserve.protocol.requests import SamplingParams
from tests.engine.drive import alone
from tests.fakes import FakeClock, FaultyRunner

BLOCK_SIZE = 4
NUM_BLOCKS = 25
BUDGET = 16
MAX_NUM_SEQS = 4
# More than enough for everything that was asked for, one token at a time, with preemptions.
MAX_STEPS_TO_END = 3_000
# Prompts that share beginnings, so that the cache is busy.
STEMS = (
    tuple(range(40)),
    (*range(8), *range(60, 90)),
    (*range(4), *range(90, 94), *range(8, 40)),  # equal blocks after different ones
    (200, 201),
)


@cache
def reference(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    """The tokens of a sequence that is alone in the world."""
    one = SequenceRequest(seq_id=1, prompt_token_ids=prompt, sampling=sampling)
    return tuple(alone(one, num_blocks=200, check_integrity=False))


@dataclass
class Asked:
    """One answer as its reader sees it; parking and resuming change `seq_id` only."""

    request: SequenceRequest
    shown: list[int] = field(default_factory=list)
    is_over: bool = False
    seq_id: int = 0
    num_admissions: int = 0


class Simulation:
    """Everything happens through its methods; `step` checks."""

    def __init__(self) -> None:
        echo = EchoRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.clock = FakeClock()
        self.plans: list[StepPlan] = []
        self.asked: list[Asked] = []
        self.by_seq_id: dict[int, Asked] = {}
        self.to_fail: set[int] = set()
        self.to_preempt: set[int] = set()
        self._next_id = 1
        config = EngineConfig(
            max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET, prefill_chunk=6, check_integrity=True
        )
        self.core = EngineCore(
            FaultyRunner(echo, lambda step, seq_id: seq_id in self.to_fail),
            config,
            self.clock,
            on_plan=self._check_plan,
            on_forget=echo.poison,
        )
        self.core.scheduler.forced_preempt = self._forced

    def ask(
        self,
        stem: int,
        length: int,
        max_tokens: int,
        *,
        tenant: str = "a",
        num_public: int = 0,
        is_greedy: bool = True,
        seed: int = 0,
        latency_class: str = "chat",
        timeout: float | None = None,
    ) -> None:
        """A new request."""
        sampling = SamplingParams(temperature=0.0 if is_greedy else 1.0, seed=seed, max_tokens=max_tokens)
        request = SequenceRequest(
            seq_id=0,
            prompt_token_ids=STEMS[stem][:length],
            sampling=sampling,
            salt=tenant,
            tenant=tenant,
            num_public_tokens=num_public,
            arrived_at=self.clock(),
            deadline=None if timeout is None else self.clock() + timeout,
            latency_class=latency_class,
        )
        asked = Asked(request)
        self.asked.append(asked)
        self._admit(asked)

    def open(self) -> list[Asked]:
        """Those that are not over, in order of asking."""
        return [asked for asked in self.asked if not asked.is_over]

    def abort(self, asked: Asked) -> None:
        """Its reader leaves for good."""
        self.core.abort(asked.seq_id)
        del self.by_seq_id[asked.seq_id]
        asked.is_over = True

    def park(self, asked: Asked) -> None:
        """The engine forgets it, and gets it again with what was shown."""
        self.core.abort(asked.seq_id)
        del self.by_seq_id[asked.seq_id]
        self._admit(asked)

    def stop(self, asked: Asked) -> None:
        """A stop string was found after half of what was shown."""
        self.core.stop(asked.seq_id, len(asked.shown) // 2)
        del asked.shown[len(asked.shown) // 2 :]

    def fail(self, asked: Asked) -> None:
        """Its next chunk will fail."""
        self.to_fail.add(asked.seq_id)

    def preempt(self, asked: Asked) -> None:
        """Memory is taken away from it before the next step."""
        self.to_preempt.add(asked.seq_id)

    def step(self) -> None:
        """One step, and the laws."""
        self.clock.advance(0.01)
        before = (len(self.plans), len(self.core._sequences), len(self.core._inbox))
        could_decode = self._decoding()
        oldest = self.core.scheduler.running[0] if self.core.scheduler.running else None
        forced = set(self.to_preempt)
        updates = self.core.step()
        for update in updates:
            self._take(update)
        self._check_progress(before, updates)
        self._check_decodes(before[0], could_decode, oldest, forced)
        self._check_states()

    def finish(self) -> None:
        """Ask for nothing more: everything ends, and nothing is left."""
        for _ in range(MAX_STEPS_TO_END):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "does not come to an end"
        assert not self.open()
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)

    def _admit(self, asked: Asked) -> None:
        asked.seq_id, self._next_id = self._next_id, self._next_id + 1
        self.by_seq_id[asked.seq_id] = asked
        asked.num_admissions += 1
        one = asked.request
        self.core.add(
            SequenceRequest(
                seq_id=asked.seq_id,
                prompt_token_ids=one.prompt_token_ids,
                output_token_ids=tuple(asked.shown),
                sampling=one.sampling,
                salt=one.salt,
                tenant=one.tenant,
                num_public_tokens=one.num_public_tokens,
                arrived_at=one.arrived_at,
                deadline=one.deadline,
                latency_class=one.latency_class,
            )
        )

    def _forced(self, running: tuple[Sequence, ...]) -> list[Sequence]:
        victims = [sequence for sequence in running if sequence.seq_id in self.to_preempt]
        self.to_preempt.clear()
        return victims

    def _take(self, update: SequenceUpdate) -> None:
        asked = self.by_seq_id[update.seq_id]  # a KeyError here is an update after an abort
        assert not asked.is_over, "an update after the last one"
        if update.finish_reason != "stop":
            asked.shown += update.token_ids
        tokens = reference(asked.request.prompt_token_ids, asked.request.sampling)
        assert tuple(asked.shown) == tokens[: len(asked.shown)], "other tokens than alone"
        asked.is_over = update.is_last
        if update.finish_reason == "length":
            assert len(asked.shown) == len(tokens) == asked.request.sampling.max_tokens
        if update.error == "numerical_error":
            assert update.seq_id in self.to_fail
        if update.error == "timeout":
            assert asked.request.deadline is not None
            assert asked.request.deadline <= self.clock()

    def _check_plan(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        assert 0 < plan.num_tokens <= BUDGET
        assert len(plan.chunks) <= MAX_NUM_SEQS
        assert len({chunk.seq_id for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            sequence = self.core._sequences[chunk.seq_id]
            assert chunk.seq_id in self.by_seq_id, "an aborted sequence is planned"
            assert chunk.start == sequence.num_computed_tokens
            assert chunk.token_ids == tuple(sequence.token_ids[chunk.start : chunk.start + len(chunk.token_ids)])
            assert len(chunk.block_table) * BLOCK_SIZE >= chunk.start + len(chunk.token_ids)
            assert 0 not in chunk.block_table
            self._check_hit(sequence, self.by_seq_id[chunk.seq_id])

    def _check_hit(self, sequence: Sequence, asked: Asked) -> None:
        """Cached tokens were computed before by the same tenant, or lie in blocks that are public in both requests."""
        if sequence.num_preemptions == 0 and sequence.num_cached_tokens:
            tokens = tuple(sequence.token_ids[: sequence.num_cached_tokens])
            sources = [other for other in self.asked if other is not asked or other.num_admissions > 1]
            assert any(_may_share(asked.request, tokens, other.request) for other in sources), "another tenant's block"

    def _decoding(self) -> set[int]:
        aborted = {item.seq_id for item in self.core._inbox if hasattr(item, "seq_id")}
        return {s.seq_id for s in self.core.scheduler.running if s.num_uncomputed_tokens == 1} - aborted

    def _check_progress(self, before: tuple[int, int, int], updates: tuple[SequenceUpdate, ...]) -> None:
        num_plans, num_sequences, num_messages = before
        if num_sequences and not num_messages:
            assert len(self.plans) > num_plans or any(update.is_last for update in updates), "a step advanced nobody"

    def _check_decodes(self, num_plans: int, could_decode: set[int], oldest: Sequence | None, forced: set[int]) -> None:
        planned = {chunk.seq_id for plan in self.plans[num_plans:] for chunk in plan.chunks}
        waiting = {sequence.seq_id for sequence in self.core.scheduler.waiting}
        for seq_id in could_decode - planned - waiting:
            assert seq_id not in self.core._sequences, "a decode was left out"
        if oldest is not None and oldest.seq_id not in forced:
            assert oldest.seq_id not in waiting, "the oldest was preempted"

    def _check_states(self) -> None:
        scheduler = self.core.scheduler
        waiting, running = ({s.seq_id for s in group} for group in (scheduler.waiting, scheduler.running))
        assert not waiting & running
        assert waiting | running == set(self.core._sequences)
        assert waiting | running == {asked.seq_id for asked in self.open()}
        assert all(sequence.state is State.RUNNING for sequence in scheduler.running)
        assert all(sequence.state is State.WAITING for sequence in scheduler.waiting)
        for group in (scheduler.waiting, scheduler.running):
            assert group == sorted(group, key=order_key)
        now = self.clock()
        for sequence in self.core._sequences.values():
            assert sequence.request.deadline is None or sequence.request.deadline > now, "late and still there"


def _may_share(request: SequenceRequest, tokens: tuple[int, ...], other: SequenceRequest) -> bool:
    """Whether `other` can have computed blocks with these first tokens that `request` may find."""
    answer = reference(other.prompt_token_ids, other.sampling)
    if (*other.prompt_token_ids, *answer)[: len(tokens)] != tokens:
        return False
    num_public, other_public = (one.num_public_tokens // BLOCK_SIZE * BLOCK_SIZE for one in (request, other))
    is_public = len(tokens) <= min(num_public, other_public)
    return is_public or (request.salt == other.salt and num_public == other_public)
