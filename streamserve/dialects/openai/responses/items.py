"""Items of the Responses API: what a body sends, what the model is asked with, and what lists of items show.

    "input" ──► read_items ──► items as they are kept and listed ──► messages_of ──► Message turns of a prompt

Items that an answer has (output.py) have the same form: an earlier answer goes into the next prompt as it is. In a
prompt neighbouring items of the assistant are one turn: its thoughts, its text and its calls. A history is read
leniently: clients send back what they got, with fields of their own. What this server has answered itself
(`mcp_call`) is left out. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streamserve.dialects.fields import (
    Reader,
    Table,
    any_list,
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
    wrong_value,
)
from streamserve.dialects.messages import any_text, known_fields, refuse_too_long
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.json_body import num_containers, too_many_containers
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import TEXT_PARTS, Message

Item = Mapping[str, Any]

ROLES = ("user", "assistant", "system", "developer")
INPUT = "input"  # the argument of a custom tool's function: its free text
_MAX_PARTS = 1_024
_MAX_ID_CHARS = 512
_id = text(1, _MAX_ID_CHARS)
_name = text(1, 4_096)
# Parts of a user's message that only models elsewhere take, and the name of their type in a prompt.
_OTHER_PARTS = {"input_image": "image_url", "input_file": "file", "input_audio": "input_audio"}
_FILE_FIELDS = ("file_data", "file_id", "filename", "file_url", "detail")
# Of the server itself: kept in a list, and no part of a prompt.
LEFT_OUT = ("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response")
_STATUSES = ("in_progress", "completed", "incomplete")


# Which fields an item needs depends on its type; an item of no type is a message.
_ITEM: Mapping[str, Any] = {
    "title": "InputItem",
    "type": "object",
    "properties": {
        "type": {"type": ["string", "null"]},
        "id": {"type": ["string", "null"]},
        "role": {"enum": [*ROLES, None]},
        "content": {},
        "summary": {},
        "call_id": {"type": ["string", "null"]},
        "name": {"type": ["string", "null"]},
        "arguments": {"type": ["string", "null"]},
        "output": {},
    },
}


def read_items(limits: Limits) -> Reader:
    """Return the reader of `input`: a text, or 1 to `max_messages` items. Its value is a tuple of items."""

    @described(_ITEM)
    def one(value: Any, param: str) -> Item:
        return _item(value, param, limits)

    several = list_of(one, low=1, high=limits.max_messages)

    @described(lambda: {"anyOf": [{"type": "string", "minLength": 1}, schema_of(several)]})
    def reader(value: Any, param: str) -> tuple[Item, ...]:
        if isinstance(value, str):
            if not value:
                raise BadRequest(f"{param} must not be empty.", code="empty_prompt", param=param)
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list):
            wrong_type(value, param, "a string or an array of items")
        items: tuple[Item, ...] = several(value, param)
        refuse_too_long(messages_of(items, param), param, limits)
        arguments = [item["arguments"] for item in items if item["type"] == "function_call"]
        if sum(map(num_containers, arguments)) > limits.max_json_containers:
            raise too_many_containers(f"What {param} has as arguments of calls", limits, param)
        return items

    return reader


def with_ids(items: Iterable[Item], response_id: str) -> list[dict[str, Any]]:
    """Return items with an id each: their own, or one that is made of the response's id and their place."""
    number = response_id.partition("_")[2]
    return [{"id": f"{_PREFIXES[item['type']]}_{number}i{place}", **item} for place, item in enumerate(items)]


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    **dict.fromkeys(LEFT_OUT, "mcp"),
}


