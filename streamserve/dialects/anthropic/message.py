"""A message of the Messages API: an answer as its events (`message_start` … `message_stop`), or whole. Pure.

    message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop | error

A message has one choice. Its blocks are ours, numbered anew: those that are empty or of a kind that this API lacks are
left out. Citations belong to a block of text there. What is cited while no text is open waits for the next text; a
last, empty block shows what is left. `ping` is the keepalive. An end without success is `error`, and nothing after it.
`request` parses bodies.

Errors and models have the shapes of that API too (anthropic 2.12, `types/shared/error_response.py`, `model_info.py`).
Beside the fields of the public API an error has our `code` and `param`; `details.error_code` is the code again, where
the official client looks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from streamserve.dialects.encoder import Frame, FrameIds, PieceEncoder
from streamserve.dialects.fields import Table, digits, plain_text, read
from streamserve.dialects.fold import (
    THINKING,
    TOOL_USE,
    Answer,
    AnswerBlock,
    Block,
    BlockBegun,
    BlockEnded,
    ChoiceEnded,
    Cited,
    Delta,
    Failed,
    Piece,
    Succeeded,
)
from streamserve.dialects.named import DescribedModel, NamedStream
from streamserve.protocol.errors import BadRequest, ErrorBody, to_body
from streamserve.protocol.events import TEXT, Approval, Citation, Meta, Usage
from streamserve.protocol.json_body import loads_written
from streamserve.protocol.sse import frame, one_line_json

VERSION_HEADER = "anthropic-version"
# By status; any other below 500 is the request's fault, any above the server's.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MOST_ON_A_PAGE, _ON_A_PAGE = 1000, 20


def error_json(body: ErrorBody) -> dict[str, Any]:
    """Return the body of an error response, or the data of an `error` event."""
    kind = _ERROR_TYPES.get(body.http_status, "invalid_request_error" if body.http_status < 500 else "api_error")
    error = {
        "type": kind,
        "message": body.message,
        "code": body.code,
        "param": body.param,
        "details": {"error_code": body.code},
    }
    return {"type": "error", "error": error, "request_id": body.request_id or None}


def model_json(model: DescribedModel) -> dict[str, Any]:
    """Return the body of `GET /v1/models/{id}`. A model that is not loaded yet is of 1970, as there."""
    return {
        "type": "model",
        "id": model.alias,
        "display_name": model.alias,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len or None,
    }


def models_json(models: Sequence[DescribedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of `GET /v1/models`: `limit` of them, after `after_id` or before `before_id`."""
    asked = parse_list(query)
    items, limit = [model_json(model) for model in models], asked["limit"]
    ids = [item["id"] for item in items]
    if "before_id" in asked:
        end = _place(asked["before_id"], ids, "before_id")
        begin = max(0, end - limit)
        has_more = begin > 0
    else:
        begin = _place(asked["after_id"], ids, "after_id") + 1 if "after_id" in asked else 0
        end = min(begin + limit, len(items))
        has_more = end < len(items)
    shown = list(items[begin:end])
    edges = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"data": shown, "has_more": has_more, **edges}


LIST: Table = {"limit": digits(1, _MOST_ON_A_PAGE), "before_id": plain_text(0, 256), "after_id": plain_text(0, 256)}


def parse_list(query: Mapping[str, str]) -> dict[str, Any]:
    """Check the query of a list; other parameters count for nothing, as there. It always has a `limit`."""
    return {"limit": _ON_A_PAGE, **read({name: query[name] for name in LIST if name in query}, LIST)}


def _place(id_: str, ids: Sequence[str], param: str) -> int:
    if id_ not in ids:
        raise BadRequest(f"No model here has the id in '{param}'.", code="invalid_value", param=param)
    return ids.index(id_)


