"""`GenerateRequest` → the route and body of an OpenAI-compatible server; what that server lacks is refused by name.

Fields that the caller left open are left out: then the server's own defaults hold. A field that a server ignores would
change the answer silently, so a field that its `Dialect` does not have is a 400. A `Grammar` has names of its own on
each kind of server, or none:

    openai         response_format, of chats only
    vllm           response_format; structured_outputs{regex, choice, grammar}: vLLM 0.11 and later
    vllm-guided    response_format; guided_regex, guided_choice, guided_grammar: vLLM before 0.12
    sglang         response_format; regex, which choices are written as; ebnf, which is GBNF
    llama-server   response_format of chats, json_schema of prompts; `grammar`, which is GBNF, of choices too
    streamserve    grammar, of every kind, on both routes

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from streamserve.clients.remote.config import Dialect, RemoteConfig
from streamserve.protocol.errors import BadRequest, CannotContinue
from streamserve.protocol.events import TEXT
from streamserve.protocol.requests import (
    MODEL_DEFAULTS,
    GenerateRequest,
    Grammar,
    Message,
    Resume,
    SamplingParams,
    ShownChoice,
    refuse_parts,
)

_JSON_KINDS = ("json_object", "json_schema")
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_OF_NATIVE = {"json_schema": "schema", "regex": "pattern", "choice": "choices", "lark": "grammar", "gbnf": "grammar"}


def refuse_grammar(grammar: Grammar, server: str, dialect: Dialect, *, is_chat: bool) -> None:
    """Raise BadRequest for a grammar that this server does not take on this route."""
    if grammar.kind not in dialect.grammars:
        raise BadRequest(
            f"grammar of the type {grammar.kind} is not supported by this model's server ({server}). "
            f"It takes: {', '.join(sorted(dialect.grammars))}. Send a grammar of these types, or leave it out.",
            code="unsupported_parameter",
            param="grammar",
        )
    if server == "openai" and not is_chat:
        raise BadRequest(
            "grammar is not supported by this model's server (openai) with prompt; send messages.",
            code="unsupported_parameter",
            param="grammar",
        )


def grammar_fields(grammar: Grammar | None, server: str, dialect: Dialect, *, is_chat: bool) -> dict[str, Any]:
    """Return the fields of a grammar that was not refused."""
    if grammar is None:
        return {}
    kind = grammar.kind
    value = msgspec.json.decode(grammar.value) if kind in ("choice", "json_schema") else grammar.value
    if server == "streamserve":
        return {"grammar": {"type": kind, **({_OF_NATIVE[kind]: value} if kind in _OF_NATIVE else {})}}
    if kind in _JSON_KINDS:
        if server == "llama-server" and not is_chat:
            return {"json_schema": value if kind == "json_schema" else {"type": "object"}}
        return {"response_format": _response_format(kind, value)}
    if server == "sglang" and kind == "choice":
        return {"regex": "|".join(f"({_regex_of(one)})" for one in value)}
    if server == "llama-server" and kind == "choice":
        return {"grammar": "root ::= " + " | ".join(_gbnf_string(one) for one in value)}
    field, _, inner = dialect.grammars[kind].partition(".")
    return {field: {inner: value} if inner else value}


def _response_format(kind: str, schema: Any) -> dict[str, Any]:
    if kind == "json_object":
        return {"type": kind}
    return {"type": kind, "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _regex_of(text: str) -> str:
    """Return a regular expression that is the text, in the syntax that all engines share."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def _gbnf_string(text: str) -> str:
    """Return a literal of GBNF, which knows fewer escapes than JSON: a control character stands by its number."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", escaped) + '"'


CHAT, COMPLETIONS = "/chat/completions", "/completions"

_PLAIN = SamplingParams()
_STANDARD = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_BY_HAND = ("seed", "max_tokens", "stop", "logprobs")
# Of these a server takes what its `Dialect` names.
_EXTRA = tuple(one.name for one in fields(SamplingParams) if one.name not in (*_STANDARD, *_BY_HAND))
# For these a server has defaults of the model's own, as we do: a value that switches a default off is sent, too.
_WITH_DEFAULTS = tuple(name for name in MODEL_DEFAULTS if name in _EXTRA)

CUT = "the connection to the model's server was lost in the middle of this answer. Ask again."
_CUT_AFTER = (
    "the connection to the model's server was lost after {} tokens of this answer, and no server continues it. What "
    "was shown stays. Ask again."
)


def cut_after(num_tokens: int) -> str:
    """Return the message of an answer that ends after so many tokens."""
    return _CUT_AFTER.format(f"{num_tokens:,}") if num_tokens > 1 else CUT


def body_of(
    request: GenerateRequest, resume: Resume, model: str, server: str, dialect: Dialect
) -> tuple[str, dict[str, Any]]:
    """Return the route and the JSON body. Raises BadRequest for what the server lacks, CannotContinue."""
    refuse_unsupported(request, server, dialect)
    is_chat = request.messages is not None
    options: dict[str, Any] = {"include_usage": True, **({"continuous_usage_stats": True} if dialect.counts else {})}
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": options}
    if request.n > 1:
        body["n"] = request.n
    body |= _sampling(request, resume, dialect)
    if is_chat:
        body |= _chat(request, resume, dialect)
    else:
        body |= _prompt(request, resume)
    body |= grammar_fields(request.grammar, server, dialect, is_chat=is_chat)
    if request.sampling.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.sampling.logprobs}
    return (CHAT if is_chat else COMPLETIONS), body


def refuse_unsupported(request: GenerateRequest, server: str, dialect: Dialect) -> None:
    """Raise BadRequest for the first field that this server does not have."""
    sampling, is_chat = request.sampling, request.messages is not None
    for name in _EXTRA:
        if (
            name not in request.unset
            and getattr(sampling, name) != getattr(_PLAIN, name)
            and name not in dialect.fields
        ):
            raise _unsupported(name, server)
    if sampling.logprobs is not None and not is_chat:
        raise _unsupported("logprobs", server, " with prompt; send messages")
    if request.echo and is_chat:
        raise _unsupported("echo", server, " with messages; send prompt")
    if request.chat_template_kwargs and not dialect.takes_template_kwargs:
        raise _unsupported("chat_template_kwargs", server)
    if request.continue_final_message and not dialect.continues:
        raise _unsupported("continue_final_message", server)
    if request.grammar is not None:
        refuse_grammar(request.grammar, server, dialect, is_chat=is_chat)


# What is passed on of a part; all must be texts.
_FIELDS_OF = {"image_url": ("url", "detail"), "input_audio": ("data", "format"), "file": ("file_data", "filename")}


def check_parts(request: GenerateRequest, config: RemoteConfig) -> None:
    """Raise BadRequest for the first part that this model does not take, or that names what its caller may not reach.

    An address would be fetched by the model's server, and an id of a file is of the account whose key this site has.
    """
    refuse_parts(request, config.content_parts, f"the model {request.model}")
    for message in request.messages or ():
        for index, part in enumerate(message.parts):
            if part["type"] in _FIELDS_OF:
                _check_part(part, f"{message.param}.content[{index}]", config)


def _check_part(part: Mapping[str, Any], place: str, config: RemoteConfig) -> None:
    kind = part["type"]
    inner, names = part[kind], _FIELDS_OF[kind]
    place = f"{place}.{kind}"
    if not isinstance(inner, Mapping) or not all(isinstance(value, str) for value in inner.values()):
        raise BadRequest(f"{place} is an object of texts: {', '.join(names)}.", code="invalid_type", param=place)
    for name in inner:
        if name not in names:
            message = f"{place}.{name[:64]} is not passed on. It takes {', '.join(names)}."
            raise BadRequest(message, code="unsupported_content", param=f"{place}.{name[:64]}")
    if names[0] not in inner:
        raise BadRequest(f"{place}.{names[0]} is missing.", code="missing_field", param=f"{place}.{names[0]}")
    url = inner.get("url", "data:")
    if not url.startswith("data:") and not (config.part_addresses and url.startswith(("http://", "https://"))):
        message = f"{place}.url is an address, which this site lets no server fetch. Send the image as a data: address."
        raise BadRequest(message, code="unsupported_content", param=f"{place}.url")


def can_continue(request: GenerateRequest, shown: ShownChoice, dialect: Dialect) -> bool:
    """Return whether this server would continue the only choice, of which this was shown.

    Nothing shown: the request is sent again. Else only text is continued: of a thought or a tool call the server's
    parser would not know that it has begun, and a grammar would begin anew.
    """
    if not any(block.text for block in shown.blocks):
        return True
    if request.grammar is not None:
        return False
    is_text = request.n == 1 and [block.kind for block in shown.blocks] == [TEXT]
    return is_text and (request.prompt is not None or (request.messages is not None and dialect.continues))


def _sampling(request: GenerateRequest, resume: Resume, dialect: Dialect) -> dict[str, Any]:
    """Return the sampling fields that the caller has set, under the server's names."""
    sampling, unset = request.sampling, request.unset
    out: dict[str, Any] = {name: getattr(sampling, name) for name in _STANDARD if name not in unset}
    for name in ("seed", "max_tokens"):
        if name not in unset and getattr(sampling, name) is not None:
            out[name] = getattr(sampling, name)
    num_shown = sum(choice.num_tokens for choice in resume.shown)
    if "max_tokens" in out:
        out["max_tokens"] -= num_shown
    if sampling.stop:
        out["stop"] = list(sampling.stop)
    for name in _EXTRA:
        value = getattr(sampling, name)
        if name == "min_tokens":
            value = max(0, value - num_shown)
        is_said = value != getattr(_PLAIN, name) or (name in _WITH_DEFAULTS and name in dialect.fields)
        if name not in unset and is_said:
            out[dialect.fields[name]] = _plain(name, value)
    if out.get("top_k") == 0 and dialect.no_top_k:
        out["top_k"] = dialect.no_top_k
    return out


