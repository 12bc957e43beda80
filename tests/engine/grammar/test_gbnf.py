"""Laws of GBNF: what llguidance converts matches as llama.cpp says, and what is wrong with one is said of it alone."""

from __future__ import annotations

import time

import pytest

from streamserve.engine.grammar.gbnf import as_lark
from streamserve.engine.grammar.limits import GrammarLimits
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import Grammar
from tests.support.bodies.grammars import accepts, compiling, lark, one_matcher, regex

pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")

LIMITS = GrammarLimits()


def gbnf(text: str) -> Grammar:
    return Grammar(kind="gbnf", value=text)


@pytest.mark.parametrize(
    ("text", "matching", "others"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["y", "yesno"]),
        ('# a list\nroot ::= item ("," item)*\nitem ::= [a-c]{2,3}\n', ["ab", "ab,abc"], ["a", "ab,", "abcd"]),
        ('root ::= "(" my-word ")"?\nmy-word ::= [^()\\n]+', ["(a", "(ab)"], ["()", "a"]),
        ('root ::= "\\u0041bc" [\\u0030-\\u0032] "\\U0001F389"', ["Abc1🎉"], ["Abc3🎉", "䆼1🎉"]),
        ('root ::= "\\x41\\"\\\\" .', ['A"\\b'], ["A"]),
        ('root ::= map\nmap ::= "{" (pair ("," pair)*)? "}"\npair ::= "\\"" [a-z]+ "\\":" [0-9]', ['{"a":1,"b":2}'],
         ['{"a":1,}']),
    ],
)  # fmt: skip
def test_what_it_matches(text: str, matching: list[str], others: list[str]) -> None:
    """Whole texts match, and nothing else does."""
    with compiling() as compiler:
        assert [one for one in matching if not accepts(compiler, gbnf(text), one)] == []
        assert [one for one in others if accepts(compiler, gbnf(text), one)] == []


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ('root ::= "a" | b', "invalid_grammar", "'b' not found"),
        ('start ::= "a"', "invalid_grammar", "No 'root' rule"),
        ('root ::= "a', "invalid_grammar", "Unexpected end"),
        ('root ::= "a\\', "invalid_grammar", "cut short"),
        ("root ::= <[5]>", "invalid_grammar", "GBNF"),
        ('root ::= "a" root', "invalid_grammar", "no finite text"),
        ('root ::= "\\uD83D"', "invalid_grammar", "no character"),
        ("root ::= [z-a]", "invalid_grammar", "range"),
        ("root ::= " + "(" * 33 + '"a"' + ")" * 33, "grammar_too_complex", "nested"),
        ("\n".join(f'a{number} ::= "a"' for number in range(501)), "grammar_too_complex", "500 rules"),
    ],
)
def test_what_is_wrong_with_it_is_said(text: str, code: str, says: str) -> None:
    """A 400 in one line that speaks of the caller's grammar, not of the Lark that we have made of it."""
    with compiling() as compiler, pytest.raises(BadRequest) as caught:
        one_matcher(compiler, gbnf(text))
    assert (caught.value.code, caught.value.param) == (code, "grammar")
    assert says in caught.value.message
    for internal in ('start: "', "%llguidance", "any_tokens", "\n", "^ 1 |"):
        assert internal not in caught.value.message


def test_brackets_of_texts_and_classes_are_not_nested() -> None:
    """Only groups count: forty texts of one bracket each are as flat as forty letters."""
    text = "root ::= " + " ".join(['"("', "[(]"] * 20) + " # ((((\n"
    assert as_lark(gbnf(text), LIMITS).kind == "lark"


def test_the_converter_takes_a_bounded_time() -> None:
    """The rules that cost it most, each waiting for the next: less CPU than a second, however many there may be."""
    rules = [f"r{number} ::= r{number + 1}" for number in range(498)]
    text = "\n".join(["root ::= r0", *rules, 'r498 ::= "a"'])
    begun = time.thread_time()
    as_lark(gbnf(text), LIMITS)
    assert time.thread_time() - begun < 5


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (regex("(a"), "The grammar cannot be used: invalid regex"),
        (lark("start: missing"), 'The grammar cannot be used: at 1(8): unknown name: "missing"'),
        (lark('start: %json {"type": "nope"}'), "The grammar cannot be used: at 1(8): failed to compile JSON schema"),
        (lark('start: "a" §'), "The grammar cannot be used: 1(12): lexer error"),
    ],
)
def test_the_text_that_is_compiled_is_not_shown(grammar: Grammar, says: str) -> None:
    """What we wrap a grammar into is no caller's business; a place is given where it is one of the caller's text."""
    with compiling() as compiler, pytest.raises(BadRequest) as caught:
        one_matcher(compiler, grammar)
    assert caught.value.message.startswith(says)
    for internal in ("x-guidance", "any_tokens", "start: /", " 1 | "):
        assert internal not in caught.value.message


@pytest.mark.parametrize(
    "text", ['root ::= "' + '\\"' * 32_000, "root ::= " + "[" * 65_000, "root ::= [" + "\\]" * 32_000]
)
def test_a_text_without_an_end_is_read_once(text: str) -> None:
    """Of each quote or bracket that could begin another one, the rest would be read again: for a minute and more."""
    with pytest.raises(BadRequest, match="Unexpected end of input"):
        as_lark(gbnf(text), GrammarLimits())


def test_a_comment_ends_at_a_carriage_return() -> None:
    """What follows it is counted, as the converter reads it."""
    rules = "".join(f'r{number} ::= "a"\r' for number in range(600))
    with pytest.raises(BadRequest, match="more than 500 rules"):
        as_lark(gbnf("# rules\rroot ::= r0\r" + rules), GrammarLimits())