def _item(value: Any, param: str, limits: Limits) -> Item:
    """Read an item. Its type is checked first: an item of a tool that this server lacks is unsupported."""
    given = any_object(value, param)
    if given.get("type") is None:
        kind = "message" if "role" in given else "item_reference"
    else:
        kind = text(1, 64)(given["type"], param + ".type")
    if kind == "item_reference":
        message = f"{param} names an item by its id. Send the item itself, or previous_response_id."
        raise BadRequest(message, code="unsupported_content", param=param)
    if kind in LEFT_OUT:
        return {"type": kind, **{name: one for name, one in given.items() if name != "type"}}
    if kind not in _READERS:
        message = f"{param} is of type {shorten(kind)}; this server takes {', '.join(_READERS)}."
        raise BadRequest(message, code="unsupported_content", param=param)
    fields = _READERS[kind](given, param)
    own = {"id": _id(given["id"], param + ".id")} if given.get("id") is not None else {}
    return {"type": kind, **own, **fields}


def _message(given: Item, param: str) -> dict[str, Any]:
    table: Table = {"role": one_of(*ROLES), "content": anything, "status": _status, "phase": _phase}
    fields = known_fields(given, table, param)
    role = required(fields, "role", prefix=param + ".")
    content = required(fields, "content", prefix=param + ".")
    phase = {"phase": fields["phase"]} if role == "assistant" and "phase" in fields else {}
    shown = {"role": role, "status": "completed", **phase}
    return {**shown, "content": _parts(content, param + ".content", role)}


def _parts(value: Any, param: str, role: str) -> list[dict[str, Any]]:
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(value, str):
        value = [{"type": kind, "text": value}]
    if not isinstance(value, list):
        wrong_type(value, param, "a string or an array of parts")
    return list(list_of(lambda one, where: _part(one, where, role), high=_MAX_PARTS)(value, param))


def _part(value: Any, param: str, role: str) -> dict[str, Any]:
    part = any_object(value, param)
    kind = text(1, 64)(required(part, "type", prefix=param + "."), param + ".type")
    if kind == "refusal":
        return {"type": kind, kind: any_text(required(part, kind, prefix=param + "."), f"{param}.{kind}")}
    if kind in TEXT_PARTS:
        shown = any_text(required(part, "text", prefix=param + "."), f"{param}.text")
        if role == "assistant":
            return {"type": "output_text", "text": shown, "annotations": _annotations(part, param)}
        return {"type": "input_text", "text": shown}
    if kind in _OTHER_PARTS and role == "user":
        return dict(part)
    message = f"{param} is of type {shorten(kind)}; a message of role {role} has text"
    others = f", {', '.join(_OTHER_PARTS)}" if role == "user" else ""
    raise BadRequest(f"{message}{others}.", code="unsupported_content", param=param)


def _annotations(part: Item, param: str) -> list[Any]:
    return any_list(part["annotations"], param + ".annotations") if part.get("annotations") is not None else []


def _reasoning(given: Item, param: str) -> dict[str, Any]:
    several = list_of(_thought, high=_MAX_PARTS)
    table: Table = {"summary": several, "content": several}
    fields = known_fields(given, table, param)
    content = {"content": list(fields["content"])} if fields.get("content") else {}
    return {"summary": list(fields.get("summary", ())), **content}


def _thought(value: Any, param: str) -> dict[str, Any]:
    part = known_fields(value, {"type": one_of("summary_text", "reasoning_text"), "text": any_text}, param)
    return {name: required(part, name, prefix=param + ".") for name in ("type", "text")}


def _call(given: Item, param: str, *, field: str = "arguments") -> dict[str, Any]:
    table: Table = {"call_id": _id, "name": _name, field: any_text, "status": _status}
    fields = known_fields(given, table, param)
    named = {name: required(fields, name, prefix=param + ".") for name in ("call_id", "name", field)}
    return {**named, "status": fields.get("status", "completed")}


def _custom_call(given: Item, param: str) -> dict[str, Any]:
    return {name: one for name, one in _call(given, param, field=INPUT).items() if name != "status"}


def _output(given: Item, param: str) -> dict[str, Any]:
    table: Table = {"call_id": _id, "output": anything, "status": _status}
    fields = known_fields(given, table, param)
    call_id = required(fields, "call_id", prefix=param + ".")
    output = required(fields, "output", prefix=param + ".")
    where = param + ".output"
    shown: str | list[dict[str, Any]] = output if isinstance(output, str) else _parts(output, where, "tool")
    return {"call_id": call_id, "output": shown, "status": "completed"}


