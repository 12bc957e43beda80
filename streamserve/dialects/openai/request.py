"""`POST /v1/chat/completions` bodies → `ChatRequest`. A field of the public API is treated in one of four ways:

honoured (the table of `_own_fields`), ignored after a type check (`IGNORED`), refused when it asks for a feature that
this server lacks (`_REFUSED`: a 400 is better than an answer that silently lacks it), or unknown and refused. Fields
that other servers added to this API and that widespread clients send are treated in the same ways. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamserve.dialects.fields import (
    Reader,
    Table,
    any_list,
    any_object,
    boolean,
    conflict,
    integer,
    object_of,
    one_of,
    read,
    text,
    wrong_type,
)
from streamserve.dialects.generate import (
    alias_fields,
    build,
    most_tokens,
    prompt_logprobs,
    request_fields,
    sampling_fields,
)
from streamserve.dialects.grammar_fields import format_fields, take_format
from streamserve.dialects.native import ON_DISCONNECT
from streamserve.dialects.openai.shapes import refuse_streamed
from streamserve.dialects.pace import PACE, SITES_OWN, Pace, pace_of
from streamserve.dialects.tools import tool_fields, with_tools
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import GenerateRequest, Limits

_WORD = text(0, 512)


def _word_or_number(value: Any, param: str) -> Any:
    return _WORD(value, param) if isinstance(value, str) else integer(-(2**31), 2**31 - 1)(value, param)


# Accepted, checked for their type, and without effect on an answer (docs/openai.md).
IGNORED: Table = {
    "user": _WORD,
    "safety_identifier": _WORD,
    "prompt_cache_key": _WORD,
    "prompt_cache_retention": _WORD,
    "prompt_cache_options": any_object,
    "prediction": any_object,
    "verbosity": _WORD,
    # Of other servers: hints for their caches, queues and reports.
    "cache_control": any_object,
    "cache_prompt": boolean,
    "cache_salt": _WORD,
    "id_slot": integer(-1, 2**31 - 1),
    "keep_alive": _word_or_number,
    "priority": integer(-(2**31), 2**31 - 1),
    "provider": any_object,
    "request_id": _WORD,
    "return_progress": boolean,
    "session_id": _WORD,
    "timings_per_token": boolean,
    "usage": any_object,
}

# reasoning_effort of the API → variables of chat templates, which know three levels and two names of a switch.
_ON, _OFF = ({"enable_thinking": is_on, "thinking": is_on} for is_on in (True, False))
_EFFORTS: Mapping[str, Mapping[str, Any]] = {
    "none": _OFF,
    "minimal": {**_ON, "reasoning_effort": "low"},
    "low": {**_ON, "reasoning_effort": "low"},
    "medium": {**_ON, "reasoning_effort": "medium"},
    "high": {**_ON, "reasoning_effort": "high"},
    "xhigh": {**_ON, "reasoning_effort": "high"},
    "max": {**_ON, "reasoning_effort": "high"},
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
    """A checked body. With `stream`, `include_usage` asks for a last chunk with token counts, `continuous_usage` for
    the counts so far in every chunk, `include_obfuscation` for deltas whose size says little about their text.
    `include_reasoning` False leaves thoughts out of the response; `return_token_ids` adds the tokens' ids to it.
    `on_disconnect` is "" where the caller left it open.
    `latency_class` is what the body names, by that field or by `service_tier`; None leaves it to the defaults. `store`
    asks for the answer to be kept, with `metadata`.
    `grammar_field` is where the grammar stood.
    """

    generate: GenerateRequest
    latency_class: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    include_obfuscation: bool = False
    include_reasoning: bool = True
    return_token_ids: bool = False
    on_disconnect: str = ""
    pace: Pace = SITES_OWN
    grammar_field: str = "grammar"
    store: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


def parse(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> ChatRequest:
    """Check every field of a chat completion body; raise `BadRequest` naming the first wrong one."""
    values = _renamed(read(_without_empty_messages(body), _table(limits)))
    grammar_field = take_format(values)
    stream = values.get("stream", False)
    if "stream_options" in values and not stream:
        raise conflict("stream_options is for streams; set stream to true or leave it out.", "stream_options")
    refuse_streamed(values)
    if not values.get("add_generation_prompt", True) and not values.get("continue_final_message", False):
        raise BadRequest(
            "add_generation_prompt false is for continue_final_message, which continues the last message. Send both.",
            code="unsupported_parameter",
            param="add_generation_prompt",
        )
    options = values.get("stream_options", {})
    return ChatRequest(
        generate=with_tools(build(values, limits, default_model=default_model), values),
        latency_class=values.get("latency_class"),
        stream=stream,
        **usage_options(options),
        include_obfuscation=options.get("include_obfuscation", False),
        include_reasoning=values.get("include_reasoning", True),
        return_token_ids=values.get("return_token_ids", False),
        on_disconnect=values.get("on_disconnect", ""),
        pace=pace_of(values),
        grammar_field=grammar_field,
        store=values.get("store", False),
        metadata=values.get("metadata", {}),
    )


def usage_options(options: Mapping[str, bool]) -> dict[str, bool]:
    """Return which counts `stream_options` asks for. As in vLLM, counts in every chunk need those of the last one."""
    include_usage = options.get("include_usage", False)
    return {
        "include_usage": include_usage,
        "continuous_usage": include_usage and options.get("continuous_usage_stats", False),
    }


def _table(limits: Limits) -> Table:
    refused = {name: _refused(*rule) for name, rule in _REFUSED.items()}
    shared = {**sampling_fields(limits), **alias_fields(limits), **request_fields(limits)}
    return {**shared, **_own_fields(limits), **IGNORED, **refused, **elsewhere_fields()}


def elsewhere_fields() -> Table:
    """Return the readers of the fields of other servers that ask for something only by some of their values."""
    return {name: _refused(*rule) for name, rule in _ELSEWHERE.items()}


def _own_fields(limits: Limits) -> dict[str, Reader]:
    """Return the readers of the fields whose name or meaning is this API's own."""
    return {
        "stream": boolean,
        "store": boolean,
        "on_disconnect": one_of(*ON_DISCONNECT),
        **PACE,
        "stream_options": object_of(_STREAM_OPTIONS),
        "max_completion_tokens": most_tokens(limits),
        "add_generation_prompt": boolean,
        "include_reasoning": boolean,
        "return_token_ids": boolean,
        "seed": integer(-(2**63), 2**63 - 1),
        "logprobs": boolean,
        "top_logprobs": integer(0, limits.max_logprobs),
        "prompt_logprobs": prompt_logprobs(limits),
        "reasoning_effort": one_of(*_EFFORTS),
        **tool_fields(limits),
        **format_fields(limits),
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


def _refused(allows: Callable[[Any, str], bool], way_out: str = "") -> Reader:
    def reader(value: Any, param: str) -> None:
        if not allows(value, param):
            message = f"{param} is not supported by this server. {way_out or 'Leave it out.'}"
            raise BadRequest(message, code="unsupported_parameter", param=param)

    return reader


def _is_empty_list(value: Any, param: str) -> bool:
    return not any_list(value, param)


def _is_no_choice(value: Any, param: str) -> bool:
    if not isinstance(value, str | dict):
        wrong_type(value, param, "a string or an object")
    return value in ("none", "auto")


def _is_text_only(value: Any, param: str) -> bool:
    return all(modality == "text" for modality in any_list(value, param))


def _never(value: Any, param: str) -> bool:
    return False


def _only(*values: Any) -> Callable[[Any, str], bool]:
    """Return whether a value is one of these, which are what this server does anyway."""

    def allows(value: Any, param: str) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    return allows


_ONE, _ZERO = _only(1, 1.0), _only(0, 0.0)
_TRUE, _FALSE = _only(True), _only(False)

# Each field, which of its values ask for nothing that this server lacks, and perhaps what to send instead.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "functions": (_is_empty_list, "It is the old form of tools; send tools."),
    "function_call": (_is_no_choice, "It is the old form of tool_choice; send tool_choice."),
    "modalities": (_is_text_only,),
    "audio": (_never,),
    "moderation": (_never,),
    "web_search_options": (_never,),
    # Of other servers.
    "add_special_tokens": (_FALSE,),
    "best_of": (_only(1), "n asks for several answers."),
    "reasoning_format": (_only("auto", "deepseek"),),
    "separate_reasoning": (_TRUE,),
    "stream_reasoning": (_TRUE,),
}
# Those that other servers take on every route.
_ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    "dry_multiplier": (_ZERO,),
    "length_penalty": (_ONE,),
    "mirostat": (_ZERO,),
    "repeat_penalty": (_ONE, "Send repetition_penalty."),
    "return_tokens_as_token_ids": (_FALSE,),
    "safe_prompt": (_FALSE,),
    "spaces_between_special_tokens": (_TRUE,),
    "transforms": (_is_empty_list,),
    "typical_p": (_ONE,),
    "use_beam_search": (_FALSE,),
    "xtc_probability": (_ZERO,),
}
