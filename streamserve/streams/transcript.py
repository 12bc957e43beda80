"""`Transcript`: what a stream's log holds so far, as far as resuming it needs: tokens of each choice, usage, timings.

Counts committed events only. Pure but for `time.monotonic()`.

`StreamSummary`: the metrics of one stream, measured where its events are committed (`Timings` in
protocol/measures.py). It holds no prompt or answer text.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from streamserve.dialects.fold import Answer, is_outline
from streamserve.protocol.engine import Accepted
from streamserve.protocol.events import (
    Approval,
    BlockStart,
    BlockStop,
    ChoiceDone,
    Citation,
    Done,
    Error,
    Event,
    Meta,
    Status,
    Token,
    Usage,
)
from streamserve.protocol.measures import Timings, parts_of
from streamserve.protocol.requests import Resume, ShownChoice
from streamserve.protocol.trace import Trace
from streamserve.streams.shown_prompt import ShownPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSummary:
    """The metrics of one stream, for the admin page, the log line and `/metrics`.

    `intake`, `ttfb`, `ttft`, `itl_p50`, `itl_p95` are seconds, None before they can be measured. `num_readers` counts
    the owner's readers; `lead` is the number of tokens that the furthest reader has not received. `park_reason` is one
    of `clients/engine_run.py`.
    """

    id: str
    log_id: str
    model: str
    owner: str
    tenant: str
    state: str
    created: int
    age_seconds: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens_per_second: float
    ttft: float | None
    itl_p50: float | None
    itl_p95: float | None
    finish_reason: str | None
    error_code: str | None
    num_readers: int
    num_watchers: int
    lead: int
    num_parks: int
    park_reason: str | None
    transport: str
    intake: float | None = None
    ttfb: float | None = None
    latency: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    counted_as: str = ""
    on_disconnect: str = ""
    trace: Trace | None = None  # the span of the answer, or what it belongs to


_OF_A_CHOICE = (Token, BlockStart, BlockStop, ChoiceDone)
_MAX_OUTLINE = 2_000
_ONE_WITHOUT_ID = (0,)  # counted, and never shown
_numbers = partial(array, "I")  # makes an empty array of four bytes each


@dataclass(slots=True, eq=False)
class _ChoiceTokens:
    """One choice's tokens, four bytes each, and their number at each of its events.

    Consecutive events of one token each form a run. `_seqs` has each run's first event, `_befores` the number of tokens
    before that event, `_counts` the number including it.
    """

    token_ids: array[int] = field(default_factory=_numbers)
    is_finished: bool = False
    # The newest blocks that have begun, have ended, and were given text without ids; -1 before the first.
    started: int = -1
    stopped: int = -1
    ended: int = -1
    thinking: int = -1  # the newest thinking block
    num_reasoning_tokens: int = 0
    _seqs: array[int] = field(default_factory=_numbers)
    _befores: array[int] = field(default_factory=_numbers)
    _counts: array[int] = field(default_factory=_numbers)
    _last_seq: int = -1

    def note(self, token_ids: Sequence[int], seq: int) -> None:
        if len(token_ids) == 1 and seq == self._last_seq + 1:
            self.token_ids.append(token_ids[0])
        else:
            self._seqs.append(seq)
            self._befores.append(len(self.token_ids))
            self.token_ids.extend(token_ids)
            self._counts.append(len(self.token_ids))
        self._last_seq = seq

    def num_delivered(self, seq: int) -> int:
        index = bisect_right(self._seqs, seq)
        if not index:
            return 0
        most = self._befores[index] if index < len(self._befores) else len(self.token_ids)
        return min(self._counts[index - 1] + seq - self._seqs[index - 1], most)


class Transcript:
    """The state of one stream's log. `note` takes every committed event, in order.

    In a stream whose `has_token_ids` is False, each `Token` with text counts as one token, and the text is kept.
    """

    def __init__(self, accepted: Accepted, n: int, started_at: float, *, shows_prompt: bool = False) -> None:
        self.timings = Timings(started_at)
        self.last_seq = 0
        self.terminal: Done | Error | None = None
        self.shown_prompt = ShownPrompt() if shows_prompt else None  # of an answer that shows some of its prompt
        self.num_tokens = 0
        self.may_repeat = False  # a choice of several has finished, or there are blocks
        self.has_blocks = False
        self.outline: list[Citation | Status | Approval] = []  # of a run: first citations and steps, what it asks
        self._num_prompt_tokens = accepted.num_prompt_tokens
        self._num_cached_tokens: int | None = None
        self._choices = [_ChoiceTokens() for _ in range(n)]
        self._shown = None if accepted.has_token_ids else Answer(n)  # its blocks, of a stream without token ids

    def accept(self, accepted: Accepted) -> None:
        """Take the prompt's length from the first acceptance, if the answer began without."""
        self._num_prompt_tokens = self._num_prompt_tokens or accepted.num_prompt_tokens

    def is_repeated(self, event: Event) -> bool:
        """Return whether a resumed generation repeats an event that the log has.

        That is every event of a choice that had finished, and those that a block writer gives with an id that was not
        shown yet, or after the last id (engine/text/formats/base.py).
        """
        if not self.may_repeat or not isinstance(event, _OF_A_CHOICE):
            return False
        choice = self._choice(event.choice)
        if choice.is_finished or self._shown is not None:  # without ids it continues the text, and repeats no token
            return choice.is_finished
        if isinstance(event, BlockStart):
            return event.index <= choice.started
        if isinstance(event, BlockStop):
            return event.index <= choice.stopped
        if isinstance(event, Token) and not event.token_ids and choice.token_ids:
            return event.index <= choice.ended
        return False

    def note(self, event: Event, seq: int, *, is_ours: bool = True) -> None:
        """Count a committed event. With `is_ours` False it was read from the log, so its time is not known."""
        self.last_seq = seq
        if self.shown_prompt is not None and self.shown_prompt.takes(event):
            return
        if self._shown is not None and isinstance(event, Token | BlockStart | BlockStop):
            self._shown.feed(event)
        if isinstance(event, Token):
            choices, index, token_ids = self._choices, event.choice, event.token_ids
            if self._shown is not None:
                token_ids = _ONE_WITHOUT_ID if event.text else ()
            choice = choices[index] if index < len(choices) else self._choice(index)
            choice.note(token_ids, seq)
            if self.has_blocks:
                self._note_in_block(choice, event)
            elif not token_ids and choice.token_ids:
                choice.ended, self.may_repeat = event.index, True
            self.num_tokens += len(token_ids)
            if is_ours:
                self.timings.note(time.monotonic(), index, len(token_ids))
            else:
                self.timings.skip(time.monotonic())
        elif isinstance(event, ChoiceDone):
            self._choice(event.choice).is_finished = self.may_repeat = True
        elif isinstance(event, BlockStart):
            self.has_blocks = self.may_repeat = True
            choice = self._choice(event.choice)
            choice.started = event.index
            if event.kind == "thinking":
                choice.thinking = event.index
        elif isinstance(event, BlockStop):
            self._choice(event.choice).stopped = event.index
        elif isinstance(event, Citation | Status | Approval):
            if is_outline(event) and len(self.outline) < _MAX_OUTLINE:
                self.outline.append(event)
        elif isinstance(event, Meta):
            self._num_prompt_tokens = event.prompt_tokens
            self._shown = None if event.has_token_ids else Answer(len(self._choices))
            if self._shown is not None:
                self._shown.feed(event)
        elif isinstance(event, Done | Error):
            self.terminal = event
        if not is_ours and self.num_tokens:
            self._num_cached_tokens = self._num_cached_tokens or 0  # later cache hits may be this answer's own blocks

    @staticmethod
    def _note_in_block(choice: _ChoiceTokens, token: Token) -> None:
        """Count what a token is in its block."""
        if not token.token_ids:
            choice.ended = token.index
        elif token.index == choice.thinking:
            choice.num_reasoning_tokens += len(token.token_ids)

    def _choice(self, index: int) -> _ChoiceTokens:
        """Return the tokens of a choice; add it if needed, as the record of a finished stream does not have `n`."""
        while len(self._choices) <= index:
            self._choices.append(_ChoiceTokens())
        return self._choices[index]

    def note_cached(self, num_tokens: int) -> None:
        """Note the cached tokens of the run that gave the first token; later runs find this answer's own blocks."""
        if self._num_cached_tokens is None and self.timings.first_at is not None:
            self._num_cached_tokens = min(num_tokens, self._num_prompt_tokens)

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """The output tokens of each choice; () where there are no ids."""
        return tuple(tuple(choice.token_ids) for choice in self._choices) if self._shown is None else ()

    @property
    def shown(self) -> tuple[ShownChoice, ...]:
        """What was shown of each choice of a stream without token ids; () of any other."""
        if self._shown is None:
            return ()
        return tuple(
            ShownChoice(blocks=self._shown.choice(index).block_texts(), num_tokens=len(choice.token_ids))
            for index, choice in enumerate(self._choices)
        )

    def resume(self) -> Resume:
        """Return where an engine is asked to continue: after all this."""
        prompt, n = self.shown_prompt, len(self._choices)
        return Resume(
            output_token_ids=self.token_ids,
            shown=self.shown,
            first_token_at=self.timings.first_at,
            num_prompt_chars=() if prompt is None else prompt.num_chars(n),
            num_prompt_logprobs=0 if prompt is None else prompt.num_logprobs,
        )

    @property
    def has_token_ids(self) -> bool:
        """Whether the stream's tokens have ids."""
        return self._shown is None

    @property
    def num_output_tokens(self) -> tuple[int, ...]:
        """The number of output tokens of each choice."""
        return tuple(len(choice.token_ids) for choice in self._choices)

    def delivered(self, seq: int) -> tuple[int, ...]:
        """Return the number of output tokens of each choice in the events up to `seq`."""
        return tuple(choice.num_delivered(seq) for choice in self._choices)

    def num_unread(self, read: Sequence[int]) -> int:
        """Return the number of tokens after the `read` tokens, in the unfinished choice with the most."""
        pairs = zip(self._choices, read, strict=True)
        return max((len(one.token_ids) - count for one, count in pairs if not one.is_finished), default=0)

    @property
    def usage(self) -> Usage:
        """The token counts known so far."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self.num_tokens,
            cached_tokens=self._num_cached_tokens or 0,
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
        )

    def with_metrics(self, done: Done, usage: Usage | None = None) -> Done:
        """Return `done` with usage, latency and breakdown of the whole stream, over all its runs in the engine."""
        now, timings = time.monotonic(), self.timings
        return replace(
            done,
            usage=usage or self.usage,
            latency=now - timings.started_at,
            breakdown=timings.breakdown(max(self.num_output_tokens)),
            phases=timings.phases(now, done.phases),
        )

    def of_one_run(self, done: Done) -> Done:
        """Return the engine's `done` of an answer without a park, with the times that count from the arrival.

        The last tokens may be committed together with it: the first token too, if the answer is short.
        """
        now = time.monotonic()
        latency = now - self.timings.started_at
        times = {**done.breakdown, **self.timings.since_arrival()}
        phases = self.timings.phases(now, done.phases or parts_of(done.breakdown))
        if self.timings.first_at is None and "ttft" in times:
            times["ttft"] = latency
        num_tokens = done.usage.completion_tokens if len(self._choices) == 1 else max(self.num_output_tokens)
        if num_tokens > 1 and "decode" in times and "tpot" not in times:  # a run has its answers' value
            times["tpot"] = times["decode"] / (num_tokens - 1)
        return replace(done, latency=latency, breakdown=times, phases=phases)

    def over_all_runs(self, done: Done) -> Done:
        """Return the engine's `done` of the last run with the metrics of all runs."""
        cached_tokens = self._num_cached_tokens
        if cached_tokens is None:
            cached_tokens = min(done.usage.cached_tokens, self._num_prompt_tokens)
        return self.with_metrics(done, replace(done.usage, cached_tokens=cached_tokens))
