"""`POST /v1/responses` bodies → `ResponseRequest`. Pure.

As in the other dialects of this API a field is honoured, ignored after a type check (`IGNORED`), refused where the
answer would silently lack what it asks for, or unknown and refused. A custom tool is a function with one argument, its
free text; `output` shows it as a custom tool again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

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
    object_of,
    object_schema,
    one_of,
    read,
    required,
    schema_of,
    shorten,
    text,
    wrong_type,
)
from streamserve.dialects.generate import (
    alias_fields,
    build,
    most_tokens,
    refuse_conflicts,
    request_fields,
    sampling_fields,
)
from streamserve.dialects.grammar_fields import response_format
from streamserve.dialects.messages import refuse_too_long
from streamserve.dialects.openai.body import EFFORTS, IGNORED, TIERS, is_empty_list, never, only, refused, seed
from streamserve.dialects.openai.responses.items import INPUT, Item, messages_of, read_items, refuse_no_call
from streamserve.dialects.tools import (
    MODES,
    check_choice,
    schema_of_arguments,
    several_tools,
    tool_name,
    with_tools,
)
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import SYSTEM_ROLES, GenerateRequest, Message, Tool, ToolChoice

_WORD = text(0, 512)
_MAX_TOOL_CALLS = 2**31 - 1
_MAX_INCLUDED = 32
LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
# Of this server's other APIs, under the same names.
_SHARED_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words"),
    *("skip_special_tokens", "include_stop"),
)
_SHARED = ("model", "metadata", "timeout_seconds", "latency_class", "chat_template_kwargs", "prediction")
_TEXT_ID = text(1, 128)
_INSTRUCTIONS = "instructions"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(Asked):
    """A checked body. `items` are what it sends, `head` the fields of a response that repeat what was asked.

    `previous_id` and `conversation_id` are "" where it names none. `shows_logprobs` shows log-probabilities of text.
    `shortens`: the oldest items may be left out of a prompt that is too long.
    """

    generate: GenerateRequest
    items: tuple[Item, ...]
    head: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    background: bool = False
    store: bool = True
    previous_id: str = ""
    conversation_id: str = ""
    include_obfuscation: bool = False
    shortens: bool = False


def parse(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> ResponseRequest:
    """Check every field of a body; raise `BadRequest` naming the first wrong field."""
    values = read(body, body_fields(limits))
    _refuse_together(values)
    items: tuple[Item, ...] = values["input"]
    fields = _sampling(values) | {name: values[name] for name in (*_SHARED_SAMPLING, *_SHARED) if name in values}
    effort = values.get("reasoning", {}).get("effort")
    if effort is not None:
        fields["chat_template_kwargs"] = {**EFFORTS[effort], **values.get("chat_template_kwargs", {})}
    fields["messages"] = messages_of(items, "input")
    if "instructions" in values:
        fields["messages"].insert(0, Message(role="system", content=values["instructions"], param=_INSTRUCTIONS))
    fields["messages"] = tuple(fields["messages"])
    fields["grammar"] = values.get("text", {}).get("format")
    take_tier(values, TIERS)
    if "latency_class" in values:
        fields["latency_class"] = values["latency_class"]
    refuse_conflicts(fields)
    request = _with_tools(build(fields, limits, default_model=default_model), values)
    stored = values.get("store", True)
    return ResponseRequest(
        generate=request,
        items=items,
        head=head_of(body, values, request, stored=stored),
        stream=values.get("stream", False),
        background=values.get("background", False),
        store=stored,
        previous_id=values.get("previous_response_id", ""),
        conversation_id=values.get("conversation", ""),
        include_obfuscation=values.get("stream_options", {}).get("include_obfuscation", False),
        shortens=values.get("truncation") == "auto",
        **asked_of(values),
    )


def with_history(asked: ResponseRequest, history: Sequence[Item], limits: Limits) -> ResponseRequest:
    """Return the request with the items before its own. Raises `BadRequest` where they are too many together."""
    items = (*history, *asked.items)
    messages = (*instructions_of(asked), *messages_of(items, INPUT))
    refuse_no_call(messages, INPUT)
    refuse_too_long(messages, INPUT, limits)
    return replace(asked, generate=replace(asked.generate, messages=messages))


def with_messages(asked: ResponseRequest, messages: Sequence[Message]) -> ResponseRequest:
    """Return the request with the messages of a conversation: its instructions, then system messages, then the rest."""
    system = [one for one in messages_of(asked.items, INPUT) if one.role in SYSTEM_ROLES]
    whole = (*instructions_of(asked), *system, *messages)
    refuse_no_call(messages, INPUT)
    return replace(asked, generate=replace(asked.generate, messages=whole))


def instructions_of(asked: ResponseRequest) -> list[Message]:
    """Return the message of the request's `instructions`, if it has any."""
    return [message for message in asked.generate.messages or () if message.param == _INSTRUCTIONS]


