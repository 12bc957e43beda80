"""What an answer must match, as bodies name it: the native `grammar`, and the schema of OpenAI's `response_format`.

    {"type": "json_schema", "schema": {…}}     {"type": "json_object"}     {"type": "regex", "pattern": "[0-9]+"}
    {"type": "choice", "choices": ["yes", "no"]}                           {"type": "lark", "grammar": "start: …"}

Types, sizes and combinations are checked here; whether the grammar is one is found at acceptance, where it is compiled
(engine/grammar/). The order of a schema's keys is kept: it is the order of the answer's. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from streamserve.dialects.fields import Reader, Table, any_object, list_of, one_of, read, required, text, wrong_value
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GRAMMAR_KINDS, Grammar

MAX_CHOICES = 10_000  # their characters are bounded together


@lru_cache(maxsize=8)
def grammar(limits: Limits) -> Reader:
    """Return the reader of the native `grammar`; its value is a `Grammar`."""
    table: Table = {
        "type": one_of(*GRAMMAR_KINDS),
        "schema": any_object,
        "pattern": text(1, limits.max_grammar_chars),
        "choices": list_of(text(1, limits.max_grammar_chars), low=1, high=MAX_CHOICES),
        "grammar": text(1, limits.max_grammar_chars),
    }

    def reader(value: Any, param: str) -> Grammar:
        values = read(any_object(value, param), table, prefix=param + ".")
        kind = required(values, "type", prefix=param + ".")
        own = _FIELD_OF_KIND.get(kind)
        for name in values:
            if name not in ("type", own):
                message = f"{param}.{name} does not belong to the type {kind}."
                raise BadRequest(message, code="conflicting_fields", param=f"{param}.{name}")
        if own is None:
            return Grammar(kind=kind)
        return grammar_of(kind, required(values, own, prefix=param + "."), f"{param}.{own}", limits)

    return reader


def grammar_of(kind: str, value: Any, param: str, limits: Limits) -> Grammar:
    """Return the grammar of a kind that has a value, which was checked for its type."""
    return _MAKERS[_FIELD_OF_KIND[kind]](value, param, limits)


def schema_grammar(schema: Mapping[str, Any], param: str, limits: Limits) -> Grammar:
    """Return the grammar of a JSON schema that a body has; `param` names the field it stood in."""
    return Grammar(kind="json_schema", value=_json(schema, param, limits))


def _choice(choices: tuple[str, ...], param: str, limits: Limits) -> Grammar:
    return Grammar(kind="choice", value=_json(choices, param, limits))


def _json(value: object, param: str, limits: Limits) -> str:
    """Return a value as JSON text of bounded size; calls from Python may hold what is no JSON."""
    try:
        out = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise BadRequest(f"{param} is not JSON.", code="invalid_value", param=param) from None
    if len(out) > limits.max_grammar_chars:
        wrong_value(param, f"has {len(out):,} characters of JSON; the limit is {limits.max_grammar_chars:,}")
    return out


_FIELD_OF_KIND = {"json_schema": "schema", "regex": "pattern", "choice": "choices", "lark": "grammar"}
_MAKERS: Mapping[str, Callable[[Any, str, Limits], Grammar]] = {
    "schema": schema_grammar,
    "pattern": lambda value, param, limits: Grammar(kind="regex", value=value),
    "choices": _choice,
    "grammar": lambda value, param, limits: Grammar(kind="lark", value=value),
}
