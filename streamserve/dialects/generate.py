"""What generating dialects share: the sampling fields with their ranges, the prompt, and the request made of them.

A dialect renames its own fields to these first. Combinations of fields are checked here, single fields in their
readers. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from streamserve.dialects.fields import (
    Fields,
    Reader,
    Table,
    any_object,
    boolean,
    conflict,
    described,
    integer,
    list_of,
    number,
    object_of,
    object_schema,
    one_of,
    read,
    schema_of,
    shorten,
    text,
    wire_object,
    wrong_type,
    wrong_value,
)
from streamserve.dialects.grammar_fields import grammar
from streamserve.dialects.messages import messages
from streamserve.protocol.errors import BadRequest, PromptTooLong
from streamserve.protocol.json_patch import json_value
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import (
    LATENCY_CLASSES,
    MODEL_DEFAULTS,
    RESERVED_TEMPLATE_NAMES,
    GenerateRequest,
    Message,
    SamplingParams,
)

# Below this a temperature is greedy: dividing logits by less overflows.
_MIN_TEMPERATURE = 1e-3
_MAX_TOKEN_ID = 2**31 - 1
_MAX_ID_DIGITS = 10
_MAX_SEED = 2**63 - 1
MODEL = text(1, 256)  # the name of a model or pipeline
_MAX_VARIABLE_CHARS = 64
_MOST_NUMBER = 1_000_000  # of a template's variable
_MAX_COUNT = 2**31 - 1  # of tokens that an engine counts
_MAX_MAXIMUM = 2**63 - 1  # of a maximum, which is lowered to what there is

# A prompt as /v1/completions takes it: text, or token ids.
Prompt = str | tuple[int, ...]

# Variables of chat templates whose type is known; the engine knows which other variables a model's template reads.
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
        "top_k": _top_k(limits),
        "top_p": number(0.001, 1),
        "min_p": number(0, 1),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(0.1, 10),
        "seed": integer(0, _MAX_SEED),
        "max_tokens": most_tokens(limits),
        "min_tokens": integer(0, limits.max_tokens),
        "stop": stop_strings(limits),
        "stop_token_ids": list_of(integer(0, _MAX_TOKEN_ID), high=limits.max_stop_token_ids),
        "ignore_eos": boolean,
        "logprobs": integer(0, limits.max_logprobs),
        "logit_bias": _logit_bias(limits),
        "allowed_token_ids": list_of(integer(0, _MAX_TOKEN_ID), low=1, high=limits.max_allowed_token_ids),
        "bad_words": strings(limits.max_bad_word_chars, limits.max_bad_words),
        "include_stop": boolean,
        "skip_special_tokens": boolean,
        "truncate_prompt_tokens": _kept_tokens,
    }


@lru_cache(maxsize=8)
def scoring_fields(limits: Limits) -> Mapping[str, Reader]:
    """Return the readers of those fields of `SamplingParams` that score the prompt, which some routes only take."""
    return {"prompt_logprobs": integer(0, limits.max_logprobs)}


# vLLM's names of fields that have another name here; every route that takes sampling fields takes them.
ALIASES: Mapping[str, str] = {"include_stop_str_in_output": "include_stop"}


def alias_fields(limits: Limits) -> Mapping[str, Reader]:
    """Return the readers of ALIASES."""
    return {alias: sampling_fields(limits)[name] for alias, name in ALIASES.items()}


def with_own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the aliases under their names here."""
    out = {name: value for name, value in values.items() if name not in ALIASES}
    for alias, name in ALIASES.items():
        if alias in values and out.setdefault(name, values[alias]) != values[alias]:
            raise conflict(f"{name} and {alias} differ; send one of them.", alias)
    return out


