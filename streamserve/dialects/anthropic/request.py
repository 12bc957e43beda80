"""`POST /v1/messages` bodies → `MessagesRequest`. As in the OpenAI dialect a field is honoured, ignored after a type
check (`IGNORED`), refused where the answer would silently lack what it asks for, or unknown and refused.

Without `thinking` an answer is not to think, as in the public API: clients take the first block for its text. A last
turn of the assistant is the beginning of the answer. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from streamserve.dialects.anthropic import conversation
from streamserve.dialects.asked import ASKED, Asked, asked_of, take_tier
from streamserve.dialects.fields import (
    Fields,
    Reader,
    Table,
    any_list,
    any_object,
    boolean,
    conflict,
    described,
    integer,
    list_of,
    nullable,
    object_of,
    object_schema,
    one_of,
    read,
    required,
    schema_of,
    shorten,
    text,
)
from streamserve.dialects.generate import build, most_tokens, request_fields, sampling_fields, stop_strings
from streamserve.dialects.grammar_fields import schema_grammar
from streamserve.dialects.messages import refuse_too_long
from streamserve.dialects.tools import schema_of_arguments, several_tools, tool_name, with_tools
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest, Grammar, Message, Tool, ToolChoice

_WORD = text(0, 512)
_MAX_BUDGET = 2**31 - 1
_MAX_EDITS = 16

# Accepted, checked for their type, and without effect on an answer (docs/anthropic.md).
IGNORED: Table = {
    "cache_control": any_object,
    "diagnostics": any_object,
    "inference_geo": _WORD,
    "speed": _WORD,
    "user_profile_id": _WORD,
    "workspace_id": _WORD,
}
# Of this server's other APIs.
_SHARED_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_SHARED = ("model", "metadata", "timeout_seconds", "latency_class", "input")

# `thinking` and effort of the API → variables of chat templates, which know two names of a switch and three levels.
_ON, _OFF = ({"enable_thinking": is_on, "thinking": is_on} for is_on in (True, False))
_LEVELS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_TIERS: Mapping[str, str | None] = {"auto": None, "standard_only": "chat"}
_MODES = {"auto": "auto", "any": "required", "none": "none", "tool": "required"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest(Asked):
    """A checked body.

    `asks_for_thinking`: the caller has set what the chat template's variables come from; else the request has some of
    ours beside the caller's own `template_kwargs`, which a template may lack. `shows_thinking` False leaves the text of
    thoughts out of the response.
    """

    generate: GenerateRequest
    stream: bool = False
    asks_for_thinking: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    shows_thinking: bool = True


def parse(
    body: Mapping[str, Any], limits: Limits, *, default_model: str, needs_max_tokens: bool = True
) -> MessagesRequest:
    """Check every field of a body; raise `BadRequest` naming the first wrong field."""
    values = read(body, body_fields(limits))
    if needs_max_tokens:
        required(values, "max_tokens")
    _refuse_long_thinking(values, body.get("max_tokens"))
    _refuse_edits(values, body)
    config = values.get("output_config", {})
    asks_for_thinking = "thinking" in values or config.get("effort") is not None
    named = values.get("chat_template_kwargs", {})
    kwargs = {**values.get("thinking", {"kwargs": _OFF})["kwargs"]}
    if config.get("effort") is not None:
        kwargs["reasoning_effort"] = _LEVELS[config["effort"]]
    fields = {name: values[name] for name in (*_SHARED_SAMPLING, *_SHARED, "max_tokens") if name in values}
    if "stop_sequences" in values:
        fields["stop"] = values["stop_sequences"]
    if "messages" in values:
        fields |= _conversation(values["messages"], values.get("system", ""), limits)
        fields["chat_template_kwargs"] = {**kwargs, **named}
    elif "input" not in values:
        required(values, "messages")
    elif "system" in values:
        raise conflict("system goes before messages; send them too.", "system")
    choice, is_parallel = values.get("tool_choice", (ToolChoice(), True))
    about_tools = {"tools": values.get("tools", ()), "tool_choice": choice, "parallel_tool_calls": is_parallel}
    request = with_tools(build(fields, limits, default_model=default_model), about_tools)
    take_tier(values, _TIERS)
    return MessagesRequest(
        generate=replace(request, grammar=config.get("format")),
        stream=values.get("stream", False),
        template_kwargs=named,
        asks_for_thinking=asks_for_thinking,
        shows_thinking=values.get("thinking", {}).get("display") != "omitted",
        **asked_of(values),
    )


def parse_count(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> GenerateRequest:
    """Check a body of `/v1/messages/count_tokens`, which is one of a message; `max_tokens` may be left out."""
    return parse(body, limits, default_model=default_model, needs_max_tokens=False).generate


@lru_cache(maxsize=8)
def body_fields(limits: Limits) -> Table:
    """Return the readers of a body's fields."""
    shared = {**sampling_fields(limits), **request_fields(limits)}

    @described(lambda: _with_nulls(schema_of(shared["metadata"])))
    def metadata(value: Any, param: str) -> Any:
        return shared["metadata"](_without_nulls(value), param)

    return {
        **{name: shared[name] for name in (*_SHARED_SAMPLING, *_SHARED)},
        "metadata": metadata,
        "max_tokens": most_tokens(limits),
        "messages": conversation.messages(limits),
        "system": conversation.system,
        "stop_sequences": stop_strings(limits),
        "chat_template_kwargs": shared["chat_template_kwargs"],
        "stream": boolean,
        **ASKED,
        "thinking": _thinking,
        "tools": several_tools(_one_tool(limits), limits),
        "tool_choice": _tool_choice,
        "output_config": object_of({"effort": one_of(*_LEVELS), "format": _format(limits)}),
        "service_tier": one_of(*_TIERS),
        **IGNORED,
        "container": _unsupported("This server runs no code for a model; leave it out."),
        "context_management": object_of({"edits": list_of(any_object, high=_MAX_EDITS)}),
        "mcp_servers": _unsupported("Send what their tools are as tools.", []),
        # The code on which the client's `tool_runner` and `thread` send the whole conversation instead.
        "thread": _unsupported("Send the whole conversation as messages.", code="thread_unsupported_request"),
    }


