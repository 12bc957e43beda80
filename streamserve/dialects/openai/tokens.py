"""The dialect of `/tokenize` and `/detokenize`, which vLLM has added beside OpenAI's routes. Pure.

    {"model", "prompt", "add_special_tokens"} or {"model", "messages", "tools", …}  →  {"tokens": [1, 2], "count": 2, …}
    {"model", "tokens": [1, 2]}                                                     →  {"prompt": "…"}

Fields as vLLM has them (`TokenizeCompletionRequest`, `TokenizeChatRequest`, `DetokenizeRequest`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamserve.dialects import tools
from streamserve.dialects.fields import Fields, Table, boolean, conflict, read
from streamserve.dialects.generate import MODEL, build, request_fields, token_ids
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest

_OF_CHATS = ("tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeBody:
    """A checked body. `adds_special`: a bare prompt gets the tokens with which the model begins and ends prompts."""

    request: GenerateRequest
    adds_special: bool = True
    shows_texts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeBody:
    """A checked body."""

    model: str
    token_ids: tuple[int, ...]


def tokenize_fields(limits: Limits) -> Table:
    """Return the readers of the fields of `/tokenize`."""
    fields = request_fields(limits)
    names = ("model", "messages", "prompt", "chat_template_kwargs", "continue_final_message")
    return {
        **{name: fields[name] for name in names},
        "tools": tools.tools(limits),
        "add_generation_prompt": boolean,
        "add_special_tokens": boolean,
        "return_token_strs": boolean,
    }


def detokenize_fields(limits: Limits) -> Table:
    """Return the readers of the fields of `/detokenize`."""
    return Fields({"model": MODEL, "tokens": token_ids(limits.max_prompt_chars)}, "tokens")


def parse_tokenize(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> TokenizeBody:
    """Check every field of a body; raise `BadRequest` naming the first wrong field."""
    values = read(body, tokenize_fields(limits))
    if "messages" not in values:
        for name in _OF_CHATS:
            if name in values:
                raise conflict(f"{name} has no effect on a bare prompt; send messages.", name)
    elif values.get("add_special_tokens"):
        message = "add_special_tokens has no effect on messages: the chat template has these tokens. Leave it out."
        raise conflict(message, "add_special_tokens")
    request = replace(build(values, limits, default_model=default_model), tools=values.get("tools", ()))
    if values.get("add_generation_prompt") is False:
        kwargs = {**request.chat_template_kwargs, "add_generation_prompt": False}
        request = replace(request, chat_template_kwargs=kwargs)
    return TokenizeBody(
        request=request,
        adds_special=values.get("add_special_tokens", True),
        shows_texts=values.get("return_token_strs", False),
    )


def parse_detokenize(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> DetokenizeBody:
    """Check every field of a body; raise `BadRequest` naming the first wrong field."""
    values = read(body, detokenize_fields(limits))
    return DetokenizeBody(model=values.get("model", default_model), token_ids=values["tokens"])


def tokenize_json(ids: Sequence[int], texts: Sequence[str] | None, *, max_model_len: int) -> dict[str, Any]:
    """Return the body of a response of `/tokenize`."""
    shown = None if texts is None else list(texts)
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": list(ids), "token_strs": shown}
