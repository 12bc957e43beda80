"""Bodies of `/v1/messages` that a correct server refuses, each with the code and the param of its error."""

from __future__ import annotations

import json
from typing import Any

from streamserve.protocol.limits import Limits
from tests.support.bodies.bad_bodies import bad_bodies
from tests.support.bodies.bad_fields import BadBody

ANTHROPIC = "anthropic"
LIMITS = Limits()
HI: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "foggy"}
FIRST = "messages[0].content[0]"
WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    ({"max_tokens": None}, "missing_field", "max_tokens"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": "8"}, "invalid_type", "max_tokens"),
    ({"messages": None}, "missing_field", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": [{"role": "assistant", "content": ""}]}, "empty_prompt", "messages"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "invalid_type", "messages[0].content"),
    ({"messages": [user(1)]}, "invalid_type", FIRST),
    ({"messages": [user({"text": "Hi"})]}, "missing_field", FIRST + ".type"),
    ({"messages": [user(IMAGE)]}, "unsupported_content", FIRST),
    ({"messages": [user({"type": "document"})]}, "unsupported_content", FIRST),
    ({"messages": [user({"type": "text"})]}, "missing_field", FIRST + ".text"),
    ({"messages": [user(CALL)]}, "invalid_value", FIRST + ".type"),
    ({"messages": [assistant(RESULT)]}, "invalid_value", FIRST + ".type"),
    ({"messages": [user(RESULT)]}, "invalid_value", FIRST + ".tool_use_id"),
    ({"messages": [*HI, assistant(CALL)]}, "conflicting_fields", "messages"),
    (
        {"messages": [*HI, assistant(CALL), user({**RESULT, "content": [IMAGE]})]},
        "unsupported_content",
        "messages[2].content[0].content[0]",
    ),
    ({"messages": [*HI, assistant({**CALL, "input": "{}"})]}, "invalid_type", "messages[1].content[0].input"),
    ({"messages": [*HI, assistant({"type": "thinking"})]}, "missing_field", "messages[1].content[0].thinking"),
    ({"messages": HI * (LIMITS.max_messages + 1)}, "invalid_value", "messages"),
    ({"messages": [user(said("x" * LIMITS.max_prompt_chars), said("y"))]}, "context_length_exceeded", "messages"),
    ({"system": "x" * LIMITS.max_prompt_chars}, "context_length_exceeded", "system and messages"),
    ({"system": [IMAGE]}, "unsupported_content", "system[0]"),
    ({"system": 1}, "invalid_type", "system"),
    ({"system": "Hi", "messages": None, "input": {}}, "conflicting_fields", "system"),
    ({"stop_sequences": ["a"] * 17}, "invalid_value", "stop_sequences"),
    ({"stop_sequences": ["a", 1]}, "invalid_type", "stop_sequences[1]"),
    ({"chat_template_kwargs": ["thinking"]}, "invalid_type", "chat_template_kwargs"),
    ({"temperature": 9}, "invalid_value", "temperature"),
    ({"stream": 1}, "invalid_type", "stream"),
    ({"thinking": {"type": "enabled"}}, "missing_field", "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 8}}, "conflicting_fields", "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 4}}, "unknown_field", "thinking.budget_tokens"),
    ({"thinking": {"type": "deep"}}, "invalid_value", "thinking.type"),
    ({"thinking": {}}, "missing_field", "thinking.type"),
    ({"thinking": {"type": "adaptive", "display": "some"}}, "invalid_value", "thinking.display"),
    (
        {
            "context_management": {
                "edits": [
                    {
                        "type": "clear_tool_uses_20250919",
                        "trigger": {"type": "input_tokens", "value": 1},
                        "keep": {"type": "tool_uses", "value": -1},
                    }
                ]
            }
        },
        "unsupported_parameter",
        "context_management",
    ),
    ({"context_management": {"edits": [{"type": "summarize"}]}}, "unsupported_parameter", "context_management"),
    ({"context_management": {"edits": {}}}, "invalid_type", "context_management.edits"),
    ({"context_management": {"edit": []}}, "unknown_field", "context_management.edit"),
    ({"tools": [{"name": "x"}]}, "missing_field", "tools[0].input_schema"),
    ({"tools": [{**WEATHER, "name": "two words"}]}, "invalid_value", "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "invalid_value", "tools[1]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{**WEATHER, "input_schema": {"type": "array"}}]}, "invalid_value", "tools[0].input_schema"),
    (
        {"tools": [{**WEATHER, "input_schema": {"maximum": 2**64}}]},
        "invalid_value",
        "tools[0].input_schema",
    ),
    ({"input": {"n": [-(2**63) - 1]}, "messages": None}, "invalid_value", "input"),
    ({"tool_choice": {"type": "any"}}, "conflicting_fields", "tool_choice"),
    ({"tool_choice": "auto"}, "invalid_type", "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "missing_field", "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "invalid_value", "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "required"}}, "invalid_value", "tool_choice.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "missing_field", "output_config.format.schema"),
    ({"output_config": {"format": {"type": "text"}}}, "invalid_value", "output_config.format.type"),
    ({"output_config": {"effort": "huge"}}, "invalid_value", "output_config.effort"),
    ({"service_tier": "flex"}, "invalid_value", "service_tier"),
    ({"service_tier": "standard_only", "latency_class": "batch"}, "conflicting_fields", "service_tier"),
    ({"container": {}}, "unsupported_parameter", "container"),
    ({"context_management": {"edits": [{}]}}, "unsupported_parameter", "context_management"),
    ({"thread": {"type": "create"}}, "thread_unsupported_request", "thread"),
    ({"mcp_servers": [{}]}, "unsupported_parameter", "mcp_servers"),
    ({"max_token": 8}, "unknown_field", "max_token"),
    ({"metadata": {"user_id": 1}}, "invalid_type", "metadata"),
]


def bad_messages() -> list[BadBody]:
    """Return the corpus: a right body with these changes (None leaves a field out), and what is no JSON."""
    changed = [
        BadBody(name=f"{number}: {param} {code}", body=_body(fields), dialect=ANTHROPIC, code=code, param=param)
        for number, (fields, code, param) in enumerate(WRONG)
    ]
    return [*changed, *(bad for bad in bad_bodies() if bad.code in ("invalid_json", "unsupported_media_type"))]


def _body(fields: dict[str, Any]) -> bytes:
    body = {"max_tokens": 8, "messages": HI, **fields}
    return json.dumps({name: one for name, one in body.items() if one is not None}).encode()
