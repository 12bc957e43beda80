"""The output of an engine: `SequenceUpdate`, and `OutputProcessor`, which makes updates from the results of steps.

It launches nothing and plans nothing. Each sequence gets exactly one last update, or was aborted and gets no more.
Engine thread only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

from streamserve.engine.config import EngineConfig
from streamserve.engine.grammar.matcher import Matcher, advance
from streamserve.engine.in_flight import Launched, Part
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.plan import Chunk, RawLogprobs, Sampled, StepResult
from streamserve.engine.policy.backlog import Rank
from streamserve.engine.policy.speculation import DRAFTED
from streamserve.engine.policy.waiting import rank_of
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import Sequence, SequenceRequest, State
from streamserve.protocol.engine import Park


@dataclass(slots=True, kw_only=True)
class SequenceUpdate:
    """What is new of one sequence. The last has one of `finish_reason` ("stop", "length"), `error` (a code) and `park`.

    After "stop" the last token is the eos or stop token: counted, but no part of the text; unless the answer
    `is_complete`: then it is the last token of a text that matches its grammar. `num_cached_tokens`,
    `scheduled_at` and `first_token_at` are repeated in each update; an update without tokens means that the sequence
    waits, was scheduled, has more of its prompt computed, or ended. Times are the core's clock; `at` is the end of the
    step. `place`: a step was planned without the sequence, which is so far from the front of the queue (1 is next).
    `num_prefilled`: so many tokens of its prompt are computed, and not all. `num_proposed`: tokens so far that were
    proposed after another token, of which `num_accepted` were accepted. `scored`: the next tokens of its prompt with
    their log-probabilities, each once; the first token has none.
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
    place: int | None = None
    num_prefilled: int | None = None
    is_complete: bool = False
    num_proposed: int = 0
    num_accepted: int = 0
    scored: tuple[tuple[int, RawLogprobs], ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None or self.park is not None


# More than any model takes; the real bound comes from the config or the pool.
_NO_MODEL_LIMIT = 1 << 40
_PAUSED = Park(reason="paused")
# Weight of the newest prompt in the share that the prefix cache lacks: about the last ten count.
_NEWEST = 0.1
# A prompt that takes several steps is reported in so many parts at most.
_PREFILL_PARTS = 10


class OutputProcessor:
    """The open sequences by id, their pending updates, and counts.

    `is_suspect`: an integrity check has failed, and no step has succeeded since.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, scheduler: Scheduler) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.pool = pool
        self.is_paused = False
        self.is_suspect = False
        self.num_unknown_ids = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_parks = 0
        self.num_grammar_waits = 0
        self.cold_share = 1.0  # of the tokens of recent prompts, those that had to be computed
        self.max_model_len = config.max_model_len or _NO_MODEL_LIMIT
        self._batch_weight = config.batch_weight
        self._scheduler = scheduler
        self._updates: list[SequenceUpdate] = []

    def add(self, request: SequenceRequest, now: float) -> None:
        """Queue a new sequence, unless it is over already, or the engine is paused."""
        sequence = Sequence(request)
        self.sequences[sequence.seq_id] = sequence
        self._scheduler.queue.add(sequence, now)
        reason = sequence.finish_reason(self.max_model_len) if sequence.num_output_tokens else None
        if reason is not None:  # resumed after its last token
            self.emit(sequence, now, finish_reason=reason)
        elif self.is_paused:
            self.emit(sequence, now, park=_PAUSED)

    def abort(self, seq_id: int) -> None:
        """Remove a sequence without an update; its pending updates are dropped. An unknown id is counted."""
        sequence = self.sequences.get(seq_id)
        self.num_unknown_ids += sequence is None
        if sequence is not None:
            self._remove(sequence)
        self._updates = [update for update in self._updates if update.seq_id != seq_id]

    def truncate(self, seq_id: int, at: int, now: float) -> None:
        """End a sequence after `at` output tokens; blocks that hold a later token are evicted."""
        sequence = self.sequences.get(seq_id)
        self.num_unknown_ids += sequence is None
        if sequence is not None:
            kept = len(sequence.request.prompt_token_ids) + at
            self.pool.evict(sequence.block_hashes[kept // self.pool.block_size :])
            self.emit(sequence, now, finish_reason="stop")

    def reader_at(self, seq_id: int, num_tokens: int | None, now: float, *, is_away: bool) -> None:
        """Record a reader's position. Answers end before they are read to the end: unknown ids are not counted here."""
        sequence = self.sequences.get(seq_id)
        if sequence is not None:
            sequence.reader.report(num_tokens, sequence.num_output_tokens, now, is_away=is_away)

    def pause(self, now: float) -> None:
        """Park every sequence, and each new sequence until `resume`."""
        self.is_paused = True
        for sequence in list(self.sequences.values()):
            self.emit(sequence, now, park=_PAUSED)

    def resume(self) -> None:
        """Accept sequences again."""
        self.is_paused = False

    def expire_deadlines(self, now: float) -> None:
        """End the sequences whose deadline has passed."""
        late = [one for one in self.sequences.values() if one.request.deadline is not None]
        for sequence in late:
            if sequence.request.deadline is not None and sequence.request.deadline <= now:
                self.emit(sequence, now, error="timeout")

    def note_places(self, now: float) -> None:
        """Emit the place of each sequence that a step was planned without, and again when it has halved.

        That is at most 1 + log2(place) updates for a sequence, and none for a sequence that the next step holds.
        """
        for place, sequence in enumerate(self._scheduler.waiting, 1):
            if sequence.scheduled_at is not None or sequence.num_output_tokens:
                continue
            if sequence.place is None or 2 * place <= sequence.place:
                sequence.place = place
                self.emit(sequence, now, place=place)

    def note_starts(self, chunks: tuple[Chunk, ...], now: float) -> None:
        """Emit that a sequence has started which the step does not hold: it waits for a block that another writes."""
        if len(chunks) == len(self._scheduler.running):
            return
        planned = {chunk.seq_id for chunk in chunks}
        for sequence in self._scheduler.running:
            if sequence.scheduled_at == now and sequence.seq_id not in planned:
                self.emit(sequence, now)

    def process_step(self, step: Launched, result: StepResult, now: float) -> None:
        """Record a step's result for the sequences that still take part in it; all tenants are charged."""
        num_tokens: defaultdict[str, float] = defaultdict(float)
        for part in step.parts:
            weight = self._batch_weight if rank_of(part.sequence) == Rank.ROWS else 1.0
            num_tokens[part.sequence.request.admission.share_of] += weight * len(part.chunk.token_ids)
        for tenant, number in num_tokens.items():
            self._scheduler.queue.shares.charge(tenant, number, now)
        sampled = {one.seq_id: one for one in result.sampled}
        parts = [
            part for part in step.parts if part.is_current and self.sequences.get(part.chunk.seq_id) is part.sequence
        ]
        advance(_moves(parts, sampled))
        for part in parts:
            self._process_part(part, sampled.get(part.chunk.seq_id), result.scores.get(part.chunk.seq_id), now)

    def fail(self, sequence: Sequence, error: str, now: float) -> None:
        """End one sequence with an error code. All its blocks are evicted: any of them may be the cause."""
        self.pool.evict(sequence.block_hashes)
        self.emit(sequence, now, error=error)

    def quarantine(self, now: float) -> None:
        """Continue with an empty pool: the sequences that hold blocks of the inconsistent pool end with an error.

        Waiting sequences stay, unless this is the second quarantine in a row: then one of them may be the cause.
        """
        self.pool = self.pool.renewed()
        lost = self._scheduler.start_over(self.pool, list(self.sequences.values()))
        if self.is_suspect:
            lost = list(self.sequences.values())
        self.is_suspect = True
        for sequence in lost:
            self.emit(sequence, now, error="internal_error")

    def emit(
        self,
        sequence: Sequence,
        now: float,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[RawLogprobs | None, ...] = (),
        finish_reason: str | None = None,
        error: str | None = None,
        park: Park | None = None,
        place: int | None = None,
        num_prefilled: int | None = None,
        scored: tuple[tuple[int, RawLogprobs], ...] = (),
    ) -> None:
        """Queue an update; the last update removes the sequence, after it is queued, in case the removal fails."""
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
            place=place,
            num_prefilled=num_prefilled,
            is_complete=finish_reason == "stop" and sequence.constraints.is_complete,
            num_proposed=0 if sequence.proposer is None else sequence.proposer.num_proposed,
            num_accepted=0 if sequence.proposer is None else sequence.proposer.num_accepted,
            scored=scored,
        )
        self._updates.append(update)
        self.num_parks += park is not None
        if finish_reason is not None:
            self._scheduler.note_length(sequence)
        if update.is_last:
            self._remove(sequence)

    def take_updates(self) -> tuple[SequenceUpdate, ...]:
        """Return the updates since the last call."""
        updates, self._updates = tuple(self._updates), []
        return updates

    def _process_part(
        self, part: Part, sampled: Sampled | None, scores: tuple[RawLogprobs, ...] | None, now: float
    ) -> None:
        """Record one sequence's part of a step."""
        sequence, num_tokens = part.sequence, len(part.chunk.token_ids)
        error = _error_of(part, sampled, scores)
        if error is not None:
            self.fail(sequence, error, now)
            return
        is_first = sequence.num_computed_tokens == sequence.num_cached_tokens and sequence.num_preemptions == 0
        token_ids = self._append(sequence, sampled, now)
        self._learn(sequence, part.chunk, token_ids)
        # All tokens but the newest are computed: what was proposed and not chosen is void.
        num_wrong = len(part.chunk.samples) - len(token_ids)
        sequence.mark_computed(num_tokens, num_wrong=num_wrong)
        self.pool.cache_blocks(sequence, num_tokens - num_wrong)
        self.pool.free_unread(sequence)
        scored = _take_scores(part, scores or ())
        reason = sequence.finish_reason(self.max_model_len)
        if is_first:
            self.num_prompt_tokens += len(sequence.request.prompt_token_ids)
        num_prefilled = None if token_ids or reason else _newly_prefilled(sequence, num_tokens)
        if num_prefilled is not None:
            self.emit(sequence, now, num_prefilled=num_prefilled, scored=scored)
        elif token_ids or reason or is_first or scored:
            logprobs = (sampled.logprobs if sampled is not None else ())[: len(token_ids)] or (None,) * len(token_ids)
            self.emit(sequence, now, token_ids=token_ids, logprobs=logprobs, finish_reason=reason, scored=scored)
        self.is_suspect = False

    def _append(self, sequence: Sequence, sampled: Sampled | None, now: float) -> tuple[int, ...]:
        if sampled is None:
            return ()
        sequence.proposed_ids = sampled.proposed_ids
        num_known = len(sequence.token_ids)
        token_ids = sequence.append(sampled.token_ids, self.max_model_len)
        self.num_generation_tokens += len(token_ids)
        if not token_ids:
            return ()
        if num_known == sequence.ticket.num_tokens:  # its first ones here: now it is known what was cached
            self.cold_share += _NEWEST * (1 - sequence.num_cached_tokens / num_known - self.cold_share)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.reader.begin(sequence.num_output_tokens, now)
        return token_ids

    def _learn(self, sequence: Sequence, chunk: Chunk, token_ids: tuple[int, ...]) -> None:
        """Count which of the proposed tokens were accepted."""
        speculation, proposed = self._scheduler.speculation, chunk.proposed_ids
        if speculation is None or sequence.proposer is None or not proposed:
            return
        num_accepted = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, proposed, strict=False))
        )
        if sequence.proposer.kind == DRAFTED and sequence.held.num_drafted_tokens == chunk.start + 1:
            # The draft model has computed its proposals but the last, in these blocks. Those accepted are known now.
            sequence.held.num_drafted_tokens += min(num_accepted, len(proposed) - 1)
        speculation.note(sequence.proposer, sequence.request.latency_class, len(proposed), num_accepted)

    def _remove(self, sequence: Sequence) -> None:
        self.num_grammar_waits += sequence.constraints.num_grammar_waits
        del self.sequences[sequence.seq_id]
        if sequence.state is not State.FINISHED:
            self._scheduler.finish(sequence)


