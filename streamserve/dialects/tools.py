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
    Fields,
    Reader,
    Table,
    any_object,
    boolean,
    described,
    list_of,
    object_of,
    object_schema,
    one_of,
    read,
    required,
    schema_of,
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
    function = Fields(
        {
            "name": tool_name,
            "description": text(0, limits.max_prompt_chars),
            "parameters": schema_of_arguments,
            "strict": boolean,
        },
        "name",
    )
    own = Fields(
        {"type": one_of("function"), "function": object_of(function), "cache_control": any_object}, "type", "function"
    )

    @described(lambda: {"title": "Tool", **object_schema(own)})
    def one(value: Any, param: str) -> Tool:
        return _tool(value, param, own)

    return several_tools(one, limits)


def several_tools(one: Reader, limits: Limits) -> Reader:
    """Return a reader of functions with names of their own, of `max_prompt_chars` characters in all."""
    several = list_of(one, high=limits.max_tools)

    @described(lambda: schema_of(several))
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


def _read_choice(value: Any, param: str) -> ToolChoice:
    """Read a mode, one function by its name, or `allowed_tools`: a mode and the functions that it is about."""
    if isinstance(value, str):
        mode = _mode(value, param)
        return ToolChoice(mode="required" if mode == _ANY else mode)
    if not isinstance(value, dict):
        wrong_type(value, param, f"one of {', '.join(MODES)}, or an object")
    kind = one_of("function", "allowed_tools")(required(value, "type", prefix=param + "."), param + ".type")
    if kind == "function":
        return ToolChoice(mode="required", names=(_function_name(value, param),))
    allowed = read(value, _ALLOWED, prefix=param + ".")[kind]
    names: tuple[str, ...] = allowed["tools"]
    _refuse_twice(names, f"{param}.{kind}.tools")
    return ToolChoice(mode=allowed["mode"], names=names)


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


def _tool(value: Any, param: str, table: Table) -> Tool:
    """Read one tool. Its type is checked first: a custom tool is unsupported, not malformed."""
    tool = any_object(value, param)
    kind = text(1, 64)(required(tool, "type", prefix=param + "."), param + ".type")
    if kind != "function":
        raise BadRequest(
            f"{param} is of type {kind}; this server calls functions only. Send it as one of type function.",
            code="unsupported_parameter",
            param=param + ".type",
        )
    return Tool(**read(tool, table, prefix=param + ".")["function"])


@described({"type": "object", "properties": {"type": {"type": "string", "enum": ["object"]}}})
def schema_of_arguments(value: Any, param: str) -> Mapping[str, Any]:
    """Read the schema of a function's arguments, which are an object."""
    schema = wire_object(value, param)
    if schema.get("type", "object") != "object":
        wrong_value(param, "must be a schema of type object: a function's arguments have names")
    return schema


@described({"type": "string", "pattern": f"^{_NAME.pattern}$"})
def tool_name(value: Any, param: str) -> str:
    """Read the name of a function."""
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    if not _NAME.fullmatch(value):
        wrong_value(param, _NAME_RULE)
    return value


_NAMED: Table = Fields(
    {"type": one_of("function"), "function": object_of(Fields({"name": tool_name}, "name"))}, "function"
)


@described(lambda: object_schema(_NAMED))
def _function_name(value: Any, param: str) -> str:
    """Read `{"type": "function", "function": {"name": …}}`."""
    return str(read(any_object(value, param), _NAMED, prefix=param + ".")["function"]["name"])


_mode = one_of(*MODES, _ANY)
_SOME = Fields(
    {"mode": one_of("auto", "required"), "tools": list_of(_function_name, low=1, high=_MAX_ALLOWED)}, "tools", "mode"
)
_ALLOWED: Table = Fields({"type": one_of("allowed_tools"), "allowed_tools": object_of(_SOME)}, "allowed_tools")
_CHOICES = (Fields(_NAMED, "type", "function"), Fields(_ALLOWED, "type", "allowed_tools"))
tool_choice: Reader = described({"title": "ToolChoice", "anyOf": [schema_of(_mode), *map(object_schema, _CHOICES)]})(
    _read_choice
)


def _refuse_twice(names: Sequence[str], param: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            wrong_value(f"{param}[{index}]", f"is named {name}, as another tool is; names must differ")
