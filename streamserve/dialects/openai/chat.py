"""The OpenAI chat dialect: an answer as `chat.completion.chunk` frames, or whole as one `chat.completion`. Pure.

Shapes as the official client's types have them (openai 3.52, `types/chat`). A failure after the head is one
`data: {"error": {…}}`, which makes that client raise, and then no `[DONE]`. Text blocks are `content`. Thinking is
`reasoning_content` and `reasoning`, fields that other servers added; the public API has none. A tool_use block is an
entry of `tool_calls`: its id and name first, then its arguments piece by piece. Token ids, where they are asked for,
are in vLLM's fields. Bodies are parsed in request.py.

Citations with a url are annotations (`AnnotationURLCitation`). That type requires a title and a place in the content. A
citation without a title shows its source. Citations without a url have no such form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from streamserve.dialects.encoder import Frame, FrameIds, PieceEncoder
from streamserve.dialects.fold import (
    THINKING,
    TOOL_USE,
    Answer,
    AnswerBlock,
    AnswerChoice,
    Block,
    BlockBegun,
    ChoiceEnded,
    Cited,
    Delta,
    Failed,
    Piece,
    Succeeded,
)
from streamserve.dialects.named import NamedStream
from streamserve.dialects.openai.shapes import PROMPT_LOGPROBS, error_json, head_json, prompt_logprobs_json, reason_of
from streamserve.protocol.errors import to_body
from streamserve.protocol.events import TEXT, Approval, Citation, Meta, PositionLogprobs, Token, Usage
from streamserve.protocol.sse import frame, one_line_json

# With obfuscation a delta's JSON is filled up to a multiple of this, so that its size reveals little about its text.
_OBFUSCATED_CHARS = 64
# Values of the setting REASONING_FIELD: which field of a delta or message has the thinking. The first is the default.
REASONING_FIELDS = ("both", "reasoning_content", "reasoning")
_DIALECT = "c"  # in the ids of frames


def identity(stream: NamedStream) -> dict[str, Any]:
    """Return what names a completion, in each of its chunks or as a whole."""
    return {"completion_id": f"chatcmpl-{stream.id}", "model": stream.model, "created": stream.created}


def encoder_for(stream: NamedStream, **options: Any) -> ChatEncoder:
    """Return the encoder of that stream: the same bytes for a reader of the answer and for a reader who resumes it.

    `options` are the options of `ChatEncoder`.
    """
    return ChatEncoder(stream.log_id, n=stream.request.n, **options, **identity(stream))


class ChatEncoder(PieceEncoder):
    """One reader's chunks: per choice a role chunk, deltas, a finish chunk; then usage if asked for; then `[DONE]`."""

    @property
    def keepalive_event(self) -> bytes:
        """A chunk without choices, as the chunk with the usage is."""
        return frame(self._chunk([]).data)

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
        last_id: str = "",
    ) -> None:
        super().__init__(FrameIds(log_id, _DIALECT, last_id), n=n)
        self._head = head_json(completion_id, "chat.completion.chunk", created, model)
        self._include_usage, self._include_obfuscation = include_usage, include_obfuscation
        self._usage = Usage() if continuous_usage else None  # as the next chunk shows it
        self._reasoning_field = reasoning_field if include_reasoning else None
        self._has_ids = return_token_ids
        self._prompt_token_ids = prompt_token_ids  # until the first chunk has shown them
        self._started: set[int] = set()
        self._num_cited: Counter[int] = Counter()
        self._num_asked = 0

    def show(self, piece: Piece) -> Sequence[Frame]:
        """Return the piece's chunks."""
        match piece:
            case Delta(block, token):
                return self._delta(block, token)
            case BlockBegun(block):
                return self._call(block)
            case Cited(citation, places) if citation.url is not None:
                return [one for choice in places for one in self._cite(choice, citation, places[choice])]
            case Approval():
                asked = {"index": self._num_asked, **piece.payload()}
                self._num_asked += 1
                return self._show(0, {"approvals": [asked]})
            case ChoiceEnded(choice, reason):
                return [*self._start(choice), self._choice(choice, {}, finish_reason=reason_of(reason))]
            case Succeeded(done):
                return [*([self._chunk([], usage=done.usage)] if self._include_usage else []), Frame("[DONE]")]
            case Failed():
                return [Frame(one_line_json(error_json(to_body(piece.error()))))]
            case Meta():
                self._head["created"] = piece.created  # the log's, also in a process that has only the row
                self._count()
        return []

    def _count(self) -> None:
        """Show the counts of all that was fed in the chunks that follow."""
        if self._usage is not None:
            self._usage = self.fold.usage

    def _call(self, block: Block) -> Sequence[Frame]:
        """Return the first chunk of a call, which has all but its arguments."""
        if block.kind != TOOL_USE:
            return []
        function = {"name": block.name or "", "arguments": ""}
        call = {"index": block.call, "id": block.id, "type": "function", "function": function}
        return self._show(block.choice, {"tool_calls": [call]})

    def _cite(self, choice: int, citation: Citation, place: tuple[int, int]) -> Sequence[Frame]:
        """Return the annotation's chunk. Its index is its number: the official client joins deltas by it."""
        index = self._num_cited[choice]
        self._num_cited[choice] += 1
        return self._show(choice, {"annotations": [{"index": index, **_annotation_json(citation, place)}]})

    def _delta(self, block: Block, token: Token) -> Sequence[Frame]:
        delta = self._delta_of(block, token)
        # Before the token counts: what precedes the last frame must not depend on how tokens are joined.
        start = [] if delta is None else self._start(token.choice, "" if "content" in delta else None)
        self._count()
        if delta is None:
            return []
        logprobs = None
        if block.kind == TEXT and token.logprobs is not None:
            logprobs = _logprobs_json(token.logprobs)
        return [*start, *self._show(token.choice, delta, logprobs=logprobs, token_ids=token.token_ids)]

    def _delta_of(self, block: Block, token: Token) -> dict[str, Any] | None:
        """Return what a token adds to its choice; None for nothing."""
        if block.kind == TEXT and (token.text or token.logprobs):
            return {"content": token.text}
        if block.kind == THINKING and token.text and self._reasoning_field is not None:
            return _thinking_json(token.text, self._reasoning_field)
        if block.kind == TOOL_USE and token.text:
            return {"tool_calls": [{"index": block.call, "function": {"arguments": token.text}}]}
        return {} if self._has_ids and token.token_ids else None  # as in vLLM: each id is shown with its event

    def _show(
        self, choice: int, delta: dict[str, Any], *, logprobs: Any = None, token_ids: Sequence[int] = ()
    ) -> list[Frame]:
        start = self._start(choice, "" if "content" in delta else None)
        chunk = self._choice(choice, delta, logprobs=logprobs, token_ids=token_ids)
        return [*start, _obfuscated(chunk) if self._include_obfuscation else chunk]

    def _start(self, choice: int, content: str | None = "") -> list[Frame]:
        """Return the choice's first chunk, once. Its content is null where the answer does not begin with text."""
        if choice in self._started:
            return []
        self._started.add(choice)
        return [self._choice(choice, {"role": "assistant", "content": content, "refusal": None})]

    def _choice(
        self,
        choice: int,
        delta: dict[str, Any],
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        token_ids: Sequence[int] = (),
    ) -> Frame:
        shown = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._has_ids:
            shown["token_ids"] = list(token_ids)
        return self._chunk([shown])

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> Frame:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._prompt_token_ids is not None:
            chunk["prompt_token_ids"], self._prompt_token_ids = list(self._prompt_token_ids), None
        if self._include_usage:
            usage = usage or self._usage
            chunk["usage"] = None if usage is None else _usage_json(usage)
        return Frame(one_line_json(chunk))


