"""`messages` and `system` of the Messages API → `Message` values.

A turn is a string or blocks. What a block is there is a field of a message in chat templates: thoughts and calls are
fields of the assistant's turn, each result of a tool is a turn of its own. Neighbouring turns of one role are joined,
as in the public API. A history is read leniently, as in dialects/messages.py. Text only. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from streamserve.dialects.fields import (
    Fields,
    Reader,
    Table,
    any_object,
    anything,
    described,
    list_of,
    one_of,
    required,
    schema_of,
    shorten,
    text,
    wrong_type,
)
from streamserve.dialects.messages import any_text, arguments_text, known_fields, refuse_too_long
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Message

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
_MAX_BLOCKS = 1024
_NAME = text(1, 4_096)
# The kinds of blocks that a turn of each role may have.
_KINDS = {
    USER: ("text", "tool_result"),
    ASSISTANT: ("text", "thinking", "redacted_thinking", "tool_use"),
    SYSTEM: ("text",),
}
_KNOWN = frozenset(kind for kinds in _KINDS.values() for kind in kinds)


# The fields of each kind that are read; clients send a reply's other fields back with the history.
_TABLES: dict[str, Table] = {
    "text": {"text": any_text},
    "thinking": {"thinking": any_text},
    "redacted_thinking": {},
    "tool_use": {"id": _NAME, "name": _NAME, "input": any_object},
    "tool_result": {"tool_use_id": _NAME, "content": anything},
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

    @described(lambda: schema_of(turns))
    def reader(value: Any, param: str) -> tuple[Message, ...]:
        found = tuple(_as_messages(turns(value, param)))
        refuse_too_long(found, param, limits)
        return found

    return reader


_BLOCK = {
    "title": "MessageBlock",
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": sorted(_KNOWN)},
        "text": {"type": ["string", "null"]},
        "thinking": {"type": ["string", "null"]},
        "id": {"type": ["string", "null"]},
        "name": {"type": ["string", "null"]},
        "input": {"type": ["object", "null"]},
        "tool_use_id": {"type": ["string", "null"]},
        "content": {},
    },
    "required": ["type"],
}
_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK, "maxItems": _MAX_BLOCKS}]}


@described(_BLOCKS)
def system(value: Any, param: str) -> str:
    """Read the system prompt: a string, or blocks of text."""
    return _joined(_blocks(value, param, SYSTEM))


_role = one_of(*_KINDS)
_TURN: Table = Fields({"role": _role, "content": anything}, "role", "content")


@described(
    {
        "title": "MessageTurn",
        "type": "object",
        "properties": {"role": schema_of(_role), "content": _BLOCKS},
        "required": ["role", "content"],
    }
)
def _turn(value: Any, param: str) -> _Turn:
    fields = known_fields(value, _TURN, param)
    role: str = fields["role"]
    return _Turn(role=role, blocks=_blocks(fields["content"], param + ".content", role), param=param)


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
    fields = known_fields(block, _TABLES[kind], param)
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
            yield from _user_messages(blocks, calls, group[0].param)
        elif role == ASSISTANT:
            calls |= {block.fields["id"] for block in blocks if block.kind == "tool_use"}
            yield _assistant_message(blocks, group[0].param)
        else:
            yield from (Message(role=role, content=_joined(turn.blocks), param=turn.param) for turn in group)


def _user_messages(blocks: list[_Block], calls: set[str], param: str) -> Iterator[Message]:
    """Yield the blocks' messages, in their order: neighbouring texts are one message, each result is a message."""
    if not any(block.kind == "tool_result" or block.fields["text"] for block in blocks):
        yield Message(role=USER, content="", param=param)
    for kind, several in groupby(blocks, key=lambda block: block.kind):
        if kind == "text":
            texts = list(several)
            said = _joined(texts)
            if said:
                yield Message(role=USER, content=said, param=_turn_of(texts[0]))
            continue
        for block in several:
            call_id = block.fields["tool_use_id"]
            if call_id not in calls:
                where = block.param + ".tool_use_id"
                message = f"{where}: no tool_use in the turns before it has this id."
                raise BadRequest(message, code="invalid_value", param=where)
            extra = {"tool_call_id": call_id}
            yield Message(role="tool", content=block.fields["content"], extra=extra, param=_turn_of(block))


def _turn_of(block: _Block) -> str:
    """Return the place of the turn that has the block."""
    return block.param.partition(".")[0]


def _assistant_message(blocks: list[_Block], param: str) -> Message:
    extra: dict[str, Any] = {}
    thought = "".join(block.fields["thinking"] for block in blocks if block.kind == "thinking")
    calls = [_call(block.fields) for block in blocks if block.kind == "tool_use"]
    if calls:
        extra["tool_calls"] = calls
    if thought:
        extra["reasoning_content"] = thought
    return Message(role=ASSISTANT, content=_joined(blocks), extra=extra, param=param)


def _call(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a call in OpenAI's shape. `partial_json` alone is what an answer has for arguments that are no object."""
    given = fields["input"]
    raw = given["partial_json"] if given.keys() == {"partial_json"} else None
    arguments = raw if isinstance(raw, str) else arguments_text(given)
    return {"id": fields["id"], "type": "function", "function": {"name": fields["name"], "arguments": arguments}}