def _custom_output(given: Item, param: str) -> dict[str, Any]:
    return {name: one for name, one in _output(given, param).items() if name != "status"}


_status = one_of(*_STATUSES)
_phase = one_of("commentary", "final_answer")

_READERS: Mapping[str, Any] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _custom_output,
}


def messages_of(items: Sequence[Item], param: str = "") -> list[Message]:
    """Return the messages of checked items. `param` names the field that they stood in, for errors."""
    found: list[Message] = []
    thought = ""
    for place, item in enumerate(items):
        where, kind = f"{param}[{place}]" if param else "", item["type"]
        if kind == "reasoning":
            thought += _thoughts_of(item)
        elif kind in ("function_call", "custom_tool_call"):
            _add_to_turn(found, Message(role="assistant", content="", extra=_call_extra(item), param=where), thought)
            thought = ""
        elif kind in ("function_call_output", "custom_tool_call_output"):
            extra = {"tool_call_id": item["call_id"]}
            found.append(Message(role="tool", content=_text_of(item["output"]), extra=extra, param=where))
        elif kind == "message":
            message = _as_message(item, where)
            if message.role == "assistant":
                _add_to_turn(found, message, thought)
                thought = ""
            else:
                found.append(message)
    return found


def _add_to_turn(found: list[Message], more: Message, thought: str) -> None:
    """Add what the assistant has said or called to its turn, which begins here after anything of another role."""
    extra = dict(more.extra)
    if thought:
        extra["reasoning_content"] = thought
    if not found or found[-1].role != "assistant":
        found.append(Message(role=more.role, content=more.content, extra=extra, param=more.param))
        return
    before = found.pop()
    calls = [*before.extra.get("tool_calls", ()), *extra.get("tool_calls", ())]
    thoughts = before.extra.get("reasoning_content", "") + thought
    joined = {**({"tool_calls": calls} if calls else {}), **({"reasoning_content": thoughts} if thoughts else {})}
    content = "\n".join(one for one in (before.content, more.content) if one)
    found.append(Message(role="assistant", content=content, extra=joined, param=before.param))


def _as_message(item: Item, where: str) -> Message:
    content, role = item["content"], item["role"]
    parts = tuple(_chat_part(part) for part in content)
    has_others = any(part["type"] in _OTHER_PARTS for part in content)
    return Message(role=role, content=_text_of(content), param=where, parts=parts if has_others else ())


def _text_of(content: str | Sequence[Item]) -> str:
    if isinstance(content, str):
        return content
    texts = (part.get("refusal" if part["type"] == "refusal" else "text") for part in content)
    return "\n".join(one for one in texts if isinstance(one, str))


def _chat_part(part: Item) -> dict[str, Any]:
    """Return a part as a prompt has it (`Message.parts`), in the shape of chat completions."""
    kind = part["type"]
    if kind == "input_image":
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), **detail}}
    if kind == "input_file":
        return {"type": "file", "file": {name: part[name] for name in _FILE_FIELDS if part.get(name)}}
    if kind == "input_audio":
        return {"type": kind, kind: part.get(kind)}
    return {"type": "text", "text": part.get("text", "")}


def _thoughts_of(item: Item) -> str:
    return "".join(part["text"] for part in (item.get("content") or item["summary"]))


def _call_extra(item: Item) -> dict[str, Any]:
    is_custom = item["type"] == "custom_tool_call"
    arguments = json.dumps({INPUT: item[INPUT]}, ensure_ascii=False) if is_custom else item["arguments"]
    function = {"name": item["name"], "arguments": arguments}
    return {"tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}


def refuse_no_call(messages: Sequence[Message], param: str) -> None:
    """Raise BadRequest for a result of a call that no message before it has made."""
    calls: set[str] = set()
    for message in messages:
        calls |= {call["id"] for call in message.extra.get("tool_calls", ())}
        if message.role == "tool" and message.extra["tool_call_id"] not in calls:
            where = f"{message.param}.call_id" if message.param else param
            wrong_value(where, "names no call of the items before it")
