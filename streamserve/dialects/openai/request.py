"""`POST /v1/chat/completions` bodies → `ChatRequest`. Pure.

A field of the public API is honoured, ignored, refused when it asks for a feature that this server lacks (body.py), or
unknown and refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamserve.dialects.asked import take_tier
from streamserve.dialects.fields import Table, any_list, boolean, conflict, described, integer, one_of, read, wrong_type
from streamserve.dialects.generate import (
    build,
    most_tokens,
)
from streamserve.dialects.openai.body import (
    EFFORTS,
    FALSE,
    TIERS,
    TRUE,
    BodyRequest,
    is_empty_list,
    never,
    only,
    refused,
    shared_fields,
    shared_values,
)
from streamserve.dialects.tools import tool_fields, with_tools
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(BodyRequest):
    """A checked body. `include_obfuscation` asks for deltas whose size reveals little about their text.

    `include_reasoning` False leaves thoughts out of the response. Its latency class is named by that field or by
    `service_tier`. `store` asks for the answer to be kept, with `metadata`.
    """

    generate: GenerateRequest
    include_obfuscation: bool = False
    include_reasoning: bool = True
    store: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


def parse(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> ChatRequest:
    """Check every field of a chat completion body; raise `BadRequest` naming the first wrong field."""
    values = _renamed(read(_without_empty_messages(body), body_fields(limits)))
    shared = shared_values(values)
    if not values.get("add_generation_prompt", True) and not values.get("continue_final_message", False):
        raise BadRequest(
            "add_generation_prompt false is for continue_final_message, which continues the last message. Send both.",
            code="unsupported_parameter",
            param="add_generation_prompt",
        )
    return ChatRequest(
        generate=with_tools(build(values, limits, default_model=default_model), values),
        include_obfuscation=values.get("stream_options", {}).get("include_obfuscation", False),
        include_reasoning=values.get("include_reasoning", True),
        store=values.get("store", False),
        metadata=values.get("metadata", {}),
        **shared,
    )


def body_fields(limits: Limits) -> Table:
    """Return the readers of a body's fields: the API's fields, and the fields whose meaning is this route's own."""
    return {
        **shared_fields(limits),
        **tool_fields(limits),
        **{name: refused(*rule) for name, rule in _REFUSED.items()},
        "store": boolean,
        "max_completion_tokens": most_tokens(limits),
        "add_generation_prompt": boolean,
        "include_reasoning": boolean,
        "logprobs": boolean,
        "top_logprobs": integer(0, limits.max_logprobs),
        "reasoning_effort": one_of(*EFFORTS),
        "service_tier": one_of(*TIERS),
    }


def _without_empty_messages(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop `messages: []` beside a `prompt`: the official client cannot leave `messages` out."""
    if body.get("messages") == [] and body.get("prompt") is not None:
        return {name: value for name, value in body.items() if name != "messages"}
    return body


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Rename this API's fields to the names in `SamplingParams`."""
    _rename_max_tokens(values)
    _rename_logprobs(values)
    take_tier(values, TIERS)
    if "messages" in values and "reasoning_effort" in values:
        effort = EFFORTS[values["reasoning_effort"]]
        values["chat_template_kwargs"] = {**effort, **values.get("chat_template_kwargs", {})}
    return values


def _rename_max_tokens(values: dict[str, Any]) -> None:
    newer = values.pop("max_completion_tokens", None)
    if newer is not None and values.setdefault("max_tokens", newer) != newer:
        raise conflict("max_tokens and max_completion_tokens differ; send one of them.", "max_completion_tokens")


def _rename_logprobs(values: dict[str, Any]) -> None:
    wanted = values.pop("logprobs", False)
    top = values.pop("top_logprobs", 0)
    if top and not wanted:
        raise conflict("top_logprobs needs logprobs to be true.", "top_logprobs")
    if wanted:
        values["logprobs"] = top


@described({"anyOf": [{"enum": ["none", "auto"]}]})
def _is_no_choice(value: Any, param: str) -> bool:
    if not isinstance(value, str | dict):
        wrong_type(value, param, "a string or an object")
    return value in ("none", "auto")


@described({"type": "array", "items": {"const": "text"}})
def _is_text_only(value: Any, param: str) -> bool:
    return all(modality == "text" for modality in any_list(value, param))


# Each field, which of its values this server accepts, and perhaps what to send instead.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "functions": (is_empty_list, "It is the old form of tools; send tools."),
    "function_call": (_is_no_choice, "It is the old form of tool_choice; send tool_choice."),
    "modalities": (_is_text_only,),
    "audio": (never,),
    "moderation": (never,),
    "web_search_options": (never,),
    # Of other servers.
    "add_special_tokens": (FALSE,),
    "best_of": (only(1), "n asks for several answers."),
    "reasoning_format": (only("auto", "deepseek"),),
    "separate_reasoning": (TRUE,),
    "stream_reasoning": (TRUE,),
}
