"""Random JSON schemas and regular expressions: most can be matched, some contradict themselves, some are broken."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("a", "b", "name", "é", "long name", "$ref", "0", "")
_PATTERNS = ("^[a-z]+$", "[0-9]{2}", "^(ab|cd)*$", "^.{0,3}$", "x")
_FORMATS = ("date", "uuid", "ipv4", "email", "unknown-format")
_TEXTS = ("", "a", "é\n", '"\\', "🙂", "long text")
_BROKEN = ({"type": "nothing"}, {"minimum": "a"}, {"properties": []}, {"required": "a"}, {"enum": []}, {"not": {}})
_LETTERS = "abcxyz019 é.\\/\"'{}[]()|*+?^$-,:\n🙂"


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema nested a few levels deep."""
    if rng.random() < 0.015:
        return dict(rng.choice(_BROKEN))
    makers = [_string, _number, _simple, _enum]
    if depth < 4:
        makers += [_object, _object, _array, _any_of, _all_of, _reference]
    schema: dict[str, Any] = rng.choice(makers)(rng, depth)
    if depth == 0:
        schema["$defs"] = {"one": random_schema(rng, 3), "list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}
    if rng.random() < 0.1:
        schema["title"] = rng.choice(_TEXTS)
    return schema


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "string"}
    how = rng.randrange(4)
    if how == 0:
        out["pattern"] = rng.choice(_PATTERNS)
    elif how == 1:
        out["format"] = rng.choice(_FORMATS)
    elif how == 2:
        out["minLength"], out["maxLength"] = rng.randrange(4), rng.randrange(2, 9)
    return out


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    out: dict[str, Any] = {"type": rng.choice(["integer", "integer", "number"])}
    if rng.random() < 0.5:
        out[rng.choice(["minimum", "exclusiveMinimum"])] = rng.randrange(-50, 50)
    if rng.random() < 0.5:
        out[rng.choice(["maximum", "exclusiveMaximum"])] = rng.randrange(-50, 500)
    if out["type"] == "integer" and rng.random() < 0.3:
        out["multipleOf"] = rng.choice([1, 2, 7, 30])
    return out


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["null", "boolean", "string", "integer", "array", "object"]
    return rng.choice([{}, {"type": rng.choice(kinds)}, {"type": rng.sample(kinds, 2)}])


def _value(rng: random.Random) -> Any:
    values = (None, True, False, 0, -7, 1.5, *_TEXTS, [], [1, "a"], {}, {"b": 1, "a": [None]})
    return rng.choice(values)


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"const": _value(rng)}
    return {"enum": [_value(rng) for _ in range(rng.randint(1, 4))]}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randrange(4))
    out: dict[str, Any] = {"type": "object"}
    if names or rng.random() < 0.5:
        out["properties"] = {name: random_schema(rng, depth + 1) for name in names}
        out["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.3:
        out["additionalProperties"] = rng.choice([True, False, {"type": "integer"}])
    if rng.random() < 0.1:
        out["patternProperties"] = {"^x": random_schema(rng, depth + 1)}
    if rng.random() < 0.1:
        out["minProperties"] = rng.randrange(3)
    return out


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.8:
        out["items"] = rng.choice([False, random_schema(rng, depth + 1), random_schema(rng, depth + 1)])
    if rng.random() < 0.3:
        out["prefixItems"] = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.5:
        out["minItems"], out["maxItems"] = rng.randrange(3), rng.randrange(1, 5)
    return out


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    return {rng.choice(["anyOf", "anyOf", "oneOf"]): parts}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"allOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 2))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": rng.choice(["#/$defs/one", "#/$defs/list", "#", "#/$defs/missing"])}


def random_regex(rng: random.Random, depth: int = 0) -> str:
    """Return a regular expression that Python and Rust read alike: no class of a Unicode version."""
    return "".join(_part(rng, depth) for _ in range(rng.randint(1, 4)))


def broken_regex(rng: random.Random) -> str:
    """Return one with a few characters put in: perhaps still one, and perhaps one that Python reads otherwise."""
    made = random_regex(rng)
    place = rng.randrange(len(made) + 1)
    return made[:place] + "".join(rng.choices(_LETTERS, k=3)) + made[place:]


def _part(rng: random.Random, depth: int) -> str:
    simple = ["a", "bc", "[a-z]", "[^a-y]", "[0-9]", ".", "é", "\\.", "[0-9a-f]", " ", "/", "\\n"]
    if depth < 3 and rng.random() < 0.4:
        inner = random_regex(rng, depth + 1)
        other = random_regex(rng, depth + 1)
        part = rng.choice([f"({inner})", f"(?:{inner}|{other})", f"({inner}|)"])
    else:
        part = rng.choice(simple)
    return part + rng.choice(["", "", "?", "*", "+", "{2}", "{1,3}", "{0,2}"])
