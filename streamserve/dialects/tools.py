"""What the model may call: the fields `tools`, `tool_choice` and `parallel_tool_calls` → `Tool` and `ToolChoice`.

Types, names and combinations are checked here. Whether a schema can be compiled is found at acceptance, and whether the
model's chat template shows tools at all. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from streamserve.dialects.fields import (
    Reader,
    Table,
    any_object,
    boolean,
    list_of,
    one_of,
    read,
    required,
    shorten,
    text,
    wire_object,
    wrong_type,
    wrong_value,
)
from streamserve.protocol.errors import BadRequest, PromptTooLong
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest, Tool, ToolChoice

MODES = ("none", "auto", "required")
_ANY = "any"  # another name of "required", of Mistral's API
_MAX_ALLOWED = 1024  # names in `allowed_tools`, which are some of the tools
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_RULE = "is a name of 1 to 64 letters, digits, underscores, dashes and dots"


@lru_cache(maxsize=8)
def tool_fields(limits: Limits) -> Table:
    """Return the readers of the fields about tools."""
    return {"tools": tools(limits), "tool_choice": tool_choice, "parallel_tool_calls": boolean}


def with_tools(request: GenerateRequest, values: Mapping[str, Any]) -> GenerateRequest:
    """Return the request with its tools. Without tools, the other fields about tools have no effect."""
    offered, choice = values.get("tools", ()), values.get("tool_choice", ToolChoice())
    check_choice(choice, offered, "tool_choice")
    if not offered:
        return request
    if request.messages is None:
        message = "tools are shown to the model by its chat template; send messages."
        raise BadRequest(message, code="conflicting_fields", param="tools")
    is_parallel = values.get("parallel_tool_calls", True)
    return replace(request, tools=offered, tool_choice=choice, parallel_tool_calls=is_parallel)


def tools(limits: Limits) -> Reader:
    """Return the reader of `tools`."""
    return several_tools(lambda value, param: _tool(value, param, limits), limits)


def several_tools(one: Reader, limits: Limits) -> Reader:
    """Return a reader of functions with names of their own, of `max_prompt_chars` characters in all."""
    several = list_of(one, high=limits.max_tools)

    def reader(value: Any, param: str) -> tuple[Tool, ...]:
        found: tuple[Tool, ...] = several(value, param)
        _refuse_twice([tool.name for tool in found], param)
        num_chars = sum(len(tool.description) + len(str(tool.parameters)) for tool in found)
        if num_chars > limits.max_prompt_chars:
            raise PromptTooLong(
                f"{param} have {num_chars:,} characters; the limit is {limits.max_prompt_chars:,}. Shorten them.",
                param=param,
            )
        return found

    return reader


def tool_choice(value: Any, param: str) -> ToolChoice:
    """Read a mode, one function by its name, or `allowed_tools`: a mode and the functions that it is about."""
    if isinstance(value, str):
        mode = one_of(*MODES, _ANY)(value, param)
        return ToolChoice(mode="required" if mode == _ANY else mode)
    if not isinstance(value, dict):
        wrong_type(value, param, f"one of {', '.join(MODES)}, or an object")
    kind = one_of("function", "allowed_tools")(required(value, "type", prefix=param + "."), param + ".type")
    if kind == "function":
        return ToolChoice(mode="required", names=(_function_name(value, param),))
    fields = read(value, {"type": one_of(kind), kind: any_object}, prefix=param + ".")
    where = f"{param}.{kind}"
    table: Table = {"mode": one_of("auto", "required"), "tools": list_of(_function_name, low=1, high=_MAX_ALLOWED)}
    allowed = read(required(fields, kind, prefix=param + "."), table, prefix=where + ".")
    names: tuple[str, ...] = required(allowed, "tools", prefix=where + ".")
    _refuse_twice(names, where + ".tools")
    return ToolChoice(mode=required(allowed, "mode", prefix=where + "."), names=names)


def check_choice(choice: ToolChoice, offered: Sequence[Tool], param: str) -> None:
    """Raise `BadRequest` for a choice that `offered` cannot meet."""
    if choice.mode == "required" and not offered:
        raise BadRequest(f"{param} asks for a call; send tools.", code="conflicting_fields", param=param)
    known = {tool.name for tool in offered}
    for name in choice.names:
        if name not in known:
            raise BadRequest(
                f"{param} names {shorten(name)}, which is none of the tools: {shorten(', '.join(sorted(known)))}.",
                code="invalid_value",
                param=param,
            )


def _tool(value: Any, param: str, limits: Limits) -> Tool:
    """Read one tool. Its type is checked first: a custom tool is unsupported, not malformed."""
    tool = any_object(value, param)
    kind = text(1, 64)(required(tool, "type", prefix=param + "."), param + ".type")
    if kind != "function":
        raise BadRequest(
            f"{param} is of type {kind}; this server calls functions only. Send it as one of type function.",
            code="unsupported_parameter",
            param=param + ".type",
        )
    own: Table = {"type": one_of("function"), "function": any_object, "cache_control": any_object}
    outer = read(tool, own, prefix=param + ".")
    inner = param + ".function."
    table: Table = {
        "name": tool_name,
        "description": text(0, limits.max_prompt_chars),
        "parameters": schema_of_arguments,
        "strict": boolean,
    }
    fields = read(required(outer, "function", prefix=param + "."), table, prefix=inner)
    required(fields, "name", prefix=inner)
    return Tool(**fields)


def schema_of_arguments(value: Any, param: str) -> Mapping[str, Any]:
    """Read the schema of a function's arguments, which are an object."""
    schema = wire_object(value, param)
    if schema.get("type", "object") != "object":
        wrong_value(param, "must be a schema of type object: a function's arguments have names")
    return schema


def _function_name(value: Any, param: str) -> str:
    """Read `{"type": "function", "function": {"name": …}}`."""
    fields = read(any_object(value, param), {"type": one_of("function"), "function": any_object}, prefix=param + ".")
    inner = param + ".function."
    function = read(required(fields, "function", prefix=param + "."), {"name": tool_name}, prefix=inner)
    return str(required(function, "name", prefix=inner))


def tool_name(value: Any, param: str) -> str:
    """Read the name of a function."""
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    if not _NAME.fullmatch(value):
        wrong_value(param, _NAME_RULE)
    return value


def _refuse_twice(names: Sequence[str], param: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            wrong_value(f"{param}[{index}]", f"is named {name}, as another tool is; names must differ")
