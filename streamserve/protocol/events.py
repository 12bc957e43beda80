"""The events of a stream: frozen values and their native JSON payloads. Pure: no I/O, no clock.

A log numbers its events: `LoggedEvent.seq` is dense from 1. The order that events keep is protocol/grammar.py's:

    meta (status | citation | state | custom | block_start | token | block_stop | approval | choice_done)*
         (done | error)

The answer of a choice is a row of blocks: text, thinking, tool_use. `Token.index` names the block that a token belongs
to. A choice without a `BlockStart` is one text block, 0, so a plain text answer has no block events at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

# `[DONE]` may follow these, and only these.
SUCCESS_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "interrupt"})
FINISH_REASONS = SUCCESS_REASONS | {"cancelled", "abandoned"}
# A run ends so where a tool waits for its user's answer (`Approval`); another stream continues it.
INTERRUPT = "interrupt"

# The block whose deltas are the answer's text. Blocks of any other kind, of later releases too, are not.
TEXT = "text"
BLOCK_KINDS = (TEXT, "thinking", "tool_use")

# Fields that the release before this one does not have. They are left out of bytes and payloads at their default, so
# that an event that does not use them has the bytes it always had.
ADDED_FIELDS = frozenset(
    {
        "stop_string",
        "reasoning_tokens",
        "has_token_ids",
        "phases",
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One candidate token: its text (may be ""), its exact bytes, and its natural-log probability.

    Nothing precedes a prompt's first token, which has none.
    """

    token_id: int
    token: str
    bytes_: bytes
    logprob: float | None

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's shape: `bytes` is a list of ints, so that split code points survive.

        -9999.0 stands for minus infinity (a masked token), which JSON does not have.
        """
        logprob = None if self.logprob is None else max(self.logprob, -9999.0)
        return {"token": self.token, "logprob": logprob, "bytes": list(self.bytes_)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """The chosen token of one position, and the likeliest tokens, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's shape."""
        return {**self.chosen.as_json(), "top_logprobs": [candidate.as_json() for candidate in self.top]}