def _newly_prefilled(sequence: Sequence, num_tokens: int) -> int | None:
    """Return how much of a prompt is computed, if the last `num_tokens` of it bring it into another part of it."""
    after, prompt_len = sequence.num_computed_tokens, len(sequence.request.prompt_token_ids)
    if sequence.num_output_tokens or after >= prompt_len:
        return None
    before = after - num_tokens
    has_moved = _PREFILL_PARTS * before // prompt_len != _PREFILL_PARTS * after // prompt_len
    return after if has_moved or before == sequence.num_cached_tokens else None


def _moves(parts: list[Part], sampled: Mapping[int, Sampled]) -> Iterator[tuple[Matcher, tuple[int, ...]]]:
    """Yield the matchers of a step with their new tokens; an end is no part of the text."""
    for part in parts:
        constraints, one = part.sequence.constraints, sampled.get(part.chunk.seq_id)
        matcher = constraints.matcher
        if matcher is None or one is None or one.error is not None:
            continue
        yield matcher, constraints.before_end(one.token_ids)


def _take_scores(part: Part, scores: tuple[RawLogprobs, ...]) -> tuple[tuple[int, RawLogprobs], ...]:
    """Record that a part's positions are scored; return the prompt's tokens after them with their scores."""
    spec = part.chunk.scores
    if spec is None:
        return ()
    assert part.sequence.scoring is not None
    part.sequence.scoring.note(spec)
    return tuple(zip(spec.token_ids, scores, strict=True))


def _error_of(part: Part, sampled: Sampled | None, scores: tuple[RawLogprobs, ...] | None) -> str | None:
    """Return the runner's error code, "runner_error" where a result is missing, or the matcher's."""
    num_rows, matcher = len(part.chunk.samples), part.sequence.constraints.matcher
    if sampled is None:
        is_missing = num_rows > 0 or (part.chunk.scores is not None and scores is None)
        return "runner_error" if is_missing else None
    least = 1 if num_rows == 1 else 0
    if sampled.error is None and not least <= len(sampled.token_ids) <= num_rows:
        return "runner_error"
    return sampled.error or (None if matcher is None else matcher.error)
