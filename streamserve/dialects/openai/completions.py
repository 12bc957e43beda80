"""The OpenAI completions dialect: `POST /v1/completions` bodies in, `text_completion` frames or a whole object out.

Shapes as the official client's types have them (openai 3.52, `types/completion.py`). A body holds one prompt or
several; each is a request of its own, and choice `prompt * n + choice` of the response. What `echo` repeats is in the
log before a choice's first id, with its log-probabilities in choice 0, which all choices show. Pure.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamserve.dialects.encoder import Frame, FrameIds, PieceEncoder
from streamserve.dialects.fields import Fields, Reader, conflict, described, integer, read
from streamserve.dialects.fold import (
    Answer,
    AnswerChoice,
    Block,
    ChoiceEnded,
    Delta,
    Failed,
    Piece,
    PromptScored,
    Succeeded,
)
from streamserve.dialects.generate import (
    Prompt,
    build,
    most_tokens,
    prompts,
)
from streamserve.dialects.named import NamedStream
from streamserve.dialects.openai.body import BodyRequest, shared_fields, shared_values
from streamserve.dialects.openai.shapes import (
    PROMPT_LOGPROBS,
    error_json,
    head_json,
    prompt_logprobs_json,
    reason_of,
)
from streamserve.protocol.errors import BadRequest, to_body
from streamserve.protocol.events import TEXT, Meta, PositionLogprobs, Token, TokenLogprob, Usage
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest
from streamserve.protocol.sse import frame, one_line_json

_DIALECT = "t"  # in the ids of frames
DEFAULT_MAX_TOKENS = 16  # of this API, whose callers rely on it
_MAX_BEST_OF = 20
# Fields of requests that a bare prompt does not have.
_OF_CHATS = ("messages", "chat_template_kwargs", "continue_final_message")
# Fields of the other APIs that have no meaning here, beside what the request should do.
_ELSEWHERE = {"messages": "Send them to /v1/chat/completions.", "suffix": "Text is continued, not filled in."}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(BodyRequest):
    """A checked body: a request for each prompt.

    `shows_prompt`: the response has the prompts' log-probabilities in vLLM's field, whatever `echo` shows.
    """

    generates: tuple[GenerateRequest, ...]
    shows_prompt: bool = False


def parse(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> CompletionRequest:
    """Check every field of a body; raise `BadRequest` naming the first wrong field."""
    values = read(body, body_fields(limits))
    given: tuple[Prompt, ...] = values["prompt"]
    values.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    n = values.get("n", 1)
    if values.get("best_of", n) != n:
        message = "best_of other than n is not supported: no answer is thrown away. Leave it out and raise n."
        raise BadRequest(message, code="unsupported_parameter", param="best_of")
    shows_prompt = PROMPT_LOGPROBS in values
    if not values["max_tokens"] and not values.get("echo") and not shows_prompt:
        raise conflict(
            f"max_tokens 0 generates nothing; raise it, or add echo or {PROMPT_LOGPROBS} for the prompt alone.",
            "max_tokens",
        )
    shared = shared_values(values)
    if values.get("echo") and "logprobs" in values:
        values.setdefault(PROMPT_LOGPROBS, values["logprobs"])
    asked = build({**values, "prompt": " "}, limits, default_model=default_model)
    generates = tuple(_with_prompt(asked, prompt) for prompt in given)
    return CompletionRequest(generates=generates, shows_prompt=shows_prompt, **shared)


def _with_prompt(request: GenerateRequest, prompt: Prompt) -> GenerateRequest:
    if isinstance(prompt, str):
        return replace(request, prompt=prompt)
    return replace(request, prompt=None, prompt_token_ids=prompt)


def body_fields(limits: Limits) -> Mapping[str, Reader]:
    """Return the readers of a body's fields."""
    readers = {
        **{name: reader for name, reader in shared_fields(limits).items() if name not in _OF_CHATS},
        "prompt": prompts(limits),
        "max_tokens": most_tokens(limits, 0),
        "best_of": integer(1, _MAX_BEST_OF),
        **{name: _refused(way_out) for name, way_out in _ELSEWHERE.items()},
    }
    return Fields(readers, "prompt")


def _refused(way_out: str) -> Reader:
    @described({"anyOf": [{"const": ""}, {"type": "array", "items": {}, "maxItems": 0}], "description": way_out})
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

    def end(self) -> list[Frame]:
        """Return what follows the streams; nothing where a stream has failed: its error was shown."""
        if self._num_open:
            return []
        chunk = Frame(one_line_json({**self._head, "choices": [], "usage": self._usage.as_json()}))
        return [chunk, Frame("[DONE]")] if self._include_usage else [Frame("[DONE]")]

    def last_bytes(self) -> bytes:
        """Return the bytes of `end`."""
        return b"".join(frame(one.data) for one in self.end())