_COMPLETION_DETAILS = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a whole request (all choices). `reasoning_tokens` of `completion_tokens` are thinking.

    `accepted_prediction_tokens` of `completion_tokens` were proposed after another token of their step;
    `rejected_prediction_tokens` were proposed and not accepted. Of the run that ended the answer.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        """Return the counts of two requests together."""
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            accepted_prediction_tokens=self.accepted_prediction_tokens + other.accepted_prediction_tokens,
            rejected_prediction_tokens=self.rejected_prediction_tokens + other.rejected_prediction_tokens,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the OpenAI shape, which the native `done` event uses too."""
        out: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        details = {name: count for name in _COMPLETION_DETAILS if (count := getattr(self, name))}
        return {**out, "completion_tokens_details": details} if details else out


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The stream's first event: which model answers, under which id.

    `has_token_ids` False: no token of the stream has ids; each `Token` with text counts as one token.
    """

    type: ClassVar[str] = "meta"
    model: str
    """Alias of the model or pipeline that answers."""
    stream_id: str
    """The stream's id, 32 hex digits: what `/streams/{id}` takes."""
    created: int
    """When the request arrived, in Unix time."""
    prompt_tokens: int = 0
    """Tokens of the prompt."""
    cached_tokens: int = 0
    """Of these, those found in the prefix cache."""
    has_token_ids: bool = True
    """Shown where it is false: a model elsewhere gives no ids (docs/remote.md#what-is-different)."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        out: dict[str, Any] = {
            "model": self.model,
            "stream_id": self.stream_id,
            "created": self.created,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }
        return out if self.has_token_ids else {**out, "has_token_ids": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a request waits for, before and between tokens: queued, prefill, generating; waiting, loading, resumed.

    `queued` has the place in the queue as `step`, `prefill` the computed tokens of the prompt as `step` of `of`; an
    answer that is not made to wait has neither, and no `generating`, which ends them. A long job reports its steps
    here: `step` of `of`, and `message`. `resumable` is given when it changes: False while
    only this process has the stream's newest events.
    """

    type: ClassVar[str] = "status"
    status: str
    """`queued`, `prefill`, `generating`, `waiting`, `loading` or `resumed` (docs/events.md#statuses)."""
    step: int | None = None
    """Of `queued` the place in the queue, 1 is next; else how far: tokens of the prompt, or steps of a job."""
    of: int | None = None
    """How many steps there are."""
    message: str | None = None
    """What is done or waited for, in words."""
    resumable: bool | None = None
    """Given when it changes: false while only this process has the stream's newest events."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {"status": self.status, **_given(self, "step", "of", "resumable", "message")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """New text of one block, whole code points only, with the ids that made it. Every block's delta is a token.

    `text` may be "" while a code point or a possible stop string is incomplete, and for ids of markup (`token_ids`
    then still count); it may be longer than its ids when held-back text is released. In a stream whose `meta` has
    `has_token_ids` False no token has ids. In a tool_use block it is part of the arguments. `choice` is 0 to n-1,
    `index` counts this choice's blocks. Each sampled id stands in exactly one event: a readmitted stream sends the ids
    of its events back to the engine. What comes before a choice's first id is of the prompt: the text that `echo`
    repeats, and in choice 0 the log-probabilities that were asked for, one entry for each prompt token.
    """

    type: ClassVar[str] = "token"
    text: str
    """New text, whole code points; may be ""."""
    token_ids: tuple[int, ...]
    """The ids that made it."""
    index: int = 0
    """The content block that it belongs to."""
    choice: int = 0
    """The answer that it belongs to, 0 to n-1."""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """Where they were asked for: of each token `token`, `logprob`, `bytes` and `top_logprobs`."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        out: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "index": self.index,
            "choice": self.choice,
        }
        if self.logprobs is not None:
            out["logprobs"] = [position.as_json() for position in self.logprobs]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStart:
    """Block `index` of a choice begins. `id` and `name` belong to a tool call."""

    type: ClassVar[str] = "block_start"
    choice: int
    """The answer that it belongs to."""
    index: int
    """The block's number in its answer, from 0."""
    kind: str
    """`text`, `thinking` or `tool_use`; of a pipeline also `server_tool_use`, a call that the server answers itself,
    and `tool_result`, what its function returned, as text.
    """
    id: str | None = None
    """The id of a tool call; of a result the id of its call."""
    name: str | None = None
    """The name of the function that is called."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {"choice": self.choice, "index": self.index, "kind": self.kind, **_given(self, "id", "name")}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStop:
    """Block `index` of a choice is whole. `signature` vouches for a thinking block; no model here has a signature."""

    type: ClassVar[str] = "block_stop"
    choice: int
    """The answer that it belongs to."""
    index: int
    """The block that is whole."""
    signature: str | None = None
    """What vouches for a thinking block, where the model gives it."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {"choice": self.choice, "index": self.index, **_given(self, "signature")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Citation:
    """A source of the answer, or of characters `start` to `end` of one block's text."""

    type: ClassVar[str] = "citation"
    source: str
    """The source's name."""
    id: str
    """The passage in it."""
    title: str | None = None
    """What to show for it."""
    url: str | None = None
    """Where it can be read."""
    choice: int | None = None
    """The answer that it belongs to."""
    index: int | None = None
    """The block that it belongs to."""
    start: int | None = None
    """The first character of the block's text that it supports."""
    end: int | None = None
    """The character after the last."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        optional = _given(self, "title", "url", "choice", "index", "start", "end")
        return {"source": self.source, "id": self.id, **optional}


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """A pipeline asks its user whether a tool may run: the run then ends in `interrupt`, and the answer continues it.

    It stands after the block of the call, `server_tool_use`, has stopped.
    """

    type: ClassVar[str] = "approval"
    id: str
    """The call's id: what the answer names."""
    name: str
    """The name of the tool."""
    arguments: str
    """The arguments of the call, as JSON text."""
    message: str | None = None
    """What the user is asked, where the tool has a question of its own."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {"id": self.id, "name": self.name, "arguments": self.arguments, **_given(self, "message")}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a pipeline's run has changed: `run.state`. The first is a snapshot; later there may be patches.

    Both are kept as JSON text. One of them is set.
    """

    type: ClassVar[str] = "state"
    snapshot: str | None = None
    """The whole state, an object: it replaces what the reader has."""
    delta: str | None = None
    """What has changed since the event before, as a JSON patch (RFC 6902): `add`, `remove` and `replace`."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {name: json.loads(text) for name, text in _given(self, "snapshot", "delta").items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """An event of the pipeline's own: `run.emit(name, value)`. `value` is kept as JSON text."""

    type: ClassVar[str] = "custom"
    name: str
    """What the pipeline calls it."""
    value: str
    """Any JSON value."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {"name": self.name, "value": json.loads(self.value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDone:
    """One choice of several is whole; `Done` follows when all are. `stop_string` is the stop string that ended it."""

    type: ClassVar[str] = "choice_done"
    choice: int
    """The answer that is whole."""
    finish_reason: str
    """Why it ended: `stop`, `length`, `tool_calls` or `content_filter`."""
    stop_string: str | None = None
    """The stop string that ended it."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {"choice": self.choice, "finish_reason": self.finish_reason, **_given(self, "stop_string")}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockText:
    """One block of a choice, as a snapshot has it. `is_open`: more of it may follow."""

    index: int
    kind: str
    text: str
    id: str | None = None
    name: str | None = None
    signature: str | None = None
    is_open: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the block's JSON object in the `snapshot` event."""
        out = {"index": self.index, "kind": self.kind, "text": self.text, **_given(self, "id", "name", "signature")}
        return {**out, "is_open": True} if self.is_open else out


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceText:
    """One choice so far. `text` is the text of its text blocks; `blocks` is () while there is only the implied block.

    `finish_reason` and `stop_string` are set where one of several choices is whole.
    """

    text: str
    finish_reason: str | None = None
    blocks: tuple[BlockText, ...] = ()
    stop_string: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the choice's JSON object in the `snapshot` event, without its number."""
        out: dict[str, Any] = {"text": self.text, **_given(self, "finish_reason", "stop_string")}
        return {**out, "blocks": [block.as_json() for block in self.blocks]} if self.blocks else out


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole answer up to event `seq`, for a reader far behind, in place of the events it lacks. Never logged.

    It holds all that those events held, except token ids, overtaken statuses and unknown events. Choices from 0 on.
    """

    type: ClassVar[str] = "snapshot"
    seq: int
    """The last event that it replaces."""
    choices: tuple[ChoiceText, ...]
    """Of one answer `text` and its `blocks` are fields of the event; of several, `text` is the first answer's, and
    `choices` has each answer's `choice`, `text`, `blocks`, and `finish_reason` where it is whole.
    """
    citations: tuple[Citation, ...] = ()
    """The citations so far."""
    approvals: tuple[Approval, ...] = ()
    """What the run's user is asked."""
    state: str | None = None
    """The whole state of a pipeline's run, where it has one."""
    customs: tuple[Custom, ...] = ()
    """The pipeline's own events so far."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event: the first choice's text and blocks, then `choices` if several."""
        out: dict[str, Any] = {"text": self.choices[0].text, "seq": self.seq}
        if len(self.choices) > 1:
            out["choices"] = [{"choice": index, **one.as_json()} for index, one in enumerate(self.choices)]
        elif self.choices[0].blocks:
            out["blocks"] = [block.as_json() for block in self.choices[0].blocks]
        if self.citations:
            out["citations"] = [citation.payload() for citation in self.citations]
        if self.approvals:
            out["approvals"] = [approval.payload() for approval in self.approvals]
        if self.state is not None:
            out["state"] = json.loads(self.state)
        if self.customs:
            out["customs"] = [custom.payload() for custom in self.customs]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Terminal: the stream ended for `finish_reason`."""

    type: ClassVar[str] = "done"
    finish_reason: str
    """`stop`, `length`, `tool_calls`, `content_filter`, `interrupt` (a tool waits for its user's answer); or
    `cancelled` (stopped), `abandoned` (no reader for too long), which are not successes.
    """
    usage: Usage = field(default_factory=Usage)
    """Counts in OpenAI's shape. `totalTokens` repeats `completion_tokens`."""
    latency: float = 0.0
    """From the request's arrival to the end of the answer, in seconds; `latency_ms` is the same in milliseconds."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """Moments and rates, as far as they are known (docs/reference/metrics.md#breakdown)."""
    kept_seq: int | None = None
    """After a stop: the last event that is kept of the answer."""
    stop_string: str | None = None
    """The stop string that ended the only answer."""
    phases: Mapping[str, float] | None = None
    """What the latency is made of (docs/reference/metrics.md#phases)."""

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {
            "finish_reason": self.finish_reason,
            "totalTokens": self.usage.completion_tokens,
            "latency": round(self.latency, 4),
            "latency_ms": round(1000 * self.latency, 1),
            "usage": self.usage.as_json(),
            "breakdown": _rounded(self.breakdown),
            **({} if self.phases is None else {"phases": _rounded(self.phases)}),
            **_given(self, "kept_seq", "stop_string"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Terminal: the stream failed. `code` is in CODES (protocol/codes.py).

    `phases` belong to a pipeline's run, for the stream's row; they are not shown.
    """

    type: ClassVar[str] = "error"
    code: str
    """The error's code (docs/reference/errors.md)."""
    message: str
    """What happened, and the way out, in words that are safe to show."""
    retryable: bool = False
    """Whether the same request may succeed later."""
    phases: Mapping[str, float] | None = field(default=None, compare=False)

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {"code": self.code, "message": self.message, "retryable": self.retryable}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """An event of a kind that this release does not know. It keeps its number, and its bytes if it is logged again.

    The native dialect and the WebSocket show that it is there, so that ids stay dense and credit can be acknowledged;
    the other dialects and every fold skip it. `fields` is MessagePack.
    """

    type: ClassVar[str] = "unknown"
    kind: str
    """The kind's name."""
    fields: bytes

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {"kind": self.kind}


Event = (
    Meta
    | Status
    | Citation
    | State
    | Custom
    | BlockStart
    | Token
    | BlockStop
    | Approval
    | ChoiceDone
    | Snapshot
    | Error
    | Done
    | Unknown
)
TERMINALS = (Done, Error)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingAway:
    """A notice, not an event of the log: this server stops showing the stream after event `seq`.

    The reader connects again after `retry_ms`. On the wire it is called `farewell`.
    """

    stream_id: str
    seq: int
    retry_ms: int


class LoggedEvent(NamedTuple):
    """An event with its number in the log, dense from 1. Its wire id is `f"{log_id}-{seq}"`."""

    seq: int
    event: Event


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}


def is_terminal(event: Event) -> bool:
    """Return whether nothing may follow `event` in its stream."""
    return isinstance(event, TERMINALS)


def is_success(event: Event) -> bool:
    """Return whether `event` is a terminal that `[DONE]` may follow."""
    return isinstance(event, Done) and event.finish_reason in SUCCESS_REASONS


def _given(value: object, *names: str) -> dict[str, Any]:
    """Return those fields of `value` that are not None."""
    return {name: item for name in names if (item := getattr(value, name)) is not None}
