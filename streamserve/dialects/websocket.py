"""The messages of `/ws/streams`: the fields of those a client sends, those the server sends, and the close codes.

An event of a stream is `native.websocket_message`. docs/websocket.md describes the same; a test compares the two.

`NextTurn` makes of an `input` message, the request before and its answer the next request. A field that the caller set
in the request before keeps its value unless the input changes it; a field that it left open is open again. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Protocol

from streamserve.dialects import native
from streamserve.dialects.approvals import read_approvals
from streamserve.dialects.asked import ON_DISCONNECT, on_disconnect
from streamserve.dialects.fields import (
    Table,
    any_list,
    any_object,
    boolean,
    conflict,
    integer,
    one_of,
    read,
    text,
    wrong_type,
)
from streamserve.dialects.generate import build, request_fields, sampling_fields
from streamserve.dialects.messages import messages, refuse_too_long
from streamserve.dialects.native import NativeRequest
from streamserve.dialects.pace import EVENT, PACE, Pace, pace_of
from streamserve.protocol.errors import BadRequest, Gone, StreamserveError, no_stream, to_body
from streamserve.protocol.ids import event_id, is_stream_id
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest, Message


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
    """Read the id of a stream. A text that cannot be an id is answered as an unknown id."""
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    if not is_stream_id(value):
        raise no_stream()
    return value


_TYPE = {"type": text(1, 16)}
_ID = {"id": _stream_id}
_REF = {"ref": text(1, _SHORT)}
_CREDIT = {"credit": integer(1, MAX_CREDIT)}
_PACE: Table = {**PACE, "keepalive": one_of(EVENT)}  # its keepalive is a message, `ping`

FIELDS: Mapping[str, Table] = {
    "start": {**_TYPE, "request": any_object, "sent_at": integer(0, _MAX_SEQ), **_CREDIT, **_REF},
    "resume": {**_TYPE, **_ID, "after": integer(0, _MAX_SEQ), **_CREDIT, **_PACE, **_REF},
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
    "approve": {**_TYPE, **_ID, "approvals": read_approvals, **_CREDIT, **_PACE, **_REF},
    "ping": {**_TYPE, "t": _note},
    "pong": {**_TYPE, "t": _note},
}


def check_pace(pace: Pace) -> None:
    """Raise BadRequest for a keepalive that a socket does not have."""
    if pace.keepalive is not None:
        _PACE["keepalive"](pace.keepalive, "keepalive")


def about(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what an error answer refers to: `ref` and `id` of the message, where they can be shown."""
    named = {name: values.get(name) for name in ("ref", "id")}
    return {name: value for name, value in named.items() if isinstance(value, str) and len(value) <= _SHORT}


def started(
    stream: NamedStream, message: Mapping[str, Any], ids: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the answer to a start; or to an input or an approval, whose `id` is the stream that is continued.

    `ids`: of what the start has added to a conversation.
    """
    out = {"type": "started", "id": stream.id, "log_id": stream.log_id, "ref": message.get("ref"), **ids}
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


_FIXED = frozenset({"messages", "prompt", "n"})  # fields of a start that `request` cannot change


class NextTurn:
    """A checked input message: `text` or `messages`, and in `request` the fields that change."""

    def __init__(self, message: Mapping[str, Any], limits: Limits) -> None:
        if ("text" in message) == ("messages" in message):
            code = "conflicting_fields" if "text" in message else "missing_field"
            raise BadRequest("Send text or messages.", code=code, param="text")
        has_text = "text" in message
        self._turns = _user_turn(message["text"]) if has_text else messages(limits)(message["messages"], "messages")
        self._limits = limits
        table = {**sampling_fields(limits), **request_fields(limits), "on_disconnect": on_disconnect, **_PACE}
        changeable = {name: reader for name, reader in table.items() if name not in _FIXED}
        self._changed = read(message.get("request", {}), changeable)

    def after(self, before: GenerateRequest, answer: str | Message, on_disconnect: str) -> NativeRequest:
        """Return the request for `before`'s conversation, then `answer`, then the new turns. Its tools stay.

        Raises BadRequest or Gone for a conversation that cannot be continued, BadRequest where it becomes too long.
        """
        turn = Message(role="assistant", content=answer) if isinstance(answer, str) else answer
        values = {"on_disconnect": on_disconnect, **_given(before, self._limits), **self._changed}
        values["messages"] = (*_conversation(before, turn), *self._turns)
        refuse_too_long(values["messages"], "messages", self._limits)
        request = build(values, self._limits, default_model=before.model)
        kept = values["on_disconnect"]
        return NativeRequest(
            generate=replace(
                request,
                tools=before.tools,
                tool_choice=before.tool_choice,
                parallel_tool_calls=before.parallel_tool_calls,
            ),
            on_disconnect=kept if kept in ON_DISCONNECT else ON_DISCONNECT[0],
            pace=pace_of(self._changed),
        )


def _user_turn(text: str) -> tuple[Message, ...]:
    if not text:
        raise BadRequest("text must not be empty.", code="empty_prompt", param="text")
    return (Message(role="user", content=text),)


def _conversation(before: GenerateRequest, answer: Message) -> tuple[Message, ...]:
    """Return the turns so far and the answer, or raise an error that names what to send instead."""
    if before.messages is None and before.prompt == "":  # a finished stream of another process (streams/registry.py)
        message = "What was asked is no longer kept here. Send the whole conversation with start."
        raise Gone(message, code="conversation_gone", param="id")
    if before.messages is None:
        message = "That stream continued a bare prompt, which has no turns. Send messages with start."
        raise BadRequest(message, code="no_conversation", param="id")
    if before.n > 1:
        raise conflict("That stream has several answers. Choose an answer and send the conversation with start.", "id")
    turns = before.messages[before.has_public_system :]  # the server puts its own system prompt before each request
    if before.continue_final_message:  # one turn: its beginning was sent, the answer is its end, or all of it
        answer = answer if before.echo else replace(answer, content=turns[-1].content + answer.content)
        turns = turns[:-1]
    return (*turns, answer)


def _given(before: GenerateRequest, limits: Limits) -> dict[str, Any]:
    """Return the fields that the caller set, with their checked values."""
    names = set(sampling_fields(limits)) - set(before.unset)
    sampling = {name: getattr(before.sampling, name) for name in names}
    around = {name: getattr(before, name) for name in ("chat_template_kwargs", "timeout_seconds", "latency_class")}
    return {"model": before.model, **{name: value for name, value in (sampling | around).items() if value is not None}}
