"""The `messages` field, as the native and the OpenAI dialect share it: turns of a conversation → `Message` values.

Text only: parts of type text are joined by newlines, any other part is refused. Other fields that chat templates use
(`name`, `tool_call_id`, `tool_calls`, `reasoning_content`) are checked and go to `Message.extra`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamserve.dialects.fields import (
    Reader,
    Table,
    any_list,
    any_object,
    list_of,
    one_of,
    read,
    required,
    text,
    wrong_type,
    wrong_value,
)
from streamserve.protocol.errors import BadRequest, PromptTooLong, StreamserveError
from streamserve.protocol.json_body import decode_json, num_containers, too_many_containers
from streamserve.protocol.requests import Limits, Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_MAX_PARTS = 256
_MAX_TOOL_CALLS = 64
_NAME = text(1, 128)
# Fields that only one role may carry.
_ONLY = {"tool_calls": "assistant", "reasoning_content": "assistant", "reasoning": "assistant", "tool_call_id": "tool"}

# What a reply may have that is cut before its text, or has none.
_INSTEAD_OF_TEXT = ("tool_calls", "reasoning_content", "reasoning", "refusal")

_PLAIN = {"role", "content"}


def messages(limits: Limits) -> Reader:
    """Read a conversation of 1 to `max_messages` turns and at most `max_prompt_chars` characters in all."""

    table = _message_table(limits)
    conversation = list_of(lambda turn, where: _message(turn, where, table, limits), low=1, high=limits.max_messages)

    def reader(value: Any, param: str) -> tuple[Message, ...]:
        _refuse_many_containers(value, param, limits)
        turns: tuple[Message, ...] = conversation(value, param)
        refuse_too_long(turns, param, limits)
        return turns

    return reader


def _message_table(limits: Limits) -> Table:
    some_text = text(0, limits.max_body_bytes)
    return {
        "role": one_of(*ROLES),
        "content": lambda value, param: _content(value, param, some_text),
        "name": _NAME,
        "tool_call_id": _NAME,
        "tool_calls": list_of(_tool_call, low=0, high=_MAX_TOOL_CALLS),
        "reasoning_content": some_text,
        "reasoning": some_text,
        # Fields of a reply that clients append to the history as it came; null or ignored.
        "refusal": some_text,
        "annotations": any_list,
        "parsed": _anything,  # the official client's `.parse`
        "provider_specific_fields": any_object,  # litellm
        "thinking_blocks": any_list,
        "cache_control": any_object,  # a hint for other servers' caches
        "audio": _unsupported,
        "function_call": _unsupported,
    }


def _message(value: Any, param: str, table: Table, limits: Limits) -> Message:
    if not isinstance(value, dict):
        wrong_type(value, param, "an object")
    fields = read(value, table, prefix=param + ".")
    role: str = required(fields, "role", prefix=param + ".")
    for name, only in _ONLY.items():
        if name in fields and role != only:
            raise BadRequest(
                f"{param}.{name} belongs to a message of role {only}.", code="invalid_value", param=f"{param}.{name}"
            )
    content = fields.get("content")
    if not content:
        _refuse_empty(role, content, fields, param + ".content")
    extra = {} if fields.keys() <= _PLAIN else _extra(fields, limits)
    return Message(role=role, content=content or "", extra=extra)


def _refuse_empty(role: str, content: str | None, fields: Mapping[str, Any], param: str) -> None:
    """Raise for a user's empty content, and for one that is missing with nothing in its place; else "" is valid."""
    if role == "user" and content is not None:
        raise BadRequest(f"{param} must not be empty.", code="empty_prompt", param=param)
    if content is None and not any(fields.get(name) for name in _INSTEAD_OF_TEXT):
        raise BadRequest(f"{param} is missing.", code="missing_field", param=param)


def _extra(fields: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    extra = {name: fields[name] for name in ("name", "tool_call_id") if name in fields}
    if fields.get("tool_calls"):
        extra["tool_calls"] = [_for_template(call, limits) for call in fields["tool_calls"]]
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    if reasoning:
        extra["reasoning_content"] = reasoning
    return extra


def _content(value: Any, param: str, some_text: Reader) -> str:
    if isinstance(value, str):
        return str(some_text(value, param))
    if not isinstance(value, list):
        wrong_type(value, param, "a string or an array of text parts")
    return "\n".join(list_of(_part, high=_MAX_PARTS)(value, param))


def _part(value: Any, param: str) -> str:
    """Read one content part. Its type is checked first: an image is unsupported, not malformed."""
    part = any_object(value, param)
    kind = text(1, 64)(required(part, "type", prefix=param + "."), param + ".type")
    if kind != "text":
        raise BadRequest(
            f"{param} is of type {kind}; this server takes text only.", code="unsupported_content", param=param
        )
    table: Table = {"type": one_of("text"), "text": _any_text, "cache_control": any_object}
    fields = read(part, table, prefix=param + ".")
    return str(required(fields, "text", prefix=param + "."))


def _any_text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    return value


def _anything(value: Any, param: str) -> Any:
    return value


def _tool_call(value: Any, param: str) -> dict[str, Any]:
    """Read `{"id", "type": "function", "function": {"name", "arguments"}}`; all three names are required."""
    table: Table = {"id": _NAME, "type": one_of("function"), "function": any_object, "index": _anything}
    fields = read(any_object(value, param), table, prefix=param + ".")
    inner = param + ".function."
    parts: Table = {"name": _NAME, "arguments": _any_text, "parsed_arguments": _anything}
    function = read(required(fields, "function", prefix=param + "."), parts, prefix=inner)
    function.pop("parsed_arguments", None)
    for name in ("name", "arguments"):
        required(function, name, prefix=inner)
    return {"id": required(fields, "id", prefix=param + "."), "type": "function", "function": function}


def _for_template(call: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """Parse the arguments: templates print them with `tojson`. Arguments that are no object stay text."""
    function = dict(call["function"])
    try:
        function["arguments"] = decode_json(function["arguments"].encode("utf-8", "replace"), limits)
    except StreamserveError:
        return dict(call)
    return {**call, "function": function}


def _refuse_many_containers(turns: Any, param: str, limits: Limits) -> None:
    """Raise BadRequest for calls whose arguments, JSON within the body's, hold more than a body may hold itself."""
    turns = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    calls = [call for turn in turns if isinstance(turn.get("tool_calls"), list) for call in turn["tool_calls"]]
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    arguments = [function.get("arguments") for function in functions if isinstance(function, dict)]
    if sum(num_containers(text) for text in arguments if isinstance(text, str)) > limits.max_json_containers:
        raise too_many_containers(f"What {param} have as arguments of calls", limits, param)


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