def _conversation(turns: tuple[Message, ...], system: str, limits: Limits) -> dict[str, Any]:
    """Return the fields of a conversation. Its last turn may be the assistant's: the beginning of the answer, or ""."""
    last = turns[-1]
    is_prefill = last.role == conversation.ASSISTANT
    if is_prefill and "tool_calls" in last.extra:
        raise conflict("messages end with a tool_use. Add a turn of the user with its tool_result.", "messages")
    if is_prefill and not last.content:
        turns, is_prefill = turns[:-1], False
        if not turns:
            raise BadRequest("messages have no turn of the user.", code="empty_prompt", param="messages")
    if system:
        turns = (Message(role=conversation.SYSTEM, content=system, param="system"), *turns)
        refuse_too_long(turns, "system and messages", limits)
    return {"messages": turns, "continue_final_message": is_prefill}


_shown = one_of("summarized", "omitted")
_KINDS: Mapping[str, Table] = {
    "enabled": Fields(
        {"type": one_of("enabled"), "budget_tokens": integer(1, _MAX_BUDGET), "display": _shown},
        *("type", "budget_tokens"),
    ),
    "disabled": Fields({"type": one_of("disabled")}, "type"),
    "adaptive": Fields({"type": one_of("adaptive"), "display": _shown}, "type"),
}


