"""What bodies of the OpenAI API's dialects share: fields, and what is made of them. Pure.

A field that other servers added to this API, and that widespread clients send, is honoured, ignored after a type check
(`IGNORED`), or refused when it asks for a feature that this server lacks (`refused`): a 400 is better than an answer
that silently lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.asked import ASKED, Asked, asked_of
from streamserve.dialects.fields import (
    Reader,
    Table,
    any_list,
    any_object,
    boolean,
    conflict,
    described,
    integer,
    object_of,
    schema_of,
    text,
)
from streamserve.dialects.generate import alias_fields, request_fields, sampling_fields, scoring_fields
from streamserve.dialects.grammar_fields import format_fields, take_format
from streamserve.dialects.openai.shapes import PROMPT_LOGPROBS
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits

_WORD = text(0, 512)


@described({"anyOf": [schema_of(_WORD), {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}]})
def _word_or_number(value: Any, param: str) -> Any:
    return _WORD(value, param) if isinstance(value, str) else integer(-(2**31), 2**31 - 1)(value, param)


# Accepted, checked for their type, and without effect on an answer (docs/openai.md).
IGNORED: Table = {
    "user": _WORD,
    "safety_identifier": _WORD,
    "prompt_cache_key": _WORD,
    "prompt_cache_retention": _WORD,
    "prompt_cache_options": any_object,
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
EFFORTS: Mapping[str, Mapping[str, Any]] = {
    "none": _OFF,
    "minimal": {**_ON, "reasoning_effort": "low"},
    "low": {**_ON, "reasoning_effort": "low"},
    "medium": {**_ON, "reasoning_effort": "medium"},
    "high": {**_ON, "reasoning_effort": "high"},
    "xhigh": {**_ON, "reasoning_effort": "high"},
    "max": {**_ON, "reasoning_effort": "high"},
}

# service_tier of the API → latency class. "auto" leaves it to the defaults of key, route and model.
TIERS: Mapping[str, str | None] = {
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
class BodyRequest(Asked):
    """A part of a checked body. `include_usage` asks for a last chunk with token counts, `continuous_usage` for the
    counts so far in every chunk; `return_token_ids` adds the tokens' ids to the response. `grammar_field` is where the
    grammar stood.
    """

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    grammar_field: str = "grammar"


def shared_fields(limits: Limits) -> dict[str, Reader]:
    """Return the readers of the fields that all dialects of this API take."""
    return {
        **sampling_fields(limits),
        **scoring_fields(limits),
        **alias_fields(limits),
        **request_fields(limits),
        **format_fields(limits),
        **IGNORED,
        **{name: refused(*rule) for name, rule in _ELSEWHERE.items()},
        **ASKED,
        "seed": seed,
        "stream": boolean,
        "stream_options": object_of(_STREAM_OPTIONS),
        "return_token_ids": boolean,
    }


def shared_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `BodyRequest`, and put the grammar where `build` looks for it. Raises BadRequest."""
    grammar_field = take_format(values)
    stream, options = values.get("stream", False), values.get("stream_options")
    if options is not None and not stream:
        raise conflict("stream_options is for streams; set stream to true or leave it out.", "stream_options")
    if stream and PROMPT_LOGPROBS in values:  # the field belongs to a whole answer, as in vLLM
        message = f"{PROMPT_LOGPROBS} are not available in streams here; leave stream out, or ask POST /streams, which"
        raise conflict(f"{message} shows them.", PROMPT_LOGPROBS)
    include_usage = (options or {}).get("include_usage", False)
    return {
        "stream": stream,
        "include_usage": include_usage,
        # As in vLLM, counts in every chunk need the counts of the last chunk.
        "continuous_usage": include_usage and (options or {}).get("continuous_usage_stats", False),
        "return_token_ids": values.get("return_token_ids", False),
        "grammar_field": grammar_field,
        **asked_of(values),
    }


_signed = integer(-(2**63), 2**63 - 1)


@described(schema_of(_signed))
def seed(value: Any, param: str) -> int:
    """Read a seed. Negative seeds are legal in this API."""
    number: int = _signed(value, param)
    return number & 2**63 - 1


def refused(allows: Callable[[Any, str], bool], way_out: str = "") -> Reader:
    """Return the reader of a field that is refused with a value that `allows` does not allow."""
    rule = f"Other values are not supported by this server. {way_out}".strip()

    @described({**schema_of(allows), "description": rule})
    def reader(value: Any, param: str) -> None:
        if not allows(value, param):
            message = f"{param} is not supported by this server. {way_out or 'Leave it out.'}"
            raise BadRequest(message, code="unsupported_parameter", param=param)

    return reader


@described({"type": "array", "items": {}, "maxItems": 0})
def is_empty_list(value: Any, param: str) -> bool:
    """Return whether a list is empty."""
    return not any_list(value, param)


@described({"type": "null"})
def never(value: Any, param: str) -> bool:
    """Return that no value is allowed."""
    return False


def only(*values: Any) -> Callable[[Any, str], bool]:
    """Return whether a value is one of `values`, which this server does anyway."""

    different = list(dict.fromkeys(values))

    @described({"enum": different} if len(different) > 1 else {"const": different[0]})
    def allows(value: Any, param: str) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    return allows


ONE, ZERO, TRUE, FALSE = only(1, 1.0), only(0, 0.0), only(True), only(False)

# Fields that other servers take on every route: which of their values this server accepts, and
# perhaps what to send instead.
_ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    "dry_multiplier": (ZERO,),
    "length_penalty": (ONE,),
    "mirostat": (ZERO,),
    "repeat_penalty": (ONE, "Send repetition_penalty."),
    "return_tokens_as_token_ids": (FALSE,),
    "safe_prompt": (FALSE,),
    "spaces_between_special_tokens": (TRUE,),
    "transforms": (is_empty_list,),
    "typical_p": (ONE,),
    "use_beam_search": (FALSE,),
    "xtc_probability": (ZERO,),
}
