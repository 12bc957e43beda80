"""The native dialect: `POST /streams` bodies in, numbered SSE events and WebSocket messages out (docs/events.md).

Every event of the log is one frame or message, with `event.payload()` as its data: blocks and citations too, and
`unknown` events, so that ids stay dense. Clients ignore events whose name they do not know. Before `done` stands `meta`
once more, with what is known only then (`closing_meta`): it is made from `done`, is in no log, and has no id. Other
dialects show less of the same log. `"format": "tokens"` and `"text"` are plainer: see `TokensEncoder`, `TextEncoder`.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from typing import Any, NamedTuple, cast

from streamserve.dialects.asked import ASKED, Asked, asked_of
from streamserve.dialects.conversation import Ask, conversation_fields, take_ask
from streamserve.dialects.fields import Fields, Reader, Table, boolean, conflict, integer, number, one_of, read, text
from streamserve.dialects.fold import TRIMMED, Answer
from streamserve.dialects.generate import build, request_fields, sampling_fields, scoring_fields
from streamserve.dialects.named import NamedStream
from streamserve.dialects.pace import refuse_silent
from streamserve.dialects.query import query_values
from streamserve.dialects.tools import tool_fields, with_tools
from streamserve.protocol.errors import ErrorBody
from streamserve.protocol.events import Approval, Citation, Done, GoingAway, LoggedEvent, Meta, Status, Token
from streamserve.protocol.glass import MAX_RECONNECTS, MAX_SECONDS, ReaderTimes, disorder
from streamserve.protocol.ids import event_id
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import SYSTEM_ROLES, GenerateRequest, Message
from streamserve.protocol.sse import (
    CONTENT_TYPE,
    FIRST_BYTES,
    KEEPALIVE,
    frame,
    numbered_head,
    one_line_json,
    one_line_json_string,
)

# The citations and steps of a run, and what it asks its user.
Outline = Sequence[Citation | Status | Approval]
FORMATS = ("native", "tokens", "text")
MAX_SEQ = 2**53  # what JavaScript counts exactly
_MAX_SEALED_CHARS = 100_000
STOP_FIELDS: Table = {"seen_seq": integer(0, MAX_SEQ)}
ACK_FIELDS: Table = Fields({"reader": text(1, 32), "seq": integer(0, MAX_SEQ), "away": boolean}, "reader", "seq")
_SECONDS = number(0.0, MAX_SECONDS)
TIMES_FIELDS: Table = Fields(
    {
        **{one.name: _SECONDS for one in dataclass_fields(ReaderTimes)},
        "reconnects": integer(0, MAX_RECONNECTS),
        "hidden": boolean,
    },
    "headers",
)

_OWN_FIELDS: Table = {"format": one_of(*FORMATS), **ASKED}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest(Asked):
    """A checked body: what to generate, and how to show it. An answer without a reader is parked by default.

    With an `ask` the last of its messages stands for the conversation's, and a `model` "" for the conversation's model.
    """

    generate: GenerateRequest
    ask: Ask | None = None
    format: str = "native"
    on_disconnect: str = "park"


def parse(
    body: Mapping[str, Any],
    limits: Limits,
    *,
    default_model: str,
    unseal: Callable[[str], str] | None = None,
    in_conversations: bool = False,
) -> NativeRequest:
    """Check every field of a `POST /streams` body; raise `BadRequest` naming the first wrong field.

    `unseal` opens `sealed_system`, the system prompt of a chat element's page. Without it that field is unknown; so are
    the fields of conversations, unless `in_conversations`.
    """
    values = read(body, body_fields(limits, has_page=unseal is not None, in_conversations=in_conversations))
    ask = take_ask(body, values) if in_conversations else None
    format = values.get("format", "native")
    if format != "native" and values.get("n", 1) > 1:
        raise conflict(f"format {format} shows one choice; use native for n above 1.", "n")
    for name in ("logprobs", "prompt_logprobs"):
        if format != "native" and name in values:
            raise conflict(f"format {format} does not show {name}; use native.", name)
    refuse_silent(values, format)
    if "prompt_logprobs" in values and "prompt" not in values:
        raise conflict("prompt_logprobs are of a bare prompt; send prompt, or leave it out.", "prompt_logprobs")
    generate = build(values, limits, default_model=default_model if ask is None else "")
    if "tools" in values or "tool_choice" in values:
        generate = with_tools(generate, values)
    if unseal is not None and "sealed_system" in values:
        generate = _with_page_system(generate, unseal(values["sealed_system"]))
    return NativeRequest(
        generate=generate,
        ask=ask,
        format=format,
        **asked_of(values),
    )


@lru_cache(maxsize=8)  # built once, as the tables that it is made of
def body_fields(limits: Limits, *, has_page: bool, in_conversations: bool) -> Mapping[str, Reader]:
    """Return the readers of a body; pages of chat elements, and conversations, have fields of their own."""
    fields = {
        **sampling_fields(limits),
        **scoring_fields(limits),
        **request_fields(limits),
        **tool_fields(limits),
        **_OWN_FIELDS,
    }
    if has_page:
        fields["sealed_system"] = text(1, _MAX_SEALED_CHARS)
    if in_conversations:
        fields |= conversation_fields(limits)
    return fields


def _with_page_system(request: GenerateRequest, system: str) -> GenerateRequest:
    """Return the request with the page's system prompt before its messages."""
    if request.messages is None:
        raise conflict("sealed_system goes before messages, not before a bare prompt.", "sealed_system")
    if any(message.role in SYSTEM_ROLES for message in request.messages):
        raise conflict("sealed_system is the system prompt; messages must not bring another.", "messages")
    own = Message(role="system", content=system, param="sealed_system")
    return replace(request, messages=(own, *request.messages))


