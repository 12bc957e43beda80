"""The OpenAI chat dialect: the log as `chat.completion.chunk` frames, or collected into one `chat.completion`.

Shapes as the official client's types have them (openai 3.52, `types/chat`). A failure after the head is one
`data: {"error": {…}}`, which makes that client raise, and then no `[DONE]`. Text blocks are `content`. Thinking is
`reasoning_content` and `reasoning`, fields that other servers added; the public API has none. A tool_use block is one
of `tool_calls`: its id and name first, then its arguments piece by piece. Citations with a url are `annotations`. Token
ids, where they are asked for, are in vLLM's fields. Pure folds; bodies are parsed in request.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from streamserve import __version__
from streamserve.dialects.base import GOING_DOWN, FrameIds, ending, successful
from streamserve.dialects.openai.parts import FIELD, Annotations, is_of_prompt, prompt_logprobs_json, without_prompt
from streamserve.dialects.openai.request import ChatRequest, parse
from streamserve.protocol.errors import ErrorBody, to_body
from streamserve.protocol.events import (
    TEXT,
    BlockStart,
    ChoiceDone,
    Citation,
    Done,
    Event,
    GoingAway,
    LoggedEvent,
    Meta,
    Token,
    Usage,
    is_terminal,
)
from streamserve.protocol.requests import GenerateRequest
from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, KEEPALIVE, frame, one_line_json

__all__ = [
    "REASONING_FIELDS",
    "ChatEncoder",
    "ChatRequest",
    "collect",
    "encoder_for",
    "error_json",
    "from_text",
    "identity",
    "model_json",
    "models_json",
    "parse",
]

# With obfuscation a delta's JSON is filled up to a multiple of this, so that its size says little about its text.
_OBFUSCATED_CHARS = 64
THINKING, TOOL_USE = "thinking", "tool_use"
# Values of the setting REASONING_FIELD: which field of a delta or message has the thinking. The first is the default.
REASONING_FIELDS = ("both", "reasoning_content", "reasoning")
DIALECT = "c"  # in the ids of frames
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class DescribesModel(Protocol):
    """What `models_json` needs of a `ModelDescription`, which lives in a layer above."""

    @property
    def alias(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...


class IsStream(Protocol):
    """What names a completion, of a `Stream`, which lives in a layer above."""

    id: str
    log_id: str
    created: int

    @property
    def model(self) -> str: ...

    @property
    def request(self) -> GenerateRequest: ...


class _Blocks:
    """A fold: the kind of each token's block, and the number of each choice's newest call."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], str] = {}  # (choice, index) of the blocks that are not text
        self._num_calls: dict[int, int] = {}

    def note(self, block: BlockStart) -> None:
        """Take the kind of a block that begins."""
        if block.kind != TEXT:
            self._kinds[block.choice, block.index] = block.kind
        if block.kind == TOOL_USE:
            self._num_calls[block.choice] = self._num_calls.get(block.choice, 0) + 1

    def kind_of(self, token: Token) -> str:
        """Return the kind of the token's block: text without a `BlockStart`."""
        return self._kinds.get((token.choice, token.index), TEXT) if self._kinds else TEXT

    def call_of(self, choice: int) -> int:
        """Return the number of the choice's newest call, from 0."""
        return self._num_calls[choice] - 1