@lru_cache(maxsize=8)
def request_fields(limits: Limits) -> Mapping[str, Reader]:
    """Return the readers of the other fields: model, prompt, choices, timeout, class, grammar, metadata."""
    return {
        "model": MODEL,
        "messages": messages(limits),
        "prompt": prompt_text(limits),
        "n": integer(1, limits.max_n),
        "chat_template_kwargs": template_kwargs(limits),
        "continue_final_message": boolean,
        "echo": boolean,
        "timeout_seconds": number(0.1, limits.max_timeout_seconds),
        "latency_class": one_of(*LATENCY_CLASSES),
        "metadata": metadata(limits),
        "input": wire_object,
        "state": state,
        "grammar": grammar(limits),
        "prediction": prediction(limits),
    }


@described({"type": "object"})
def state(value: Any, param: str) -> dict[str, Any]:
    """Read what a run's state begins with: an object of `MAX_VALUE_CHARS` characters as JSON."""
    given = wire_object(value, param)
    try:
        return dict(json_value(given, param))
    except ValueError as error:
        raise BadRequest(f"{error}.", code="invalid_value", param=param) from None


def prediction(limits: Limits) -> Reader:
    """Read OpenAI's `prediction`: {"type": "content", "content": a text, or parts of text}. Returns the text."""
    part = {"type": one_of("text"), "text": text(0, limits.max_prompt_chars)}
    parts = list_of(object_of(part), high=limits.max_messages)

    @described(lambda: {"anyOf": [schema_of(part["text"]), schema_of(parts)]})
    def content(value: Any, param: str) -> Any:
        return (part["text"] if isinstance(value, str) else parts)(value, param)

    table = Fields({"type": one_of("content"), "content": content}, "content")

    @described(lambda: object_schema(table))
    def reader(value: Any, param: str) -> str:
        found = read(any_object(value, param), table, prefix=param + ".")["content"]
        whole = found if isinstance(found, str) else "".join(one.get("text", "") for one in found)
        if len(whole) > limits.max_prompt_chars:
            wrong_value(param, f"has {len(whole):,} characters; the limit is {limits.max_prompt_chars:,}")
        return whole

    return reader


def template_kwargs(limits: Limits) -> Reader:
    """Read variables of a chat template: up to `max_template_kwargs`, of `max_prompt_chars` characters in all.

    Never those that the server sets. Numbers are small: a template may repeat something so often.
    """

    @described(lambda: {**object_schema(TEMPLATE_KWARGS, is_open=True), "maxProperties": limits.max_template_kwargs})
    def reader(value: Any, param: str) -> dict[str, Any]:
        given = any_object(value, param)
        if len(given) > limits.max_template_kwargs:
            wrong_value(param, f"has {len(given):,} entries; the limit is {limits.max_template_kwargs:,}")
        for name in given:
            if name in RESERVED_TEMPLATE_NAMES or not (name.isidentifier() and len(name) <= _MAX_VARIABLE_CHARS):
                where = f"{param}.{shorten(name)}"
                message = f"{where} is no variable that a caller sets."
                raise BadRequest(message, code="unknown_field", param=where)
        num_chars = len(str(given))
        if num_chars > limits.max_prompt_chars:
            wrong_value(param, f"has {num_chars:,} characters; the limit is {limits.max_prompt_chars:,}")
        table = {name: TEMPLATE_KWARGS.get(name, _variable) for name in given}
        return read(given, table, prefix=param + ".")

    return reader


def _variable(value: Any, param: str) -> Any:
    """Read any JSON whose numbers are small."""
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _variable(item, param)
    elif isinstance(value, int | float):
        number(-_MOST_NUMBER, _MOST_NUMBER)(float(value) if isinstance(value, bool) else value, param)
    return value


def build(values: Mapping[str, Any], limits: Limits, *, default_model: str) -> GenerateRequest:
    """Return the request made of checked fields; other names in `values` are ignored."""
    values = with_own_names(values)
    refuse_conflicts(values)
    sampling = {name: values[name] for name in (*sampling_fields(limits), *scoring_fields(limits)) if name in values}
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
        state=values.get("state", {}),
        grammar=values.get("grammar"),
        prediction=values.get("prediction", ""),
        continue_final_message=values.get("continue_final_message", False),
        echo=values.get("echo", False),
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
    if "continue_final_message" in values or "echo" in values:
        _refuse_continuation(values)


