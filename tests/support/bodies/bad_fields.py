"""`BadBody`, and bodies that are right but for one field: with values beyond its bounds, or of a wrong type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

NATIVE, OPENAI, BOTH = "native", "openai", "both"
JSON = "application/json"


@dataclass(frozen=True, kw_only=True)
class BadBody:
    """One body and its error. The server, not the dialect, refuses a `by_server` one (unknown model, content type)."""

    name: str
    body: bytes
    dialect: str = BOTH
    status: int = 400
    code: str
    param: str | None = None
    content_type: str = JSON
    by_server: bool = False

    def is_for(self, dialect: str) -> bool:
        """Return whether to post it to this dialect's route."""
        return self.dialect in (dialect, BOTH)


# Literals, as JSON text, and the kind of each.
_LITERALS = {
    "-1": "int",
    "0": "int",
    "2147483648": "int",
    "9223372036854775807": "int",
    "9223372036854775808": "int",
    "-9223372036854775809": "int",
    "1.5": "float",
    "1.0": "float",
    "-0.5": "float",
    "1e308": "float",
    "-1e308": "float",
    "1e-320": "float",
    "NaN": "not json",
    "Infinity": "not json",
    "-Infinity": "not json",
    "1e999": "not json",
    "-1e999": "not json",
    "12345678901234567890123456": "int",
    "true": "bool",
    "false": "bool",
    '"1"': "str",
    '""': "str",
    '"low"': "str",
    "[]": "list",
    "[1]": "list",
    "{}": "dict",
}

# name, dialect, kind, low, high. Bounds are those of docs/streams.md and of `Limits`' defaults.
_NUMERIC = (
    ("temperature", BOTH, "float", 0, 2),
    ("top_p", BOTH, "float", 0.001, 1),
    ("min_p", BOTH, "float", 0, 1),
    ("presence_penalty", BOTH, "float", -2, 2),
    ("frequency_penalty", BOTH, "float", -2, 2),
    ("repetition_penalty", BOTH, "float", 0.1, 10),
    ("timeout_seconds", BOTH, "float", 0.1, 3600),
    ("keepalive_seconds", BOTH, "float", 1, 300),
    ("interval_ms", BOTH, "int", 0, 5_000),
    ("interval_tokens", BOTH, "int", 1, 1_000),
    ("top_k", BOTH, "int", -1, 1_000_000),
    ("max_tokens", BOTH, "int", 1, 2**63 - 1),
    ("min_tokens", BOTH, "int", 0, 16_384),
    ("n", BOTH, "int", 1, 16),
    ("truncate_prompt_tokens", BOTH, "int", -1, 2**31 - 1),
    ("seed", NATIVE, "int", 0, 2**63 - 1),
    ("logprobs", NATIVE, "int", 0, 20),
    ("prompt_logprobs", BOTH, "int", 0, 20),
    ("seed", OPENAI, "int", -(2**63), 2**63 - 1),
    ("top_logprobs", OPENAI, "int", 0, 20),
    ("max_completion_tokens", OPENAI, "int", 1, 2**63 - 1),
)

