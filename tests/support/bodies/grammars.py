"""Grammars, and their compilers over the echo engine's tokens and over a small table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamserve.engine.echo import VOCAB_SIZE, EchoTokenizer
from streamserve.engine.grammar.compiler import GrammarCompiler
from streamserve.engine.grammar.limits import GrammarLimits
from streamserve.engine.grammar.matcher import Matcher, advance
from streamserve.protocol.requests import Grammar

# Takes many seconds of compiling: every remainder by this number is a state.
SLOW_SCHEMA = {"type": "integer", "multipleOf": 999_983}


def regex(pattern: str) -> Grammar:
    return Grammar(kind="regex", value=pattern)


def schema(value: object) -> Grammar:
    return Grammar(kind="json_schema", value=json.dumps(value))


def choice(*choices: str) -> Grammar:
    return Grammar(kind="choice", value=json.dumps(choices))


def lark(text: str) -> Grammar:
    return Grammar(kind="lark", value=text)


@contextmanager
def compiling(**limits: Any) -> Iterator[GrammarCompiler]:
    """A compiler over the echo engine's tokens, whose ids below 256 are bytes."""
    tokenizer = EchoTokenizer()
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, tokenizer.eos_token_ids, GrammarLimits(**limits))
    try:
        yield compiler
    finally:
        compiler.close()


def one_matcher(compiler: GrammarCompiler, grammar: Grammar, shown: tuple[int, ...] = ()) -> Matcher:
    [matcher] = compiler.matchers(grammar, [shown])
    return matcher


def allowed(matcher: Matcher) -> set[int]:
    """The ids that may follow, ends left out."""
    return {id_ for id_ in range(len(matcher.mask) * 8) if matcher.mask[id_ // 8] >> id_ % 8 & 1}


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether a text, given byte by byte, is a whole match."""
    matcher = one_matcher(compiler, grammar)
    for byte in text.encode():
        if byte not in allowed(matcher):
            return False
        advance([(matcher, [byte])])
    assert matcher.error is None
    return matcher.may_end