def _refuse_continuation(values: Mapping[str, Any]) -> None:
    """Raise `BadRequest` where there is no message to continue, or none to repeat."""
    turns: tuple[Message, ...] | None = values.get("messages")
    if values.get("continue_final_message"):
        last = turns[-1] if turns else None
        if last is None or last.role != "assistant" or not last.content or "tool_calls" in last.extra:
            raise conflict(
                "continue_final_message continues the text of a last message of role assistant. Add it to messages.",
                "continue_final_message",
            )
    elif values.get("echo") and turns is not None:
        raise conflict("echo repeats a prompt, or with continue_final_message the last message.", "echo")


def most_tokens(limits: Limits, low: int = 1) -> Reader:
    """Read a maximum of tokens. A maximum above the site's own is that: the answer may end sooner, with `length`."""
    number_of_tokens = integer(low, _MAX_MAXIMUM)

    @described(schema_of(number_of_tokens))
    def reader(value: Any, param: str) -> int:
        return int(min(number_of_tokens(value, param), limits.max_tokens))

    return reader


def _top_k(limits: Limits) -> Reader:
    """Read how many of the likeliest tokens are left; 0, and -1 as vLLM has it, are all."""
    count = integer(-1, limits.max_top_k)

    @described(schema_of(count))
    def reader(value: Any, param: str) -> int:
        return max(0, int(count(value, param)))

    return reader


_count = integer(-1, _MAX_COUNT)


@described({**schema_of(_count), "not": {"const": 0}})
def _kept_tokens(value: Any, param: str) -> int:
    """Read how many tokens of the prompt's end are kept; -1 is as many as fit."""
    count: int = _count(value, param)
    if not count:
        wrong_value(param, "must be 1 or more, or -1 for as many as fit")
    return count


def stop_strings(limits: Limits) -> Reader:
    """Read the strings that end an answer. An empty string ends nothing, and is left out."""
    several = strings(limits.max_stop_chars, limits.max_stop)
    one = {"type": "string", "maxLength": limits.max_stop_chars}

    @described({"anyOf": [one, {"type": "array", "items": one}]})  # empty strings do not count as items
    def reader(value: Any, param: str) -> tuple[str, ...]:
        if value == "":
            return ()
        if isinstance(value, list) and "" in value:
            value = [one for one in value if one != ""]
        found: tuple[str, ...] = several(value, param)
        return found

    return reader


def _temperature(limits: Limits) -> Reader:
    in_range = number(0, limits.max_temperature)

    @described(schema_of(in_range))
    def reader(value: Any, param: str) -> float:
        temperature: float = in_range(value, param)
        return temperature if temperature >= _MIN_TEMPERATURE else 0.0

    return reader


def strings(max_chars: int, most: int) -> Reader:
    """Read a string, or up to `most` of them, none empty or longer than `max_chars`."""
    one = text(1, max_chars)
    several = list_of(one, high=most)

    @described(lambda: {"anyOf": [schema_of(one), schema_of(several)]})
    def reader(value: Any, param: str) -> tuple[str, ...]:
        if isinstance(value, str):
            return (one(value, param),)
        if not isinstance(value, list):
            wrong_type(value, param, "a string or an array of strings")
        return tuple(several(value, param))

    return reader


def _logit_bias(limits: Limits) -> Reader:
    """Read `{"token id": bias}`. The keys of a JSON object are strings."""
    bias, ids = number(-100, 100), integer(0, _MAX_TOKEN_ID)

    @described(
        {
            "type": "object",
            "maxProperties": limits.max_logit_bias,
            "propertyNames": {"pattern": f"^[0-9]{{1,{_MAX_ID_DIGITS}}}$"},
            "additionalProperties": schema_of(bias),
        }
    )
    def reader(value: Any, param: str) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            wrong_type(value, param, "an object of token ids and biases")
        if len(value) > limits.max_logit_bias:
            wrong_value(param, f"has {len(value):,} token ids; the limit is {limits.max_logit_bias:,}")
        found: dict[int, float] = {}
        for name, one in value.items():
            where = f"{param}.{shorten(name)}"
            if not (name.isascii() and name.isdigit() and len(name) <= _MAX_ID_DIGITS):
                wrong_value(where, 'is not a token id; write it in digits, like "50256"')
            token_id = ids(int(name), where)
            if token_id in found:
                wrong_value(where, "is there twice")
            found[token_id] = bias(one, where)
        return tuple(found.items())

    return reader


