"""The `messages` field, as the native and the OpenAI dialect share it: turns of a conversation → `Message` values.

A history is read leniently: clients send back what they got, with fields of their own. Fields that hold no part of the
conversation are left out. Parts of a content are joined by newlines; a user's may be images, audio and files, for
models elsewhere that take them (`Message.parts`): the client of a model refuses the others. What chat templates use
besides (`name`, `tool_call_id`, `tool_calls`, `reasoning_content`) goes to `Message.extra`, the arguments of a call as
the text that they are in the API. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from streamserve.dialects.fields import (
    Fields,
    Reader,
    Table,
    any_object,
    described,
    list_of,
    nothing,
    object_schema,
    one_of,
    read,
    required,
    schema_of,
    shorten,
    text,
    wrong_type,
    wrong_value,
)
from streamserve.protocol.errors import BadRequest, PromptTooLong
from streamserve.protocol.json_body import num_containers, too_many_containers
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import OTHER_PARTS, TEXT_PARTS, Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_MAX_PARTS = 1_024
_MAX_TOOL_CALLS = 1_024
# Fields that only one role may carry; an empty field counts as absent.
_ONLY = {"tool_calls": ("assistant",), "tool_call_id": ("tool", "function")}
# Roles whose content may be missing: an answer that has none, and a tool that returned nothing.
_MAY_BE_SILENT = ("assistant", "tool", "function")


def messages(limits: Limits) -> Reader:
    """Read a conversation of 1 to `max_messages` turns and at most `max_prompt_chars` characters in all."""

    table = message_table(limits)

    @described(lambda: {"title": "ChatMessage", **object_schema(table, is_open=True)})
    def turn(value: Any, param: str) -> Message:
        return message_of(value, param, table)

    conversation = list_of(turn, low=1, high=limits.max_messages)

    @described(lambda: schema_of(conversation))
    def reader(value: Any, param: str) -> tuple[Message, ...]:
        turns: tuple[Message, ...] = conversation(value, param)
        refuse_many_containers(turns, param, limits)
        refuse_too_long(turns, param, limits)
        return turns

    return reader


def known_fields(value: Any, table: Table, param: str) -> dict[str, Any]:
    """Return the checked fields of an object of the history that `table` has; other fields are left out."""
    given = any_object(value, param)
    return read({name: given[name] for name in given if name in table}, table, prefix=param + ".")


def message_table(limits: Limits) -> Table:
    """Return the readers of a turn's fields."""
    some_text = text(0, limits.max_body_bytes)
    readers: dict[str, Reader] = {
        "role": one_of(*ROLES),
        "content": described(lambda: {"anyOf": [schema_of(some_text), schema_of(_parts)]})(
            partial(_content, some_text=some_text)
        ),
        "name": some_text,
        "tool_call_id": some_text,
        "tool_calls": list_of(_tool_call, high=_MAX_TOOL_CALLS),
        "reasoning_content": some_text,
        "reasoning": some_text,
        "refusal": some_text,
        # Content that would be lost.
        "audio": _unsupported,
        "images": _unsupported,
        "function_call": _unsupported,
    }
    return Fields(readers, "role")


def message_of(value: Any, param: str, table: Table) -> Message:
    """Read one turn by `message_table`."""
    fields = known_fields(value, table, param)
    role: str = fields["role"]
    for name, roles in _ONLY.items():
        if fields.get(name) and role not in roles:
            raise BadRequest(
                f"{param}.{name} belongs to a message of role {roles[0]}.",
                code="invalid_value",
                param=f"{param}.{name}",
            )
    content, parts = fields.get("content") or (None, ())
    for index, part in enumerate(parts):
        if role != "user" and part["type"] not in TEXT_PARTS:
            raise _not_text(part["type"], f"{param}.content[{index}]")
    if content is None and role not in _MAY_BE_SILENT:
        raise BadRequest(f"{param}.content is missing.", code="missing_field", param=param + ".content")
    said = content or (role == "assistant" and fields.get("refusal")) or ""
    return Message(role=role, content=said, extra=_extra(role, fields), param=param, parts=parts)