class ChatEncoder:
    """One reader's chunks: per choice a role chunk, deltas, a finish chunk; then usage if asked for; then `[DONE]`."""

    content_type = CONTENT_TYPE
    first_bytes = FIRST_BYTES
    keepalive = KEEPALIVE
    takes_snapshots = False

    @property
    def keepalive_event(self) -> bytes:
        """A chunk without choices, as the one with the usage is."""
        return frame(self._chunk([]))

    def __init__(
        self,
        log_id: str,
        *,
        completion_id: str,
        model: str,
        created: int,
        include_usage: bool = False,
        continuous_usage: bool = False,
        include_obfuscation: bool = False,
        include_reasoning: bool = True,
        reasoning_field: str = REASONING_FIELDS[0],
        return_token_ids: bool = False,
        prompt_token_ids: Sequence[int] | None = None,
        n: int = 1,
        after: int = 0,
        num_seen: int = 0,
    ) -> None:
        self._ids = FrameIds(log_id, DIALECT, after=after, num_seen=num_seen)
        self._head = {**_head(completion_id, created, model), "object": "chat.completion.chunk"}
        self._include_usage, self._include_obfuscation = include_usage, include_obfuscation
        self._counts = UsageSoFar() if continuous_usage else None
        self._reasoning_field = reasoning_field if include_reasoning else None
        self._has_ids = return_token_ids
        self._prompt_token_ids = prompt_token_ids  # until the first chunk has shown them
        self._n = n
        self._blocks, self._annotations = _Blocks(), Annotations(n)
        self._has_token_ids = True
        self._started: set[int] = set()
        self._finished: set[int] = set()

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the event's frames, each with its id."""
        return b"".join(frame(data, id=id) for data, id in self._ids.of(logged.seq, self._data(logged.event)))

    def going_away(self, notice: GoingAway) -> bytes:
        """Return an error: the clients of this API take a clean end for a whole answer. The ids before it resume."""
        return b"".join(map(frame, self._end(GOING_DOWN)))

    def _data(self, event: Event) -> list[str]:
        if isinstance(event, Token):
            return self._delta(event)
        if isinstance(event, ChoiceDone):
            return self._finish(event.choice, event.finish_reason)
        if isinstance(event, BlockStart):
            return self._begin(event)
        if isinstance(event, Citation):
            cited = self._annotations.of(event)
            return [data for choice, one in cited for data in self._show(choice, {"annotations": [one]})]
        if isinstance(event, Meta):
            self._head["created"] = event.created  # the log's, also in a process that has only the row
            self._has_token_ids = event.has_token_ids
            if self._counts is not None:
                self._counts.begin(event)
        return self._end(event) if is_terminal(event) else []

    def _begin(self, block: BlockStart) -> list[str]:
        """Note the block; the first chunk of a call has all but its arguments."""
        self._blocks.note(block)
        self._annotations.note(block, block.kind)
        if block.kind != TOOL_USE:
            return []
        function = {"name": block.name or "", "arguments": ""}
        call = {"index": self._blocks.call_of(block.choice), "id": block.id, "type": "function", "function": function}
        return self._show(block.choice, {"tool_calls": [call]})

    def _delta(self, token: Token) -> list[str]:
        kind = self._blocks.kind_of(token)
        self._annotations.note(token, kind)
        if is_of_prompt(token, has_token_ids=self._has_token_ids):
            return []  # a whole completion shows them, a stream does not
        delta = self._delta_of(token, kind)
        # Before the token counts: what precedes the last frame must not depend on how tokens are joined.
        start = [] if delta is None else self._start(token.choice, "" if "content" in delta else None)
        if self._counts is not None:
            self._counts.note(token, is_thinking=kind == THINKING)
        if delta is None:
            return []
        logprobs = _logprobs_json([token]) if kind == TEXT else None
        return [*start, *self._show(token.choice, delta, logprobs=logprobs, token_ids=token.token_ids)]

    def _delta_of(self, token: Token, kind: str) -> dict[str, Any] | None:
        """Return what a token adds to its choice; None for nothing."""
        if kind == TEXT and (token.text or token.logprobs):
            return {"content": token.text}
        if kind == THINKING and token.text and self._reasoning_field is not None:
            return _thinking_json(token.text, self._reasoning_field)
        if kind == TOOL_USE and token.text:
            call = {"index": self._blocks.call_of(token.choice), "function": {"arguments": token.text}}
            return {"tool_calls": [call]}
        return {} if self._has_ids and token.token_ids else None  # as in vLLM: each id is shown with its event

    def _show(
        self, choice: int, delta: dict[str, Any], *, logprobs: Any = None, token_ids: Sequence[int] = ()
    ) -> list[str]:
        start = self._start(choice, "" if "content" in delta else None)
        chunk = self._choice(choice, delta, logprobs=logprobs, token_ids=token_ids)
        return [*start, _obfuscated(chunk) if self._include_obfuscation else chunk]

    def _start(self, choice: int, content: str | None = "") -> list[str]:
        """Return the choice's first chunk, once. Its content is null where the answer does not begin with text."""
        if choice in self._started:
            return []
        self._started.add(choice)
        return [self._choice(choice, {"role": "assistant", "content": content, "refusal": None})]

    def _finish(self, choice: int, reason: str) -> list[str]:
        if choice in self._finished:
            return []
        self._finished.add(choice)
        return [*self._start(choice), self._choice(choice, {}, finish_reason=reason)]

    def _end(self, event: Event) -> list[str]:
        end = ending(event)
        if end is not None:
            return [one_line_json(error_json(to_body(end.error())))]
        assert isinstance(event, Done)
        out = [data for choice in range(self._n) for data in self._finish(choice, event.finish_reason)]
        if self._include_usage:
            out.append(self._chunk([], usage=event.usage))
        return [*out, "[DONE]"]

    def _choice(
        self,
        choice: int,
        delta: dict[str, Any],
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        token_ids: Sequence[int] = (),
    ) -> str:
        shown = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._has_ids:
            shown["token_ids"] = list(token_ids)
        return self._chunk([shown])

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> str:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._prompt_token_ids is not None:
            chunk["prompt_token_ids"], self._prompt_token_ids = list(self._prompt_token_ids), None
        if self._include_usage:
            if usage is None and self._counts is not None:
                usage = self._counts.usage
            chunk["usage"] = None if usage is None else _usage_json(usage)
        return one_line_json(chunk)