_DIALECT = "m"  # in the ids of frames
PING = frame('{"type":"ping"}', event="ping")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
# The type and the field of a block's deltas: the kinds of blocks that a message has.
_DELTAS = {
    TEXT: ("text_delta", "text"),
    THINKING: ("thinking_delta", "thinking"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}


def identity(stream: NamedStream) -> dict[str, Any]:
    """Return what names a message, streamed or whole."""
    return {"message_id": f"msg_{stream.id}", "model": stream.model}


def encoder_for(stream: NamedStream, **options: Any) -> MessageEncoder:
    """Return the encoder of that stream: the same bytes for a reader of the answer and for a reader who resumes it.

    `options` are the options of `MessageEncoder`.
    """
    return MessageEncoder(stream.log_id, **options, **identity(stream))


class MessageEncoder(PieceEncoder):
    """One reader's events. Each has its name on an `event:` line, without which the official client drops it.

    `shows_thinking` False leaves the text of the thinking blocks out: they stay, and are empty.
    """

    keepalive = keepalive_event = PING

    def __init__(
        self,
        log_id: str,
        *,
        message_id: str,
        model: str,
        shows_thinking: bool = True,
        last_id: str = "",
    ) -> None:
        super().__init__(FrameIds(log_id, _DIALECT, last_id))
        self._message_id, self._model, self._shows_thinking = message_id, model, shows_thinking
        self._open: Block | None = None  # the block that is shown; text stays open for what is cited after it
        self._num_shown = 0
        self._sources: dict[tuple[str, str], int] = {}
        self._held: list[dict[str, Any]] = []  # citations that wait for a text
        self._ended: ChoiceEnded | None = None
        self._asked: list[dict[str, Any]] = []

    def show(self, piece: Piece) -> Sequence[Frame]:
        """Return the piece's events."""
        return [Frame(one_line_json(event), event=event["type"]) for event in self._events(piece)]

    def _events(self, piece: Piece) -> list[dict[str, Any]]:
        match piece:
            case Delta(block, token) if block.choice == 0 and token.text and block.kind in _DELTAS:
                kind, field = _DELTAS[block.kind]
                is_shown = block.kind != THINKING or self._shows_thinking
                return [*self._begin(block), *([self._delta({"type": kind, field: token.text})] if is_shown else [])]
            case BlockBegun(block) if block.choice == 0:
                ended = self._end()
                return [*ended, *self._begin(block)] if block.kind == TOOL_USE else ended  # calls may have no arguments
            case BlockEnded(block, signature) if block.choice == 0 and block.kind != TEXT:
                return self._end(signature or "")
            case Cited(citation, places) if 0 in places:
                self._held.append({"type": "citations_delta", "citation": _citation_json(citation, self._sources)})
                return self._cite() if self._open is not None and self._open.kind == TEXT else []
            case Approval():
                self._asked.append(piece.payload())
            case ChoiceEnded(choice) if choice == 0:
                self._ended = piece
            case Meta():
                usage = Usage(prompt_tokens=piece.prompt_tokens, cached_tokens=piece.cached_tokens)
                return [{"type": "message_start", "message": self._message_json(usage)}]
            case Succeeded(done):
                assert self._ended is not None  # the fold ends every choice before
                blocks = self._end()
                if self._held:
                    blocks += [*self._begin(Block(choice=0, index=0)), *self._end()]
                asked = {"approvals": self._asked} if self._asked else {}
                stop = _stop_json(self._ended) | asked
                delta = {"type": "message_delta", "delta": stop, "usage": usage_json(done.usage)}
                return [*blocks, delta, {"type": "message_stop"}]
            case Failed():
                return [error_json(to_body(piece.error()))]
        return []

    def _message_json(self, usage: Usage) -> dict[str, Any]:
        head = _head_json(self._message_id, self._model)
        return {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_json(usage)}

    def _begin(self, block: Block) -> list[dict[str, Any]]:
        """Open a block, unless it is open."""
        if self._open is not None:
            return []
        self._open = block
        self._num_shown += 1
        start = {"type": "content_block_start", "index": self._num_shown - 1, "content_block": _empty_json(block)}
        return [start, *self._cite()] if block.kind == TEXT else [start]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_shown - 1, "delta": delta}

    def _cite(self) -> list[dict[str, Any]]:
        held, self._held = self._held, []
        return [self._delta(one) for one in held]

    def _end(self, signature: str = "") -> list[dict[str, Any]]:
        """Close the open block, if any."""
        if self._open is None:
            return []
        is_thinking, self._open = self._open.kind == THINKING, None
        signed = [self._delta({"type": "signature_delta", "signature": signature})] if is_thinking else []
        return [*signed, {"type": "content_block_stop", "index": self._num_shown - 1}]


