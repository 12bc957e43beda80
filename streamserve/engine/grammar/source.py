"""From a request's `Grammar` to the text that llguidance compiles; refuses what needs no compiler to refuse. Pure.

A JSON schema is read first: its size and depth, its keywords, its closed objects, and whether it can end. An object
that declares `properties` and does not mention others has no others (as OpenAI's strict mode asks for), but not where
schemas are merged (`allOf`, or keywords beside `anyOf`, `oneOf` and `$ref`): there one part would forbid what the other
one declares. The rest is llguidance's: the keys come in the order in which they are declared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streamserve.engine.grammar.gbnf import as_lark
from streamserve.engine.grammar.lark import Unreadable, endless_rules, with_schemas
from streamserve.engine.grammar.limits import GrammarLimits, invalid_grammar, too_complex, unsupported_grammar
from streamserve.protocol.requests import GRAMMAR_KINDS, Grammar

# No blanks between the parts of a JSON text: they would be tokens without meaning. In Lark a schema may have its own.
_COMPACT: Mapping[str, Any] = {"whitespace_flexible": False}
_BLANKS = frozenset({"whitespace_flexible", "item_separator", "key_separator"})
# Where one text must follow, llguidance allows one way only to write it in tokens: the tokenizer's, which is not given
# to it (matcher.py). A model that writes '{"' as one token would have to spell each key byte by byte, as it never
# does, and all that follows would be a guess. This option holds for all grammars once one grammar has it: any tokens
# may.
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


def _gbnf(value: str, limits: GrammarLimits) -> str:
    return _lark(as_lark(Grammar(kind="gbnf", value=value), limits).value, limits)


_MAKERS: Mapping[str, Callable[[str, GrammarLimits], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "gbnf": _gbnf,
}


# Keywords that llguidance would refuse one by one; here they are named together, with their place.
UNSUPPORTED = frozenset(
    {
        "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired",
        "dependentSchemas", "dependencies", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef",
        "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", "x-guidance",
    }
)  # fmt: skip
_ONE = ("additionalProperties", "items", "additionalItems")  # keywords with a schema
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # with a list of schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # with schemas by name
_MERGING = ("allOf", "anyOf", "oneOf", "$ref")
_OTHERS = ("additionalProperties", "patternProperties")
_MAX_LISTED = 8

Schema = dict[str, Any]


def read_schema(text: str, limits: GrammarLimits) -> Schema:
    """Return the schema in a JSON text, with its objects closed; raise BadRequest if it cannot be enforced."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid_grammar("the schema is not JSON, or too deep.") from None
    if not isinstance(root, dict):
        raise invalid_grammar("the schema must be an object.")
    found = list(subschemas(root, limits))
    unsupported = [f"{key} (at {place or '/'})" for place, node in found for key in node if key in UNSUPPORTED]
    if unsupported:
        names = ", ".join(unsupported[:_MAX_LISTED])
        raise unsupported_grammar(f"these keywords of JSON schema are not supported: {names}. Leave them out.")
    for place, node in found:
        least = node.get("minProperties", 0)
        if isinstance(least, int | float) and least > 1:  # a key may come twice, and counts once
            raise unsupported_grammar(f"minProperties above 1 (at {place or '/'}) is not supported. Use required.")
    nodes = [node for _, node in found]
    without_end = endless(root, nodes)
    if without_end is not None:
        place = next(place for place, node in found if node is without_end)
        raise invalid_grammar(f"no finite JSON text matches the schema at {place or '/'}: it requires itself.")
    _close_objects(root, nodes)
    return root


def subschemas(root: Schema, limits: GrammarLimits) -> Iterator[tuple[str, Schema]]:
    """Yield the root and every schema below it with its place, as a JSON pointer; bounded in depth and number."""
    left: list[tuple[str, Any, int]] = [("", root, 1)]
    num_nodes = 0
    while left:
        place, node, depth = left.pop()
        if not isinstance(node, dict):
            continue  # true, false, or what llguidance will refuse
        num_nodes += 1
        if depth > limits.max_depth:
            raise too_complex(f"the schema is nested more than {limits.max_depth} levels deep.")
        if num_nodes > limits.max_nodes:
            raise too_complex(f"the schema has more than {limits.max_nodes:,} parts.")
        yield place, node
        left.extend((f"{place}/{key}", child, depth + 1) for key, child in _children(node))


