"""From a request's `Grammar` to the text that llguidance compiles; refuses what needs no compiler to refuse. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from streamserve.engine.grammar.lark import Unreadable, endless_rules, with_schemas
from streamserve.engine.grammar.limits import GrammarLimits, invalid_grammar, too_complex
from streamserve.engine.grammar.schema import as_text, read_schema
from streamserve.protocol.requests import GRAMMAR_KINDS, Grammar

# No blanks between the parts of a JSON text: they would be tokens that say nothing. In Lark a schema may have its own.
_COMPACT: Mapping[str, Any] = {"whitespace_flexible": False}
_BLANKS = frozenset({"whitespace_flexible", "item_separator", "key_separator"})
# Where one text must follow, llguidance allows one way only to write it in tokens: the tokenizer's, which is not given
# to it (vocabulary.py). A model that writes '{"' as one token would have to spell each key byte by byte, as it never
# does, and all that follows would be a guess. This option holds for all grammars once one has it: any tokens may.
_ANY_TOKENS = {"name": "any_tokens", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'}


def source_of(grammar: Grammar, limits: GrammarLimits) -> str:
    """Return the text to compile. Raises BadRequest for a grammar that is too large, or wrong on the face of it."""
    if len(grammar.value) > limits.max_chars:
        raise too_complex(f"it has {len(grammar.value):,} characters; the limit is {limits.max_chars:,}.")
    if "\0" in grammar.value:
        raise invalid_grammar("it has a NUL character.")
    maker = _MAKERS.get(grammar.kind)
    if maker is None:
        raise invalid_grammar(f"its kind is one of {', '.join(GRAMMAR_KINDS)}.")
    try:
        out = maker(grammar.value, limits)
        out.encode()
    except UnicodeEncodeError:
        raise invalid_grammar("it holds half of a surrogate pair.") from None
    return out


def _json_schema(value: str, limits: GrammarLimits) -> str:
    schema = {**read_schema(value, limits), "x-guidance": _COMPACT}
    return _as_text_of({"json_schema": schema})


def _json_object(value: str, limits: GrammarLimits) -> str:
    return _json_schema('{"type":"object"}', limits)


def _regex(value: str, limits: GrammarLimits) -> str:
    if _depth(value) > limits.max_depth:
        raise too_complex(f"groups are nested more than {limits.max_depth} levels deep.")
    # The same as `LLMatcher.grammar_from_regex`: a slash ends an expression in Lark.
    escaped = re.sub(r"\\.|/|\n", _in_lark, value, flags=re.DOTALL)
    return _as_lark(f"start: /{escaped}/" if value else 'start: ""')


def _in_lark(match: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n", "\\/": "\\/"}.get(match[0], match[0])


def _depth(pattern: str) -> int:
    """Return how deep a regular expression's groups are nested, escapes and classes left out. One pass."""
    depth = most = 0
    in_class = is_escaped = False
    for character in pattern:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            depth += {"(": 1, ")": -1}.get(character, 0)
            most = max(most, depth)
    return most


def _choice(value: str, limits: GrammarLimits) -> str:
    try:
        choices = json.loads(value)
    except (ValueError, RecursionError):
        choices = None
    is_list = isinstance(choices, list) and choices and all(isinstance(one, str) and one for one in choices)
    if not is_list:
        raise invalid_grammar("choices are a list of one or more texts, and none is empty.")
    options = " | ".join(json.dumps(one, ensure_ascii=False) for one in dict.fromkeys(choices))
    return _as_lark(f"start: {options}")


def _lark(value: str, limits: GrammarLimits) -> str:
    def prepared(text: str) -> str:
        schema = json.loads(text)
        options = schema.pop("x-guidance", _COMPACT)
        if not isinstance(options, dict) or not set(options) <= _BLANKS:
            raise invalid_grammar(f"x-guidance of a schema may have {', '.join(sorted(_BLANKS))}.")
        return as_text({**read_schema(as_text(schema), limits), "x-guidance": options})

    try:
        text = with_schemas(value, prepared)
    except Unreadable:
        raise invalid_grammar("the JSON after a directive cannot be read.") from None
    endless = endless_rules(text, limits)
    if endless:
        raise invalid_grammar(f"no finite text matches the rule {endless[0][:64]}: it requires itself.")
    return _as_lark(text)


def _as_lark(text: str) -> str:
    return _as_text_of({"lark_grammar": text})


def _as_text_of(grammar: Mapping[str, Any]) -> str:
    return as_text({"grammars": [grammar, _ANY_TOKENS]})


_MAKERS: Mapping[str, Callable[[str, GrammarLimits], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
}
