"""A JSON schema before it is compiled: its size and depth, its keywords, its closed objects, and whether it can end.

An object that declares `properties` and says nothing of others has no others (as OpenAI's strict mode asks for), but
not where schemas are merged (`allOf`, or keywords beside `anyOf`, `oneOf` and `$ref`): there one part would forbid what
the other one declares. The rest is llguidance's: the keys come in the order in which they are declared. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from streamserve.engine.grammar.limits import GrammarLimits, invalid_grammar, too_complex, unsupported_grammar

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
    """Return the schema in a JSON text, with its objects closed; raise BadRequest for one that cannot be enforced."""
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
