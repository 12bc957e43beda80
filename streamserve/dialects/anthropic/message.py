"""The log as the events of a message (`message_start` … `message_stop`), or collected into one `message`.

    message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop | error

Blocks are ours, numbered anew: those that are empty or of a kind that this API lacks are left out. Citations belong to
a block of text there. What is cited while none is open waits for the next one; a last, empty one shows what is left.
`ping` is the keepalive. An end without success is `error`, and nothing after it. Pure folds; `request` parses bodies.

Errors and models have the shapes of that API too (anthropic 2.12, `types/shared/error_response.py`, `model_info.py`).
Beside the fields of the public API an error has our `code` and `param`; `details.error_code` is the code again, where
the official client looks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from streamserve.dialects.base import GOING_DOWN, Ending, FrameIds, ending
from streamserve.dialects.openai.chat import DescribesModel, IsStream
from streamserve.protocol.errors import BadRequest, ErrorBody, to_body
from streamserve.protocol.events import (
    TEXT,
    BlockStart,
    BlockStop,
    ChoiceDone,
    Citation,
    Done,
    Event,
    GoingAway,
    LoggedEvent,
    Meta,
    Token,
    Usage,
)
from streamserve.protocol.json_body import loads_written
from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, frame, one_line_json

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


def model_json(model: DescribesModel) -> dict[str, Any]:
    """Return the body of `GET /v1/models/{id}`. A model that is not loaded yet is of 1970, as there."""
    return {
        "type": "model",
        "id": model.alias,
        "display_name": model.alias,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len or None,
    }


def models_json(models: Sequence[DescribesModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of `GET /v1/models`: `limit` of them, after `after_id` or before `before_id`."""
    return page_json([model_json(model) for model in models], query)


