"""Laws of the reader of Lark grammars: which rules never end, and where the JSON schemas are."""

from __future__ import annotations

import contextlib
import json

import pytest

from streamserve.engine.grammar.lark import endless_rules, with_schemas
from streamserve.engine.grammar.limits import GrammarLimits
from streamserve.engine.grammar.source import source_of
from streamserve.protocol.errors import BadRequest
from tests.support.bodies.grammars import choice, lark, regex

LIMITS = GrammarLimits()


@pytest.mark.parametrize(
    ("text", "endless"),
    [
        ('start: "a" start', ["start"]),
        ("start: a\na: b\nb: a", ["start", "a", "b"]),
        ('start: "x" | b\nb: "y" b', ["b"]),
        ('start: (b | "x")\nb: "q" b', ["b"]),
        ('start: a~1..2 "x"\na: a', ["start", "a"]),
        ('start: a\na: "x"\n | a a', []),
        ('start: ("a"\n | "b" start)', []),
        ('start: a? "x"\na: "y" start', []),
        ('start: a* "x"\na: "y" start', []),
        ('start: [a] "x"\na: "y" start', []),
        ('start: a{0,2} "x"\na: "y" start', []),
        ('start: a{,2} "x"\na: "y" start', []),
        ('start: a~0..2 "x"\na: "y" start', []),
        ('start: a{ , 2} "x"\na: "y" start', []),
        ("start: a{" + "0" * 5_000 + '} "x"\na: "y" start', []),
        ("start: a{" + "1" * 5_000 + '} "x"\na: a', ["start", "a"]),
        ('start: a+ "x"\na: "y" a | A\nA: /[a-z]/', []),
        ('start: a+ "x" // a\na: "y" a # b\n', ["start", "a"]),
        ('start: %json {"type": "object"} | "|" start "("', []),
        ('start: /[|(]/ <|tool|> "\\"" "a".."z" -> name', []),
        ('%import common.INT\n%ignore " "\nstart: INT start?', []),
        ('start[max_tokens=3]: "a" | start', []),
    ],
)
def test_rules_that_never_end_are_found(text: str, endless: list[str]) -> None:
    """A rule ends if one of its options does, and an option if all do that it cannot leave out."""
    assert endless_rules(text, LIMITS) == endless


def test_what_cannot_be_read_is_the_compilers() -> None:
    """This reader refuses nothing that it does not know."""
    assert endless_rules("start: a.b ^ §", LIMITS) == []


def test_groups_are_nested_so_deep_at_most() -> None:
    """Counted here, before a compiler recurses."""
    deep = "(" * 33 + '"a"' + ")" * 33
    with pytest.raises(BadRequest) as caught:
        endless_rules(f"start: {deep}", LIMITS)
    assert caught.value.code == "grammar_too_complex"


def test_schemas_in_a_grammar_are_changed_where_they_stand() -> None:
    """Not in texts and comments, and with what follows them."""
    text = 'start: %json {"a": {"b": "}"}} "%json {}" // %json {}\n  | %json {}'
    assert with_schemas(text, str.upper) == 'start: %json {"A": {"B": "}"}} "%json {}" // %json {}\n  | %json {}'


@pytest.mark.parametrize("before", ['"\\"', "/\\/", "/* /", '"x" " \\"'])
def test_schemas_behind_an_unclosed_text_are_changed_too(before: str) -> None:
    """The compiler may read on where this reader sees no text: no schema is left as it was."""
    text = with_schemas(f"{before} %json {{}}\n{before} %json {{}}", lambda found: f"{found}.")
    assert text == f"{before} %json {{}}.\n{before} %json {{}}."


def test_a_schema_in_a_grammar_obeys_the_same_rules() -> None:
    """Its objects are closed, blanks are left out, and its keywords are checked."""
    grammar, _ = json.loads(source_of(lark('start: %json {"properties": {"a": {}}}'), LIMITS))["grammars"]
    assert '"additionalProperties":false' in grammar["lark_grammar"]
    assert '"whitespace_flexible":false' in grammar["lark_grammar"]
    with pytest.raises(BadRequest) as caught:
        source_of(lark('start: %json {"not": {}}'), LIMITS)
    assert caught.value.code == "unsupported_grammar"


@pytest.mark.parametrize(
    "grammar",
    [
        regex("(" * 40 + ")" * 40),
        lark("%json {" * 9_000),
        lark('start: "\0"'),
        regex("a\0"),
        regex("\ud83d"),
        choice(),
        choice("a", ""),
        regex("a" * 65_537),
    ],
    ids=str,
)
def test_what_is_wrong_on_the_face_of_it_needs_no_compiler(grammar: object) -> None:
    """Sizes, NUL, half characters and empty choices are refused before a process is asked."""
    with pytest.raises(BadRequest):
        source_of(grammar, LIMITS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        *("[a" * 30_000, '"' * 65_000, "/" * 65_000, "<" * 65_000, "\\" * 65_001, "(|" * 30_000),
        *('"' + '\\"' * 32_000, '"' + '\\"%a' * 16_000, "/" + "\\/" * 32_000, "a{" + " " * 65_000),
        *("{" + " " * 32_000 + "," + " " * 32_000, '"a"{' + "1" * 65_000 + "}", '"a"~' + "1" * 65_000),
    ],
    ids=lambda text: text[:6],
)
def test_reading_is_linear(text: str) -> None:
    """What a quadratic scan would take minutes for is read at once: the suite's own timeout is the bound."""
    for grammar in (regex(text), lark(text)):
        with contextlib.suppress(BadRequest):
            assert source_of(grammar, LIMITS)
