"""`messages` and `system` of the Messages API → `Message` values.

A turn is a string or blocks. What a block is there is a field of a message in chat templates: thoughts and calls are
fields of the assistant's turn, each result of a tool is a turn of its own. Neighbouring turns of one role are one, as
in the public API. Text only. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from streamserve.dialects.fields import (
    Reader,
    Table,
    any_list,
    any_object,
    boolean,
    list_of,
    one_of,
    read,
    required,
    shorten,
    text,
    wrong_type,
)
from streamserve.dialects.messages import refuse_too_long
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import Limits, Message

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
_MAX_BLOCKS = 1024
_NAME = text(1, 128)
# The kinds of blocks that a turn of each role may have.
_KINDS = {
    USER: ("text", "tool_result"),
    ASSISTANT: ("text", "thinking", "redacted_thinking", "tool_use"),
    SYSTEM: ("text",),
}
_KNOWN = frozenset(kind for kinds in _KINDS.values() for kind in kinds)


def _anything(value: Any, param: str) -> Any:
    return value


def _any_text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    return value


# The fields of each kind. Those of `_COMMON` change nothing; clients send a reply's back with the history.
_COMMON: Table = {"type": _any_text, "cache_control": any_object}
_TABLES: dict[str, Table] = {
    "text": {**_COMMON, "text": _any_text, "citations": any_list, "parsed_output": _anything},
    "thinking": {**_COMMON, "thinking": _any_text, "signature": _any_text},
    "redacted_thinking": {**_COMMON, "data": _any_text},
    "tool_use": {
        **_COMMON,
        "id": _NAME,
        "name": _NAME,
        "input": any_object,
        "caller": any_object,
        "toolset_name": _NAME,
    },
    "tool_result": {
        **_COMMON,
        "tool_use_id": _NAME,
        "content": _anything,  # read by `_result_text`
        "is_error": boolean,
        "toolset_name": _NAME,
    },
}
_REQUIRED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A checked block; `param` is its place in the body."""

    kind: str
    fields: dict[str, Any]
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    role: str
    blocks: tuple[_Block, ...]
    param: str


def messages(limits: Limits) -> Reader:
    """Return the reader of `messages`: 1 to `max_messages` turns, `max_prompt_chars` characters in all."""
    turns = list_of(_turn, low=1, high=limits.max_messages)

    def reader(value: Any, param: str) -> tuple[Message, ...]:
        found = tuple(_as_messages(turns(value, param)))
        refuse_too_long(found, param, limits)
        return found

    return reader


def system(value: Any, param: str) -> str:
    """Read the system prompt: a string, or blocks of text."""
    return _joined(_blocks(value, param, SYSTEM))


def _turn(value: Any, param: str) -> _Turn:
    table: Table = {"role": one_of(*_KINDS), "content": _anything}
    fields = read(any_object(value, param), table, prefix=param + ".")
    role: str = required(fields, "role", prefix=param + ".")
    content = required(fields, "content", prefix=param + ".")
    return _Turn(role=role, blocks=_blocks(content, param + ".content", role), param=param)


def _blocks(value: Any, param: str, role: str) -> tuple[_Block, ...]:
    if isinstance(value, str):
        return (_Block(kind="text", fields={"text": value}, param=param),)
    if not isinstance(value, list):
        wrong_type(value, param, "a string or an array of blocks")
    blocks: tuple[_Block, ...] = list_of(lambda one, where: _block(one, where, role), high=_MAX_BLOCKS)(value, param)
    return blocks


def _block(value: Any, param: str, role: str) -> _Block:
    """Read one block. Its type is checked first: an image is unsupported, not malformed."""
    block = any_object(value, param)
    kind = text(1, 64)(required(block, "type", prefix=param + "."), param + ".type")
    if kind not in _KNOWN:
        raise BadRequest(
            f"{param} is of type {shorten(kind)}; this server takes text only.", code="unsupported_content", param=param
        )
    if kind not in _KINDS[role]:
        raise BadRequest(
            f"{param} is of type {kind}; a turn of the {role} has {', '.join(_KINDS[role])}.",
            code="invalid_value",
            param=param + ".type",
        )
    fields = read(block, _TABLES[kind], prefix=param + ".")
    for name in _REQUIRED[kind]:
        required(fields, name, prefix=param + ".")
    if kind == "tool_result":
        fields["content"] = _joined(_blocks(fields.get("content", ""), param + ".content", SYSTEM))
    return _Block(kind=kind, fields=fields, param=param)


def _joined(blocks: Iterable[_Block]) -> str:
    return "\n".join(block.fields["text"] for block in blocks if block.kind == "text")


def _as_messages(turns: Iterable[_Turn]) -> Iterator[Message]:
    """Yield the messages of a conversation. A result needs the call that it answers."""
    calls: set[str] = set()
    for role, several in groupby(turns, key=lambda turn: turn.role):
        group = list(several)
        blocks = [block for turn in group for block in turn.blocks]
        if role == USER:
            yield from _user_messages(blocks, calls, group[0].param + ".content")
        elif role == ASSISTANT:
            calls |= {block.fields["id"] for block in blocks if block.kind == "tool_use"}
            yield _assistant_message(blocks)
        else:
            yield from (Message(role=role, content=_joined(turn.blocks)) for turn in group)


def _user_messages(blocks: list[_Block], calls: set[str], param: str) -> Iterator[Message]:
    """Yield what the blocks say, in their order: neighbouring texts are one message, each result is one."""
    if not any(block.kind == "tool_result" or block.fields["text"] for block in blocks):
        raise BadRequest(f"{param} must not be empty.", code="empty_prompt", param=param)
    for kind, several in groupby(blocks, key=lambda block: block.kind):
        if kind == "text":
            said = _joined(several)
            if said:
                yield Message(role=USER, content=said)
            continue
        for block in several:
            call_id = block.fields["tool_use_id"]
            if call_id not in calls:
                where = block.param + ".tool_use_id"
                message = f"{where} is the id of no tool_use in the turns before it."
                raise BadRequest(message, code="invalid_value", param=where)
            yield Message(role="tool", content=block.fields["content"], extra={"tool_call_id": call_id})


def _assistant_message(blocks: list[_Block]) -> Message:
    extra: dict[str, Any] = {}
    thought = "".join(block.fields["thinking"] for block in blocks if block.kind == "thinking")
    calls = [_call(block.fields) for block in blocks if block.kind == "tool_use"]
    if calls:
        extra["tool_calls"] = calls
    if thought:
        extra["reasoning_content"] = thought
    return Message(role=ASSISTANT, content=_joined(blocks), extra=extra)


def _call(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates have it; they print its arguments with `tojson`."""
    function = {"name": fields["name"], "arguments": fields["input"]}
    return {"id": fields["id"], "type": "function", "function": function}