def _obfuscated(chunk: Frame) -> Frame:
    """Return the chunk with an `obfuscation` that makes the length of its JSON in bytes a multiple of 64."""
    begin = chunk.data[:-1]
    num_bytes = len((begin + ',"obfuscation":""}').encode())
    return Frame(begin + f',"obfuscation":"{"0" * (-num_bytes % _OBFUSCATED_CHARS)}"}}')


def completion_json(
    answer: Answer,
    *,
    completion_id: str,
    model: str,
    created: int,
    reasoning_field: str = REASONING_FIELDS[0],
    include_reasoning: bool = True,
    return_token_ids: bool = False,
    prompt_token_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the whole answer as one `chat.completion`; raise the error that it ended in.

    `include_reasoning` False leaves the thoughts out.
    """
    done, field = answer.done, reasoning_field if include_reasoning else None
    shown: list[dict[str, Any]] = []
    approvals = {"approvals": [one.payload() for one in answer.approvals]} if answer.approvals else {}
    for choice in answer.choices:
        ids = {"token_ids": choice.token_ids.tolist()} if return_token_ids else {}
        shown.append(
            {
                "index": choice.number,
                "message": _message_json(choice, field) | approvals,
                "logprobs": _logprobs_of(list(choice.blocks)),
                "finish_reason": reason_of(choice.finish_reason),
                **ids,
            }
        )
    return {
        **head_json(completion_id, "chat.completion", created, model),
        "choices": shown,
        "usage": _usage_json(done.usage),
        **({} if prompt_token_ids is None else {"prompt_token_ids": list(prompt_token_ids)}),
        **({PROMPT_LOGPROBS: prompt_logprobs_json(answer.prompt)} if answer.prompt else {}),
    }


def _message_json(choice: AnswerChoice, reasoning_field: str | None) -> dict[str, Any]:
    content = choice.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    thoughts = [block.text for block in choice.blocks if block.kind == THINKING and block.num_deltas]
    if thoughts and reasoning_field is not None:
        message |= _thinking_json("".join(thoughts), reasoning_field)
    calls = [_call_json(block) for block in choice.blocks if block.kind == TOOL_USE]
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    cited = [part for part in choice.parts if isinstance(part, Cited) and part.citation.url is not None]
    if cited:
        message["annotations"] = [_annotation_json(one.citation, one.places[choice.number]) for one in cited]
    return message


def _call_json(call: AnswerBlock) -> dict[str, Any]:
    function = {"name": call.block.name or "", "arguments": call.text}
    return {"id": call.block.id, "type": "function", "function": function}


def _annotation_json(citation: Citation, place: tuple[int, int]) -> dict[str, Any]:
    start, end = place
    cited = {"url": citation.url, "title": citation.title or citation.source, "start_index": start, "end_index": end}
    return {"type": "url_citation", "url_citation": cited}


def _thinking_json(text: str, field: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text} if field == "both" else {field: text}


def _usage_json(usage: Usage) -> dict[str, Any]:
    """Return the counts with both details, which the native shape leaves out where they are 0."""
    out = usage.as_json()
    details = {"reasoning_tokens": usage.reasoning_tokens, **out.get("completion_tokens_details", {})}
    return {**out, "completion_tokens_details": details}


def _logprobs_of(blocks: Sequence[AnswerBlock]) -> dict[str, Any] | None:
    """Return the log-probabilities of the text, or None if no token of any block has any."""
    if all(block.logprobs is None for block in blocks):
        return None
    return _logprobs_json([one for block in blocks if block.kind == TEXT for one in block.logprobs or ()])


def _logprobs_json(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    return {"content": [position.as_json() for position in positions], "refusal": None}
