"""Tools, choices and formats that the chat API refuses: the fields of the body, the error's code, and its `param`."""

from __future__ import annotations

from typing import Any


def _function(name: object = "look_up", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def _named(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _allowed(*names: str, mode: str = "auto", **fields: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(_named, names)], **fields}}


TOOLS = [_function("look_up"), _function("book")]
_LOOP: dict[str, Any] = {"type": "object"}
_IN = "tools[0].function"
_SCHEMA = "response_format.json_schema"

WRONG_TOOLS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"tools": [None]}, "invalid_type", "tools[0]"),
    ({"tools": [{}]}, "missing_field", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "missing_field", "tools[0].function"),
    ({"tools": [{"type": 1, "function": {"name": "f"}}]}, "invalid_type", "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{"type": "function", "function": []}]}, "invalid_type", "tools[0].function"),
    ({"tools": [{"type": "function", "name": "f"}]}, "unknown_field", "tools[0].name"),
    ({"tools": [{"type": "function", "function": {}}]}, "missing_field", f"{_IN}.name"),
    ({"tools": [_function("")]}, "invalid_value", f"{_IN}.name"),
    ({"tools": [_function("n" * 65)]}, "invalid_value", f"{_IN}.name"),
    ({"tools": [_function("look up")]}, "invalid_value", f"{_IN}.name"),
    ({"tools": [_function("</tool_call>")]}, "invalid_value", f"{_IN}.name"),
    ({"tools": [_function(3)]}, "invalid_type", f"{_IN}.name"),
    ({"tools": [_function(description=1)]}, "invalid_type", f"{_IN}.description"),
    ({"tools": [_function(strict="yes")]}, "invalid_type", f"{_IN}.strict"),
    ({"tools": [_function(parameters=[])]}, "invalid_type", f"{_IN}.parameters"),
    ({"tools": [_function(parameters={"type": "array"})]}, "invalid_value", f"{_IN}.parameters"),
    ({"tools": [_function(colour="red")]}, "unknown_field", f"{_IN}.colour"),
    ({"tools": [_function(), _function()]}, "invalid_value", "tools[1]"),
    ({"tools": [_function(f"f{index}") for index in range(129)]}, "invalid_value", "tools"),
    ({"tools": [_function(description="a" * 400_000, parameters=_LOOP)]}, "context_length_exceeded", "tools"),
    ({"messages": None, "prompt": "Hi", "tools": TOOLS}, "conflicting_fields", "tools"),
    ({"tool_choice": "some", "tools": TOOLS}, "invalid_value", "tool_choice"),
    ({"tool_choice": "required"}, "conflicting_fields", "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "conflicting_fields", "tool_choice"),
    ({"tool_choice": _named("look_up")}, "conflicting_fields", "tool_choice"),
    ({"tool_choice": _named("lookup"), "tools": TOOLS}, "invalid_value", "tool_choice"),
    ({"tool_choice": {}, "tools": TOOLS}, "missing_field", "tool_choice.type"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}, "tools": TOOLS}, "invalid_value", "tool_choice.type"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "missing_field", "tool_choice.function"),
    ({"tool_choice": {"type": "function", "name": "f"}, "tools": TOOLS}, "unknown_field", "tool_choice.name"),
    ({"tool_choice": {"type": "function", "function": {}}, "tools": TOOLS}, "missing_field",
     "tool_choice.function.name"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "missing_field", "tool_choice.allowed_tools"),
    ({"tool_choice": _allowed("look_up", mode="none"), "tools": TOOLS}, "invalid_value",
     "tool_choice.allowed_tools.mode"),
    ({"tool_choice": _allowed(), "tools": TOOLS}, "invalid_value", "tool_choice.allowed_tools.tools"),
    ({"tool_choice": _allowed("book", "book"), "tools": TOOLS}, "invalid_value",
     "tool_choice.allowed_tools.tools[1]"),
    ({"tool_choice": _allowed("book", "hook"), "tools": TOOLS}, "invalid_value", "tool_choice"),
    ({"tool_choice": _allowed("book")}, "invalid_value", "tool_choice"),
    ({"parallel_tool_calls": 1, "tools": TOOLS}, "invalid_type", "parallel_tool_calls"),
    ({"response_format": {}}, "missing_field", "response_format.type"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"response_format": {"type": 1}}, "invalid_type", "response_format.type"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "unknown_field", "response_format.json_schema"),
    ({"response_format": {"type": "json_schema"}}, "missing_field", _SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "invalid_type", _SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {}, "schema": {}}}, "conflicting_fields",
     "response_format.schema"),
    ({"response_format": {"type": "json_object", "schema": "x"}}, "invalid_type", "response_format.schema"),
    ({"response_format": {"type": "text", "schema": {}}}, "unknown_field", "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "invalid_value", f"{_SCHEMA}.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "x"}}}, "invalid_type",
     f"{_SCHEMA}.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": 1}}}, "invalid_type",
     f"{_SCHEMA}.strict"),
)  # fmt: skip