class CompletionEncoder(PieceEncoder):
    """One stream's chunks: per choice text, then a finish chunk; then usage if asked for; then `[DONE]`.

    `joined` is shared by the encoders of one response, whose choices begin at `first_index`: those frames have no ids.
    `continuous_usage` counts in every chunk; `return_token_ids` adds ids to them, the first of a choice the prompt's.
    """

    @property
    def keepalive_event(self) -> bytes:
        """A chunk without choices, as the chunk with the usage is."""
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return frame(one_line_json({**self._head, "choices": [], **usage}))

    def __init__(
        self,
        stream: NamedStream,
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
        return_token_ids: bool = False,
        prompt_token_ids: Sequence[int] | None = None,
        joined: Joined | None = None,
        completion_id: str = "",
        first_index: int = 0,
        last_id: str = "",
    ) -> None:
        n, log_id = stream.request.n, stream.log_id if joined is None else ""
        super().__init__(FrameIds(log_id, _DIALECT, last_id), n=n)
        self._n, self._first_index = n, first_index
        self._prompt_top = _prompt_top(stream)
        self._counts = continuous_usage
        self._shows_ids = return_token_ids
        self._prompt_token_ids = prompt_token_ids
        self._joined = joined or Joined(1, include_usage=include_usage)
        self._is_alone = joined is None
        self._include_usage = include_usage
        self._head = _head(completion_id or id_of(stream), stream)
        self._begun: set[int] = set()
        self._offsets = [_Offsets() for _ in range(n)]

    def show(self, piece: Piece) -> Sequence[Frame]:
        """Return the piece's chunks."""
        match piece:
            case Delta(block, token):
                return self._text(block, token)
            case PromptScored(positions):
                shown = _shortened(positions, self._prompt_top)
                return [self._chunk(choice, "", positions=shown) for choice in range(self._n) if shown]
            case ChoiceEnded(choice, reason):
                return [self._chunk(choice, "", finish_reason=reason_of(reason))]
            case Succeeded(done):
                self._joined.note(done.usage, self._head)
                return self._joined.end() if self._is_alone else []
            case Failed():
                return [Frame(one_line_json(error_json(to_body(piece.error()))))]
            case Meta():
                self._head["created"] = piece.created
        return []

    def _text(self, block: Block, token: Token) -> Sequence[Frame]:
        is_text = block.kind == TEXT
        if not (is_text and (token.text or token.logprobs)) and not (self._shows_ids and token.token_ids):
            return []
        text, positions = (token.text, token.logprobs) if is_text else ("", None)
        return [self._chunk(token.choice, text, positions=positions, token_ids=token.token_ids)]

    def _chunk(
        self,
        choice: int,
        text: str,
        *,
        positions: Sequence[PositionLogprobs] | None = None,
        finish_reason: str | None = None,
        token_ids: Sequence[int] = (),
    ) -> Frame:
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
        usage: dict[str, Any] = {}
        if self._include_usage:
            usage = {"usage": self.fold.usage.as_json() if self._counts else None}
        return Frame(one_line_json({**self._head, "choices": [shown], **usage}))


class _Offsets:
    """Counts characters of a choice's tokens: where each of them begins in the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def take(self, token: TokenLogprob) -> int:
        begin = self._num_chars
        self._num_chars += len(self._decoder.decode(token.bytes_))
        return begin


def completion_json(
    answers: Sequence[tuple[NamedStream, Answer]],
    *,
    shows_prompt: bool = False,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Return the whole answers of a response's streams as one `text_completion`; raise the first error of any.

    With the `prompt_token_ids` of each stream, choices have these and the ids of their own tokens.
    """
    choices: list[dict[str, Any]] = []
    usage = Usage()
    for place, (stream, answer) in enumerate(answers):
        usage += answer.done.usage
        echoed = _shortened(answer.prompt, _prompt_top(stream))
        for choice in answer.choices:
            shown = _choice_json(choice, len(choices), echoed)
            if shows_prompt:
                shown[PROMPT_LOGPROBS] = prompt_logprobs_json(answer.prompt)
            if prompt_token_ids is not None:
                shown["prompt_token_ids"] = list(prompt_token_ids[place])
                shown["token_ids"] = choice.token_ids.tolist()
            choices.append(shown)
    first = answers[0][0]
    return {**_head(id_of(first), first), "choices": choices, "usage": usage.as_json()}


def _choice_json(choice: AnswerChoice, index: int, echoed: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """Return a choice, whose log-probabilities begin with the prompt's, where `echo` shows the prompt."""
    texts = [block for block in choice.blocks if block.kind == TEXT]
    positions = [*echoed, *(one for block in texts for one in block.logprobs or ())]
    return {
        "index": index,
        "text": choice.text,
        "logprobs": _logprobs_json(positions, _Offsets()) if positions else None,
        "finish_reason": reason_of(choice.finish_reason),
    }


def _prompt_top(stream: NamedStream) -> int | None:
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
    """Return the likeliest tokens, and the chosen token where it is not among them."""
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


def id_of(stream: NamedStream) -> str:
    """Return what names a completion: the id of its first stream."""
    return f"cmpl-{stream.id}"


def _head(completion_id: str, stream: NamedStream) -> dict[str, Any]:
    return head_json(completion_id, "text_completion", stream.created, stream.model)