def parse_count(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> ResponseRequest:
    """Check a body of `/v1/responses/input_tokens`: of a response, and all of it may be left out but the input."""
    rest = {name: one for name, one in body.items() if name != "personality"}
    return parse(rest, limits, default_model=default_model)


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have another name here."""
    found: dict[str, Any] = {}
    if "max_output_tokens" in values:
        found["max_tokens"] = values["max_output_tokens"]
    if LOGPROBS in values.get("include", ()) or values.get("top_logprobs"):
        found["logprobs"] = values.get("top_logprobs", 0)
    if "seed" in values:
        found["seed"] = values["seed"]
    return found


def _refuse_together(values: Mapping[str, Any]) -> None:
    """Raise `BadRequest` for fields that are valid alone and not together."""
    if "previous_response_id" in values and "conversation" in values:
        message = "conversation has its own history; send previous_response_id or conversation, not both."
        raise conflict(message, "conversation")
    if "stream_options" in values and not values.get("stream", False):
        raise conflict("stream_options is for streams; set stream to true or leave it out.", "stream_options")
    if values.get("background") and not values.get("store", True):
        raise conflict("A response in the background is read later, so it needs store to be true.", "store")
    if "conversation" in values and not values.get("store", True):
        raise conflict("A conversation keeps what is asked in it: leave store out, or conversation.", "store")


# What a response repeats of its request, and the value where it was left out.
_HEAD: Mapping[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "store": True,
    "temperature": 1.0,
    "top_logprobs": 0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "truncation": "disabled",
    "user": None,
}


def head_of(
    body: Mapping[str, Any], values: Mapping[str, Any], request: GenerateRequest, *, stored: bool
) -> dict[str, Any]:
    """Return the fields of a response that repeat what was asked, as their types are there."""
    given = {name: body[name] for name in _HEAD if body.get(name) is not None}
    reasoning, shown = body.get("reasoning") or {}, body.get("text") or {}
    conversation = {"conversation": {"id": values["conversation"]}} if "conversation" in values else {}
    return {
        **_HEAD,
        **given,
        **conversation,
        "model": request.model,
        "store": stored,
        "reasoning": {name: reasoning.get(name) for name in ("effort", "summary")},
        "service_tier": "default",
        "text": {"format": _format_json(shown.get("format")), "verbosity": shown.get("verbosity") or "medium"},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_tool_json(tool) for tool in body.get("tools") or ()],
    }


def _format_json(asked: Mapping[str, Any] | None) -> dict[str, Any]:
    if not asked or asked["type"] != "json_schema":
        return {"type": "text"} if not asked else {"type": asked["type"]}
    own = {name: asked.get(name) for name in ("name", "description", "schema")}
    return {"type": "json_schema", **own, "strict": bool(asked.get("strict"))}


def _tool_json(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] == "custom":
        own = {name: tool.get(name) for name in ("name", "description")}
        return {"type": "custom", **own, "format": tool.get("format") or {"type": "text"}}
    own = {name: tool.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", **own, "strict": bool(tool.get("strict"))}


@lru_cache(maxsize=8)
def body_fields(limits: Limits) -> Table:
    """Return the readers of a body's fields."""
    shared = {**sampling_fields(limits), **alias_fields(limits), **request_fields(limits)}
    readers = {
        **{name: shared[name] for name in (*_SHARED_SAMPLING, *_SHARED)},
        **{name: one for name, one in IGNORED.items() if name != "usage"},
        **ASKED,
        **{name: refused(*rule) for name, rule in _REFUSED.items()},
        "seed": seed,
        "input": read_items(limits),
        "instructions": text(0, limits.max_prompt_chars),
        "stream": boolean,
        "stream_options": object_of({"include_obfuscation": boolean}),
        "background": boolean,
        "store": boolean,
        "previous_response_id": _TEXT_ID,
        "conversation": _conversation,
        "include": list_of(one_of(*_INCLUDABLE), high=_MAX_INCLUDED),
        "max_output_tokens": most_tokens(limits),
        "max_tool_calls": integer(0, _MAX_TOOL_CALLS),
        "top_logprobs": integer(0, limits.max_logprobs),
        "reasoning": object_of(_REASONING),
        "text": _text(limits),
        "tools": several_tools(_one_tool(limits), limits),
        "tool_choice": _tool_choice,
        "parallel_tool_calls": boolean,
        "truncation": one_of("auto", "disabled"),
        "service_tier": one_of(*TIERS),
    }
    return Fields(readers, "input")


_REASONING: Table = {
    "effort": one_of(*EFFORTS),
    # Without effect: thoughts are shown as the model writes them.
    "summary": one_of("auto", "concise", "detailed"),
    "generate_summary": one_of("auto", "concise", "detailed"),
    "context": _WORD,
    "mode": _WORD,
}

# Each field, which of its values this server accepts, and perhaps what to send instead.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "context_management": (is_empty_list, "truncation auto leaves out the oldest items."),
    "prompt": (never, "Templates of prompts are not kept here: send instructions and input."),
    "moderation": (never,),
    "access_programs": (never,),
    "image": (never,),
    "n": (only(1), "Ask several times."),
}


