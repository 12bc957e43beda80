"""Into and out of a step: `StepPlan`, `StepResult`, and the `Runner` that turns a plan into a result.

Ints in, ints out. The scheduler makes plans and knows no tensors; a runner holds the model and the KV memory and knows
no requests. Lives on the engine thread. Nothing here changes once it is made; classes of which thousands are made a
second are not declared frozen, which would triple their cost. `Progress` reports the load of a runner. (Idea:
nano-vllm's three-beat step; vLLM V1's "no prefill or decode phase".)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from streamserve.engine.kv.groups import ONE_GROUP, Windows
from streamserve.protocol.requests import SamplingParams

# In a chunk: the token that the step before, launched and not yet collected, gives its sequence.
PENDING = -1


class StepOutOfMemory(Exception):
    """A runner had not enough memory for a plan. Its results are dropped; a smaller plan may work."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class TokenRules:
    """Which tokens all draws of a sequence prefer, allow and avoid. A runner keeps tensors of it while it lives.

    `logit_bias` is added to the logits of ids. Nothing but `allowed_token_ids` may be chosen, where there are any.
    `bad_words` are never completed by the output, unless nothing else may be chosen.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def bad_token_ids(self) -> tuple[int, ...]:
        """Return the bad words of one token."""
        return tuple(word[0] for word in self.bad_words if len(word) == 1)

    def bad_endings(self, output_token_ids: Sequence[int], *, is_pending: bool) -> tuple[tuple[int, int], ...]:
        """Return (the newest token, the next token) of each longer bad word that the tokens before them have begun.

        The newest token is the last of `output_token_ids`, or pending and compared where its value is: in the runner.
        """
        if not (output_token_ids or is_pending):
            return ()
        before = tuple(output_token_ids if is_pending else output_token_ids[:-1])
        num = len(before)
        longer = (word for word in self.bad_words if len(word) > 1)
        return tuple((word[-2], word[-1]) for word in longer if before[max(0, num - len(word) + 2) :] == word[:-2])


@dataclass(slots=True, kw_only=True)
class SampleSpec:
    """How to choose the token that follows one row of a chunk, so that a runner needs no request.

    `sampling` is the choice's, whole, with its seed resolved. The draw is
    `argmax(log p + Gumbel(seed, position, token))`: fixed given equal logits, whatever the batch.
    `position` is the absolute index of the token to be chosen (= number of tokens before it, known or proposed).
    `banned_token_ids` (eos and stop ids before min_tokens) must not be chosen. `mask` has one bit for each id, the
    lowest first, that a grammar allows; `mask_end_ids` are allowed beside these. Where nothing that is allowed is left
    by bans, the bans are lifted: no row is without a token. Order of transforms: the rules (bias, allowed ids, bad
    words), ban, mask, penalties, temperature, top-k, top-p, min-p.
    `bad_endings` are pairs: after the first, if that is the row's token, the second completes a bad word.
    `penalty_slot` is where the runner counts the sequence's tokens for its penalties; None without penalties. A spec
    with `prompt_token_ids` begins the slot afresh: these and `output_token_ids` are all tokens before `position`. A
    later spec has neither: the chunk's only token, pending or not, is the token that the slot lacks.
    `sampling.logprobs` k asks for log-softmax of the *unmodified* logits (OpenAI's and vLLM's default): chosen + k
    likeliest.
    """

    position: int
    sampling: SamplingParams
    penalty_slot: int | None = None
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    banned_token_ids: tuple[int, ...] = ()
    mask: bytes | None = None
    mask_end_ids: tuple[int, ...] = ()
    rules: TokenRules | None = None
    bad_endings: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSpec:
    """Positions of a prompt whose next token is known and scored: `token_ids[i]` is the token after `first + i`.

    Each score is its log-probability and the `num_top` likeliest tokens there, as `SamplingParams.logprobs` has them.
    """

    first: int
    token_ids: tuple[int, ...]
    num_top: int

    def within(self, start: int, end: int) -> ScoreSpec | None:
        """Return the part for positions `start` to `end`, None for none."""
        first = max(start, self.first)
        token_ids = self.token_ids[first - self.first : max(0, end - self.first)]
        return ScoreSpec(first=first, token_ids=token_ids, num_top=self.num_top) if token_ids else None


@dataclass(slots=True, kw_only=True)
class Chunk:
    """The part of one sequence that a step computes.

    tokens:       [ 0 ........ start )[ start ........ start+len(token_ids) )
                    already in blocks   computed now, written to their slots
    block_table:  one block id per `block_size` positions, covering [0, start+len(token_ids)).
    slot of position i = block_table[i // block_size] * block_size + i % block_size.
    `block_table` is that of the first group of layers, `other_tables` those of the others (see kv/groups.py). Where a
    group has a window, the null block stands before what the chunk reads.
    `samples`: how to choose the token after each of its last rows; none while the chunk ends before the last known
    token. With n of them the last n - 1 tokens are proposals, which no reader has seen: what is chosen after the row
    before a proposal decides whether it was right. `token_ids` is (PENDING,) where the token is the token that the
    sequence gets from the launched step before this step: only for runners that `can_overlap`. `scores`: which of its
    positions are scored. `adapter`: the name of the adapter that its tokens are computed with, "" for none.
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    samples: tuple[SampleSpec, ...] = ()
    scores: ScoreSpec | None = None
    adapter: str = ""
    other_tables: tuple[tuple[int, ...], ...] = ()

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """The block table of each group of layers."""
        return (self.block_table, *self.other_tables)

    @property
    def proposed_ids(self) -> tuple[int, ...]:
        """The tokens at its end that are proposals."""
        return self.token_ids[len(self.token_ids) - len(self.samples) + 1 :] if self.samples else ()

    def kept(self, chosen_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the tokens to keep of those chosen after its rows: to the first that was not proposed, itself kept."""
        if len(self.samples) == 1:  # nearly every chunk: nothing was proposed
            return tuple(chosen_ids)
        kept: list[int] = []
        for chosen, proposed in zip_longest(chosen_ids, self.proposed_ids):
            kept.append(chosen)
            if chosen != proposed:
                break
        return tuple(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a draft model is asked about one sequence, before a step that holds the sequence.

    tokens:  [ 0 ........ start )[ start ........ known )( proposed )
               in its blocks       computed now           up to `num_wanted`; 0: none, it only catches up

    Its KV memory has blocks of the same numbers as the model's, and `block_table` covers what is proposed. A proposal
    is drawn as the model's own next token will be: by `sampling`, its seed and the position.
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    sampling: SamplingParams
    num_wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass: chunks of different sequences, decodes (one token) first. Never empty."""

    step_id: int
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLogprobs:
    """Natural-log probabilities of one position: the chosen token's, and (token_id, logprob) of the likeliest."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, kw_only=True)
class Sampled:
    """The result of a step for one sequence. With an `error` (a code: "numerical_error") its blocks are unusable.

    One entry for every chunk that had `samples`, and for every chunk that failed. `token_ids` are the new tokens:
    one token for one row, for several rows at most one token a row, or none. Each is what its row's spec chooses after
    the tokens before it. `logprobs`: of each token, where they were asked for. `proposed_ids`: what the runner expects
    next; a plan may hold some of them.
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[RawLogprobs | None, ...] = ()
    proposed_ids: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of step `step_id`, in the plan's order. `scores`: of each chunk that asked for them and succeeded."""

    step_id: int
    sampled: tuple[Sampled, ...]
    scores: Mapping[int, tuple[RawLogprobs, ...]] = field(default_factory=dict)  # by sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """What the engine reports of its steps: the streams that hold a part of those in flight.

    `seconds_allowed`: the call of the runner that begins now counts as hung after so long without progress; None: no
    call is under way. `is_trial`: the step is a suspect's own.
    """

    seconds_allowed: float | None
    stream_ids: frozenset[str]
    is_trial: bool = False


OnStep = Callable[[Flight], None]


class Runner(Protocol):
    """Runs plans. `launch` may return before the work is done; `collect` waits for it. Engine thread only.

    A failure of one sequence comes back in `Sampled.error`. `StepOutOfMemory` from either call means that no part of
    the plan counts; any other exception that the whole runner is broken and the engine is dead. A runner that
    `can_overlap` takes a second plan before the first is collected (in order), with PENDING tokens, and gains by it.
    `windows`: how far each group of its layers looks back, None: to the start.
    """

    block_size: int
    num_blocks: int
    vocab_size: int
    can_overlap: bool = False
    windows: Windows = ONE_GROUP

    def launch(self, plan: StepPlan) -> object:
        """Start the step and return a handle for `collect`."""

    def collect(self, handle: object) -> StepResult:
        """Wait for the step and return its result."""

    def close(self) -> None:
        """Free the model and its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A small model with a model's tokens, which proposes what may follow (see `Draft`).

    Its runner has as many blocks as the model's, of the same size. `weight`: its weights as a share of the model's;
    `max_len`: its context.
    """

    runner: Runner
    weight: float
    max_len: int


class Progress(Protocol):
    """Reports how far a load is: the stage, its fraction (0 to 1), and bytes read. It may raise to end the load."""

    def __call__(self, stage: str, fraction: float, loaded_bytes: int = 0, total_bytes: int = 0) -> None: ...


def no_progress(stage: str, fraction: float, loaded_bytes: int = 0, total_bytes: int = 0) -> None:
    """Report nothing."""
