"""What generating dialects share: the sampling fields with their ranges, the prompt, and the request made of them.

A dialect renames its own fields to these first. Combinations of fields are checked here, single fields in their
readers. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from streamserve.dialects.fields import (
    Reader,
    Table,
    any_object,
    boolean,
    integer,
    list_of,
    number,
    object_of,
    one_of,
    text,
    wrong_type,
)
from streamserve.dialects.messages import messages
from streamserve.dialects.output.grammar_fields import grammar
from streamserve.protocol.errors import BadRequest, PromptTooLong
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import LATENCY_CLASSES, MODEL_DEFAULTS, GenerateRequest, SamplingParams

# Below this a temperature is greedy: dividing logits by less overflows.
_MIN_TEMPERATURE = 1e-3
_MAX_TOKEN_ID = 2**31 - 1
_MAX_SEED = 2**63 - 1
_MAX_MODEL_CHARS = 256

# Chat templates take any variable; a caller may set only these, of these types (CVE-2025-62426: `tokenize`).
TEMPLATE_KWARGS: Table = {
    "enable_thinking": boolean,
    "thinking": boolean,
    "reasoning_effort": one_of("low", "medium", "high"),
}


# The tables depend on the limits only, which a process rarely changes: they are built once, not for each request.
@lru_cache(maxsize=8)
def sampling_fields(limits: Limits) -> Mapping[str, Reader]:
    """Return the readers of `SamplingParams`' fields, by the same names; `logprobs` is a count."""
    return {
        "temperature": _temperature(limits),
        "top_k": integer(0, limits.max_top_k),
        "top_p": number(0.001, 1),
        "min_p": number(0, 1),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(0.1, 10),
        "seed": integer(0, _MAX_SEED),
        "max_tokens": integer(1, limits.max_tokens),
        "min_tokens": integer(0, limits.max_tokens),
        "stop": _stop(limits),
        "stop_token_ids": list_of(integer(0, _MAX_TOKEN_ID), high=limits.max_stop_token_ids),
        "ignore_eos": boolean,
        "logprobs": integer(0, limits.max_logprobs),
    }


@lru_cache(maxsize=8)
def request_fields(limits: Limits) -> Mapping[str, Reader]:
    """Return the readers of the other fields: model, prompt, choices, timeout, class, grammar, metadata."""
    return {
        "model": text(1, _MAX_MODEL_CHARS),
        "messages": messages(limits),
        "prompt": _prompt(limits),
        "n": integer(1, limits.max_n),
        "chat_template_kwargs": object_of(TEMPLATE_KWARGS),
        "timeout_seconds": number(0.1, limits.max_timeout_seconds),
        "latency_class": one_of(*LATENCY_CLASSES),
        "metadata": _metadata(limits),
        "input": any_object,
        "grammar": grammar(limits),
    }


def build(values: Mapping[str, Any], limits: Limits, *, default_model: str) -> GenerateRequest:
    """Return the request made of checked fields; other names in `values` are ignored."""
    refuse_conflicts(values)
    sampling = {name: values[name] for name in sampling_fields(limits) if name in values}
    return GenerateRequest(
        model=values.get("model", default_model),
        messages=values.get("messages"),
        prompt=values.get("prompt"),
        sampling=SamplingParams(**sampling),
        unset=tuple(name for name in MODEL_DEFAULTS if name not in sampling),
        n=values.get("n", 1),
        chat_template_kwargs=values.get("chat_template_kwargs", {}),
        timeout_seconds=values.get("timeout_seconds"),
        latency_class=values.get("latency_class", LATENCY_CLASSES[0]),
        input=values.get("input", {}),
        grammar=values.get("grammar"),
    )


def refuse_conflicts(values: Mapping[str, Any]) -> None:
    """Raise `BadRequest` for fields that are valid alone and not together."""
    has_messages, has_prompt = "messages" in values, "prompt" in values
    if not has_messages and not has_prompt and "input" not in values:
        raise BadRequest("Send messages, or prompt.", code="missing_field", param="messages")
    if has_messages and has_prompt:
        raise conflict("Send messages or prompt, not both.", "prompt")
    if has_prompt and values.get("chat_template_kwargs"):
        raise conflict("chat_template_kwargs has no effect on a bare prompt; send messages.", "chat_template_kwargs")
    if "max_tokens" in values and values.get("min_tokens", 0) > values["max_tokens"]:
        raise conflict("min_tokens must not be above max_tokens.", "min_tokens")


def conflict(message: str, param: str) -> BadRequest:
    """Return the error for two fields that cannot go together."""
    return BadRequest(message, code="conflicting_fields", param=param)


def _temperature(limits: Limits) -> Reader:
    in_range = number(0, limits.max_temperature)

    def reader(value: Any, param: str) -> float:
        temperature: float = in_range(value, param)
        return temperature if temperature >= _MIN_TEMPERATURE else 0.0

    return reader


def _stop(limits: Limits) -> Reader:
    one = text(1, limits.max_stop_chars)
    several = list_of(one, high=limits.max_stop)

    def reader(value: Any, param: str) -> tuple[str, ...]:
        if isinstance(value, str):
            return (one(value, param),)
        if not isinstance(value, list):
            wrong_type(value, param, "a string or an array of strings")
        return tuple(several(value, param))

    return reader


def _prompt(limits: Limits) -> Reader:
    def reader(value: Any, param: str) -> str:
        if not isinstance(value, str):
            wrong_type(value, param, "a string")
        if not value:
            raise BadRequest(f"{param} must not be empty.", code="empty_prompt", param=param)
        if len(value) > limits.max_prompt_chars:
            raise PromptTooLong(
                f"{param} has {len(value):,} characters; the limit is {limits.max_prompt_chars:,}. Shorten it.",
                param=param,
            )
        return value

    return reader


def _metadata(limits: Limits) -> Reader:
    """Read the caller's own notes. They are not used; the check bounds their size."""
    note = text(0, limits.max_metadata_chars)

    def reader(value: Any, param: str) -> dict[str, str]:
        if not isinstance(value, dict):
            wrong_type(value, param, "an object")
        if len(value) > limits.max_metadata_keys or any(len(name) > limits.max_metadata_chars for name in value):
            raise BadRequest(
                f"{param} takes at most {limits.max_metadata_keys} keys of {limits.max_metadata_chars} characters.",
                code="invalid_value",
                param=param,
            )
        return {name: note(item, param) for name, item in value.items()}

    return reader