def page_json(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of `items` that the query names; an id that is not there is refused."""
    limit = limit_of(query)
    ids = [item["id"] for item in items]
    if "before_id" in query:
        end = _place(query["before_id"], ids, "before_id")
        begin = max(0, end - limit)
        has_more = begin > 0
    else:
        begin = _place(query["after_id"], ids, "after_id") + 1 if "after_id" in query else 0
        end = min(begin + limit, len(items))
        has_more = end < len(items)
    shown = list(items[begin:end])
    edges = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"data": shown, "has_more": has_more, **edges}


def limit_of(query: Mapping[str, str]) -> int:
    """Return how many items a query asks for."""
    text = query.get("limit", str(_ON_A_PAGE))
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= _MOST_ON_A_PAGE):
        message = f"'limit' is a number from 1 to {_MOST_ON_A_PAGE:,}."
        raise BadRequest(message, code="invalid_value", param="limit")
    return int(text)


def _place(id_: str, ids: Sequence[str], param: str) -> int:
    if id_ not in ids:
        raise BadRequest(f"'{param}' is the id of nothing in this list.", code="invalid_value", param=param)
    return ids.index(id_)


DIALECT = "m"  # in the ids of frames
THINKING, TOOL_USE = "thinking", "tool_use"
PING = frame('{"type":"ping"}', event="ping")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
# A block's fields at its start, and the type and the field of its deltas.
_EMPTY: dict[str, dict[str, Any]] = {TEXT: {"text": ""}, THINKING: {"thinking": "", "signature": ""}}
_DELTAS = {
    TEXT: ("text_delta", "text"),
    THINKING: ("thinking_delta", "thinking"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}


class MessageFold:
    """A fold of the first choice: each event of the log → the message's events, in order.

    `shows_thinking` False leaves the text of the thinking blocks out: they stay, and are empty.
    """

    def __init__(self, *, message_id: str, model: str, shows_thinking: bool = True) -> None:
        self._message_id, self._model, self._shows_thinking = message_id, model, shows_thinking
        self._kind = TEXT  # of the log's newest block; text 0 is implied
        self._index = -1  # of the newest block that is shown
        self._is_open = False
        self._held: list[dict[str, Any]] = []  # citations
        self._sources: dict[tuple[str, str], int] = {}
        self._end: ChoiceDone | None = None

    def feed(self, event: Event) -> Iterator[dict[str, Any]]:
        """Yield what `event` adds. Run it to its end."""
        if isinstance(event, Token):
            if event.choice == 0 and event.text and self._kind in _DELTAS:
                yield from self._open()
                kind, field = _DELTAS[self._kind]
                if self._kind != THINKING or self._shows_thinking:
                    yield self._delta({"type": kind, field: event.text})
        elif isinstance(event, BlockStart):
            if event.choice == 0:
                yield from self._close()
                self._kind = event.kind
                if event.kind == TOOL_USE:  # a call without arguments is one
                    yield from self._open({"id": event.id, "name": event.name or "", "input": {}})
        elif isinstance(event, BlockStop):
            if event.choice == 0 and self._kind != TEXT:  # text stays open for what is cited after it
                yield from self._close(event.signature or "")
        elif isinstance(event, Citation):
            yield from self._cite(event)
        elif isinstance(event, ChoiceDone):
            self._end = event if event.choice == 0 else self._end
        elif isinstance(event, Meta):
            yield self._start(event)
        else:
            yield from self._finish(event)

    def _start(self, meta: Meta) -> dict[str, Any]:
        usage = Usage(prompt_tokens=meta.prompt_tokens, cached_tokens=meta.cached_tokens)
        message: dict[str, Any] = {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_json(usage),
        }
        return {"type": "message_start", "message": message}

    def _open(self, fields: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        if self._is_open:
            return
        self._is_open = True
        self._index += 1
        block = {"type": self._kind, **(_EMPTY[self._kind] if fields is None else fields)}
        yield {"type": "content_block_start", "index": self._index, "content_block": block}
        if self._kind == TEXT:
            held, self._held = self._held, []
            yield from (self._delta(one) for one in held)

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self, signature: str = "") -> Iterator[dict[str, Any]]:
        if self._is_open:
            self._is_open = False
            if self._kind == THINKING:
                yield self._delta({"type": "signature_delta", "signature": signature})
            yield {"type": "content_block_stop", "index": self._index}

    def _cite(self, cited: Citation) -> Iterator[dict[str, Any]]:
        if cited.choice:
            return
        number = self._sources.setdefault((cited.source, cited.id), len(self._sources))
        citation = {
            "type": "search_result_location",
            "cited_text": "",
            "search_result_index": number,
            "source": cited.url or f"{cited.source}/{cited.id}",
            "title": cited.title,
            "start_block_index": 0,
            "end_block_index": 1,
        }
        self._held.append({"type": "citations_delta", "citation": citation})
        if self._is_open and self._kind == TEXT:
            yield self._delta(self._held.pop())

    def _finish(self, event: Event) -> Iterator[dict[str, Any]]:
        end = ending(event)
        if end is not None:
            yield _error(end)
        elif isinstance(event, Done):
            yield from self._close()
            if self._held:
                self._kind = TEXT
                yield from self._open()
                yield from self._close()
            last = self._end or event
            delta = {"stop_reason": _STOP_REASONS.get(last.finish_reason, "end_turn"), "stop_sequence": None}
            if last.finish_reason == "stop" and last.stop_string is not None:
                delta = {"stop_reason": "stop_sequence", "stop_sequence": last.stop_string}
            yield {"type": "message_delta", "delta": delta, "usage": usage_json(event.usage)}
            yield {"type": "message_stop"}


class MessageEncoder:
    """One reader's events. Each has its name on an `event:` line, without which the official client drops it."""

    content_type = CONTENT_TYPE
    first_bytes = FIRST_BYTES
    keepalive = keepalive_event = PING
    takes_snapshots = False

    def __init__(
        self,
        log_id: str,
        *,
        message_id: str,
        model: str,
        shows_thinking: bool = True,
        after: int = 0,
        num_seen: int = 0,
    ) -> None:
        self._ids = FrameIds(log_id, DIALECT, after=after, num_seen=num_seen)
        self._fold = MessageFold(message_id=message_id, model=model, shows_thinking=shows_thinking)

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the event's frames, each with its id."""
        events = list(self._fold.feed(logged.event))
        return b"".join(_frame(event, id) for event, id in self._ids.of(logged.seq, events))

    def going_away(self, notice: GoingAway) -> bytes:
        """Return an error: the official client takes a clean end for a whole answer. The ids before it resume."""
        end = ending(GOING_DOWN)
        assert end is not None
        return _frame(_error(end))


def identity(stream: IsStream) -> dict[str, Any]:
    """Return what names a message, streamed or whole."""
    return {"message_id": f"msg_{stream.id}", "model": stream.model}


def encoder_for(stream: IsStream, **options: Any) -> MessageEncoder:
    """Return the encoder of that stream: the same bytes for a reader of the answer and for one that resumes it.

    `options` are those of `MessageEncoder`.
    """
    return MessageEncoder(stream.log_id, **options, **identity(stream))


def collect(
    events: Iterable[LoggedEvent], *, message_id: str, model: str, shows_thinking: bool = True
) -> dict[str, Any]:
    """Return the whole log as one `message`; raise the error that it ended in."""
    fold = MessageFold(message_id=message_id, model=model, shows_thinking=shows_thinking)
    message: dict[str, Any] = {}
    pieces: list[str] = []  # of the open block
    for logged in events:
        end = ending(logged.event)
        if end is not None:
            raise end.error()
        for event in fold.feed(logged.event):
            kind = event["type"]
            if kind == "message_start":
                message = event["message"]
            elif kind == "content_block_start":
                pieces = []
                message["content"].append({**event["content_block"]})
            elif kind == "content_block_delta":
                _add(message["content"][-1], event["delta"], pieces)
            elif kind == "content_block_stop":
                _fill(message["content"][-1], "".join(pieces))
            elif kind == "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message


def _add(block: dict[str, Any], delta: dict[str, Any], pieces: list[str]) -> None:
    if delta["type"] == "citations_delta":
        block.setdefault("citations", []).append(delta["citation"])
    elif delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        pieces.append(delta[_DELTAS[block["type"]][1]])


def _fill(block: dict[str, Any], text: str) -> None:
    """Set what the pieces of a block make: of a call the object of its arguments."""
    if block["type"] == TOOL_USE:
        block["input"] = _input_of(text) if text else {}
    else:
        block[block["type"]] = text


def _input_of(text: str) -> dict[str, Any]:
    """Return the arguments. What is no JSON stays text, under `partial_json`: those that were cut by `max_tokens`.

    So do those that a reply could not hold: NaN, a number too large, half of a surrogate pair.
    """
    try:
        value = loads_written(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"partial_json": text}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the counts. Here `input_tokens` are those that were not found in the prefix cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _error(end: Ending) -> dict[str, Any]:
    return error_json(to_body(end.error()))


def _frame(event: dict[str, Any], id: str | None = None) -> bytes:
    return frame(one_line_json(event), event=event["type"], id=id)