# name, dialect, JSON types that are right.
_OTHERS = (
    ("model", BOTH, ("str",)),
    ("prompt", BOTH, ("str",)),
    ("messages", BOTH, ("list",)),
    ("stop", BOTH, ("str", "list")),
    ("stop_token_ids", BOTH, ("list",)),
    ("ignore_eos", BOTH, ("bool",)),
    ("logit_bias", BOTH, ("dict",)),
    ("allowed_token_ids", BOTH, ("list",)),
    ("bad_words", BOTH, ("str", "list")),
    ("include_stop", BOTH, ("bool",)),
    ("skip_special_tokens", BOTH, ("bool",)),
    ("include_stop_str_in_output", OPENAI, ("bool",)),
    ("include_reasoning", OPENAI, ("bool",)),
    ("return_token_ids", OPENAI, ("bool",)),
    ("add_generation_prompt", OPENAI, ("bool",)),
    ("continue_final_message", BOTH, ("bool",)),
    ("echo", BOTH, ("bool",)),
    ("chat_template_kwargs", BOTH, ("dict",)),
    ("metadata", BOTH, ("dict",)),
    ("input", BOTH, ("dict",)),
    ("state", BOTH, ("dict",)),
    ("grammar", BOTH, ("dict", "str")),
    ("latency_class", BOTH, ("str",)),
    ("format", NATIVE, ("str",)),
    ("on_disconnect", BOTH, ("str",)),
    ("keepalive", BOTH, ("str",)),
    ("stream", OPENAI, ("bool",)),
    ("stream_options", OPENAI, ("dict",)),
    ("logprobs", OPENAI, ("bool",)),
    ("reasoning_effort", OPENAI, ("str",)),
    ("user", OPENAI, ("str",)),
    ("safety_identifier", OPENAI, ("str",)),
    ("service_tier", OPENAI, ("str",)),
    ("store", OPENAI, ("bool",)),
    ("prompt_cache_key", OPENAI, ("str",)),
    ("prediction", OPENAI, ("dict",)),
    ("parallel_tool_calls", BOTH, ("bool",)),
    ("verbosity", OPENAI, ("str",)),
    ("cache_prompt", OPENAI, ("bool",)),
    ("cache_salt", OPENAI, ("str",)),
    ("id_slot", OPENAI, ("int",)),
    ("keep_alive", OPENAI, ("str", "int")),
    ("priority", OPENAI, ("int",)),
    ("provider", OPENAI, ("dict",)),
    ("request_id", OPENAI, ("str",)),
    ("return_progress", OPENAI, ("bool",)),
    ("session_id", OPENAI, ("str",)),
    ("timings_per_token", OPENAI, ("bool",)),
    ("usage", OPENAI, ("dict",)),
    ("transforms", OPENAI, ("list",)),
    ("tools", BOTH, ("list",)),
    ("tool_choice", BOTH, ("str", "dict")),
    ("functions", OPENAI, ("list",)),
    ("response_format", OPENAI, ("dict",)),
    ("structured_outputs", OPENAI, ("dict",)),
    ("guided_json", OPENAI, ("dict", "str")),
    ("guided_regex", OPENAI, ("str",)),
    ("guided_choice", OPENAI, ("list",)),
    ("guided_grammar", OPENAI, ("str",)),
    ("modalities", OPENAI, ("list",)),
)


def with_field(name: str, literal: str) -> bytes:
    """Return a body that is valid except for one field, whose JSON is `literal`."""
    fields = {"messages": '[{"role": "user", "content": "Hi"}]', "max_tokens": "4"}
    if name == "prompt":
        del fields["messages"]
    fields[name] = literal
    return ("{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in fields.items()) + "}").encode()


def one_field(name: str, field: str, value: object, **deserts: object) -> BadBody:
    deserts.setdefault("code", "invalid_value")
    deserts.setdefault("param", field)
    return BadBody(name=name, body=with_field(field, json.dumps(value)), **deserts)  # type: ignore[arg-type]


def numbers() -> Iterator[BadBody]:
    """Yield for each numeric field every wrong literal, and the nearest values out of its bounds."""
    for field, dialect, kind, low, high in _NUMERIC:
        step = 1 if kind == "int" else 0.001
        edges = {json.dumps(low - step): kind, json.dumps(high + step): kind}
        for literal, is_kind in {**_LITERALS, **edges}.items():
            code = _numeric_code(literal, is_kind, kind, low, high)
            if code is not None:
                param = None if code == "invalid_json" else field
                name = f"{dialect}: {field} = {literal}"
                yield BadBody(name=name, body=with_field(field, literal), dialect=dialect, code=code, param=param)


def _numeric_code(literal: str, is_kind: str, kind: str, low: float, high: float) -> str | None:
    if is_kind == "not json":
        return "invalid_json"
    if is_kind not in (("int",) if kind == "int" else ("int", "float")):
        return "invalid_type"
    value = int(literal) if is_kind == "int" else float(literal)
    return None if low <= value <= high else "invalid_value"


def wrong_types() -> Iterator[BadBody]:
    """Yield for each other field a literal of every wrong type."""
    for field, dialect, right in _OTHERS:
        for literal in ("1", "1.5", "true", '"1"', "[]", "{}"):
            is_kind = _LITERALS.get(literal, "int")
            if is_kind not in right:
                name = f"{dialect}: {field} = {literal}"
                body = with_field(field, literal)
                yield BadBody(name=name, body=body, dialect=dialect, code="invalid_type", param=field)
