"""Events of a stream, as readers see them: frozen values, and their JSON payloads (DESIGN: native events).

A generation yields `Status`, `Token`, and at last one `Done` or `Error`. The log numbers them: `LoggedEvent.seq` is
dense from 1. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

# `[DONE]` may follow these, and only these.
SUCCESS_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter"})
FINISH_REASONS = SUCCESS_REASONS | {"cancelled", "abandoned"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One candidate token: its text (may be ""), its exact bytes, and its natural-log probability."""

    token_id: int
    token: str
    bytes_: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """The chosen token of one position, and the likeliest ones, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a whole request (all choices)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the OpenAI shape, which the native `done` event uses too."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a request stands before and between tokens: loading, queued, prefill, resumed.

    `resumable` is said when that changes: False while the stream is in one process only, because its log is away.
    """

    type: ClassVar[str] = "status"
    status: str
    step: int | None = None
    of: int | None = None
    message: str | None = None
    resumable: bool | None = None

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        out: dict[str, Any] = {"status": self.status}
        for name in ("step", "of", "resumable", "message"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """New text of one choice, whole code points only, with the ids that made it.

    `text` may be "" while a code point or a possible stop string is incomplete (`token_ids` then still count), and it
    may be longer than its ids when held-back text is released. `choice` is 0 to n-1. `index` counts this choice's
    content blocks (0 until reasoning and tool blocks are parsed out).
    """

    type: ClassVar[str] = "token"
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    choice: int = 0
    logprobs: tuple[PositionLogprobs, ...] | None = None

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        out: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "index": self.index,
            "choice": self.choice,
        }
        if self.logprobs is not None:
            out["logprobs"] = [_position_json(position) for position in self.logprobs]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDone:
    """One choice of several has ended. Not terminal: `Done` follows when all have. Logged as native `choice_done`."""

    type: ClassVar[str] = "choice_done"
    choice: int
    finish_reason: str

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {"choice": self.choice, "finish_reason": self.finish_reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The stream's first event: which model answers, under which id."""

    type: ClassVar[str] = "meta"
    model: str
    stream_id: str
    created: int
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {
            "model": self.model,
            "stream_id": self.stream_id,
            "created": self.created,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Terminal: the stream failed. `code` is from the catalogue in protocol/errors.py."""

    type: ClassVar[str] = "error"
    code: str
    message: str
    retryable: bool = False

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        return {"code": self.code, "message": self.message, "retryable": self.retryable}


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Terminal: the stream ended as `finish_reason` says. `latency` and `breakdown` are in seconds.

    `breakdown` keys: queue, prefill, decode, ttft, itl_p50, itl_p95 (protocol/metrics.py).
    """

    type: ClassVar[str] = "done"
    finish_reason: str
    usage: Usage = field(default_factory=Usage)
    latency: float = 0.0
    breakdown: Mapping[str, float] = field(default_factory=dict)
    kept_seq: int | None = None

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event."""
        out: dict[str, Any] = {
            "finish_reason": self.finish_reason,
            "totalTokens": self.usage.completion_tokens,
            "latency": round(self.latency, 4),
            "usage": self.usage.as_json(),
            "breakdown": {name: round(seconds, 4) for name, seconds in self.breakdown.items()},
        }
        if self.kept_seq is not None:
            out["kept_seq"] = self.kept_seq
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceText:
    """One choice as far as it has come. `finish_reason` of one of several that is whole."""

    text: str
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole answer up to event `seq`, for a reader far behind, in place of the events it lacks. Never logged.

    It says all that they said, but for tokens' ids and where one status gave way to the next. Choices from 0 on.
    """

    type: ClassVar[str] = "snapshot"
    seq: int
    choices: tuple[ChoiceText, ...]

    def payload(self) -> dict[str, Any]:
        """Return the JSON object of the native event: `text` is the first choice's; `choices` where there are more."""
        out: dict[str, Any] = {"text": self.choices[0].text, "seq": self.seq}
        if len(self.choices) > 1:
            out["choices"] = [_choice_json(index, choice) for index, choice in enumerate(self.choices)]
        return out


Event = Meta | Status | Token | ChoiceDone | Snapshot | Error | Done


TERMINALS = (Done, Error)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingAway:
    """No event of the log: the server lets a reader go after event `seq`, who may come again in `retry_ms`."""

    stream_id: str
    seq: int
    retry_ms: int


class LoggedEvent(NamedTuple):
    """An event with its number in the log, dense from 1. Its wire id is `f"{log_id}-{seq}"`."""

    seq: int
    event: Event


def is_terminal(event: Event) -> bool:
    """Tell whether nothing may follow `event` in its stream."""
    return isinstance(event, TERMINALS)


def is_success(event: Event) -> bool:
    """Tell whether `event` is a terminal that `[DONE]` may follow."""
    return isinstance(event, Done) and event.finish_reason in SUCCESS_REASONS


def _choice_json(index: int, choice: ChoiceText) -> dict[str, Any]:
    out: dict[str, Any] = {"choice": index, "text": choice.text}
    if choice.finish_reason is not None:
        out["finish_reason"] = choice.finish_reason
    return out


def _position_json(position: PositionLogprobs) -> dict[str, Any]:
    out = _logprob_json(position.chosen)
    out["top_logprobs"] = [_logprob_json(candidate) for candidate in position.top]
    return out


def _logprob_json(candidate: TokenLogprob) -> dict[str, Any]:
    """OpenAI's shape of one candidate: `bytes` is a list of ints, so that split code points survive.

    Its -9999.0 stands for minus infinity (a masked token), which JSON cannot say.
    """
    return {
        "token": candidate.token,
        "logprob": max(candidate.logprob, -9999.0),
        "bytes": list(candidate.bytes_),
    }
