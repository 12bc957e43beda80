"""The OpenAI completions dialect: `POST /v1/completions` bodies in, `text_completion` frames or one whole object out.

Shapes as the official client's types have them (openai 3.52, `types/completion.py`). A body holds one prompt or
several; each is a request of its own, and choice `prompt * n + choice` of the response. What `echo` repeats is in the
log before a choice's first id, with its log-probabilities in choice 0, which all choices show. Pure folds.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamserve.dialects.base import GOING_DOWN, FrameIds, TextBlocks, ending, successful
from streamserve.dialects.fields import (
    Reader,
    boolean,
    conflict,
    integer,
    object_of,
    one_of,
    read,
    required,
)
from streamserve.dialects.generate import (
    Prompt,
    alias_fields,
    build,
    most_tokens,
    prompt_logprobs,
    prompts,
    request_fields,
    sampling_fields,
)
from streamserve.dialects.grammar_fields import format_fields, take_format
from streamserve.dialects.native import ON_DISCONNECT
from streamserve.dialects.openai.chat import IsStream, UsageSoFar, error_json, fingerprint
from streamserve.dialects.openai.parts import (
    FIELD,
    is_of_prompt,
    prompt_logprobs_json,
    refuse_streamed,
    without_prompt,
)
from streamserve.dialects.openai.request import IGNORED, elsewhere_fields, usage_options
from streamserve.dialects.pace import PACE, SITES_OWN, Pace, pace_of
from streamserve.protocol.errors import BadRequest, to_body
from streamserve.protocol.events import (
    BlockStart,
    ChoiceDone,
    Done,
    Event,
    GoingAway,
    LoggedEvent,
    Meta,
    PositionLogprobs,
    Token,
    TokenLogprob,
    Usage,
    is_terminal,
)
from streamserve.protocol.requests import GenerateRequest, Limits
from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, KEEPALIVE, frame, one_line_json

DIALECT = "t"  # in the ids of frames
DEFAULT_MAX_TOKENS = 16  # of this API, whose callers rely on it
_MAX_BEST_OF = 20
_STREAM_OPTIONS = {"include_usage": boolean, "include_obfuscation": boolean, "continuous_usage_stats": boolean}
# Fields of the other APIs that have no meaning here, beside what the request should do.
_ELSEWHERE = {"messages": "Send them to /v1/chat/completions.", "suffix": "Text is continued, not filled in."}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked body: a request for each prompt. See `ChatRequest` for the other fields.

    `shows_prompt`: the response has the prompts' log-probabilities in vLLM's field, whatever `echo` shows.
    `grammar_field` is where the grammar stood.
    """

    generates: tuple[GenerateRequest, ...]
    latency_class: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    on_disconnect: str = ""
    pace: Pace = SITES_OWN
    shows_prompt: bool = False
    grammar_field: str = "grammar"


