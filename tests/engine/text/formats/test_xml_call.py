"""Calls in XML: how an argument's text becomes a value, and the grammar that a call is held to."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")
pytest.importorskip("llguidance", reason="needs llguidance")

from streamserve.engine.text.formats.markup import choose_format
from streamserve.engine.text.formats.xml_call import calls_of, types_of
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import Grammar, Tool, ToolChoice
from tests.engine.text.formats.test_lark import accepts, answer_in, closing  # noqa: F401  (a fixture)
from tests.support.models.tagged import EOS, blocks_of, events_of, ids_of, tagged_tokenizer

NAME = "qwen3_coder"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = "<function=x><parameter=y>{% for m in messages %}{{ m.content }}{% endfor %}"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
STRICT = Tool(name="look", parameters=SCHEMA, strict=True)
FREE = Tool(name="search")
REQUIRED = ToolChoice(mode="required")


@pytest.fixture(scope="module", params=["special", "added", "text"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    tags = {request.param: TAGS} if request.param != "text" else {}
    return tagged_tokenizer(tmp_path_factory.mktemp(request.param), template=TEMPLATE, **tags)


def call(name: str, *arguments: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


CITY, DAYS, UNIT, PLACE = ("city", "New\nYork"), ("days", "3"), ("unit", "C"), ("where", '{"x":1.5}')


def test_its_template_names_it(tokenizer: HFTokenizer) -> None:
    """Before the families that share its outer tag."""
    assert choose_format(tokenizer).name == NAME


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("42", {"type": "string"}, "42"),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("42", {}, "42"),
        ("42", None, "42"),
        ("True", {"type": "boolean"}, True),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("3", {"type": "number"}, 3),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("[1e999]", {"type": "array"}, "[1e999]"),
        ('["\\ud800"]', {"type": "array"}, ["\ud800"]),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("two", {"enum": ["two", 2]}, "two"),
        ("2", {"enum": ["two", 2]}, 2),
        ("[1]", {"anyOf": [{"type": "string"}, {"type": "array"}]}, [1]),
        ("7", {"$ref": "#/$defs/n"}, 7),
        (" a\n\nb ", {"type": "string"}, " a\n\nb "),
        ("</parameter> is a tag", {"type": "string"}, "</parameter> is a tag"),
        ("</function> is a tag", {"type": "string"}, "</function> is a tag"),
        ('"quoted"', {"type": "string"}, '"quoted"'),
    ],
)
def test_an_argument_has_the_type_of_its_schema(tokenizer: HFTokenizer, text: str, schema: Any, value: Any) -> None:
    """Text where the schema takes text only, or says nothing; what is of no type of its own is text."""
    root = {"properties": {"a": schema} if schema is not None else {}, "$defs": {"n": {"type": "integer"}}}
    tools = (Tool(name="f", parameters=root),)
    output = call("f", ("a", text), ("b", "x"))
    events = events_of(answer_in(tokenizer, NAME, tools=tools).choice(), ids_of(tokenizer, output + EOS), "stop")
    [block] = blocks_of(events)
    assert json.loads(block["text"]) == {"a": value, "b": "x"}


def test_types_have_an_end() -> None:
    """A schema that refers to itself, and one that refers out of itself or to nothing, is text."""
    root = {"a": {"$ref": "#/a"}, "b": {"anyOf": [{"$ref": "#/b"}, {"type": "integer"}]}}
    assert types_of(root["a"], root) == {"string"}
    assert types_of(root["b"], root) == {"integer"}
    for reference in ("#/none/x", "http://other/", "#/a/$ref/x"):
        assert types_of({"$ref": reference}, root) == {"string"}


def test_what_is_no_call() -> None:
    """A broken body, and without the outer tag a name that is no tool."""
    tools = {"f": Tool(name="f")}
    assert calls_of("\n", {"name": "f"}, tools) is not None
    assert calls_of("hello", {"name": "f"}, tools) is None
    assert calls_of("\n<parameter=a>b", {"name": "f"}, tools) is None
    assert calls_of("\n", {"name": "g"}, tools) is None
    [made] = calls_of("\n", {"name": "g", "tag": "<tool_call>"}, tools) or []
    assert (made.name, made.arguments) == ("g", "{}")


def test_a_forced_call_is_held_to_its_schema(tokenizer: HFTokenizer) -> None:
    """Parameters in the order of the schema, each of its type; and the parser reads what the grammar takes."""
    answer = answer_in(tokenizer, NAME, tools=(STRICT, FREE), tool_choice=REQUIRED)
    for arguments, value in (
        ((CITY, DAYS), {"city": "New\nYork", "days": 3}),
        ((CITY, UNIT, DAYS, PLACE), {"city": "New\nYork", "unit": "C", "days": 3, "where": {"x": 1.5}}),
    ):
        output = call("look", *arguments)
        assert accepts(answer, output)
        assert accepts(answer, "<think>\nHm.\n</think>\n\n" + output + "\n" + call("search", ("q", "a b")))
        events = events_of(answer.choice(), ids_of(tokenizer, output + EOS), "stop")
        [block] = blocks_of(events)
        assert (block["name"], json.loads(block["text"])) == ("look", value)
    assert accepts(answer, call("search"))
    assert accepts(answer, call("search", ("any", "thing"), ("else", "too")))
    for wrong in (
        call("look", DAYS, CITY),
        call("look", CITY),
        call("look", CITY, ("days", "three")),
        call("look", CITY, ("unit", "K"), DAYS),
        call("look", CITY, DAYS, ("where", '{"x":"no"}')),
        call("look", CITY, DAYS, ("other", "1")),
        call("nothing"),
        "It is sunny.",
    ):
        assert not accepts(answer, wrong), wrong


def test_free_text_or_strict_calls(tokenizer: HFTokenizer) -> None:
    """Without a forced call text is free, a strict tool's arguments are not; one call at most where one is asked."""
    answer = answer_in(tokenizer, NAME, tools=(STRICT,), parallel_tool_calls=False)
    assert accepts(answer, "It is sunny.")
    assert accepts(answer, "I look." + call("look", CITY, DAYS))
    assert not accepts(answer, call("look", CITY))
    assert not accepts(answer, call("look", CITY, DAYS) + "\n" + call("look", CITY, DAYS))
    schema = Grammar(kind="json_object")
    both = answer_in(tokenizer, NAME, tools=(STRICT,), grammar=schema)
    assert accepts(both, "{}")
    assert accepts(both, call("look", CITY, DAYS))


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "[a-z]+"}}},
        {"properties": {"a": {"type": "string", "maxLength": 4}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}},
        {"properties": {}, "required": ["a"]},
    ],
)
def test_what_xml_cannot_hold_is_refused(tokenizer: HFTokenizer, parameters: dict[str, Any]) -> None:
    """A strict tool whose text must match something: a 400 that names the tools; one that is not strict is free."""
    tool = Tool(name="f", parameters=parameters, strict=True)
    answer = answer_in(tokenizer, NAME, tools=(tool,), tool_choice=REQUIRED)
    with pytest.raises(BadRequest, match="strict") as caught:
        answer.format.grammar(answer.request, answer.prompt)
    assert (caught.value.code, caught.value.param) == ("unsupported_grammar", "tools")
    free = answer_in(tokenizer, NAME, tools=(Tool(name="f", parameters=parameters),), tool_choice=REQUIRED)
    assert accepts(free, call("f", ("a", "anything")))


def test_each_part_of_a_schema_is_looked_at_once() -> None:
    """Unions that refer to each other many times over take time by their length, not by its power."""
    num_looks = 0

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal num_looks
            num_looks += key == "$ref"
            return super().get(key, default)

    again = Watched({"anyOf": [Watched({"$ref": "#/$defs/it"}) for _ in range(4)]})
    root = {"$defs": {"it": again}}
    assert types_of(again, root) == {"string"}
    assert num_looks == 5