def read_flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a field that is true or false; null and absent are `default`."""
    value = body.get(name)
    return default if value is None else boolean(value, name)


def parse_query(query: Mapping[str, str], limits: Limits, *, default_model: str) -> NativeRequest:
    """Check the query of `GET /streams/new`: the fields of `parse` whose values are text, numbers or true and false."""
    return parse(query_values(query), limits, default_model=default_model)


def parse_stop(body: Mapping[str, Any]) -> int | None:
    """Check a stop's body; return its `seen_seq`, the last event that was seen."""
    seen_seq: int | None = read(body, STOP_FIELDS).get("seen_seq")
    return seen_seq


class Ack(NamedTuple):
    """The reader, by `Streamserve-Reader` of its response, has every event up to `seq`; `is_away`: it does not look."""

    reader: str
    seq: int
    is_away: bool


def parse_ack(body: Mapping[str, Any]) -> Ack:
    """Check an acknowledgement's body."""
    fields = read(body, ACK_FIELDS)
    return Ack(fields["reader"], fields["seq"], fields.get("away", False))


def parse_times(body: Mapping[str, Any]) -> ReaderTimes:
    """Check a reader's report: each number, and the order of its moments."""
    times = ReaderTimes(**read(body, TIMES_FIELDS))
    wrong = disorder(times)
    if wrong is not None:
        later, earlier = wrong
        raise conflict(f"'{later}' is less than '{earlier}', which it cannot be.", later)
    return times


def meta_of(stream: NamedStream) -> Meta:
    """Return what names the stream, for a reader that has its first event already."""
    return Meta(model=stream.model, stream_id=stream.id, created=stream.created, has_token_ids=stream.has_token_ids)


