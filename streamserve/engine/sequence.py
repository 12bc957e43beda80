"""`SequenceRequest` and `Sequence`: the tokens of one answer, and where they stand in the engine.

A sequence knows its tokens, its blocks and how far they are computed; no text and no stream. Engine thread only. (Idea:
vLLM V1's `num_computed_tokens` chasing the known tokens; mini-sglang's lesson that one guarded `release()` beats set
membership.)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING

from streamserve.engine.kv.free_list import IntegrityError
from streamserve.engine.plan import SampleSpec, ScoreSpec, TokenRules
from streamserve.engine.policy.backlog import Ticket
from streamserve.engine.policy.pace import ReaderPace
from streamserve.engine.policy.speculation import Proposer
from streamserve.protocol.engine import SUSPECT_LOSSES
from streamserve.protocol.requests import NO_CALLER, START, Admission, Resume, SamplingParams

if TYPE_CHECKING:
    from streamserve.engine.grammar.matcher import Matcher

# The most positions that a step scores of one sequence, and tokens it names for that, so that the step stays short for
# all other sequences: each position costs a row of the vocabulary.
_MOST_SCORED = 256
_MOST_CANDIDATES = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One answer to generate: choice `index` of a request, whose admission and resume it has whole.

    `sampling.seed` and `sampling.max_tokens` are resolved, as is `admission.arrived_at`; ids are never reused.
    The tokens of `resume` count towards max_tokens and min_tokens, so that a resumed sequence ends where the
    uninterrupted sequence would. `max_tokens` 0 only fills the prefix cache. The first `num_public_tokens` of the
    prompt are the server's own, the same for all tenants, and are cached without the salt. `queue_seconds`: how long it
    may wait for its first step; None: as the scheduler's queue stands. `matcher`: what the answer must match, after the
    tokens of `resume`; it changes. `bad_word_ids`: the tokens of `sampling.bad_words`. `prediction_token_ids`: what the
    caller expects the output to be. `adapter` is the name of the adapter that changes the model for it, "" for none:
    nothing of the prefix cache is shared with another adapter's.
    """

    seq_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    admission: Admission = NO_CALLER
    resume: Resume = START
    index: int = 0
    num_public_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    deadline: float | None = None
    latency_class: str = "chat"
    queue_seconds: float | None = None
    matcher: Matcher | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    prediction_token_ids: tuple[int, ...] = ()
    adapter: str = ""

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """The tokens that were shown before this admission."""
        return self.resume.output_of(self.index)

    @property
    def reader_tokens(self) -> int | None:
        """How many output tokens the reader has by now; None: the engine does not wait for readers."""
        known = self.resume.reader_tokens
        return None if known is None else known[self.index]

    @property
    def num_scored(self) -> int:
        """At so many positions of the prompt the next token was scored before this admission, and shown."""
        return max(0, self.resume.num_prompt_logprobs - 1)

    @property
    def arrived_at(self) -> float:
        """When its place in the queue began."""
        return self.admission.arrived_at or 0.0