@described(lambda: {"title": "Thinking", "anyOf": [object_schema(table) for table in _KINDS.values()]})
def _thinking(value: Any, param: str) -> dict[str, Any]:
    """Return `kwargs` for the chat template, and `budget_tokens` and `display` if there are such."""
    thinking = any_object(value, param)
    kind = one_of(*_KINDS)(required(thinking, "type", prefix=param + "."), param + ".type")
    fields = read(thinking, _KINDS[kind], prefix=param + ".")
    return {**fields, "kwargs": {"enabled": _ON, "disabled": _OFF, "adaptive": {}}[kind]}


def _refuse_long_thinking(values: Mapping[str, Any], most: int | None) -> None:
    """Raise BadRequest for a budget that is not below `most`, the maximum as it was sent."""
    budget = values.get("thinking", {}).get("budget_tokens", 0)
    if most is not None and budget >= most:
        raise conflict("thinking.budget_tokens must be below max_tokens.", "thinking.budget_tokens")


# Edits of `context_management` that begin at a size of the prompt: the size in tokens where the edit names none.
_TRIGGERS = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}
_CLEAR_THINKING = "clear_thinking_20251015"
_KEPT_TOOL_USES, _KEPT_THINKING_TURNS = 3, 1
# A token is a byte of the text at least, and a template writes fewer tokens than these around a block.
_TOKENS_OF_A_BLOCK = 64


