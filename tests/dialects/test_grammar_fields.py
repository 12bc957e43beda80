"""Laws of the fields that name a grammar; the refusals are in the corpus of bad bodies."""

import json
from typing import Any

import pytest

from streamserve.dialects import native
from streamserve.dialects.output.grammar_fields import schema_grammar
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ü"}}}


def parse(grammar: object) -> Grammar | None:
    return native.parse({"prompt": "Hi", "grammar": grammar}, Limits(), default_model="echo").generate.grammar


@pytest.mark.parametrize(
    ("body", "kind", "value"),
    [
        ({"type": "json_object"}, "json_object", ""),
        ({"type": "regex", "pattern": "[0-9]+"}, "regex", "[0-9]+"),
        ({"type": "choice", "choices": ["yes", "é"]}, "choice", '["yes","é"]'),
        ({"type": "lark", "grammar": 'start: "a"'}, "lark", 'start: "a"'),
    ],
)
def test_a_grammar_is_its_kind_and_a_text(body: dict[str, Any], kind: str, value: str) -> None:
    """Each type has a field of its own, which is kept as text."""
    assert parse(body) == Grammar(kind=kind, value=value)


def test_a_schema_keeps_the_order_of_its_keys() -> None:
    """The order of the properties is the order of the answer's: it must not be sorted."""
    found = parse({"type": "json_schema", "schema": SCHEMA})
    assert found is not None
    assert list(json.loads(found.value)["properties"]) == ["b", "a"]
    assert found == schema_grammar(SCHEMA, "response_format.json_schema.schema", Limits())


def test_no_grammar_is_none() -> None:
    """Null is absent, as everywhere."""
    assert parse(None) is None


@pytest.mark.parametrize("value", [{"enum": {1, 2}}, {"minimum": float("nan")}, {"default": object()}])
def test_what_python_sends_may_be_no_json(value: dict[str, Any]) -> None:
    """Calls from Python reach the same reader: what JSON cannot say is refused with its place."""
    with pytest.raises(BadRequest) as caught:
        parse({"type": "json_schema", "schema": value})
    assert (caught.value.code, caught.value.param) == ("invalid_value", "grammar.schema")


def test_a_schema_as_deep_as_python_makes_it_is_refused() -> None:
    """Nesting beyond the encoder's own stack is an error of the request, not of the server."""
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(BadRequest):
        parse({"type": "json_schema", "schema": deep})
    while deep:  # taken apart from the outside: its own destructor would recurse
        deep = deep.pop("items")
