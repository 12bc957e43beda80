"""GBNF, the grammars of llama.cpp (`root ::= …`), as Lark: by llguidance's own converter, within bounds.

The converter is plain Python, recursive in the brackets and quadratic in the rules, so both are bounded before it runs.
It drops the zeros that a `\\u` escape begins with, so that those escapes are read here. Pure.
"""

from __future__ import annotations

import re

from streamserve.engine.grammar.limits import GrammarLimits, invalid_grammar, refusal, shown, too_complex
from streamserve.protocol.requests import Grammar

_MAX_RULES = 500  # of 500 rules, each of which waits for the next, the converter takes 0.1 s
# An opaque part without an end goes to the end of the text, where the converter fails too.
_OPAQUE = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|\[(?:[^\]\\]++|\\.)*+(?:\]|\\?\Z)|#[^\r\n]*', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_HEADER = "%llguidance {}"
_LAST_CODE_POINT = 0x10FFFF


def as_lark(grammar: Grammar, limits: GrammarLimits) -> Grammar:
    """Return the grammar; GBNF as Lark. Raises BadRequest for a grammar that cannot be converted."""
    return Grammar(kind="lark", value=_converted(grammar.value, limits)) if grammar.kind == "gbnf" else grammar


def _converted(text: str, limits: GrammarLimits) -> str:
    _check_size(text, limits)
    try:
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
    except ImportError:
        message = 'llguidance is not installed on this server: pip install "streamserve[grammar]"'
        raise refusal("grammar_unavailable", message) from None
    text = _ESCAPE.sub(_unescaped, text)
    try:
        return str(gbnf_to_lark(text)).removeprefix(_HEADER).lstrip()
    except GbnfToLarkError as error:
        raise invalid_grammar(f"as GBNF it cannot be read: {shown(str(error))}.") from None
    except Exception as error:  # the converter's other errors have no class of their own; it fails on cut escapes
        why = str(error) if type(error) is Exception else "it is cut short, or too deep"
        raise invalid_grammar(f"as GBNF it cannot be read: {shown(why)}.") from None


def _check_size(text: str, limits: GrammarLimits) -> None:
    if len(text) > limits.max_chars:
        raise too_complex(f"it has {len(text):,} characters; the limit is {limits.max_chars:,}.")
    bare = _OPAQUE.sub(" ", text)
    if bare.count("::=") > _MAX_RULES:
        raise too_complex(f"it has more than {_MAX_RULES} rules.")
    depth = 0
    for bracket in re.findall(r"[()]", bare):
        depth += 1 if bracket == "(" else -1
        if depth > limits.max_depth:
            raise too_complex(f"groups are nested more than {limits.max_depth} levels deep.")


def _unescaped(match: re.Match[str]) -> str:
    """Return the character of a `\\u` escape; of ASCII as `\\x`, so that it stays what it is between its neighbours."""
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code > _LAST_CODE_POINT or 0xD800 <= code < 0xE000:
        raise invalid_grammar(f"{match[0]} is no character.")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