def _refuse_edits(values: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Raise BadRequest for an edit of the conversation that would change it; other edits count as made."""
    for index, edit in enumerate(values.get("context_management", {}).get("edits", ())):
        if not _changes_nothing(edit, body):
            where = f"context_management.edits[{index}]"
            message = (
                f"{where} may change the conversation, which this server never edits. Shorten the messages yourself."
            )
            raise BadRequest(message, code="unsupported_parameter", param="context_management")


def _changes_nothing(edit: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    """Return whether it is certain that an edit leaves the conversation as it is."""
    kind, blocks = edit.get("type"), list(_blocks_of(body))
    kept: object = edit.get("keep")
    if kind == _CLEAR_THINKING:
        num_turns: int = sum(_has_thinking(turn) for turn in body.get("messages") or ())
        return bool(kept == "all" or num_turns <= _value_of(kept, "thinking_turns", _KEPT_THINKING_TURNS))
    if not isinstance(kind, str) or kind not in _TRIGGERS:
        return False
    num_calls: int = sum(block.get("type") == "tool_use" for block in blocks)
    if kind != "compact_20260112" and num_calls <= _value_of(kept, "tool_uses", _KEPT_TOOL_USES):
        return True
    trigger = edit.get("trigger")
    if isinstance(trigger, dict) and trigger.get("type") == "tool_uses":
        return num_calls <= _value_of(trigger, "tool_uses", -1)
    parts = [body.get(name) for name in ("system", "messages", "tools")]
    num_bytes = len(json.dumps(parts, ensure_ascii=False).encode(errors="replace"))
    num_tokens: int = num_bytes + _TOKENS_OF_A_BLOCK * (len(blocks) + len(body.get("tools") or ()) + 1)
    return num_tokens <= _value_of(trigger, "input_tokens", _TRIGGERS[kind])


def _value_of(asked: Any, kind: str, default: int) -> int:
    """Return the number in `{"type": kind, "value": 3}`, `default` where nothing is asked, -1 for anything else."""
    if asked is None:
        return default
    value = asked.get("value") if isinstance(asked, dict) and asked.get("type") == kind else None
    return value if type(value) is int else -1


def _blocks_of(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the blocks of a checked body's messages; a text by itself is one block."""
    for turn in body.get("messages") or ():
        content = turn.get("content")
        yield from content if isinstance(content, list) else [{"type": "text"}]


def _has_thinking(turn: Mapping[str, Any]) -> bool:
    content = turn.get("content")
    return isinstance(content, list) and any(block.get("type") == "thinking" for block in content)


def _format(limits: Limits) -> Reader:
    """Return the reader of `output_config.format`: a schema that the text matches."""
    table: Table = Fields({"type": one_of("json_schema"), "schema": any_object}, "type", "schema")

    @described(lambda: object_schema(table))
    def reader(value: Any, param: str) -> Grammar:
        fields = read(any_object(value, param), table, prefix=param + ".")
        return schema_grammar(fields["schema"], param + ".schema", limits)

    return reader


def _one_tool(limits: Limits) -> Reader:
    table: Table = {
        "type": one_of("custom"),
        "name": tool_name,
        "description": text(0, limits.max_prompt_chars),
        "input_schema": schema_of_arguments,
        "strict": boolean,
        # Without effect.
        "cache_control": any_object,
        "eager_input_streaming": boolean,
        "input_examples": any_list,
        "allowed_callers": any_list,
        "defer_loading": boolean,
    }
    fields = Fields(table, "name", "input_schema")

    @described(lambda: {"title": "MessageTool", **object_schema(fields)})
    def reader(value: Any, param: str) -> Tool:
        return _tool(value, param, fields)

    return reader


def _tool(value: Any, param: str, table: Table) -> Tool:
    """Read one tool. Its type is checked first: a tool that the public API itself runs is unsupported."""
    tool = any_object(value, param)
    kind = tool.get("type")
    if kind is not None and text(1, 64)(kind, param + ".type") != "custom":
        raise BadRequest(
            f"{param} is of type {shorten(kind)}, which this server does not have. Send a function: name, description "
            "and input_schema.",
            code="unsupported_parameter",
            param=param + ".type",
        )
    fields = read(tool, table, prefix=param + ".")
    return Tool(
        name=fields["name"],
        description=fields.get("description", ""),
        parameters=fields["input_schema"],
        strict=fields.get("strict", False),
    )


_PARALLEL: Table = {"disable_parallel_tool_use": boolean}
_CHOICES: Mapping[str, Table] = {
    "auto": Fields({"type": one_of("auto"), **_PARALLEL}, "type"),
    "any": Fields({"type": one_of("any"), **_PARALLEL}, "type"),
    "none": Fields({"type": one_of("none")}, "type"),
    "tool": Fields({"type": one_of("tool"), **_PARALLEL, "name": tool_name}, "type", "name"),
}


@described(lambda: {"title": "MessageToolChoice", "anyOf": [object_schema(table) for table in _CHOICES.values()]})
def _tool_choice(value: Any, param: str) -> tuple[ToolChoice, bool]:
    """Read which tools may or must be called, and whether several may be."""
    choice = any_object(value, param)
    kind = one_of(*_MODES)(required(choice, "type", prefix=param + "."), param + ".type")
    fields = read(choice, _CHOICES[kind], prefix=param + ".")
    names = (fields["name"],) if kind == "tool" else ()
    return ToolChoice(mode=_MODES[kind], names=names), not fields.get("disable_parallel_tool_use", False)


def _with_nulls(schema: Mapping[str, Any]) -> dict[str, Any]:
    own = schema["additionalProperties"]
    return {**{name: schema[name] for name in ("type",)}, "additionalProperties": nullable(own)}


def _without_nulls(value: Any) -> Any:
    return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


def _unsupported(way_out: str, *allowed: Any, code: str = "unsupported_parameter") -> Reader:
    """Refuse every value but the `allowed` values, which have no effect."""

    empty = {"type": "array", "items": {}, "maxItems": 0}

    @described({**(empty if [] in allowed else {"type": "null"}), "description": way_out})
    def reader(value: Any, param: str) -> None:
        if value not in allowed:
            raise BadRequest(f"{param} is not supported by this server. {way_out}", code=code, param=param)

    return reader


def field_of(param: str | None, request: GenerateRequest) -> str | None:
    """Return the field of this API for the engine's `param`."""
    fields = {
        "stop": "stop_sequences",
        "chat_template_kwargs": "thinking",
        "continue_final_message": "messages",
        "grammar": "tools" if request.grammar is None else "output_config.format",
    }
    return fields.get(param or "", param)