class State(Enum):
    """In the queue, in the batch, or ended."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# Preemption is RUNNING → WAITING; nothing leaves FINISHED.
_TRANSITIONS = frozenset(
    {
        (State.WAITING, State.RUNNING),
        (State.RUNNING, State.WAITING),
        (State.WAITING, State.FINISHED),
        (State.RUNNING, State.FINISHED),
    }
)


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one `SequenceRequest`; its invariants are in `BlockPool.check_integrity`.

    token_ids:  [ prompt ............ | output ............ ]
                [ computed: K/V in blocks )[ in flight )[ to be computed ]( pending )
                                           ^num_computed ^num_launched

    In flight are the tokens of launched, uncollected steps. While `num_pending` the last of these samples so many rows.
    One row gives the sequence one token, which a runner that can overlap knows before the core does; of several
    rows it is known only afterwards how many tokens they gave. `proposed_ids`: what is expected after the known
    tokens, by the runner or by `proposer`; a chunk may compute them too, and those that prove right are kept.

    A step's result counts only if the sequence still runs and `num_preemptions` is what it was at the launch: otherwise
    its blocks were freed, and it starts again.
    `ticket`, its `order_key` and `expires_at` (the first step must come before) are the scheduler's, set when it is
    added, as is `reader`, which begins with this admission's first token.

    `num_drafted_tokens`: so many of the known tokens the draft model has computed, in the same blocks of its memory.

    A running sequence that a step leaves out is paused: it keeps its blocks, and continues where it is.

    With penalties a running sequence has a penalty slot in the runner, as it has blocks. `is_counted`:
    the slot holds every token that a launched step has seen; otherwise the next draw begins it afresh.

    With a grammar the next mask depends on the pending token: the sequence waits for it. `num_grammar_waits` counts how
    often it was left out of a step for that, which happens only with overlap.

    Where the prompt's tokens are scored, `num_scored` positions were, each once: what is computed again after a
    preemption is not scored again. A position that is not scored yet is computed, and not taken from the prefix cache.
    """

    request: SequenceRequest
    state: State = State.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0  # computed or in flight: the next chunk starts here
    num_drafted_tokens: int = 0
    block_table: list[int] = field(default_factory=list)  # of the first group of layers
    other_tables: list[list[int]] = field(default_factory=list)  # of the other groups
    num_null_blocks: int = 0  # in all tables: what lies before a window
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_once_computed: int = 0  # before a park or a preemption: what is computed of these is recomputed
    num_preemptions: int = 0
    num_pending: int = 0
    proposed_ids: tuple[int, ...] = ()
    proposer: Proposer | None = None
    penalty_slot: int | None = None
    is_counted: bool = False
    num_grammar_waits: int = 0
    num_scored: int = field(init=False)
    order_key: tuple[int, float, int] = (0, 0.0, 0)
    ticket: Ticket = Ticket()  # noqa: RUF009 (a value)
    expires_at: float = math.inf
    scheduled_at: float | None = None
    first_token_at: float | None = None
    place: int | None = None  # in the queue, as it was last reported
    seq_id: int = field(init=False)
    max_tokens: int = field(init=False)  # the most output tokens, shown tokens included
    has_penalties: bool = field(init=False)
    reader: ReaderPace = field(default_factory=lambda: ReaderPace(None))
    matcher: Matcher | None = field(init=False)  # what the answer must match, after its known tokens
    rules: TokenRules | None = field(init=False, default=None)  # for its draws

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        assert sampling.max_tokens is not None, "max_tokens is resolved at acceptance"
        assert sampling.seed is not None, "the seed is resolved at acceptance"
        self.seq_id = self.request.seq_id
        self.max_tokens = sampling.max_tokens
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        self.has_penalties = penalties != (0.0, 0.0, 1.0)
        self.matcher = self.request.matcher
        bad_word_ids = self.request.bad_word_ids
        if sampling.logit_bias or sampling.allowed_token_ids or bad_word_ids:
            self.rules = TokenRules(
                logit_bias=sampling.logit_bias,
                allowed_token_ids=sampling.allowed_token_ids,
                bad_words=bad_word_ids,
            )
        self.num_scored = self.request.num_scored
        self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids]
        if self.request.output_token_ids:  # the last of them was sampled, and not computed
            self.num_once_computed = len(self.token_ids) - 1
        self.first_token_at = self.request.resume.first_token_at

    @property
    def is_complete(self) -> bool:
        """Whether the text matches its grammar as it is, and nothing more may follow."""
        return self.matcher is not None and self.matcher.is_complete

    @property
    def tables(self) -> list[list[int]]:
        """Its block table in each group of layers."""
        return [self.block_table, *self.other_tables]

    @property
    def num_blocks(self) -> int:
        """How many blocks it holds, in all groups."""
        return len(self.block_table) + sum(map(len, self.other_tables)) - self.num_null_blocks

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those shown before a resume included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def is_suspect(self) -> bool:
        """Whether its steps hold nothing else: the answer may be what ends the engine. Until its next token."""
        request = self.request
        return request.resume.num_losses >= SUSPECT_LOSSES and self.num_output_tokens == len(request.output_token_ids)

    @property
    def is_new(self) -> bool:
        """Whether it was in no step yet, and the answer is not resumed."""
        return self.scheduled_at is None and self.num_output_tokens == 0

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose K/V is still to be computed; 1 means the sequence decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_unplanned_tokens(self) -> int:
        """Tokens, pending tokens included, that no step has been launched for; 1 means the sequence decodes."""
        return len(self.token_ids) + self.num_pending - self.num_launched_tokens

    @property
    def num_plannable_tokens(self) -> int:
        """As many of the unplanned tokens as one step may hold: of a prompt that is scored not all."""
        if self.num_reusable_tokens == sys.maxsize:
            return self.num_unplanned_tokens
        num_scored = max(1, _MOST_CANDIDATES // self.request.sampling.num_prompt_candidates)
        return min(self.num_unplanned_tokens, _MOST_SCORED, num_scored)

    @property
    def num_reusable_tokens(self) -> int:
        """How far the prefix cache may stand in for computing: to the first position that is not scored yet."""
        is_scored = self.num_scored >= len(self.request.prompt_token_ids) - 1
        return sys.maxsize if is_scored or not self.request.sampling.scores_prompt else self.num_scored

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens that may still come."""
        return max(0, self.max_tokens - self.num_output_tokens)

    def transition(self, state: State) -> None:
        """Move to `state`; every change of state goes through here."""
        if (self.state, state) not in _TRANSITIONS:
            raise IntegrityError(f"sequence {self.seq_id}: {self.state.value} → {state.value}")
        self.state = state

    def launch(self, num_tokens: int, *, num_rows: int) -> None:
        """Record that a step with the next `num_tokens` was launched, which samples so many rows."""
        self.num_launched_tokens += num_tokens
        self.num_pending = num_rows
        self.is_counted = self.is_counted or num_rows > 0

    def mark_computed(self, num_tokens: int, *, num_wrong: int = 0) -> None:
        """Record that the oldest launched step with this sequence is over; the last `num_wrong` tokens are void."""
        self.num_launched_tokens -= num_wrong
        self.num_computed_tokens += num_tokens - num_wrong
        if self.num_launched_tokens == self.num_computed_tokens:
            self.num_pending = 0

    def append(self, token_ids: Iterable[int], max_model_len: int) -> tuple[int, ...]:
        """Add a step's new tokens, up to the first that ends the answer; return those."""
        added = []
        for token_id in token_ids:
            self.token_ids.append(token_id)
            added.append(token_id)
            if self._is_stopped or self._is_full(max_model_len):
                break
        return tuple(added)

    def take_back(self, num_tokens: int) -> None:
        """Undo a launch whose result is dropped. The same must be done to every step launched after it."""
        self.num_launched_tokens -= num_tokens
        self.num_pending, self.is_counted = 0, False

    def lose_blocks(self) -> list[int]:
        """Drop the tables, the penalty slot and what is computed; returns the blocks, which are not freed yet."""
        blocks = self.block_table
        if self.num_null_blocks or self.other_tables:
            blocks = [block_id for table in self.tables for block_id in table if block_id]
        self.block_table, self.other_tables, self.num_null_blocks = [], [], 0
        self.num_once_computed = max(self.num_once_computed, self.num_computed_tokens)
        self.num_computed_tokens = self.num_launched_tokens = 0
        self.num_pending, self.is_counted = 0, False
        self.penalty_slot = None
        self.num_drafted_tokens = 0
        return blocks

    def finish_reason(self, max_model_len: int) -> str | None:
        """Return why the sequence is over, or None. The eos or stop token is its last token and no part of the text."""
        if self.max_tokens == 0:
            return None if self.num_uncomputed_tokens else "length"
        if self._is_stopped or self.is_complete:
            return "stop"
        return "length" if self._is_full(max_model_len) else None

    @property
    def _is_stopped(self) -> bool:
        # In a grammar an end is allowed before min_tokens only where nothing else is.
        has_min_tokens = self.matcher is not None or self.num_output_tokens > self.request.sampling.min_tokens
        return has_min_tokens and self.token_ids[-1] in self.stop_token_ids()

    def _is_full(self, max_model_len: int) -> bool:
        return self.num_output_tokens >= self.max_tokens or len(self.token_ids) >= max_model_len

    def must_wait(self, max_model_len: int | None) -> bool:
        """Whether what is pending must be known first: it may be the last token, or several, or a grammar needs it."""
        if not self.num_pending:
            return False
        if self.matcher is not None:
            self.num_grammar_waits += 1
            return True
        if self.num_pending > 1:
            return True
        is_last = self.num_output_tokens + 1 >= self.max_tokens
        return is_last or len(self.token_ids) + 1 >= (max_model_len or sys.maxsize)

    def ahead_seconds(self, now: float) -> float:
        """Return how long its reader's tokens last without a new token. See `ReaderPace`."""
        return self.reader.ahead_seconds(self.num_output_tokens + self.num_pending, now)

    def score_spec(self, start: int, end: int) -> ScoreSpec | None:
        """Return what to score of the chunk from `start` to `end`; None: nothing is asked for, or all is scored."""
        top, prompt = self.request.sampling.prompt_logprobs, self.request.prompt_token_ids
        if top is None or start >= len(prompt) - 1:
            return None
        first = max(start, self.num_scored)
        token_ids = prompt[first + 1 : end + 1]
        return ScoreSpec(first=first, token_ids=token_ids, num_top=top) if token_ids else None

    def sample_specs(self, num_rows: int) -> tuple[SampleSpec, ...]:
        """Return how to choose a token after the last token, known or pending, and after proposed tokens; () for none.

        Of the proposed tokens so many that there are `num_rows` rows, or fewer: none after a token that ends the answer
        or that its grammar forbids.
        """
        if self.max_tokens == 0:
            return ()
        matcher = self.matcher
        first = self._spec((), *((None, False) if matcher is None else (matcher.mask, matcher.may_end)))
        if num_rows == 1:
            return (first,)
        proposed = self.before_end(self.proposed_ids[: num_rows - 1])
        follows = [(None, False)] * len(proposed) if matcher is None else matcher.follow(proposed)
        return first, *(self._spec(proposed[:row], *follow) for row, follow in enumerate(follows, 1))

    def _spec(self, proposed: tuple[int, ...], mask: bytes | None, may_end: bool) -> SampleSpec:
        """Return how to choose the token after all known and pending tokens and these."""
        sampling, prompt = self.request.sampling, self.request.prompt_token_ids
        num_new = self.num_pending + len(proposed)
        begins_counts = self.penalty_slot is not None and not self.is_counted
        banned: tuple[int, ...] = ()
        if self.num_output_tokens + num_new < sampling.min_tokens:
            banned = tuple(sorted(self.stop_token_ids()))
        bad_endings: tuple[tuple[int, int], ...] = ()
        if self.request.bad_word_ids and self.rules is not None:
            longest = max(map(len, self.request.bad_word_ids))
            newest = (*self.token_ids[max(len(prompt), len(self.token_ids) - longest) :], *proposed)
            bad_endings = self.rules.bad_endings(newest, is_pending=self.num_pending > 0)
        return SampleSpec(
            position=len(self.token_ids) + num_new,
            sampling=sampling,
            penalty_slot=self.penalty_slot,
            prompt_token_ids=prompt if begins_counts else (),
            output_token_ids=tuple(self.token_ids[len(prompt) :]) if begins_counts else (),
            banned_token_ids=banned,
            mask=mask,
            mask_end_ids=tuple(sorted(self.stop_token_ids())) if may_end else (),
            rules=self.rules,
            bad_endings=bad_endings,
        )

    def before_end(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the tokens before the first that ends the answer."""
        ends = self.stop_token_ids()
        return tuple(takewhile(lambda token_id: token_id not in ends, token_ids))

    def stop_token_ids(self) -> Collection[int]:
        """Return the ids that end the answer."""
        sampling = self.request.sampling
        return (
            sampling.stop_token_ids
            if sampling.ignore_eos
            else self.request.eos_token_ids.union(sampling.stop_token_ids)
        )
