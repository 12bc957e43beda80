"""`EngineCore`: add, abort and stop sequences; `step()` runs the batch once and says what came out.

Pure and synchronous: no thread, no clock (it is given one), no tensor, no text. `step` and `stats` belong to one
thread; `add`, `abort` and `stop` only append to a deque and may be called from any. (Idea: nano-vllm's
`LLMEngine.step`; vLLM's EngineCore, with its lesson that an unknown id is ignored and counted, never asserted.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from streamserve.engine.block_pool import BlockPool
from streamserve.engine.config import EngineConfig
from streamserve.engine.plan import Chunk, RawLogprobs, Runner, Sampled, StepPlan, StepResult
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import Sequence, SequenceRequest

# More than any model takes; the real bound comes from the config or the pool.
_NO_MODEL_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUpdate:
    """News of one sequence. The last one has `finish_reason` ("stop", "length") or `error` (a code), never both.

    After "stop" the last token is the eos or stop token: counted, but no part of the text. `num_cached_tokens`,
    `scheduled_at` and `first_token_at` are repeated in each update; an update without tokens says that the sequence
    was scheduled, or that it ended. Times are the core's clock; `at` is when the step was over.
    """

    seq_id: int
    at: float
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[RawLogprobs | None, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStats:
    """Figures after the last step. Block counts exclude the null block: used + cached + free = total.

    `blocks_used` are held by running sequences; `blocks_cached` are reclaimable and hold reusable prefixes.
    """

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    unknown_ids: int = 0


@dataclass(frozen=True, slots=True)
class _Add:
    request: SequenceRequest


@dataclass(frozen=True, slots=True)
class _Abort:
    seq_id: int


@dataclass(frozen=True, slots=True)
class _Stop:
    seq_id: int
    at: int


class EngineCore:
    """One model's engine. `on_plan` sees each plan before it runs; `on_forget` is `BlockPool`'s (tests)."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Callable[[], float],
        on_plan: Callable[[StepPlan], None] | None = None,
        *,
        revision: str = "",
        on_forget: Callable[[int], None] | None = None,
    ) -> None:
        self._runner = runner
        self._config = config
        self._clock = clock
        self._on_plan = on_plan
        self.pool = BlockPool(
            runner.num_blocks,
            runner.block_size,
            revision=revision,
            prefix_caching=config.prefix_caching,
            on_forget=on_forget,
        )
        self.scheduler = Scheduler(config, self.pool)
        self.max_model_len = config.max_model_len or _NO_MODEL_LIMIT
        self._sequences: dict[int, Sequence] = {}
        # Grows by one add per accepted request, which the client bounds, and by at most an abort and a stop for each.
        self._inbox: deque[_Add | _Abort | _Stop] = deque()
        self._updates: list[SequenceUpdate] = []
        self._num_steps = 0
        self._num_unknown_ids = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._stats = self._count()

    def add(self, request: SequenceRequest) -> None:
        """Queue a sequence. The caller has checked that it can fit (`max_servable_tokens`)."""
        self._inbox.append(_Add(request))

    def abort(self, seq_id: int) -> None:
        """End a sequence without an update: no plan made after this call holds it. Unknown ids are counted."""
        self._inbox.append(_Abort(seq_id))

    def stop(self, seq_id: int, at: int) -> None:
        """End a sequence after `at` output tokens (a stop string, found late): later tokens are dropped, not cached."""
        self._inbox.append(_Stop(seq_id, at))

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._inbox or self._sequences)

    def stats(self) -> CoreStats:
        """Return the figures as they were after the last step."""
        return self._stats

    def step(self) -> tuple[SequenceUpdate, ...]:
        """Compute one batch and return what is new, in the plan's order."""
        self._drain()
        now = self._clock()
        self._expire(now)
        chunks = self.scheduler.schedule(now)
        if chunks:
            result = self._run(StepPlan(step_id=self._num_steps, chunks=chunks))
            self._drain()  # whoever left meanwhile hears nothing more
            self._update(chunks, result)
        elif self.scheduler.waiting:
            self._fail(self.scheduler.waiting[0], "never_fits", self._clock())
        if self._config.check_integrity:
            self.pool.check_integrity(self._sequences.values())
        self._stats = self._count()
        return self._take_updates()

    def _run(self, plan: StepPlan) -> StepResult:
        self._num_steps += 1
        if self._on_plan is not None:
            self._on_plan(plan)
        handle = self._runner.launch(plan)
        return self._runner.collect(handle)

    def _update(self, chunks: tuple[Chunk, ...], result: StepResult) -> None:
        now = self._clock()
        sampled = {one.seq_id: one for one in result.sampled}
        for chunk in chunks:
            sequence = self._sequences.get(chunk.seq_id)
            if sequence is not None:
                self._advance(sequence, chunk, sampled.get(chunk.seq_id), now)

    def _advance(self, sequence: Sequence, chunk: Chunk, sampled: Sampled | None, now: float) -> None:
        """Book one sequence's part of a finished step."""
        error = _error_of(chunk, sampled)
        if error is not None:
            self._fail(sequence, error, now)
            return
        is_first = sequence.num_computed_tokens == sequence.num_cached_tokens and sequence.first_token_at is None
        sequence.num_computed_tokens += len(chunk.token_ids)
        self.pool.register(sequence, len(chunk.token_ids))
        token_ids = self._append(sequence, sampled, now)
        reason = sequence.finish_reason(self.max_model_len)
        if reason is not None:
            self._finish(sequence)
        if token_ids or reason or is_first:
            logprobs = (sampled.logprobs,) if sampled is not None and token_ids else ()
            self._tell(sequence, now, token_ids=token_ids, logprobs=logprobs, finish_reason=reason)

    def _append(self, sequence: Sequence, sampled: Sampled | None, now: float) -> tuple[int, ...]:
        if sampled is None or sampled.token_id is None:
            return ()
        sequence.token_ids.append(sampled.token_id)
        self._num_generation_tokens += 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        return (sampled.token_id,)

    def _drain(self) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case _Add(request):
                    self._begin(Sequence(request))
                case _Abort(seq_id):
                    self._with_known(seq_id, self._finish)
                case _Stop(seq_id, at):
                    self._with_known(seq_id, partial(self._cut, at=at))

    def _begin(self, sequence: Sequence) -> None:
        self._sequences[sequence.seq_id] = sequence
        self.scheduler.add(sequence)
        self._num_prompt_tokens += len(sequence.request.prompt_token_ids)
        reason = sequence.finish_reason(self.max_model_len) if sequence.num_output_tokens else None
        if reason is not None:  # resumed after its last token
            self._finish(sequence)
            self._tell(sequence, self._clock(), finish_reason=reason)

    def _with_known(self, seq_id: int, action: Callable[[Sequence], None]) -> None:
        """Act on a sequence if it is still there; it may have ended while the message was on its way."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            self._num_unknown_ids += 1
        else:
            action(sequence)

    def _cut(self, sequence: Sequence, *, at: int) -> None:
        """Keep `at` output tokens: blocks that hold a later token lose their names."""
        kept = len(sequence.request.prompt_token_ids) + at
        self.pool.forget(sequence.block_hashes[kept // self.pool.block_size :])
        self._finish(sequence)
        self._tell(sequence, self._clock(), finish_reason="stop")

    def _fail(self, sequence: Sequence, error: str, now: float) -> None:
        """End one sequence with an error code. None of its blocks is found again: any may be what broke it."""
        self.pool.forget(sequence.block_hashes)
        self._finish(sequence)
        self._tell(sequence, now, error=error)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        del self._sequences[sequence.seq_id]

    def _expire(self, now: float) -> None:
        late = [s for s in self._sequences.values() if s.request.deadline is not None and s.request.deadline <= now]
        for sequence in late:
            self._finish(sequence)
            self._tell(sequence, now, error="timeout")

    def _tell(
        self,
        sequence: Sequence,
        now: float,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[RawLogprobs | None, ...] = (),
        finish_reason: str | None = None,
        error: str | None = None,
    ) -> None:
        self._updates.append(
            SequenceUpdate(
                seq_id=sequence.seq_id,
                at=now,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=finish_reason,
                error=error,
                num_cached_tokens=sequence.num_cached_tokens,
                scheduled_at=sequence.scheduled_at,
                first_token_at=sequence.first_token_at,
            )
        )

    def _take_updates(self) -> tuple[SequenceUpdate, ...]:
        updates, self._updates = tuple(self._updates), []
        return updates

    def _count(self) -> CoreStats:
        pool = self.pool.stats()
        return CoreStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks_total=pool.total,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_free=pool.free,
            prefix_queries=pool.prefix_queries,
            prefix_hits=pool.prefix_hits,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_generation_tokens,
            preemptions=self.scheduler.num_preemptions,
            steps=self._num_steps,
            unknown_ids=self._num_unknown_ids,
        )


def _error_of(chunk: Chunk, sampled: Sampled | None) -> str | None:
    """Return the code a runner gave, or that of a runner which forgot to answer."""
    if sampled is None:
        return "runner_error" if chunk.sample is not None else None
    return sampled.error