_HAS_ID: Table = Fields({"id": _TEXT_ID}, "id")


@described(lambda: {"anyOf": [schema_of(_TEXT_ID), object_schema(_HAS_ID)]})
def _conversation(value: Any, param: str) -> str:
    """Read the id of a conversation, or an object that has it."""
    if isinstance(value, dict):
        value = read(value, _HAS_ID, prefix=param + ".")["id"]
    return str(_TEXT_ID(value, param))


def _text(limits: Limits) -> Reader:
    """Return the reader of `text`; the value of its `format` is a `Grammar`, None for plain text."""
    chat_form = response_format(limits)

    beside = {
        "name": tool_name,
        "description": text(0, limits.max_prompt_chars),
        "schema": any_object,
        "strict": boolean,
    }

    @described(
        lambda: {
            "title": "TextFormat",
            "anyOf": [
                schema_of(chat_form),
                object_schema(Fields({"type": one_of("json_schema"), **beside}, "type", "schema")),
            ],
        }
    )
    def grammar(value: Any, param: str) -> Any:
        asked = any_object(value, param)
        if asked.get("type") != "json_schema":
            return chat_form(asked, param)
        own = {name: one for name, one in asked.items() if name != "type" and one is not None}
        required(own, "schema", prefix=param + ".")
        try:
            return chat_form({"type": "json_schema", "json_schema": own}, param)
        except BadRequest as error:
            error.param = (error.param or param).replace(".json_schema", "")
            raise

    return object_of({"format": grammar, "verbosity": one_of("low", "medium", "high")})


def _one_tool(limits: Limits) -> Reader:
    named: Table = {"name": tool_name, "description": text(0, limits.max_prompt_chars), **_UNUSED}
    tables = {
        "function": {"type": one_of("function"), **named, "parameters": schema_of_arguments, "strict": boolean},
        "custom": {"type": one_of("custom"), **named, "format": _input_format(limits)},
    }
    kinds = {kind: Fields(table, "type", "name") for kind, table in tables.items()}

    @described(lambda: {"title": "ResponseTool", "anyOf": [object_schema(table) for table in kinds.values()]})
    def reader(value: Any, param: str) -> Tool:
        return _tool(value, param, kinds)

    return reader


