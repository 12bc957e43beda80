"""Laws of a JSON schema before it is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamserve.engine.grammar.limits import GrammarLimits
from streamserve.engine.grammar.source import UNSUPPORTED, read_schema
from streamserve.protocol.errors import BadRequest

LIMITS = GrammarLimits()
AB = {"a": {"type": "integer"}, "b": {"type": "string"}}


def read(schema: object) -> dict[str, Any]:
    return read_schema(json.dumps(schema), LIMITS)


def refusal(schema: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(schema)
    assert caught.value.param == "grammar"
    return caught.value


def test_an_object_that_declares_its_properties_has_no_others() -> None:
    """As OpenAI's strict mode asks for; a schema that says otherwise is left as it is."""
    assert read({"properties": AB})["additionalProperties"] is False
    assert read({"properties": AB, "additionalProperties": True})["additionalProperties"] is True
    assert "additionalProperties" not in read({"properties": AB, "patternProperties": {"^x": {}}})
    assert "additionalProperties" not in read({"type": "object"})
    nested = read({"type": "array", "items": {"anyOf": [{"properties": AB}, {"type": "null"}]}})
    assert nested["items"]["anyOf"][0]["additionalProperties"] is False


def test_objects_that_are_merged_stay_open() -> None:
    """One part of an `allOf` would forbid what the other declares."""
    merged = read({"allOf": [{"$ref": "#/$defs/one"}, {"properties": AB}], "$defs": {"one": {"properties": {"c": {}}}}})
    assert "additionalProperties" not in merged["allOf"][1]
    assert "additionalProperties" not in merged["$defs"]["one"]
    beside = read({"properties": {"kind": {}}, "anyOf": [{"properties": AB}]})
    assert "additionalProperties" not in beside
    assert "additionalProperties" not in beside["anyOf"][0]


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED))
def test_what_cannot_be_enforced_is_named_with_its_place(keyword: str) -> None:
    """A keyword that would be ignored silently is a 400; a property of that name is none."""
    error = refusal({"properties": {"deep": {"items": {keyword: {}}}}})
    assert error.code == "unsupported_grammar"
    assert f"{keyword} (at /properties/deep/items)" in error.message
    read({"properties": {keyword: {"type": "string"}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#"}, {"type": "string"}]},
        # Not required, but an answer that begins it never comes to an end.
        {"properties": {"x": {"type": "object", "required": ["y"], "properties": {"y": {"$ref": "#/properties/x"}}}}},
    ],
)
def test_a_schema_that_requires_itself_is_refused(schema: dict[str, Any]) -> None:
    """No finite text matches it: the answer would only end at max_tokens."""
    error = refusal(schema)
    assert error.code == "invalid_grammar"
    assert "no finite JSON text" in error.message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1},
        {"$ref": "#/elsewhere/s", "elsewhere": {"s": {"type": "string"}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
    ],
)
def test_recursion_with_a_way_out_is_fine(schema: dict[str, Any]) -> None:
    """Trees and lists are schemas that refer to themselves."""
    assert read(schema)


def test_size_and_depth_are_bounded() -> None:
    """Both are counted before a compiler sees the schema."""
    deep: dict[str, Any] = {}
    for _ in range(LIMITS.max_depth):
        deep = {"items": deep}
    assert refusal(deep).code == "grammar_too_complex"
    wide = {"anyOf": [{}] * LIMITS.max_nodes}
    assert refusal(wide).code == "grammar_too_complex"
    read({"items": {}})


@pytest.mark.parametrize("kind", [1, 0, True, None, {}, {"a": 1}, [[]], [{}]], ids=str)
def test_a_type_that_is_none_is_left_to_the_compiler(kind: object) -> None:
    """It breaks nothing here."""
    read({"properties": {"a": {"type": kind}}, "required": ["a"]})


@pytest.mark.parametrize("text", ["", "{", "[]", "true", '"x"', "[" * 60_000, '{"items":' * 8_000 + "{}" + "}" * 8_000])
def test_what_is_no_schema_is_refused(text: str) -> None:
    """Also text as deep as the limit of characters allows."""
    with pytest.raises(BadRequest) as caught:
        read_schema(text, LIMITS)
    assert caught.value.code == "invalid_grammar"


def test_a_key_may_come_twice_so_it_counts_once() -> None:
    """llguidance counts pairs, a parser counts keys: `minProperties` above 1 could not be kept."""
    assert refusal({"type": "object", "minProperties": 2}).code == "unsupported_grammar"
    read({"type": "object", "minProperties": 1})


def test_reading_is_linear() -> None:
    """Chains of references as long as the limit allows are settled one by one, not by passes over all of them."""
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1500)}
    for order in (chain, dict(reversed(chain.items()))):
        schema = {"$ref": "#/$defs/a0", "$defs": {**order, "a1500": {"type": "string"}}}
        assert read(schema)