class UsageSoFar:
    """A fold: the counts of all choices, as far as the log goes."""

    def __init__(self) -> None:
        self.usage = Usage()

    def begin(self, meta: Meta) -> None:
        """Take the prompt's counts."""
        self.usage = Usage(prompt_tokens=meta.prompt_tokens, cached_tokens=meta.cached_tokens)

    def note(self, token: Token, *, is_thinking: bool = False) -> None:
        """Count a token; text without ids is one."""
        num = len(token.token_ids) or bool(token.text)
        self.usage += Usage(completion_tokens=num, reasoning_tokens=num if is_thinking else 0)


def _obfuscated(chunk: str) -> str:
    """Return the JSON of a chunk with an `obfuscation` that makes its length in bytes a multiple of 64."""
    empty = chunk[:-1] + ',"obfuscation":""}'
    return chunk[:-1] + f',"obfuscation":"{"0" * (-len(empty.encode()) % _OBFUSCATED_CHARS)}"}}'


def identity(stream: IsStream) -> dict[str, Any]:
    """Return what names a completion, in each of its chunks or as a whole."""
    completion_id = f"chatcmpl-{stream.id}"
    return {"completion_id": completion_id, "model": stream.model, "created": stream.created, "n": stream.request.n}


def encoder_for(stream: IsStream, **options: Any) -> ChatEncoder:
    """Return the encoder of that stream: the same bytes for a reader of the answer and for one that resumes it.

    `options` are those of `ChatEncoder`.
    """
    return ChatEncoder(stream.log_id, **options, **identity(stream))


@dataclass(slots=True)
class _Choice:
    """One choice of a completion being collected."""

    tokens: list[Token] = field(default_factory=list)  # of its text
    token_ids: list[int] = field(default_factory=list)  # of all blocks
    has_logprobs: bool = False
    thinking: list[str] = field(default_factory=list)
    calls: list[tuple[BlockStart, list[str]]] = field(default_factory=list)  # with their arguments
    annotations: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, token: Token, kind: str) -> None:
        """Add a token of a block of that kind; later releases may have kinds that are not shown."""
        self.token_ids += token.token_ids
        self.has_logprobs |= token.logprobs is not None
        if kind == TEXT:
            self.tokens.append(token)
        elif kind == THINKING:
            self.thinking.append(token.text)
        elif kind == TOOL_USE:
            self.calls[-1][1].append(token.text)

    def as_json(self, index: int, default_reason: str, reasoning_field: str | None) -> dict[str, Any]:
        content = "".join(token.text for token in self.tokens)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.thinking and reasoning_field is not None:
            message |= _thinking_json("".join(self.thinking), reasoning_field)
        if self.calls:
            message |= {"content": content or None, "tool_calls": [_call_json(*call) for call in self.calls]}
        if self.annotations:
            message["annotations"] = self.annotations
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs_json(self.tokens)
            or ({"content": [], "refusal": None} if self.has_logprobs else None),
            "finish_reason": self.finish_reason or default_reason,
        }


def _call_json(block: BlockStart, arguments: Sequence[str]) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": "".join(arguments)}
    return {"id": block.id, "type": "function", "function": function}