def _tool(value: Any, param: str, tables: Mapping[str, Table]) -> Tool:
    """Read one tool. Its type is checked first: a tool that the public API itself runs is unsupported."""
    tool = any_object(value, param)
    kind = text(1, 64)(required(tool, "type", prefix=param + "."), param + ".type")
    if kind not in tables:
        message = (
            f"{param} is of type {shorten(kind)}, which this server does not have. Send a function, or a custom tool."
        )
        raise BadRequest(message, code="unsupported_parameter", param=param + ".type")
    fields = read(tool, tables[kind], prefix=param + ".")
    if kind == "custom":
        schema = {"type": "string", **fields.get("format", {})}
        own: dict[str, Any] = {"parameters": _arguments_of(schema), "strict": "pattern" in schema}
    else:
        own = {name: fields[name] for name in ("parameters", "strict") if name in fields}
    return Tool(name=fields["name"], description=fields.get("description", ""), **own)


def _arguments_of(text_schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments of a custom tool's function."""
    named = {"type": "object", "properties": {INPUT: text_schema}}
    return {**named, "required": [INPUT], "additionalProperties": False}


# Fields of tools without effect.
_UNUSED: Table = {
    "allowed_callers": any_list,
    "defer_loading": boolean,
    "output_schema": any_object,
    "async": boolean,
}


def _input_format(limits: Limits) -> Reader:
    """Read what the text of a custom tool must be: any text, or a regular expression, as a part of a schema."""
    readers: Table = {
        "type": one_of("text", "grammar"),
        "syntax": one_of("lark", "regex"),
        "definition": text(1, limits.max_grammar_chars),
    }
    table = Fields(readers, "type")

    @described(lambda: object_schema(table))
    def reader(value: Any, param: str) -> dict[str, Any]:
        fields = read(any_object(value, param), table, prefix=param + ".")
        if fields["type"] == "text":
            return {}
        if required(fields, "syntax", prefix=param + ".") != "regex":
            message = f"{param}.syntax lark is not supported within a call. Send a regular expression, or no format."
            raise BadRequest(message, code="unsupported_parameter", param=f"{param}.syntax")
        return {"pattern": required(fields, "definition", prefix=param + ".")}

    return reader


_NAMED: Table = Fields({"type": one_of("function", "custom"), "name": tool_name}, "name")


@described(lambda: object_schema(_NAMED))
def _named_tool(value: Any, param: str) -> str:
    return str(read(any_object(value, param), _NAMED, prefix=param + ".")["name"])


_named_tools = list_of(_named_tool, low=1, high=1024)
_mode = one_of(*MODES)
_ALLOWED: Table = Fields(
    {"type": one_of("allowed_tools"), "mode": one_of("auto", "required"), "tools": _named_tools}, "tools", "mode"
)


@described(
    lambda: {
        "title": "ResponseToolChoice",
        "anyOf": [schema_of(_mode), object_schema(_NAMED), object_schema(_ALLOWED)],
    }
)
def _tool_choice(value: Any, param: str) -> ToolChoice:
    """Read a mode, one tool by its name, or `allowed_tools`: a mode and the tools that it is about."""
    if isinstance(value, str):
        return ToolChoice(mode=_mode(value, param))
    if not isinstance(value, dict):
        wrong_type(value, param, f"one of {', '.join(MODES)}, or an object")
    kinds = ("function", "custom", "allowed_tools")
    kind = text(1, 64)(required(value, "type", prefix=param + "."), param + ".type")
    if kind not in kinds:
        message = f"{param} is of type {shorten(kind)}; this server has {', '.join(kinds)}."
        raise BadRequest(message, code="unsupported_parameter", param=param + ".type")
    if kind != "allowed_tools":
        return ToolChoice(mode="required", names=(_named_tool(value, param),))
    fields = read(value, _ALLOWED, prefix=param + ".")
    return ToolChoice(mode=fields["mode"], names=fields["tools"])


def _with_tools(request: GenerateRequest, values: Mapping[str, Any]) -> GenerateRequest:
    offered: Sequence[Tool] = values.get("tools", ())
    check_choice(values.get("tool_choice", ToolChoice()), offered, "tool_choice")
    return with_tools(request, values)


def field_of(param: str | None, request: GenerateRequest) -> str | None:
    """Return the field of this API for the engine's `param`."""
    fields = {
        "max_tokens": "max_output_tokens",
        "messages": INPUT,
        "chat_template_kwargs": "reasoning.effort",
        "grammar": "tools" if request.grammar is None else "text.format",
    }
    return fields.get(param or "", param)