def closing_meta(meta: Meta, done: Done, outline: Outline = ()) -> dict[str, Any]:
    """Return `meta` as it stands before `done`: with the latency, the cached tokens, and what a run left out."""
    out, usage = done.payload(), done.usage
    counts = {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
    whole = {**meta.payload(), **counts, "latency": out["latency"], "latency_ms": out["latency_ms"]}
    trimmed = trimmed_of(outline)
    return {**whole, "trimmed": trimmed} if trimmed else whole


class NativeEncoder:
    """Every event of the log as one SSE frame: `event:` its type, `id:` its place, `data:` its payload.

    `stream`: for `closing_meta`, where the reader may have the first event already.
    """

    content_type = CONTENT_TYPE
    first_bytes = FIRST_BYTES
    keepalive, keepalive_event = KEEPALIVE, frame("{}", event="keepalive")
    takes_snapshots = True

    def __init__(self, log_id: str, stream: NamedStream | None = None) -> None:
        self._log_id, self._stream = log_id, stream
        self._meta: Meta | None = None  # once the reader was shown it
        self._token_head = numbered_head(Token.type, f"{log_id}-")

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the event's frame; before the frame of `done` stands the frame of `closing_meta`."""
        event = logged.event
        if isinstance(event, Token) and event.logprobs is None:  # nearly every event: the general case, written out
            ids = event.token_ids
            token_ids = str(ids[0]) if len(ids) == 1 else ",".join(map(str, ids))
            data = f'"token_ids":[{token_ids}],"index":{event.index},"choice":{event.choice}'
            text = one_line_json_string(event.text)
            return f'{self._token_head}{logged.seq}\ndata: {{"text":{text},{data}}}\n\n'.encode()
        id = event_id(self._log_id, logged.seq) if logged.seq else None  # seq 0: not in the log
        before = b""
        if isinstance(event, Meta):
            self._meta = event
        elif isinstance(event, Done):
            meta, outline = self._meta, cast(Outline, ())
            if self._stream is not None:
                meta, outline = meta or meta_of(self._stream), self._stream.outline
            if meta is not None:
                before = frame(one_line_json(closing_meta(meta, event, outline)), event=Meta.type)
        return before + frame(one_line_json(event.payload()), event=event.type, id=id)

    def going_away(self, notice: GoingAway) -> bytes:
        """Return where to resume, and when. Without an `id:` line: an EventSource keeps the id of its last event."""
        data = {
            "id": notice.stream_id,
            "after": notice.seq,
            "event_id": event_id(self._log_id, notice.seq),
            "retry": notice.retry_ms,
        }
        return frame(one_line_json(data), event="farewell", retry_ms=notice.retry_ms)


def websocket_message(stream_id: str, log_id: str, logged: LoggedEvent) -> dict[str, Any]:
    """Return the same event as a WebSocket message."""
    place = {"event_id": event_id(log_id, logged.seq), "seq": logged.seq} if logged.seq else {}  # 0: not in the log
    return {"type": "event", "id": stream_id, **place, "event": logged.event.type, "data": logged.event.payload()}


def closing_message(stream: NamedStream, done: Done) -> dict[str, Any]:
    """Return `closing_meta` as a WebSocket message, which precedes the message of `done`."""
    data = closing_meta(meta_of(stream), done, stream.outline)
    return {"type": "event", "id": stream.id, "event": Meta.type, "data": data}


def error_json(body: ErrorBody) -> dict[str, Any]:
    """Return the body of an error response."""
    return {"error": {"code": body.code, "message": body.message, "param": body.param}}


def outline_json(outline: Iterable[Citation | Status | Approval]) -> dict[str, list[dict[str, Any]]]:
    """Return steps and citations, each in order, and what a run asks its user, if anything."""
    events = list(outline)
    asked = [event.payload() for event in events if isinstance(event, Approval)]
    return {
        "steps": [event.payload() for event in events if isinstance(event, Status)],
        "citations": [event.payload() for event in events if isinstance(event, Citation)],
        **({"approvals": asked} if asked else {}),
    }


def trimmed_of(outline: Iterable[Citation | Status | Approval]) -> list[dict[str, Any]]:
    """Return what was cut of the contexts: passages kept, of how many, and the sentence that readers saw."""
    cut = (event for event in outline if isinstance(event, Status) and event.status == TRIMMED)
    return [{"kept": event.step, "of": event.of, "message": event.message} for event in cut]


def run_json(answer: Answer, *, stream_id: str, pipeline: str, created: int) -> dict[str, Any]:
    """Return a whole run: id, text, steps, citations, the fields of `done`. Raises the error that ended the run."""
    done, trimmed = answer.done, trimmed_of(answer.steps)
    return {
        "id": stream_id,
        "pipeline": pipeline,
        "created": created,
        **({"meta": {"trimmed": trimmed}} if trimmed else {}),
        "text": answer.choices[0].text,
        **outline_json([*answer.steps, *answer.citations, *answer.approvals]),
        **({} if answer.state is None else {"state": answer.state}),
        **({"customs": [one.payload() for one in answer.customs]} if answer.customs else {}),
        **done.payload(),
    }
