"""The names that vLLM has given to a grammar in OpenAI's bodies, as the native `grammar`: exactly one may be sent.

    "structured_outputs": {"json": {…}} | {"json_object": true} | {"regex": "…"} | {"choice": ["…"]} | {"grammar": "…"}
    "guided_json": {…}     "guided_regex": "…"     "guided_choice": ["…"]     "guided_grammar": "…"

The second row are the names of vLLM before 0.12, which many programs still send. `grammar` is Lark here. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from streamserve.dialects.fields import Reader, Table, any_object, boolean, list_of, read, text, wrong_value
from streamserve.dialects.generate import conflict
from streamserve.dialects.output.grammar_fields import MAX_CHOICES, grammar_of
from streamserve.dialects.output.tools import response_format
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Grammar

# Name within `structured_outputs`, and after "guided_" → kind.
_KINDS: Mapping[str, str] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
_GUIDED = tuple(f"guided_{name}" for name in _KINDS)
NAMES = ("response_format", "structured_outputs", *_GUIDED)


@lru_cache(maxsize=8)
def format_fields(limits: Limits) -> Mapping[str, Reader]:
    """Return the readers of `response_format`, `structured_outputs` and the older names; each value is a `Grammar`."""
    ones = _readers(limits)
    guided = {f"guided_{name}": _of_kind(kind, ones[name], limits) for name, kind in _KINDS.items()}
    return {
        "response_format": response_format(limits),
        "structured_outputs": _structured_outputs({**ones, "json_object": boolean}, limits),
        **guided,
    }


def take_format(values: dict[str, Any]) -> str:
    """Move the one field that names a grammar to `values["grammar"]`; return its name, for errors.

    Raises BadRequest where several are sent.
    """
    found = [name for name in (*NAMES, "grammar") if values.get(name) is not None]
    if len(found) > 1:
        raise conflict(f"{' and '.join(found)} all say what the text must match; send one of them.", found[1])
    if not found:
        return "grammar"
    values["grammar"] = values[found[0]]
    return found[0]


def _readers(limits: Limits) -> dict[str, Reader]:
    source = text(1, limits.max_grammar_chars)
    choices = list_of(source, low=1, high=MAX_CHOICES)
    return {"json": _schema, "regex": source, "choice": choices, "grammar": source}


def _structured_outputs(table: Table, limits: Limits) -> Reader:
    def reader(value: Any, param: str) -> Grammar:
        values = read(any_object(value, param), table, prefix=param + ".")
        if not values.get("json_object", True):
            del values["json_object"]
        if len(values) != 1:
            wrong_value(param, f"takes one of {', '.join(table)}")
        [(name, one)] = values.items()
        if name == "json_object":
            return Grammar(kind=name)
        return grammar_of(_KINDS[name], one, f"{param}.{name}", limits)

    return reader


def _of_kind(kind: str, one: Reader, limits: Limits) -> Reader:
    return lambda value, param: grammar_of(kind, one(value, param), param, limits)


def _schema(value: Any, param: str) -> Mapping[str, Any]:
    """Read a schema, or its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRequest(f"{param} is no JSON.", code="invalid_value", param=param) from None
    return any_object(value, param)