def _children(node: Schema) -> Iterator[tuple[str, Any]]:
    for key in _ONE:
        if isinstance(node.get(key), dict):
            yield key, node[key]
    for key in _MANY:
        if isinstance(node.get(key), list):
            yield from ((f"{key}/{index}", child) for index, child in enumerate(node[key]))
    for key in _NAMED:
        if isinstance(node.get(key), dict):
            yield from ((f"{key}/{name}", child) for name, child in node[key].items())


def _close_objects(root: Schema, nodes: list[Schema]) -> None:
    """Set `additionalProperties` to false where an object declares its properties, and is merged with nothing."""
    merged: set[int] = set()
    for node in nodes:
        if "allOf" in node or (any(key in node for key in _MERGING) and "properties" in node):
            _mark_merged(root, node, merged)
    for node in nodes:
        is_open = id(node) in merged or any(key in node for key in _OTHERS)
        if isinstance(node.get("properties"), dict) and not is_open:
            node["additionalProperties"] = False


def _mark_merged(root: Schema, first: Schema, merged: set[int]) -> None:
    """Add a schema and all that it is merged with."""
    left = [first]
    while left:
        node = left.pop()
        if id(node) in merged:
            continue
        merged.add(id(node))
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(node.get(key), list):
                left.extend(one for one in node[key] if isinstance(one, dict))
        target = resolve(root, node.get("$ref"))
        if isinstance(target, dict):
            left.append(target)


def resolve(root: Schema, ref: object) -> Any:
    """Return what a reference within the schema names; True, which anything matches, for any other."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return True
    node: Any = root
    for part in ref[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return True
    return node


def endless(root: Schema, nodes: list[Schema]) -> Schema | None:
    """Return a schema that no finite text matches, or None: an answer that enters it would never come to an end.

    The least fixed point of "a schema ends if all that it requires end". llguidance does not notice
    `{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}`.
    """
    users: dict[int, list[Schema]] = {}  # of each schema: those whose end may need its own
    for node in nodes:
        for child in (*(child for _, child in _children(node)), *_targets(root, [node])):
            if isinstance(child, dict):
                users.setdefault(id(child), []).append(node)
    ends = {id(target) for target in _targets(root, nodes)} - set(map(id, nodes))  # no schemas: not ours to judge
    left = list(nodes)  # children come after their parents, and are taken first
    while left:
        node = left.pop()
        if id(node) not in ends and _ends(root, node, ends):
            ends.add(id(node))
            left += users.get(id(node), [])
    return next((node for node in nodes if id(node) not in ends), None)


def _targets(root: Schema, nodes: list[Schema]) -> Iterator[Schema]:
    """Yield what the schemas' references name."""
    for node in nodes:
        target = resolve(root, node.get("$ref"))
        if isinstance(target, dict):
            yield target


def _ends(root: Schema, node: Schema, ends: set[int]) -> bool:
    def does(child: Any) -> bool:
        return not isinstance(child, dict) or id(child) in ends

    if "const" in node or "enum" in node:
        return True
    if "$ref" in node and not does(resolve(root, node["$ref"])):
        return False
    for key in ("anyOf", "oneOf"):
        options = node.get(key)
        if isinstance(options, list) and options and not any(map(does, options)):
            return False
    if isinstance(node.get("allOf"), list) and not all(map(does, node["allOf"])):
        return False
    kinds = node.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]  # what is no type at all, the compiler refuses
    if not kinds or any(kind not in ("object", "array") for kind in kinds):
        return True  # a number, a string, true, false or null will do
    return ("object" in kinds and _object_ends(node, does)) or ("array" in kinds and _array_ends(node, does))


def _object_ends(node: Schema, does: Any) -> bool:
    required, properties = node.get("required", ()), node.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return all(does(properties.get(name, node.get("additionalProperties"))) for name in names)


def _array_ends(node: Schema, does: Any) -> bool:
    least, first = node.get("minItems", 0), node.get("prefixItems", node.get("items"))
    if not isinstance(least, int) or least < 1:
        return True
    items = list(first) if isinstance(first, list) else []
    rest = node.get("items") if not isinstance(node.get("items"), list) else node.get("additionalItems")
    return all(map(does, items[:least])) and (least <= len(items) or does(rest))


def as_text(schema: Mapping[str, Any]) -> str:
    """Return a schema as JSON text, its keys in order."""
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
