"""`ChunkParser`: chunks of a chat or text completion → events: text, thoughts and tool calls as blocks, and usage.

    delta.content, text              → tokens of a text block (block 0 without a `block_start`, where it is the first)
    delta.reasoning_content          → tokens of a thinking block (also under vLLM's newer name `reasoning`)
    delta.tool_calls[i]              → a tool_use block for each call; its arguments are the block's tokens

Chunks are checked against types, so a server that sends something else is found here, as `UpstreamBroken`. What means
the same is read, whatever its form: text as a list of parts, arguments as an object, numbers as strings, null and ""
for what is not there, and the names of other APIs' usage and finish reasons. Pure.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from streamserve.clients.remote.errors import UpstreamBroken, UpstreamError, clean, message_of
from streamserve.protocol.events import (
    TEXT,
    BlockStart,
    BlockStop,
    BlockText,
    ChoiceDone,
    Event,
    PositionLogprobs,
    Token,
    TokenLogprob,
    Usage,
)
from streamserve.protocol.requests import ShownChoice

DONE = "[DONE]"
# Calls, and turns between thoughts and text, in one answer.
_MAX_BLOCKS = 256
_FINISH_REASONS = {
    **{reason: reason for reason in ("stop", "length", "tool_calls", "content_filter")},
    **dict.fromkeys(("function_call", "tool_use"), "tool_calls"),
    **dict.fromkeys(("max_tokens", "model_length"), "length"),
    **dict.fromkeys(("safety", "refusal"), "content_filter"),
}
_FAILED = ("abort", "error")  # SGLang's and other servers', for an answer that the server has given up


# Text, or a list of parts: strings, {"type": "text", "text": …}, {"type": "thinking", "thinking": …}.
_Text = str | list[Any] | None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | int | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: _Text = None
    refusal: str | None = None
    reasoning_content: _Text = None
    reasoning: _Text = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None  # what OpenAI had before


class _Candidate(msgspec.Struct):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    id: int | None = None
    top_logprobs: list[_Candidate] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Candidate] | None = None


class _Choice(msgspec.Struct):
    index: int | None = None
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: Any = None
    stop_reason: Any = None
    logprobs: _Logprobs | None = None
    usage: Any = None  # where some servers put it


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    message: Any = None  # of an older vLLM's error, which is the whole object
    detail: Any = None  # of FastAPI's
    object: Any = None
    timings: Any = None  # llama-server's, with the last chunk
    x_groq: Any = None  # Groq's usage, with the last chunk


_CHUNK = msgspec.json.Decoder(_Chunk, strict=False)  # numbers as strings are numbers


class _ChoiceParser:
    """One choice: its open block, how many tokens it has, and how it ended."""

    def __init__(self, number: int, shown: ShownChoice) -> None:
        self.number = number
        self.num_tokens = shown.num_tokens
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self._open = next((block for block in shown.blocks if block.is_open), None)
        self._num_blocks = len(shown.blocks)
        # Block 0 that has begun without a `block_start` is not stopped either.
        self._is_implied = self._open is not None and self._open.index == 0 and self._open.kind == TEXT
        self._call_index = 0
        self._positions: tuple[PositionLogprobs, ...] = ()  # of tokens whose text has not come

    def take(self, delta: _Delta, logprobs: tuple[PositionLogprobs, ...] | None, out: list[Event]) -> None:
        """Append the events of one delta."""
        pieces = [
            *_pieces("thinking", delta.reasoning_content or delta.reasoning),
            *_pieces(TEXT, delta.content or delta.refusal),
        ]
        is_text = delta.content is not None or bool(delta.refusal)
        if is_text and not any(kind == "thinking" for kind, _ in pieces):
            self._positions += logprobs or ()
            logprobs = None
        for kind, text in pieces:
            if kind == TEXT:
                positions, self._positions = self._positions, ()
                self._token(TEXT, text, positions, out)
            else:
                self._token(kind, text, logprobs, out)
                logprobs = None
        for call in delta.tool_calls or ():
            self._call(call, out)
        if delta.function_call is not None and not delta.tool_calls:
            self._call(_ToolCall(index=0, function=delta.function_call), out)

    def finish(self, out: list[Event]) -> None:
        """Append the end of the open block, and what is left of its log-probabilities."""
        self._show_positions(out)
        self._close(out)

    def _show_positions(self, out: list[Event]) -> None:
        """Append the log-probabilities that no text has followed, in the text block that they are of."""
        is_in_text = self._num_blocks == 0 or (self._open is not None and self._open.kind == TEXT)
        if self._positions and is_in_text:
            positions, self._positions = self._positions, ()
            self._token(TEXT, "", positions, out)

    def _token(self, kind: str, text: str, logprobs: tuple[PositionLogprobs, ...] | None, out: list[Event]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(kind, out)
        assert self._open is not None
        out.append(
            Token(text=text, token_ids=(), index=self._open.index, choice=self.number, logprobs=logprobs or None)
        )
        self.num_tokens += bool(text)

    def _call(self, call: _ToolCall, out: list[Event]) -> None:
        function = call.function or _Function()
        index, id = call.index or 0, str(call.id) if call.id else None
        is_open = self._open is not None and self._open.kind == "tool_use" and self._call_index == index
        if is_open and self._open is not None and id and id != self._open.id:
            is_open = False  # several calls that all have index 0
        if call.index is None and not id and function.name:
            is_open = False  # several calls without index and id, each of them whole
        if not is_open:
            if not function.name:
                raise UpstreamBroken("a tool call without a name")
            self._call_index = index
            self._begin("tool_use", out, id=id or f"call_{self.number}_{self._num_blocks}", name=function.name)
        if arguments := _arguments(function.arguments):
            assert self._open is not None
            out.append(Token(text=arguments, token_ids=(), index=self._open.index, choice=self.number))
            self.num_tokens += 1

    def _begin(self, kind: str, out: list[Event], *, id: str | None = None, name: str | None = None) -> None:
        if kind != TEXT:
            self._show_positions(out)
        self._close(out)
        if self._num_blocks >= _MAX_BLOCKS:
            raise UpstreamBroken(f"more than {_MAX_BLOCKS} blocks in one answer")
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        self._is_implied = index == 0 and kind == TEXT
        self._open = BlockText(index=index, kind=kind, text="", id=id, name=name, is_open=True)
        if not self._is_implied:
            out.append(BlockStart(choice=self.number, index=index, kind=kind, id=id, name=name))

    def _close(self, out: list[Event]) -> None:
        if self._open is not None and not self._is_implied:
            out.append(BlockStop(choice=self.number, index=self._open.index))
        self._open = None

    @property
    def is_text_only(self) -> bool:
        """Whether all there is so far is one text block, or nothing."""
        return self._num_blocks == 0 or (self._num_blocks == 1 and self._is_implied)


class ChunkParser:
    """Takes the data of each of the server's events, and returns ours. `usage` is the last that the server sent."""

    def __init__(self, n: int, shown: tuple[ShownChoice, ...] = ()) -> None:
        self._choices = [
            _ChoiceParser(index, shown[index] if index < len(shown) else ShownChoice()) for index in range(n)
        ]
        self._num_shown = self.num_tokens
        self.usage: Usage | None = None
        self.queue_seconds: float | None = None  # as the server reports it
        self.prefill_seconds: float | None = None
        self.is_done = False  # the server's own end mark has come

    @property
    def num_tokens(self) -> int:
        """Tokens with text so far, those shown before included."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def tokens_of_choices(self) -> tuple[int, ...]:
        """The same of each choice."""
        return tuple(choice.num_tokens for choice in self._choices)

    @property
    def has_begun(self) -> bool:
        """Whether this response has given a token."""
        return self.num_tokens > self._num_shown

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def is_text_only(self) -> bool:
        """Whether there is only the text of one choice so far, or nothing."""
        return len(self._choices) == 1 and self._choices[0].is_text_only

    @property
    def finish_reason(self) -> str:
        """How the first choice ended."""
        return self._choices[0].finish_reason or "stop"

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the only choice, where the server names it."""
        return self._choices[0].stop_string if len(self._choices) == 1 else None

    def feed(self, data: str) -> list[Event]:
        """Return the events of one chunk. Raises UpstreamBroken, UpstreamError."""
        if data.strip() == DONE:
            self.is_done = True
            return []
        try:
            chunk = _CHUNK.decode(data)
        except (ValueError, RecursionError) as error:
            raise UpstreamBroken(f"a chunk that is not what it should be: {clean(str(error))}") from error
        self._refuse_error(chunk)
        self.usage = _usage_of(chunk.usage) or self.usage
        if isinstance(chunk.timings, dict):
            self.prefill_seconds = _seconds(chunk.timings.get("prompt_ms"), 1e-3)
        for told in (chunk.usage, chunk.x_groq.get("usage") if isinstance(chunk.x_groq, dict) else None):
            if isinstance(told, dict) and "queue_time" in told:
                self.queue_seconds = _seconds(told["queue_time"])
        out: list[Event] = []
        for choice in chunk.choices or ():
            self.usage = _usage_of(choice.usage) or self.usage
            index = choice.index or 0
            if not 0 <= index < len(self._choices):
                raise UpstreamBroken(f"choice {index}, of {len(self._choices)}")
            self._take(choice, self._choices[index], out)
        return out

    def total(self) -> Usage:
        """Return the usage of the whole answer: the server's, and what was shown before this response."""
        usage = self.usage
        if usage is None:
            return Usage(completion_tokens=self.num_tokens)
        prompt_tokens = max(0, usage.prompt_tokens - self._num_shown)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=usage.completion_tokens + self._num_shown,
            cached_tokens=min(usage.cached_tokens, prompt_tokens),
            reasoning_tokens=usage.reasoning_tokens,
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
        )

    def _take(self, choice: _Choice, ours: _ChoiceParser, out: list[Event]) -> None:
        if ours.finish_reason is not None:
            return  # nothing follows it; some servers repeat the empty delta
        delta = choice.delta or _Delta(content=choice.text)
        ours.take(delta, _logprobs(choice.logprobs), out)
        # Some servers send "" until the answer ends.
        reason = choice.finish_reason.strip().lower() if isinstance(choice.finish_reason, str) else ""
        if reason in _FAILED:
            raise UpstreamError(f"finish_reason {reason}")
        if reason:
            ours.finish_reason = _FINISH_REASONS.get(reason, "stop")
            ours.stop_string = choice.stop_reason if isinstance(choice.stop_reason, str) else None
            ours.finish(out)
            if len(self._choices) > 1:
                out.append(
                    ChoiceDone(choice=ours.number, finish_reason=ours.finish_reason, stop_string=ours.stop_string)
                )

    def _refuse_error(self, chunk: _Chunk) -> None:
        if chunk.error:
            raise UpstreamError(message_of(chunk.error)[0] or "an error without a message")
        if chunk.object == "error" or (chunk.choices is None and (chunk.message or chunk.detail)):
            raise UpstreamError(message_of(chunk.message or chunk.detail)[0])


