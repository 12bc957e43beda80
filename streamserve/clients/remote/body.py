"""`GenerateRequest` → the route and body of an OpenAI-compatible server; what that server lacks is refused by name.

A field that a server ignores would change the answer silently, so a field that its `Dialect` does not have is a 400.
Fields that the caller left open are left out: then the server's own defaults hold. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from streamserve.clients.remote.config import Dialect
from streamserve.clients.remote.grammars import grammar_fields, refuse_grammar
from streamserve.protocol.errors import BadRequest, CannotContinue
from streamserve.protocol.events import TEXT
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams, ShownChoice

CHAT, COMPLETIONS = "/chat/completions", "/completions"

_PLAIN = SamplingParams()
_STANDARD = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_EXTRA = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "include_stop",
)
CUT = "the connection to the model's server was lost in the middle of this answer. Ask again."


def body_of(request: GenerateRequest, model: str, server: str, dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """Return the route and the JSON body. Raises BadRequest for what the server lacks, CannotContinue."""
    refuse_unsupported(request, server, dialect)
    is_chat = request.messages is not None
    options: dict[str, Any] = {"include_usage": True, **({"continuous_usage_stats": True} if dialect.counts else {})}
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": options}
    if request.n > 1:
        body["n"] = request.n
    body |= _sampling(request, dialect)
    if is_chat:
        body |= _chat(request, dialect)
    else:
        body |= _prompt(request)
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
    if sampling.prompt_logprobs is not None:
        raise _unsupported("prompt_logprobs", server)
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


def can_continue(request: GenerateRequest, shown: ShownChoice, dialect: Dialect) -> bool:
    """Return whether this server would continue the one choice of which this was shown.

    Nothing shown: the request is sent again. Else only text is continued: of a thought or a tool call the server's
    parser would not know that it has begun, and a grammar would begin anew.
    """
    if not any(block.text for block in shown.blocks):
        return True
    if request.grammar is not None:
        return False
    is_text = request.n == 1 and [block.kind for block in shown.blocks] == [TEXT]
    return is_text and (request.prompt is not None or (request.messages is not None and dialect.continues))


def _sampling(request: GenerateRequest, dialect: Dialect) -> dict[str, Any]:
    """Return the sampling fields that the caller has set, under the server's names."""
    sampling, unset = request.sampling, request.unset
    out: dict[str, Any] = {name: getattr(sampling, name) for name in _STANDARD if name not in unset}
    for name in ("seed", "max_tokens"):
        if name not in unset and getattr(sampling, name) is not None:
            out[name] = getattr(sampling, name)
    num_shown = sum(choice.num_tokens for choice in request.shown)
    if "max_tokens" in out:
        out["max_tokens"] -= num_shown
    if sampling.stop:
        out["stop"] = list(sampling.stop)
    for name in _EXTRA:
        value = getattr(sampling, name)
        if name == "min_tokens":
            value = max(0, value - num_shown)
        if name not in unset and value != getattr(_PLAIN, name):
            out[dialect.fields[name]] = _plain(name, value)
    return out


def _plain(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {str(token_id): bias for token_id, bias in value}
    return list(value) if isinstance(value, tuple) else value


def _chat(request: GenerateRequest, dialect: Dialect) -> dict[str, Any]:
    assert request.messages is not None
    messages = [_message(message) for message in request.messages]
    out: dict[str, Any] = {"messages": messages}
    begun = _shown_text(request)
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
    """Return a turn in OpenAI's shape: the arguments of a tool call are text there."""
    extra = dict(message.extra)
    if "tool_calls" in extra:
        extra["tool_calls"] = [_tool_call(call) for call in extra["tool_calls"]]
    return {"role": message.role, "content": message.content, **extra}


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = msgspec.json.encode(function.get("arguments")).decode()
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


def _prompt(request: GenerateRequest) -> dict[str, Any]:
    begun = _shown_text(request)
    if request.prompt is not None:
        echo = {"echo": True} if request.echo and not begun else {}
        return {"prompt": request.prompt + begun, **echo}
    if begun:
        raise CannotContinue(CUT)
    return {"prompt": list(request.prompt_token_ids or ())}


def _shown_text(request: GenerateRequest) -> str:
    return "".join(block.text for choice in request.shown for block in choice.blocks)


def _unsupported(name: str, server: str, where: str = "") -> BadRequest:
    return BadRequest(
        f"{name} is not supported by this model's server ({server}){where}. Leave it out.",
        code="unsupported_parameter",
        param=name,
    )