def parse(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> CompletionRequest:
    """Check every field of a body; raise `BadRequest` naming the first wrong one."""
    values = read(body, _table(limits))
    given: tuple[Prompt, ...] = required(values, "prompt")
    values.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    n = values.get("n", 1)
    if values.get("best_of", n) != n:
        message = "best_of other than n is not supported: no answer is thrown away. Leave it out and raise n."
        raise BadRequest(message, code="unsupported_parameter", param="best_of")
    shows_prompt = FIELD in values
    if not values["max_tokens"] and not values.get("echo") and not shows_prompt:
        raise conflict(
            "max_tokens 0 generates nothing; raise it, or add echo or prompt_logprobs for the prompt alone.",
            "max_tokens",
        )
    refuse_streamed(values)
    grammar_field = take_format(values)
    if values.get("echo") and "logprobs" in values:
        values.setdefault(FIELD, values["logprobs"])
    if "stream_options" in values and not values.get("stream", False):
        raise conflict("stream_options is for streams; set stream to true or leave it out.", "stream_options")
    if "seed" in values:
        values["seed"] &= 2**63 - 1  # negative seeds are legal here
    asked = build({**values, "prompt": " "}, limits, default_model=default_model)
    return CompletionRequest(
        generates=tuple(_with_prompt(asked, prompt) for prompt in given),
        latency_class=values.get("latency_class"),
        stream=values.get("stream", False),
        **usage_options(values.get("stream_options", {})),
        return_token_ids=values.get("return_token_ids", False),
        on_disconnect=values.get("on_disconnect", ""),
        pace=pace_of(values),
        shows_prompt=shows_prompt,
        grammar_field=grammar_field,
    )


def _with_prompt(request: GenerateRequest, prompt: Prompt) -> GenerateRequest:
    if isinstance(prompt, str):
        return replace(request, prompt=prompt)
    return replace(request, prompt=None, prompt_token_ids=prompt)


def _table(limits: Limits) -> Mapping[str, Reader]:
    without = ("messages", "prompt", "chat_template_kwargs", "continue_final_message")
    shared = {name: reader for name, reader in request_fields(limits).items() if name not in without}
    return {
        **sampling_fields(limits),
        **alias_fields(limits),
        **shared,
        **IGNORED,
        **elsewhere_fields(),
        "prompt": prompts(limits),
        "max_tokens": most_tokens(limits, 0),
        "seed": integer(-(2**63), 2**63 - 1),
        FIELD: prompt_logprobs(limits),
        **format_fields(limits),
        "best_of": integer(1, _MAX_BEST_OF),
        "stream": boolean,
        "stream_options": object_of(_STREAM_OPTIONS),
        "on_disconnect": one_of(*ON_DISCONNECT),
        **PACE,
        "return_token_ids": boolean,
        **{name: _refused(way_out) for name, way_out in _ELSEWHERE.items()},
    }


def _refused(way_out: str) -> Reader:
    def reader(value: Any, param: str) -> None:
        if value not in ("", []):
            message = f"{param} is not supported by /v1/completions. {way_out}"
            raise BadRequest(message, code="unsupported_parameter", param=param)

    return reader


class Joined:
    """The end of a response that several streams share: their usage, and one `[DONE]` after all have succeeded.

    It follows the frames of all streams, which may leave in another order than that in which they were encoded.
    """

    def __init__(self, num_streams: int, *, include_usage: bool) -> None:
        self._num_open = num_streams
        self._include_usage = include_usage
        self._usage = Usage()
        self._head: Mapping[str, Any] = {}

    def note(self, usage: Usage, head: Mapping[str, Any]) -> None:
        """Note that a stream has succeeded."""
        self._usage += usage
        self._head = head
        self._num_open -= 1

    def end(self) -> list[str]:
        """Return what follows the streams; nothing where one of them has failed, which its error has said."""
        if self._num_open:
            return []
        chunk = {**self._head, "choices": [], "usage": self._usage.as_json()}
        return [one_line_json(chunk), "[DONE]"] if self._include_usage else ["[DONE]"]

    def last_bytes(self) -> bytes:
        """Return `end` as frames."""
        return b"".join(map(frame, self.end()))


class CompletionEncoder:
    """One stream's chunks: per choice text, then a finish chunk; then usage if asked for; then `[DONE]`.

    `joined` is shared by the encoders of one response, whose choices begin at `first_index`: those frames have no ids.
    `continuous_usage` counts in every chunk; `return_token_ids` adds ids to them, the first of a choice the prompt's.
    """

    content_type = CONTENT_TYPE
    first_bytes = FIRST_BYTES
    keepalive = KEEPALIVE
    takes_snapshots = False

    @property
    def keepalive_event(self) -> bytes:
        """A chunk without choices, as the one with the usage is."""
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return frame(one_line_json({**self._head, "choices": [], **usage}))

    def __init__(
        self,
        stream: IsStream,
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
        return_token_ids: bool = False,
        prompt_token_ids: Sequence[int] | None = None,
        joined: Joined | None = None,
        completion_id: str = "",
        first_index: int = 0,
        after: int = 0,
        num_seen: int = 0,
    ) -> None:
        self._n, self._first_index = stream.request.n, first_index
        self._prompt_top = _prompt_top(stream)
        self._ids = FrameIds(stream.log_id, DIALECT, after=after, num_seen=num_seen) if joined is None else None
        self._counts = UsageSoFar() if continuous_usage else None
        self._shows_ids = return_token_ids
        self._prompt_token_ids = prompt_token_ids
        self._joined = joined or Joined(1, include_usage=include_usage)
        self._include_usage = include_usage
        self._head = _head(completion_id or id_of(stream), stream)
        self._blocks = TextBlocks()
        self._has_token_ids = True
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._offsets = [_Offsets() for _ in range(self._n)]

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the event's frames, each with its id where the response has one stream."""
        data = self._data(logged.event)
        if self._ids is None:
            return b"".join(map(frame, data))
        return b"".join(frame(one, id=id) for one, id in self._ids.of(logged.seq, data))

    def going_away(self, notice: GoingAway) -> bytes:
        """Return an error: the clients of this API take a clean end for a whole answer. The ids before it resume."""
        return b"".join(map(frame, self._end(GOING_DOWN)))

    def _data(self, event: Event) -> list[str]:
        if isinstance(event, Token):
            return self._text(event)
        if isinstance(event, ChoiceDone):
            return self._finish(event.choice, event.finish_reason)
        if isinstance(event, BlockStart):
            self._blocks.note(event)
        if isinstance(event, Meta):
            self._head["created"] = event.created
            self._has_token_ids = event.has_token_ids
            if self._counts is not None:
                self._counts.begin(event)
        return self._end(event) if is_terminal(event) else []

    def _text(self, token: Token) -> list[str]:
        if is_of_prompt(token, has_token_ids=self._has_token_ids):
            shown = _shortened(token.logprobs or (), self._prompt_top)
            return [self._chunk(choice, "", positions=shown) for choice in range(self._n) if shown]
        if self._counts is not None and (token.token_ids or not self._has_token_ids):  # else `echo` repeats the prompt
            self._counts.note(token)
        is_text = token in self._blocks
        if not (is_text and (token.text or token.logprobs)) and not (self._shows_ids and token.token_ids):
            return []
        text, positions = (token.text, token.logprobs) if is_text else ("", None)
        return [self._chunk(token.choice, text, positions=positions, token_ids=token.token_ids)]

    def _finish(self, choice: int, reason: str) -> list[str]:
        if choice in self._finished:
            return []
        self._finished.add(choice)
        return [self._chunk(choice, "", finish_reason=reason)]

    def _end(self, event: Event) -> list[str]:
        end = ending(event)
        if end is not None:
            return [one_line_json(error_json(to_body(end.error())))]
        assert isinstance(event, Done)
        out = [data for choice in range(self._n) for data in self._finish(choice, event.finish_reason)]
        self._joined.note(event.usage, self._head)
        return out if self._ids is None else [*out, *self._joined.end()]

    def _chunk(
        self,
        choice: int,
        text: str,
        *,
        positions: Sequence[PositionLogprobs] | None = None,
        finish_reason: str | None = None,
        token_ids: Sequence[int] = (),
    ) -> str:
        shown: dict[str, Any] = {
            "index": self._first_index + choice,
            "text": text,
            "logprobs": _logprobs_json(positions, self._offsets[choice]) if positions else None,
            "finish_reason": finish_reason,
        }
        if self._shows_ids:
            shown["token_ids"] = list(token_ids)
            if self._prompt_token_ids is not None and choice not in self._begun:
                self._begun.add(choice)
                shown["prompt_token_ids"] = list(self._prompt_token_ids)
        chunk = {**self._head, "choices": [shown]}
        if not self._include_usage:
            return one_line_json(chunk)
        return one_line_json({**chunk, "usage": None if self._counts is None else self._counts.usage.as_json()})


class _Offsets:
    """Counts characters of a choice's tokens: where each of them begins in the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def take(self, token: TokenLogprob) -> int:
        begin = self._num_chars
        self._num_chars += len(self._decoder.decode(token.bytes_))
        return begin


@dataclass(slots=True)
class _Choice:
    """One choice of a completion being collected."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def as_json(self, index: int, default_reason: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(self.texts),
            "logprobs": _logprobs_json(self.positions, _Offsets()) if self.positions else None,
            "finish_reason": self.finish_reason or default_reason,
        }