def _plain(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {str(token_id): bias for token_id, bias in value}
    return list(value) if isinstance(value, tuple) else value


def _chat(request: GenerateRequest, resume: Resume, dialect: Dialect) -> dict[str, Any]:
    assert request.messages is not None
    messages = [_message(message) for message in request.messages]
    out: dict[str, Any] = {"messages": messages}
    begun = _shown_text(resume)
    if begun:
        if request.continue_final_message:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + begun}
        else:
            messages.append({"role": "assistant", "content": begun})
    if begun or request.continue_final_message:
        out["continue_final_message"] = True
        if dialect.drops_generation_prompt:
            out["add_generation_prompt"] = False
    if request.chat_template_kwargs:
        out["chat_template_kwargs"] = dict(request.chat_template_kwargs)
    return {**out, **_tools(request)}


def _message(message: Message) -> dict[str, Any]:
    """Return a turn in OpenAI's shape. A call without text beside it has null: "" adds a turn in some templates."""
    extra = dict(message.extra)
    content: object = message.content or (None if "tool_calls" in extra else "")
    if message.parts:
        content = [dict(part) for part in message.parts]
    if "tool_calls" in extra:
        extra["tool_calls"] = [_tool_call(call) for call in extra["tool_calls"]]
    return {"role": message.role, "content": content, **extra}


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as text; a row of the release before has them parsed."""
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}


def _tools(request: GenerateRequest) -> dict[str, Any]:
    choice = request.tool_choice
    tools = [tool for tool in request.tools if not choice.names or tool.name in choice.names]
    if not tools:
        return {}
    out: dict[str, Any] = {"tools": [], "tool_choice": choice.mode}
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name, "parameters": dict(tool.parameters)}
        if tool.description:
            function["description"] = tool.description
        out["tools"].append({"type": "function", "function": function | ({"strict": True} if tool.strict else {})})
    if choice.mode == "required" and len(choice.names) == 1:
        out["tool_choice"] = {"type": "function", "function": {"name": choice.names[0]}}
    return out if request.parallel_tool_calls else {**out, "parallel_tool_calls": False}


def _prompt(request: GenerateRequest, resume: Resume) -> dict[str, Any]:
    begun = _shown_text(resume)
    if request.prompt is not None:
        echo = {"echo": True} if request.echo and not begun else {}
        return {"prompt": request.prompt + begun, **echo}
    if begun:
        raise CannotContinue(CUT)
    return {"prompt": list(request.prompt_token_ids or ())}


def _shown_text(resume: Resume) -> str:
    return "".join(block.text for choice in resume.shown for block in choice.blocks)


def _unsupported(name: str, server: str, where: str = "") -> BadRequest:
    return BadRequest(
        f"{name} is not supported by this model's server ({server}){where}. Leave it out.",
        code="unsupported_parameter",
        param=name,
    )