def _extra(role: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    extra = {name: fields[name] for name in ("name", "tool_call_id") if fields.get(name)}
    if fields.get("tool_calls"):
        extra["tool_calls"] = list(fields["tool_calls"])
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    if reasoning and role == "assistant":
        extra["reasoning_content"] = reasoning
    return extra


def _content(value: Any, param: str, some_text: Reader) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """Read a content: its text, and its parts where some are no text."""
    if isinstance(value, str):
        return str(some_text(value, param)), ()
    if not isinstance(value, list):
        wrong_type(value, param, "a string or an array of parts")
    parts: list[Mapping[str, Any]] = _parts(value, param)
    texts = [part[TEXT_PARTS[part["type"]]] for part in parts if part["type"] in TEXT_PARTS]
    return "\n".join(texts), tuple(parts) if len(texts) < len(parts) else ()


@described(
    {
        "title": "ContentPart",
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": [*TEXT_PARTS, *OTHER_PARTS]},
            **{name: {"type": "string"} for name in TEXT_PARTS.values()},
            **{name: {} for name in OTHER_PARTS},
        },
        "required": ["type"],
    }
)
def _part(value: Any, param: str) -> Mapping[str, Any]:
    """Read a content part. Its type is checked first: an unknown part is unsupported, not malformed."""
    part = any_object(value, param)
    kind = text(1, 64)(required(part, "type", prefix=param + "."), param + ".type")
    if kind not in TEXT_PARTS and kind not in OTHER_PARTS:
        raise _not_text(kind, param)
    if kind in OTHER_PARTS:
        return {"type": kind, kind: part.get(kind)}
    name = TEXT_PARTS[kind]
    return {"type": kind, name: any_text(required(part, name, prefix=param + "."), f"{param}.{name}")}


_parts = list_of(_part, high=_MAX_PARTS)


def _not_text(kind: str, param: str) -> BadRequest:
    message = f"{param} is of type {shorten(kind)}; this server takes text only."
    return BadRequest(message, code="unsupported_content", param=param)


@described({"type": "string"})
def any_text(value: Any, param: str) -> str:
    """Read a string of any length."""
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    return value


@described({"anyOf": [{"type": "string"}, {"type": "object"}]})
def _arguments(value: Any, param: str) -> str:
    if isinstance(value, dict):
        return arguments_text(value)
    return any_text(value, param)


_FUNCTION: Table = Fields({"name": text(1, 4_096), "arguments": _arguments}, "name")


@described(lambda: object_schema(_FUNCTION, is_open=True))
def _function(value: Any, param: str) -> dict[str, Any]:
    return known_fields(value, _FUNCTION, param)


_TOOL_CALL: Table = Fields({"id": any_text, "type": one_of("function"), "function": _function}, "function")


@described(lambda: {"title": "ToolCall", **object_schema(_TOOL_CALL, is_open=True)})
def _tool_call(value: Any, param: str) -> dict[str, Any]:
    """Read `{"id", "type": "function", "function": {"name", "arguments"}}`; the name is required.

    The arguments may be cut, no JSON, or absent, as a model has written them, and an object where a client has read
    them.
    """
    fields = known_fields(value, _TOOL_CALL, param)
    function = fields["function"]
    return {
        "id": fields.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments", "")},
    }


def arguments_text(value: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON text, which passes every seam, whatever numbers it has."""
    return json.dumps(value, ensure_ascii=False)


def refuse_many_containers(turns: Sequence[Message], param: str, limits: Limits) -> None:
    """Raise BadRequest for calls whose arguments, JSON within the body's, hold more than a body may hold itself."""
    calls = [call for turn in turns for call in turn.extra.get("tool_calls", ())]
    if sum(num_containers(call["function"]["arguments"]) for call in calls) > limits.max_json_containers:
        raise too_many_containers(f"What {param} have as arguments of calls", limits, param)


@nothing("Content that no model here takes.")
def _unsupported(value: Any, param: str) -> Any:
    raise BadRequest(f"{param} is not supported.", code="unsupported_content", param=param)


def refuse_too_long(turns: Sequence[Message], param: str, limits: Limits) -> None:
    """Raise `BadRequest` for a conversation of too many turns, or of too many characters in all."""
    if len(turns) > limits.max_messages:
        wrong_value(param, f"has {len(turns):,} items; the limit is {limits.max_messages:,}")
    num_chars = sum(len(turn.content) + (len(str(turn.extra)) if turn.extra else 0) for turn in turns)
    if num_chars > limits.max_prompt_chars:
        raise PromptTooLong(
            f"{param} have {num_chars:,} characters; the limit is {limits.max_prompt_chars:,}. "
            "Drop old turns or shorten them.",
            param=param,
        )