def collect(
    answers: Sequence[tuple[IsStream, Iterable[LoggedEvent]]],
    *,
    shows_prompt: bool = False,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Return the whole logs of a response's streams as one `text_completion`; raise the first error one ended in.

    With the `prompt_token_ids` of each stream, choices have these and the ids of their own tokens.
    """
    choices: list[dict[str, Any]] = []
    usage = Usage()
    for number, (stream, events) in enumerate(answers):
        found, of_prompt, done = _collect_one(events, stream)
        more: dict[str, Any] = {FIELD: prompt_logprobs_json(of_prompt)} if shows_prompt else {}
        for one in found:
            if prompt_token_ids is not None:
                more = {**more, "prompt_token_ids": list(prompt_token_ids[number]), "token_ids": one.token_ids}
            choices.append({**one.as_json(len(choices), done.finish_reason), **more})
        usage += done.usage
    first = answers[0][0]
    return {**_head(id_of(first), first), "choices": choices, "usage": usage.as_json()}


def _collect_one(events: Iterable[LoggedEvent], stream: IsStream) -> tuple[list[_Choice], list[PositionLogprobs], Done]:
    """Return the choices, which have the prompt's log-probabilities as `echo` shows them, and these by themselves."""
    choices, blocks, done = [_Choice() for _ in range(stream.request.n)], TextBlocks(), None
    events, of_prompt = without_prompt(events)
    for logged in events:
        event = logged.event
        if isinstance(event, Token):
            choices[event.choice].token_ids += event.token_ids
            if event in blocks:
                choices[event.choice].texts.append(event.text)
                choices[event.choice].positions += event.logprobs or ()
        elif isinstance(event, BlockStart):
            blocks.note(event)
        elif isinstance(event, ChoiceDone):
            choices[event.choice].finish_reason = event.finish_reason
        elif is_terminal(event):
            done = successful(event)
    assert done is not None, "the log has no terminal event"
    echoed = _shortened(of_prompt, _prompt_top(stream))
    for choice in choices:
        choice.positions = [*echoed, *choice.positions]
    return choices, of_prompt, done


def _prompt_top(stream: IsStream) -> int | None:
    """Return how many candidates of a prompt token `logprobs` shows; None where it shows none: without `echo`."""
    return stream.request.sampling.logprobs if stream.request.echo else None


def _shortened(positions: Sequence[PositionLogprobs], top: int | None) -> list[PositionLogprobs]:
    return [] if top is None else [replace(one, top=one.top[:top]) for one in positions]


def _logprobs_json(positions: Sequence[PositionLogprobs], offsets: _Offsets) -> dict[str, Any]:
    """Return the legacy shape. A prompt's first token has neither a log-probability nor candidates."""
    return {
        "tokens": [_name(one.chosen) for one in positions],
        "token_logprobs": [one.chosen.as_json()["logprob"] for one in positions],
        "top_logprobs": [_top_json(one) for one in positions],
        "text_offset": [offsets.take(one.chosen) for one in positions],
    }


def _top_json(position: PositionLogprobs) -> dict[str, float] | None:
    """Return the likeliest tokens, and the chosen one where it is not among them."""
    if position.chosen.logprob is None:
        return None
    found: dict[str, float] = {}
    for one in (*position.top, position.chosen):
        found.setdefault(_name(one), one.as_json()["logprob"])
    return found


def _name(token: TokenLogprob) -> str:
    """Return a token's text; `bytes:\\xe2\\x80` where it is a part of a code point, as that API has it."""
    try:
        return token.bytes_.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes_)


def id_of(stream: IsStream) -> str:
    """Return what names a completion: the id of its first stream."""
    return f"cmpl-{stream.id}"


def _head(completion_id: str, stream: IsStream) -> dict[str, Any]:
    head = {"id": completion_id, "object": "text_completion", "created": stream.created, "model": stream.model}
    return {**head, "system_fingerprint": fingerprint(stream.model)}
