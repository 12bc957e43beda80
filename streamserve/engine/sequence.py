"""`SequenceRequest` and `Sequence`: the tokens of one answer, and where they stand in the engine.

    Sequence         its tokens, and how far they are computed, launched and sampled
    Holding          what the pool has given it: blocks, a penalty slot           (kv/holding.py)
    Constraints      which token may be next, and which ends the answer           (constraints.py)
    PromptScoring    which positions of its prompt are scored, if any are         (scoring.py)
    Ticket           its place in the queue                                       (policy/backlog.py)
    ReaderPace       how far its reader is                                        (policy/pace.py)
    Proposer         what proposes its next tokens, where that pays               (policy/speculation.py)

A sequence knows no text and no stream. Engine thread only. (Idea: vLLM V1's `num_computed_tokens` chasing the known
tokens; mini-sglang's lesson that one guarded `release()` beats set membership.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from streamserve.engine.constraints import Constraints
from streamserve.engine.kv.free_list import IntegrityError
from streamserve.engine.kv.holding import Holding
from streamserve.engine.plan import SampleSpec, ScoreSpec
from streamserve.engine.policy.backlog import Ticket
from streamserve.engine.policy.pace import ReaderPace
from streamserve.engine.policy.speculation import Proposer
from streamserve.engine.scoring import PromptScoring
from streamserve.protocol.engine import SUSPECT_LOSSES
from streamserve.protocol.requests import NO_CALLER, START, Admission, Resume, SamplingParams

if TYPE_CHECKING:
    from streamserve.engine.grammar.matcher import Matcher


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
    `ticket` is the scheduler's, set when it is added, as is `reader`, which begins with this admission's first token.

    A running sequence that a step leaves out is paused: it keeps what it has `held`, and continues where it is.
    """

    request: SequenceRequest
    state: State = State.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0  # computed or in flight: the next chunk starts here
    num_pending: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    num_cached_tokens: int = 0
    num_once_computed: int = 0  # before a park or a preemption: what is computed of these is recomputed
    num_preemptions: int = 0
    held: Holding = field(default_factory=Holding)
    constraints: Constraints = field(init=False)
    scoring: PromptScoring | None = None
    proposed_ids: tuple[int, ...] = ()
    proposer: Proposer | None = None
    ticket: Ticket = Ticket()  # noqa: RUF009 (a value)
    reader: ReaderPace = field(default_factory=lambda: ReaderPace(None))
    scheduled_at: float | None = None
    first_token_at: float | None = None
    place: int | None = None  # in the queue, as it was last reported
    seq_id: int = field(init=False)
    max_tokens: int = field(init=False)  # the most output tokens, shown tokens included

    def __post_init__(self) -> None:
        request, sampling = self.request, self.request.sampling
        assert sampling.max_tokens is not None, "max_tokens is resolved at acceptance"
        assert sampling.seed is not None, "the seed is resolved at acceptance"
        self.seq_id, self.max_tokens = request.seq_id, sampling.max_tokens
        prompt = request.prompt_token_ids
        self.constraints = Constraints.of(
            sampling, prompt, request.eos_token_ids, request.matcher, request.bad_word_ids
        )
        if sampling.prompt_logprobs is not None:
            self.scoring = PromptScoring(prompt, sampling.prompt_logprobs, request.num_scored)
        self.token_ids = [*prompt, *request.output_token_ids]
        if request.output_token_ids:  # the last of them was sampled, and not computed
            self.num_once_computed = len(self.token_ids) - 1
        self.first_token_at = request.resume.first_token_at

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
        num_tokens = self.num_unplanned_tokens
        return num_tokens if self.scoring is None else min(num_tokens, self.scoring.most_tokens)

    @property
    def num_reusable_tokens(self) -> int:
        """How far the prefix cache may stand in for computing."""
        return sys.maxsize if self.scoring is None else self.scoring.num_reusable_tokens

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
        self.held.is_counted = self.held.is_counted or num_rows > 0

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
        self.num_pending, self.held.is_counted = 0, False

    def lose_blocks(self) -> list[int]:
        """Drop what it holds and what is computed; returns the blocks, which are not freed yet."""
        held, self.held = self.held, Holding()
        self.num_once_computed = max(self.num_once_computed, self.num_computed_tokens)
        self.num_computed_tokens = self.num_launched_tokens = 0
        self.num_pending = 0
        return held.block_ids

    def finish_reason(self, max_model_len: int) -> str | None:
        """Return why the sequence is over, or None. The eos or stop token is its last token and no part of the text."""
        if self.max_tokens == 0:
            return None if self.num_uncomputed_tokens else "length"
        if self._is_stopped or self.constraints.is_complete:
            return "stop"
        return "length" if self._is_full(max_model_len) else None

    @property
    def _is_stopped(self) -> bool:
        return self.constraints.is_end(self.token_ids[-1], self.num_output_tokens)

    def _is_full(self, max_model_len: int) -> bool:
        return self.num_output_tokens >= self.max_tokens or len(self.token_ids) >= max_model_len

    def must_wait(self, max_model_len: int | None) -> bool:
        """Whether what is pending must be known first: it may be the last token, or several, or a grammar needs it."""
        if not self.num_pending:
            return False
        if self.constraints.matcher is not None:
            self.constraints.num_grammar_waits += 1
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
        return None if self.scoring is None else self.scoring.spec(start, end)

    def sample_specs(self, num_rows: int) -> tuple[SampleSpec, ...]:
        """Return how to choose a token after the last token, known or pending, and after proposed tokens; () for none.

        Of the proposed tokens so many that there are `num_rows` rows, or fewer.
        """
        if self.max_tokens == 0:
            return ()
        proposed = self.proposed_ids[: num_rows - 1]
        return self.constraints.specs(self.token_ids, self.num_pending, proposed, self.held)