def collect(
    events: Iterable[LoggedEvent],
    *,
    completion_id: str,
    model: str,
    created: int,
    n: int,
    reasoning_field: str = REASONING_FIELDS[0],
    include_reasoning: bool = True,
    return_token_ids: bool = False,
    prompt_token_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the whole log as one `chat.completion`; raise the error that it ended in.

    `include_reasoning` False leaves the thoughts out.
    """
    choices = [_Choice() for _ in range(n)]
    blocks, annotations, done = _Blocks(), Annotations(n), None
    events, of_prompt = without_prompt(events)
    for logged in events:
        event = logged.event
        if isinstance(event, Token):
            kind = blocks.kind_of(event)
            choices[event.choice].take(event, kind)
            annotations.note(event, kind)
        elif isinstance(event, BlockStart):
            blocks.note(event)
            annotations.note(event, event.kind)
            if event.kind == TOOL_USE:
                choices[event.choice].calls.append((event, []))
        elif isinstance(event, Citation):
            for choice, one in annotations.of(event):
                choices[choice].annotations.append({name: one[name] for name in ("type", "url_citation")})
        elif isinstance(event, ChoiceDone):
            choices[event.choice].finish_reason = event.finish_reason
        elif is_terminal(event):
            done = successful(event)
    assert done is not None, "the log has no terminal event"
    field = reasoning_field if include_reasoning else None
    shown = [one.as_json(index, done.finish_reason, field) for index, one in enumerate(choices)]
    if return_token_ids:
        shown = [{**one, "token_ids": choice.token_ids} for one, choice in zip(shown, choices, strict=True)]
    return {
        **_head(completion_id, created, model),
        "choices": shown,
        "usage": _usage_json(done.usage),
        **({} if prompt_token_ids is None else {"prompt_token_ids": list(prompt_token_ids)}),
        **({FIELD: prompt_logprobs_json(of_prompt)} if of_prompt else {}),
    }


def from_text(
    text: str, *, completion_id: str, model: str, created: int, finish_reason: str, usage: Usage
) -> dict[str, Any]:
    """Return what is left of a `chat.completion` whose events are dropped: its text, without thoughts and calls."""
    choice = _Choice(tokens=[Token(text=text, token_ids=())])
    return {
        **_head(completion_id, created, model),
        "choices": [choice.as_json(0, finish_reason, REASONING_FIELDS[0])],
        "usage": _usage_json(usage),
    }


def _head(completion_id: str, created: int, model: str) -> dict[str, Any]:
    head = {"id": completion_id, "object": "chat.completion", "created": created, "model": model}
    return {**head, "system_fingerprint": fingerprint(model)}


@lru_cache(maxsize=64)
def fingerprint(model: str) -> str:
    """Return what names the software and the model of an answer: the same in every process of a release."""
    return "fp_" + hashlib.sha256(f"{__version__}/{model}".encode(errors="replace")).hexdigest()[:12]


def _thinking_json(text: str, field: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text} if field == "both" else {field: text}


def _usage_json(usage: Usage) -> dict[str, Any]:
    """Return the counts with both details, which the native shape leaves out where they are 0."""
    return {**usage.as_json(), "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}


def _logprobs_json(tokens: Sequence[Token]) -> dict[str, Any] | None:
    """Return `{"content": […], "refusal": null}`, or None if no token carries logprobs."""
    if all(token.logprobs is None for token in tokens):
        return None
    content = [position for token in tokens for position in token.payload().get("logprobs", [])]
    return {"content": content, "refusal": None}


def error_json(body: ErrorBody) -> dict[str, Any]:
    """Return the body of an error response, or of an error frame."""
    kind = _ERROR_TYPES.get(body.http_status, "invalid_request_error" if body.http_status < 500 else "server_error")
    return {"error": {"message": body.message, "type": kind, "param": body.param, "code": body.code}}


def models_json(models: Sequence[DescribesModel]) -> dict[str, Any]:
    """Return the body of `GET /v1/models`."""
    return {"object": "list", "data": [model_json(model) for model in models]}


def model_json(model: DescribesModel) -> dict[str, Any]:
    """Return the body of `GET /v1/models/{id}`."""
    out: dict[str, Any] = {
        "id": model.alias,
        "object": "model",
        "created": model.created,
        "owned_by": "streamserve",
    }
    return out if not model.max_model_len else {**out, "max_model_len": model.max_model_len}