def _pieces(kind: str, text: _Text) -> list[tuple[str, str]]:
    """Return text as pieces, each of a kind of block. Raises UpstreamBroken for a part without text."""
    if not text:
        return []
    if isinstance(text, str):
        return [(kind, text)]
    pieces: list[tuple[str, str]] = []
    for part in text:
        if isinstance(part, str):
            pieces += _pieces(kind, part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            pieces += _pieces(kind, part["text"])
        elif isinstance(part, dict) and isinstance(part.get("thinking"), str | list):
            pieces += [("thinking", text) for _, text in _pieces("thinking", part["thinking"])]
        elif not isinstance(part, dict) or part.get("type") != "reference":  # Mistral's, to a source
            raise UpstreamBroken("a part of an answer's content that has no text")
    return pieces


def _arguments(given: str | dict[str, Any] | None) -> str:
    """Return a call's arguments as JSON. An object is the whole of them."""
    return given or "" if not isinstance(given, dict) else msgspec.json.encode(given).decode()


_PROMPT, _COMPLETION = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")
_CACHED = ("cached_tokens", "prompt_cache_hit_tokens", "cache_read_input_tokens")


def _usage_of(given: Any) -> Usage | None:
    """Return a usage in any form that servers give it; a count that is missing, or is none, is 0."""
    if not isinstance(given, dict):
        return None
    prompt = {**given, **(_object(given, "prompt_tokens_details") or _object(given, "input_tokens_details"))}
    completion = {**given, **(_object(given, "completion_tokens_details") or _object(given, "output_tokens_details"))}
    return Usage(
        prompt_tokens=_count(given, _PROMPT),
        completion_tokens=_count(given, _COMPLETION),
        cached_tokens=_count(prompt, _CACHED),
        reasoning_tokens=_count(completion, ("reasoning_tokens",)),
        accepted_prediction_tokens=_count(completion, ("accepted_prediction_tokens",)),
        rejected_prediction_tokens=_count(completion, ("rejected_prediction_tokens",)),
    )


def _object(given: dict[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name)
    return value if isinstance(value, dict) else {}


def _count(given: dict[str, Any], names: tuple[str, ...]) -> int:
    """Return the first of the counts that is there."""
    for name in names:
        try:
            return max(0, int(float(given[name])))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return 0


def _seconds(given: Any, unit: float = 1.0) -> float | None:
    """Return a time that a server reports, in seconds; None if the value is no time."""
    is_time = isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given < math.inf
    return given * unit if is_time else None


def _logprobs(given: _Logprobs | None) -> tuple[PositionLogprobs, ...] | None:
    """Return the positions' candidates. Most servers name no token ids here: 0 stands for them."""
    if given is None or given.content is None:
        return None
    return tuple(
        PositionLogprobs(chosen=_candidate(one), top=tuple(map(_candidate, one.top_logprobs or ())))
        for one in given.content
    )


def _candidate(one: _Candidate) -> TokenLogprob:
    try:
        raw = one.token.encode() if one.bytes is None else bytes(one.bytes)
    except ValueError as error:
        raise UpstreamBroken("a token's bytes that are no bytes") from error
    logprob = one.logprob if one.logprob is not None and one.logprob < math.inf else None  # nor NaN
    return TokenLogprob(token_id=max(0, one.id or 0), token=one.token, bytes_=raw, logprob=logprob)
