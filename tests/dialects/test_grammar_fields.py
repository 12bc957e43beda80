"""Laws of the fields that name a grammar; the refusals are in the corpus of bad bodies."""

import json
from typing import Any

import pytest

from streamserve.dialects import native
from streamserve.dialects.grammar_fields import schema_grammar
from streamserve.dialects.openai import completions as openai_completions
from streamserve.dialects.openai import request as openai_request
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


OPENAI_BODIES = [
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema"),
    ({"structured_outputs": {"json_object": True}}, "json_object"),
    ({"structured_outputs": {"json_object": False, "regex": "[0-9]+"}}, "regex"),
    ({"structured_outputs": {"choice": ["yes", "é"]}}, "choice"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark"),
    ({"guided_json": SCHEMA}, "json_schema"),
    ({"guided_regex": "[0-9]+"}, "regex"),
    ({"guided_choice": ["yes", "é"]}, "choice"),
    ({"guided_grammar": 'start: "a"'}, "lark"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, "json_schema"),
]
NATIVE_BODIES = {
    "json_schema": {"type": "json_schema", "schema": SCHEMA},
    "json_object": {"type": "json_object"},
    "regex": {"type": "regex", "pattern": "[0-9]+"},
    "choice": {"type": "choice", "choices": ["yes", "é"]},
    "lark": {"type": "lark", "grammar": 'start: "a"'},
}


@pytest.mark.parametrize(("body", "kind"), OPENAI_BODIES)
def test_vllms_names_are_the_same_grammars(body: dict[str, Any], kind: str) -> None:
    """On both routes of OpenAI's; an error later on names the field that was sent."""
    limits, [name] = Limits(), body
    chat = openai_request.parse({"messages": [{"role": "user", "content": "Hi"}], **body}, limits, default_model="m")
    texts = openai_completions.parse({"prompt": ["Hi", "Ho"], **body}, limits, default_model="m")
    assert (chat.grammar_field, texts.grammar_field) == (name, name)
    assert [one.grammar for one in (chat.generate, *texts.generates)] == 3 * [parse(NATIVE_BODIES[kind])]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"enum": [' + "[]," * 20_000 + "0]}"}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_regex": "x" * 10**6}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_a_wrong_one_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    """Exactly one grammar may be named; none is dropped."""
    for parse_body in (openai_request.parse, openai_completions.parse):
        with pytest.raises(BadRequest) as caught:
            parse_body({"prompt": "Hi", **body}, Limits(), default_model="m")
        assert caught.value.param == param
