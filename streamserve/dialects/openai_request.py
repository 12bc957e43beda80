"""`POST /v1/chat/completions` bodies → `ChatRequest`. A field of the public API is treated in one of four ways:

honoured (the table of `_own_fields`), ignored after a type check (`IGNORED`), refused when it asks for a feature that
this server lacks (`_REFUSED`: a 400 is better than an answer that silently lacks it), or unknown and refused. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.fields import (
    Reader,
    Table,
    any_list,
    any_object,
    boolean,
    integer,
    object_of,
    one_of,
    read,
    text,
    wrong_type,
)
from streamserve.dialects.generate import build, conflict, request_fields, sampling_fields
from streamserve.dialects.native import ON_DISCONNECT
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest

_WORD = text(0, 512)

# Accepted, checked for their type, and without effect here (docs/api.md).
IGNORED: Table = {
    "user": _WORD,
    "safety_identifier": _WORD,
    "store": boolean,
    "prompt_cache_key": _WORD,
    "prompt_cache_retention": _WORD,
    "prompt_cache_options": any_object,
    "prediction": any_object,
    "parallel_tool_calls": boolean,
    "verbosity": _WORD,
}

# reasoning_effort of the API → variables of chat templates, which know three levels and an off switch.
_EFFORTS: Mapping[str, Mapping[str, Any]] = {
    "none": {"enable_thinking": False},
    "minimal": {"reasoning_effort": "low"},
    "low": {"reasoning_effort": "low"},
    "medium": {"reasoning_effort": "medium"},
    "high": {"reasoning_effort": "high"},
    "xhigh": {"reasoning_effort": "high"},
    "max": {"reasoning_effort": "high"},
}

# service_tier of the API → latency class. "auto" leaves it to the defaults of key, route and model.
_TIERS: Mapping[str, str | None] = {
    "auto": None,
    "default": "chat",
    "scale": "chat",
    "priority": "completion",
    "flex": "batch",
}

_STREAM_OPTIONS: Table = {
    "include_usage": boolean,
    "include_obfuscation": boolean,
    "continuous_usage_stats": boolean,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked body. With `stream`, `include_usage` asks for a last chunk with token counts, `include_obfuscation` for
    deltas whose size says little about their text. `on_disconnect` is "" where the caller left it
    open. `latency_class` is what the body names, by that field or by `service_tier`; None leaves it to the defaults.
    """

    generate: GenerateRequest
    latency_class: str | None = None
    stream: bool = False
    include_usage: bool = False
    include_obfuscation: bool = False
    on_disconnect: str = ""


def parse(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> ChatRequest:
    """Check every field of a chat completion body; raise `BadRequest` naming the first wrong one."""
    values = _renamed(read(_without_empty_messages(body), _table(limits)))
    stream = values.get("stream", False)
    if "stream_options" in values and not stream:
        raise conflict("stream_options is for streams; set stream to true or leave it out.", "stream_options")
    options = values.get("stream_options", {})
    return ChatRequest(
        generate=build(values, limits, default_model=default_model),
        latency_class=values.get("latency_class"),
        stream=stream,
        include_usage=options.get("include_usage", False),
        include_obfuscation=options.get("include_obfuscation", False),
        on_disconnect=values.get("on_disconnect", ""),
    )


def _table(limits: Limits) -> Table:
    refused = {name: _refused(allows) for name, allows in _REFUSED.items()}
    return {**sampling_fields(limits), **request_fields(limits), **_own_fields(limits), **IGNORED, **refused}


def _own_fields(limits: Limits) -> dict[str, Reader]:
    """Return the readers of the fields whose name or meaning is this API's own."""
    return {
        "stream": boolean,
        "on_disconnect": one_of(*ON_DISCONNECT),
        "stream_options": object_of(_STREAM_OPTIONS),
        "max_completion_tokens": integer(1, limits.max_tokens),
        "seed": integer(-(2**63), 2**63 - 1),
        "logprobs": boolean,
        "top_logprobs": integer(0, limits.max_logprobs),
        "reasoning_effort": one_of(*_EFFORTS),
        "service_tier": one_of(*_TIERS),
    }


def _without_empty_messages(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop `messages: []` beside a `prompt`: the official client cannot leave `messages` out."""
    if body.get("messages") == [] and body.get("prompt") is not None:
        return {name: value for name, value in body.items() if name != "messages"}
    return body


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Rename this API's fields to those of `SamplingParams`."""
    _rename_max_tokens(values)
    _rename_logprobs(values)
    _rename_tier(values)
    if "seed" in values:
        values["seed"] &= 2**63 - 1  # negative seeds are legal here
    if "messages" in values and "reasoning_effort" in values:
        effort = _EFFORTS[values["reasoning_effort"]]
        values["chat_template_kwargs"] = {**effort, **values.get("chat_template_kwargs", {})}
    return values


def _rename_max_tokens(values: dict[str, Any]) -> None:
    newer = values.pop("max_completion_tokens", None)
    if newer is not None and values.setdefault("max_tokens", newer) != newer:
        raise conflict("max_tokens and max_completion_tokens differ; send one of them.", "max_completion_tokens")


def _rename_tier(values: dict[str, Any]) -> None:
    named = _TIERS[values.pop("service_tier", "auto")]
    if named is not None and values.setdefault("latency_class", named) != named:
        raise conflict("service_tier and latency_class differ; send one of them.", "service_tier")


def _rename_logprobs(values: dict[str, Any]) -> None:
    wanted = values.pop("logprobs", False)
    top = values.pop("top_logprobs", 0)
    if top and not wanted:
        raise conflict("top_logprobs needs logprobs to be true.", "top_logprobs")
    if wanted:
        values["logprobs"] = top


def _refused(allows: Callable[[Any, str], bool]) -> Reader:
    def reader(value: Any, param: str) -> None:
        if not allows(value, param):
            raise BadRequest(f"{param} is not supported by this server.", code="unsupported_parameter", param=param)

    return reader


def _is_empty_list(value: Any, param: str) -> bool:
    return not any_list(value, param)


def _is_empty_object(value: Any, param: str) -> bool:
    return not any_object(value, param)


def _is_no_choice(value: Any, param: str) -> bool:
    if not isinstance(value, str | dict):
        wrong_type(value, param, "a string or an object")
    return value in ("none", "auto")


def _is_text_format(value: Any, param: str) -> bool:
    return any_object(value, param).get("type") == "text"


def _is_text_only(value: Any, param: str) -> bool:
    return all(modality == "text" for modality in any_list(value, param))


def _never(value: Any, param: str) -> bool:
    return False


# Each field, and which of its values ask for nothing that this server lacks.
_REFUSED: Mapping[str, Callable[[Any, str], bool]] = {
    "tools": _is_empty_list,
    "tool_choice": _is_no_choice,
    "functions": _is_empty_list,
    "function_call": _is_no_choice,
    "response_format": _is_text_format,
    "logit_bias": _is_empty_object,
    "modalities": _is_text_only,
    "audio": _never,
    "moderation": _never,
    "web_search_options": _never,
}
