"""What `EngineCore` says: `SequenceUpdate`, news of one sequence, and `CoreStats`, the figures of all. Values only.

`Ledger`: the sequences an engine knows, what each was told, and what was counted.

It books what happens to sequences, by messages or by a step's result; it launches nothing and plans nothing. Each
sequence is told its end exactly once, or was aborted and is told nothing more. Engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from streamserve.engine.config import EngineConfig
from streamserve.engine.in_flight import Launched, Part
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.plan import Chunk, RawLogprobs, Sampled, StepResult
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import Sequence, SequenceRequest, State
from streamserve.protocol.park import Park


@dataclass(slots=True, kw_only=True)
class SequenceUpdate:
    """News of one sequence. The last has one of `finish_reason` ("stop", "length"), `error` (a code) and `park`.

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
    park: Park | None = None
    num_cached_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None or self.park is not None


# More than any model takes; the real bound comes from the config or the pool.
_NO_MODEL_LIMIT = 1 << 40
_PAUSED = Park(reason="paused")


class Ledger:
    """`sequences` by id: all that wait or run. `is_suspect`: the books were wrong, and nothing went right since."""

    def __init__(self, config: EngineConfig, pool: BlockPool, scheduler: Scheduler) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.pool = pool
        self.is_paused = False
        self.is_suspect = False
        self.num_unknown_ids = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_parks = 0
        self.max_model_len = config.max_model_len or _NO_MODEL_LIMIT
        self._lead_tokens = config.lead_tokens
        self._scheduler = scheduler
        self._updates: list[SequenceUpdate] = []

    def begin(self, request: SequenceRequest, now: float) -> None:
        """Queue a new sequence, unless it is over already, or the engine is paused."""
        sequence = Sequence(request)
        self.sequences[sequence.seq_id] = sequence
        self._scheduler.add(sequence, now)
        reason = sequence.finish_reason(self.max_model_len) if sequence.num_output_tokens else None
        if reason is not None:  # resumed after its last token
            self.tell(sequence, now, finish_reason=reason)
        elif self.is_paused:
            self.tell(sequence, now, park=_PAUSED)

    def abort(self, seq_id: int) -> None:
        """Take a sequence out without a word; what this step would have told of it is not told any more."""
        self._with_known(seq_id, self._take_out)
        self._updates = [update for update in self._updates if update.seq_id != seq_id]

    def cut(self, seq_id: int, at: int, now: float) -> None:
        """Keep `at` output tokens: blocks that hold a later token lose their names."""

        def cut(sequence: Sequence) -> None:
            kept = len(sequence.request.prompt_token_ids) + at
            self.pool.forget(sequence.block_hashes[kept // self.pool.block_size :])
            self.tell(sequence, now, finish_reason="stop")

        self._with_known(seq_id, cut)

    def move_reader(self, seq_id: int, num_tokens: int | None) -> None:
        """Note how far a reader is. Answers end before they are read to the end: an unknown id is nothing odd here."""
        sequence = self.sequences.get(seq_id)
        if sequence is not None:
            sequence.reader_tokens = num_tokens

    def pause(self, now: float) -> None:
        """Park everybody, and whoever comes until `resume`."""
        self.is_paused = True
        for sequence in list(self.sequences.values()):
            self.tell(sequence, now, park=_PAUSED)

    def resume(self) -> None:
        """Let sequences begin again."""
        self.is_paused = False

    def end_late(self, now: float) -> None:
        """End those whose deadline is over."""
        late = [one for one in self.sequences.values() if one.request.deadline is not None]
        for sequence in late:
            if sequence.request.deadline is not None and sequence.request.deadline <= now:
                self.tell(sequence, now, error="timeout")

    def enter(self, step: Launched, result: StepResult, now: float) -> None:
        """Book what a step gave to those who still have a part in it."""
        self._charge(step, now)
        sampled = {one.seq_id: one for one in result.sampled}
        for part in step.parts:
            if part.is_current and self.sequences.get(part.chunk.seq_id) is part.sequence:
                self._advance(part, sampled.get(part.chunk.seq_id), now)

    def fail(self, sequence: Sequence, error: str, now: float) -> None:
        """End one sequence with an error code. None of its blocks is found again: any may be what broke it."""
        self.pool.forget(sequence.block_hashes)
        self.tell(sequence, now, error=error)

    def quarantine(self, now: float) -> None:
        """Go on with an empty pool, as nothing is known of the old one: whoever holds blocks ends with an error.

        Whoever waits goes on, unless this is the second time in a row: then the mistake may be in one of them.
        """
        self.pool = self.pool.renewed()
        lost = self._scheduler.start_over(self.pool, list(self.sequences.values()))
        if self.is_suspect:
            lost = list(self.sequences.values())
        self.is_suspect = True
        for sequence in lost:
            self.tell(sequence, now, error="internal_error")

    def tell(
        self,
        sequence: Sequence,
        now: float,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[RawLogprobs | None, ...] = (),
        finish_reason: str | None = None,
        error: str | None = None,
        park: Park | None = None,
    ) -> None:
        """Note an update; the last takes the sequence out. In this order: it is told even if the books then break."""
        update = SequenceUpdate(
            seq_id=sequence.seq_id,
            at=now,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            error=error,
            park=park,
            num_cached_tokens=sequence.num_cached_tokens,
            scheduled_at=sequence.scheduled_at,
            first_token_at=sequence.first_token_at,
        )
        self._updates.append(update)
        self.num_parks += park is not None
        if update.is_last:
            self._take_out(sequence)

    def take_updates(self) -> tuple[SequenceUpdate, ...]:
        """Return the news since the last call."""
        updates, self._updates = tuple(self._updates), []
        return updates

    def _charge(self, step: Launched, now: float) -> None:
        """Tell the scheduler whose work it was, wanted or not."""
        num_tokens: Counter[str] = Counter()
        for part in step.parts:
            num_tokens[part.sequence.request.tenant] += len(part.chunk.token_ids)
        for tenant, number in num_tokens.items():
            self._scheduler.charge(tenant, number, now)

    def _advance(self, part: Part, sampled: Sampled | None, now: float) -> None:
        """Book one sequence's part of a step."""
        sequence, num_tokens = part.sequence, len(part.chunk.token_ids)
        error = _error_of(part.chunk, sampled)
        if error is not None:
            self.fail(sequence, error, now)
            return
        is_first = sequence.num_computed_tokens == sequence.num_cached_tokens and sequence.num_preemptions == 0
        sequence.land(num_tokens)
        self.pool.register(sequence, num_tokens)
        token_ids = self._append(sequence, sampled, now)
        reason = sequence.finish_reason(self.max_model_len)
        park = self._lead_park(sequence) if token_ids and reason is None else None
        if is_first:
            self.num_prompt_tokens += len(sequence.request.prompt_token_ids)
        if token_ids or reason or is_first:
            logprobs = (sampled.logprobs,) if sampled is not None and token_ids else ()
            self.tell(sequence, now, token_ids=token_ids, logprobs=logprobs, finish_reason=reason, park=park)
        self.is_suspect = False

    def _append(self, sequence: Sequence, sampled: Sampled | None, now: float) -> tuple[int, ...]:
        if sampled is None or sampled.token_id is None:
            return ()
        sequence.token_ids.append(sampled.token_id)
        self.num_generation_tokens += 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        return (sampled.token_id,)

    def _lead_park(self, sequence: Sequence) -> Park | None:
        """Park a sequence that has said more than its reader will have read soon."""
        reader = sequence.reader_tokens
        if reader is None or sequence.num_output_tokens - reader < self._lead_tokens:
            return None
        return Park(reason="lead", resume_at_lead=self._lead_tokens // 2)

    def _with_known(self, seq_id: int, action: Callable[[Sequence], None]) -> None:
        """Act on a sequence if it is still there; it may have ended while the message was on its way."""
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            self.num_unknown_ids += 1
        else:
            action(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        del self.sequences[sequence.seq_id]
        if sequence.state is not State.FINISHED:
            self._scheduler.finish(sequence)


def _error_of(chunk: Chunk, sampled: Sampled | None) -> str | None:
    """Return the code a runner gave, or that of a runner which forgot to answer."""
    if sampled is None:
        return "runner_error" if chunk.sample is not None else None
    return sampled.error
