"""The native dialect: `POST /streams` bodies in, numbered SSE events and WebSocket messages out (docs/api.md).

Every event of the log is one frame or message, with `event.payload()` as its data: blocks and citations too, and an
`unknown` one, so that ids stay dense. Clients ignore events whose name they do not know. Other dialects show less of
the same log. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.fields import integer, one_of, read
from streamserve.dialects.generate import build, conflict, request_fields, sampling_fields
from streamserve.protocol.errors import BadRequest, ErrorBody
from streamserve.protocol.events import GoingAway, LoggedEvent, Token
from streamserve.protocol.ids import event_id
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest
from streamserve.protocol.sse import (
    CONTENT_TYPE,
    FIRST_BYTES,
    KEEPALIVE,
    frame,
    numbered_head,
    one_line_json,
    one_line_json_string,
)

FORMATS = ("native", "tokens", "text")
ON_DISCONNECT = ("park", "abort")
MAX_SEQ = 2**53  # what JavaScript counts exactly
_STOP_FIELDS = {"seen_seq": integer(0, MAX_SEQ)}

on_disconnect = one_of(*ON_DISCONNECT)
_OWN_FIELDS = {"format": one_of(*FORMATS), "on_disconnect": on_disconnect}

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_DECIMAL = re.compile(r"-?[0-9]{1,20}\.[0-9]{1,20}")
# Fields of a query that are text whatever they look like: `?prompt=42` asks "42".
_TEXT_FIELDS = frozenset({"prompt", "model", "stop", "format", "on_disconnect"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest:
    """A checked body: what to generate, how to show it, and what becomes of the answer when its reader disconnects.

    `latency_class` is what the body names; None leaves it to the defaults of key, route and model.
    """

    generate: GenerateRequest
    latency_class: str | None = None
    format: str = "native"
    on_disconnect: str = "park"


def parse(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> NativeRequest:
    """Check every field of a `POST /streams` body; raise `BadRequest` naming the first wrong one."""
    values = read(body, {**sampling_fields(limits), **request_fields(limits), **_OWN_FIELDS})
    format = values.get("format", "native")
    if format != "native" and values.get("n", 1) > 1:
        raise conflict(f"format {format} shows one choice; use native for n above 1.", "n")
    if format != "native" and "logprobs" in values:
        raise conflict(f"format {format} does not show logprobs; use native.", "logprobs")
    return NativeRequest(
        generate=build(values, limits, default_model=default_model),
        latency_class=values.get("latency_class"),
        format=format,
        on_disconnect=values.get("on_disconnect", "park"),
    )


def parse_query(query: Mapping[str, str], limits: Limits, *, default_model: str) -> NativeRequest:
    """Check the query of `GET /streams/new`: the fields of `parse` whose values are text, numbers or true and false."""
    return parse({name: _scalar(name, query[name]) for name in query}, limits, default_model=default_model)


def parse_stop(body: Mapping[str, Any]) -> int | None:
    """Check a stop's body; return its `seen_seq`, the last event that was seen."""
    seen_seq: int | None = read(body, _STOP_FIELDS).get("seen_seq")
    return seen_seq


def _scalar(name: str, text: str) -> Any:
    """Return a query value as the JSON value it spells; any other stays text, which its field's reader refuses."""
    try:
        (name + text).encode()
    except UnicodeEncodeError:
        raise BadRequest("The query holds half of a surrogate pair.", code="invalid_value") from None
    if name in _TEXT_FIELDS:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    return {"true": True, "false": False}.get(text, text)


class NativeEncoder:
    """Every event of the log as one SSE frame: `event:` its type, `id:` its place, `data:` its payload."""

    content_type = CONTENT_TYPE
    first_bytes = FIRST_BYTES
    keepalive = KEEPALIVE
    takes_snapshots = True

    def __init__(self, log_id: str) -> None:
        self._log_id = log_id
        self._token_head = numbered_head(Token.type, event_id(log_id, 0)[:-1])

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the event's one frame."""
        event = logged.event
        if isinstance(event, Token) and event.logprobs is None:  # nearly every event: the general case, written out
            data = f'"token_ids":{_int_list(event.token_ids)},"index":{event.index},"choice":{event.choice}'
            text = one_line_json_string(event.text)
            return f'{self._token_head}{logged.seq}\ndata: {{"text":{text},{data}}}\n\n'.encode()
        id = event_id(self._log_id, logged.seq) if logged.seq else None  # seq 0: not in the log
        return frame(one_line_json(event.payload()), event=event.type, id=id)

    def going_away(self, notice: GoingAway) -> bytes:
        """Return where to resume, and when. Without an `id:` line: an EventSource keeps the id of its last event."""
        data = {
            "id": notice.stream_id,
            "after": notice.seq,
            "event_id": event_id(self._log_id, notice.seq),
            "retry": notice.retry_ms,
        }
        return frame(one_line_json(data), event="farewell", retry_ms=notice.retry_ms)


def _int_list(numbers: tuple[int, ...]) -> str:
    """Return them as compact JSON."""
    return f"[{numbers[0]}]" if len(numbers) == 1 else f"[{','.join(map(str, numbers))}]"


def websocket_message(stream_id: str, log_id: str, logged: LoggedEvent) -> dict[str, Any]:
    """Return the same event as a WebSocket message."""
    place = {"event_id": event_id(log_id, logged.seq), "seq": logged.seq} if logged.seq else {}  # 0: not in the log
    return {"type": "event", "id": stream_id, **place, "event": logged.event.type, "data": logged.event.payload()}


def error_json(body: ErrorBody) -> dict[str, Any]:
    """Return the body of an error response."""
    return {"error": {"code": body.code, "message": body.message, "param": body.param}}