def _citation_json(citation: Citation, numbers: dict[tuple[str, str], int]) -> dict[str, Any]:
    """Return a citation. `numbers`: of the sources that the message has cited, where a new source gets its own."""
    return {
        "type": "search_result_location",
        "cited_text": "",
        "search_result_index": numbers.setdefault((citation.source, citation.id), len(numbers)),
        "source": citation.url or f"{citation.source}/{citation.id}",
        "title": citation.title,
        "start_block_index": 0,
        "end_block_index": 1,
    }


def message_json(answer: Answer, *, message_id: str, model: str, shows_thinking: bool = True) -> dict[str, Any]:
    """Return the whole answer as one `message`; raise the error that it ended in."""
    done, choice = answer.done, answer.choices[0]
    assert choice.ended is not None
    content: list[dict[str, Any]] = []
    sources: dict[tuple[str, str], int] = {}
    held: list[dict[str, Any]] = []
    is_text_open = False
    for part in choice.parts:
        if isinstance(part, Cited):
            held.append(_citation_json(part.citation, sources))
        else:
            is_text_open = part.kind == TEXT and bool(part.text)
            if part.kind == TOOL_USE or (part.kind in _DELTAS and part.text):
                content.append(_block_json(part, shows_thinking=shows_thinking))
        if held and is_text_open:
            content[-1].setdefault("citations", []).extend(held)
            held = []
    if held:
        content.append({**_empty_json(Block(choice=0, index=0)), "citations": held})
    head = _head_json(message_id, model)
    asked = {"approvals": [one.payload() for one in answer.approvals]} if answer.approvals else {}
    return {**head, "content": content, **_stop_json(choice.ended), "usage": usage_json(done.usage), **asked}


def _head_json(message_id: str, model: str) -> dict[str, Any]:
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}


def _empty_json(block: Block) -> dict[str, Any]:
    """Return a block as it begins."""
    if block.kind == TOOL_USE:
        return {"type": TOOL_USE, "id": block.id, "name": block.name or "", "input": {}}
    return {"type": block.kind, block.kind: "", **({"signature": ""} if block.kind == THINKING else {})}


def _block_json(part: AnswerBlock, *, shows_thinking: bool) -> dict[str, Any]:
    """Return a whole block: of a call the object of its arguments."""
    block = _empty_json(part.block)
    if part.kind == TOOL_USE:
        return {**block, "input": _input_of(part.text) if part.text else {}}
    if part.kind == THINKING:
        return {**block, THINKING: part.text if shows_thinking else "", "signature": part.signature or ""}
    return {**block, TEXT: part.text}


def _input_of(text: str) -> dict[str, Any]:
    """Return the arguments. What is no JSON stays text, under `partial_json`: those that were cut by `max_tokens`.

    So do those that a reply could not hold: NaN, a number too large, half of a surrogate pair.
    """
    try:
        value = loads_written(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"partial_json": text}


def _stop_json(ended: ChoiceEnded) -> dict[str, Any]:
    if ended.finish_reason == "stop" and ended.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_string}
    return {"stop_reason": _STOP_REASONS.get(ended.finish_reason, "end_turn"), "stop_sequence": None}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the counts. Here `input_tokens` are those that were not found in the prefix cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
