"""The messages of `/ws/streams`: the fields of those a client sends, those the server sends, and the close codes.

An event of a stream is `native.websocket_message`. docs/api.md describes the same; a test compares the two. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Protocol

from streamserve.dialects import native
from streamserve.dialects.fields import Table, any_list, any_object, boolean, integer, text, wrong_type
from streamserve.protocol.errors import StreamserveError, no_stream, to_body
from streamserve.protocol.ids import event_id, is_stream_id


class NamedStream(Protocol):
    """What a message needs of a stream, which lives in a layer above."""

    id: str
    log_id: str


class CloseCode(IntEnum):
    """Why the app closes (RFC 6455, 7.4, and its registry). Server and proxies use 1000, 1001, 1006 and 1011."""

    NOT_TEXT = 1003
    TOO_BIG = 1009
    GOING_DOWN = 1012
    TRY_LATER = 1013
    RIGHTS_LOST = 4401
    UNKNOWN_PATH = 4404
    TOO_MANY = 4429


# Errors that close the socket too.
CLOSES = {"rights_lost": CloseCode.RIGHTS_LOST, "too_many_on_socket": CloseCode.TOO_MANY}

MAX_CREDIT = 1000
_MAX_SEQ = 2**53
_SHORT = 64  # characters of `ref` and `t`


def _note(value: Any, param: str) -> Any:
    """Read a ping's `t`, which comes back as it is: a short text or a number."""
    if type(value) in (int, float):
        return value
    if not isinstance(value, str):
        wrong_type(value, param, "a string or a number")
    return text(0, _SHORT)(value, param)


def _stream_id(value: Any, param: str) -> str:
    """Read the id of a stream. One that cannot be an id is answered as one that is unknown."""
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    if not is_stream_id(value):
        raise no_stream()
    return value


_TYPE = {"type": text(1, 16)}
_ID = {"id": _stream_id}
_REF = {"ref": text(1, _SHORT)}
_CREDIT = {"credit": integer(1, MAX_CREDIT)}

FIELDS: Mapping[str, Table] = {
    "start": {**_TYPE, "request": any_object, "sent_at": integer(0, _MAX_SEQ), **_CREDIT, **_REF},
    "resume": {**_TYPE, **_ID, "after": integer(0, _MAX_SEQ), **_CREDIT, **_REF},
    "ack": {**_TYPE, **_ID, "seq": integer(0, _MAX_SEQ), "away": boolean},
    "stop": {**_TYPE, **_ID, "seen_seq": integer(0, _MAX_SEQ), **_REF},
    "input": {
        **_TYPE,
        **_ID,
        "seen_seq": integer(0, _MAX_SEQ),
        "text": text(0, _MAX_SEQ),
        "messages": any_list,
        "request": any_object,
        **_CREDIT,
        **_REF,
    },
    "ping": {**_TYPE, "t": _note},
    "pong": {**_TYPE, "t": _note},
}


def about(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what an error answer refers to: `ref` and `id` of the message, where they can be shown."""
    named = {name: values.get(name) for name in ("ref", "id")}
    return {name: value for name, value in named.items() if isinstance(value, str) and len(value) <= _SHORT}


def started(stream: NamedStream, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a start, or to an input, whose `id` is the stream that is continued."""
    out = {"type": "started", "id": stream.id, "log_id": stream.log_id, "ref": message.get("ref")}
    return {**out, "continues": message["id"]} if "id" in message else out


def going_away(stream: NamedStream, after: int) -> dict[str, Any]:
    """Return the notice that this server stops showing a stream, which can be resumed after event `after`."""
    return {"type": "farewell", "id": stream.id, "after": after, "event_id": event_id(stream.log_id, after)}


def failure(error: StreamserveError, subject: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error about a message, or about a stream."""
    return {"type": "error", **subject, **native.error_json(to_body(error))}


def internal_error() -> StreamserveError:
    """Return the error for a fault of the server's own."""
    return StreamserveError("The server failed on this message. Its log has the cause.")
