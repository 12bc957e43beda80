"""What an answer must match, as bodies name it: the native `grammar`, OpenAI's `response_format`, and vLLM's names.

    {"type": "json_schema", "schema": {…}}     {"type": "json_object"}     {"type": "regex", "pattern": "[0-9]+"}
    {"type": "choice", "choices": ["yes", "no"]}                           {"type": "lark", "grammar": "start: …"}
    {"type": "gbnf", "grammar": "root ::= …"}

    "structured_outputs": {"json": {…}} | {"json_object": true} | {"regex": "…"} | {"choice": ["…"]} | {"grammar": "…"}
    "guided_json": {…}     "guided_regex": "…"     "guided_choice": ["…"]     "guided_grammar": "…"

The last row are the names of vLLM before 0.12, which many programs still send. A body may have one of all these
names. A grammar that is text alone, as in `guided_grammar` or llama-server's `grammar`, is GBNF where a rule has
"::=", else Lark.
Types, sizes and combinations are checked here; whether the text is a grammar is found at acceptance, where it is
compiled (engine/grammar/). The order of a schema's keys is kept: it is the order of the answer's. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from streamserve.dialects.fields import (
    Fields,
    Reader,
    Table,
    any_object,
    boolean,
    conflict,
    described,
    list_of,
    object_of,
    object_schema,
    one_of,
    read,
    refuse_unknown,
    required,
    schema_of,
    text,
    wrong_value,
)
from streamserve.dialects.tools import tool_name
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.json_body import num_containers, too_many_containers
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GRAMMAR_KINDS, Grammar

MAX_CHOICES = 10_000  # their characters are bounded together


@lru_cache(maxsize=8)
def grammar(limits: Limits) -> Reader:
    """Return the reader of the native `grammar`; its value is a `Grammar`."""
    readers: Table = {
        "type": one_of(*GRAMMAR_KINDS),
        "schema": any_object,
        "pattern": text(1, limits.max_grammar_chars),
        "choices": list_of(text(1, limits.max_grammar_chars), low=1, high=MAX_CHOICES),
        "grammar": text(1, limits.max_grammar_chars),
    }
    table = Fields(readers, "type")

    @described(lambda: {"title": "Grammar", "anyOf": [schema_of(table["grammar"]), object_schema(table)]})
    def reader(value: Any, param: str) -> Grammar:
        if isinstance(value, str):
            return _of_source(table["grammar"](value, param))
        values = read(any_object(value, param), table, prefix=param + ".")
        kind = values["type"]
        own = _FIELD_OF_KIND.get(kind)
        for name in values:
            if name not in ("type", own):
                message = f"{param}.{name} does not belong to the type {kind}."
                raise BadRequest(message, code="conflicting_fields", param=f"{param}.{name}")
        if own is None:
            return Grammar(kind=kind)
        if own == "grammar":
            return Grammar(kind=kind, value=required(values, own, prefix=param + "."))
        return grammar_of(kind, required(values, own, prefix=param + "."), f"{param}.{own}", limits)

    return reader


def grammar_of(kind: str, value: Any, param: str, limits: Limits) -> Grammar:
    """Return the grammar of a kind that has a value, which was checked for its type."""
    return _MAKERS[_FIELD_OF_KIND[kind]](value, param, limits)


def schema_grammar(schema: Mapping[str, Any], param: str, limits: Limits) -> Grammar:
    """Return the grammar of a JSON schema that a body has; `param` names the field it stood in."""
    return Grammar(kind="json_schema", value=_json(schema, param, limits))


@lru_cache(maxsize=8)
def response_format(limits: Limits) -> Reader:
    """Return the reader of `response_format`; None is plain text. The schema of `json_schema` always binds.

    It may stand beside the type too, of either type, as llama-server has it.
    """
    table: Table = {
        "name": tool_name,
        "description": text(0, limits.max_prompt_chars),
        "schema": any_object,
        "strict": boolean,
    }
    asked_kind = one_of("text", "json_object", "json_schema")
    kinds = Fields({"type": asked_kind, "json_schema": object_of(table), "schema": any_object}, "type")

    @described(lambda: {"title": "ResponseFormat", **object_schema(kinds)})
    def reader(value: Any, param: str) -> Grammar | None:
        asked = any_object(value, param)
        kind = asked_kind(required(asked, "type", prefix=param + "."), param + ".type")
        own = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema", "schema")}[kind]
        refuse_unknown(asked, dict.fromkeys(("type", *own), any_object), prefix=param + ".")
        if kind == "text":
            return None
        if asked.get("schema") is not None and asked.get("json_schema") is None:
            where = param + ".schema"
            return schema_grammar(any_object(asked["schema"], where), where, limits)
        if kind == "json_object":
            return Grammar(kind=kind)
        if asked.get("schema") is not None:
            raise conflict(f"{param} has a schema twice; send it in json_schema.", f"{param}.schema")
        where = f"{param}.json_schema."
        fields = read(any_object(required(asked, kind, prefix=param + "."), where[:-1]), table, prefix=where)
        if "schema" not in fields:
            return Grammar(kind="json_object")
        return schema_grammar(fields["schema"], where + "schema", limits)

    return reader


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


def _of_source(source: str) -> Grammar:
    return Grammar(kind="gbnf" if _GBNF_RULE.search(source) else "lark", value=source)


_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_FIELD_OF_KIND = {
    "json_schema": "schema",
    "regex": "pattern",
    "choice": "choices",
    "lark": "grammar",
    "gbnf": "grammar",
}
_MAKERS: Mapping[str, Callable[[Any, str, Limits], Grammar]] = {
    "schema": schema_grammar,
    "pattern": lambda value, param, limits: Grammar(kind="regex", value=value),
    "choices": _choice,
    "grammar": lambda value, param, limits: _of_source(value),
}


# Name within `structured_outputs`, and after "guided_" → kind.
_KINDS: Mapping[str, str] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
_GUIDED = tuple(f"guided_{name}" for name in _KINDS)
_FORMAT_NAMES = ("response_format", "structured_outputs", *_GUIDED)


@lru_cache(maxsize=8)
def format_fields(limits: Limits) -> Mapping[str, Reader]:
    """Return the readers of `response_format`, `structured_outputs` and the older names; each value is a `Grammar`."""
    readers = _readers(limits)
    guided = {f"guided_{name}": _of_kind(kind, readers[name], limits) for name, kind in _KINDS.items()}
    return {
        "response_format": response_format(limits),
        "structured_outputs": _structured_outputs({**readers, "json_object": boolean}, limits),
        **guided,
    }


def take_format(values: dict[str, Any]) -> str:
    """Move the one field that names a grammar to `values["grammar"]`; return its name, for errors.

    Raises BadRequest where several are sent.
    """
    found = [name for name in (*_FORMAT_NAMES, "grammar") if values.get(name) is not None]
    if len(found) > 1:
        raise conflict(f"{' and '.join(found)} each set what the text must match; send one of them.", found[1])
    if not found:
        return "grammar"
    values["grammar"] = values[found[0]]
    return found[0]


def _readers(limits: Limits) -> dict[str, Reader]:
    source = text(1, limits.max_grammar_chars)
    choices = list_of(source, low=1, high=MAX_CHOICES)
    schema = described({"anyOf": [{"type": "object"}, {"type": "string"}]})(partial(_schema, limits=limits))
    return {"json": schema, "regex": source, "choice": choices, "grammar": source}


def _structured_outputs(table: Table, limits: Limits) -> Reader:
    @described(lambda: object_schema(table))
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
    @described(lambda: schema_of(one))
    def reader(value: Any, param: str) -> Grammar:
        return grammar_of(kind, one(value, param), param, limits)

    return reader


def _schema(value: Any, param: str, limits: Limits) -> Mapping[str, Any]:
    """Read a schema, or its JSON text."""
    if isinstance(value, str):
        if num_containers(value) > limits.max_json_containers:
            raise too_many_containers(param, limits, param)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRequest(f"{param} is no JSON.", code="invalid_value", param=param) from None
    return any_object(value, param)