def prompt_text(limits: Limits) -> Reader:
    """Read the text of a bare prompt."""

    @described({"type": "string", "minLength": 1, "maxLength": limits.max_prompt_chars})
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


def prompts(limits: Limits, *, most: int | None = None) -> Reader:
    """Read a text, several texts, token ids, or several lists of them: `most` of them, or MAX_PROMPTS."""
    most = limits.max_prompts if most is None else most
    one_text, ids = prompt_text(limits), token_ids(limits.max_prompt_chars)
    kinds = (one_text, list_of(one_text, low=1, high=most), ids, list_of(ids, low=1, high=most))

    @described(lambda: {"anyOf": [schema_of(kind) for kind in kinds]})
    def reader(value: Any, param: str) -> tuple[Prompt, ...]:
        if isinstance(value, str):
            return (one_text(value, param),)
        if not isinstance(value, list):
            wrong_type(value, param, "a string, an array of strings, token ids, or an array of arrays of token ids")
        if not value:
            wrong_value(param, "must not be empty")
        if type(value[0]) is int:
            return (ids(value, param),)
        if len(value) > most:
            wrong_value(param, f"has {len(value):,} items; the limit is {most:,}")
        wanted = str if isinstance(value[0], str) else list
        found: list[Prompt] = []
        for index, item in enumerate(value):
            where = f"{param}[{index}]"
            if not isinstance(item, wanted):
                wrong_type(item, where, "a string" if wanted is str else "an array of token ids")
            found.append(one_text(item, where) if isinstance(item, str) else ids(item, where))
        _refuse_too_long(found, param, limits)
        return tuple(found)

    return reader


def token_ids(most: int) -> Reader:
    """Read 1 to `most` token ids. A megabyte of right ids takes the event loop a few milliseconds."""
    one_by_one = list_of(integer(0, _MAX_TOKEN_ID), low=1, high=most)

    @described(lambda: schema_of(one_by_one))
    def reader(value: Any, param: str) -> tuple[int, ...]:
        is_right = isinstance(value, list) and 0 < len(value) <= most and set(map(type, value)) == {int}
        if is_right and min(value) >= 0 and max(value) <= _MAX_TOKEN_ID:
            return tuple(value)
        found: tuple[int, ...] = one_by_one(value, param)
        return found

    return reader


def _refuse_too_long(found: Sequence[Prompt], param: str, limits: Limits) -> None:
    num = sum(map(len, found))
    if num > limits.max_prompt_chars:
        message = (
            f"{param} has {num:,} characters in all; the limit is {limits.max_prompt_chars:,}. Send fewer prompts."
        )
        raise PromptTooLong(message, param=param)


def metadata(limits: Limits) -> Reader:
    """Read the caller's own notes. No answer depends on them; the check bounds their size."""
    note = text(0, limits.max_metadata_chars)

    @described(
        {
            "type": "object",
            "maxProperties": limits.max_metadata_keys,
            "propertyNames": {"maxLength": limits.max_metadata_key_chars},
            "additionalProperties": schema_of(note),
        }
    )
    def reader(value: Any, param: str) -> dict[str, str]:
        if not isinstance(value, dict):
            wrong_type(value, param, "an object")
        if len(value) > limits.max_metadata_keys or any(len(name) > limits.max_metadata_key_chars for name in value):
            raise BadRequest(
                f"{param} takes at most {limits.max_metadata_keys} keys of {limits.max_metadata_key_chars} characters.",
                code="invalid_value",
                param=param,
            )
        return {name: note(item, param) for name, item in value.items()}

    return reader
