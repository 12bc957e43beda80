"""Tool calls in XML: each argument stands in a tag of its own, as text, and its type comes from the tool's schema.

    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>

`calls_of` reads a call, `parameters_of` writes the grammar of its parameters. An argument whose schema takes text is
its text, quotes and all; any other is JSON. What is not of its type is text: it is the caller's to refuse. (Source of
the markup: the chat templates of Qwen3-Coder and Qwen3.5.) Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from streamserve.engine.text.formats.json_call import Call, call_of
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import Tool

# An argument may quote the end of an argument if neither another argument nor the end of the call follows.
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>]{1,256})>(.*?)(?:</parameter>(?=\s*(?:<parameter=|(?:</function>\s*)?\Z))|(?=<parameter=))",
    re.DOTALL,
)
_END = "</function>"  # of an output that ends there
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_ALIASES = {"float": "number", "int": "integer", "bool": "boolean", "str": "string", "list": "array", "dict": "object"}
_ANNOTATIONS = {"type", "title", "description", "default", "examples"}  # what adds nothing to a text's type

Schema = Mapping[str, Any]


def calls_of(body: str, captures: Mapping[str, str], tools: Mapping[str, Tool]) -> list[Call] | None:
    """Return the call in a region's text, None if it does not hold together or, without its outer tag, is no tool."""
    name = captures["name"].strip()
    if name not in tools and not captures.get("tag"):
        return None
    root = tools[name].parameters if name in tools else {}
    properties = _properties(root)
    arguments: dict[str, Any] = {}
    at = 0
    while match := _PARAMETER.match(body, at):
        key, at = match[1].strip(), match.end()
        arguments[key] = _value(_without_frame(match[2]), types_of(properties.get(key), root))
    if body[at:].strip() not in ("", _END):
        return None
    return [call_of(name, arguments)]


def _without_frame(text: str) -> str:
    """Return the text without the line breaks that frame it."""
    return text.removeprefix("\n").removesuffix("\n")


def _value(text: str, types: frozenset[str]) -> Any:
    """Return the value of an argument: text that its schema takes as such, else JSON of one of the types."""
    if types == {"string"}:
        return text
    word = text.strip()
    try:
        value = json.loads(
            word.lower() if word in ("True", "False", "None") else word, parse_constant=_refuse, parse_float=_finite
        )
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and "number" not in types and value.is_integer():
        value = int(value)
    return value if _type_of(value) & types else text


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        _refuse(word)
    return number


def _type_of(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    kinds: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return {kinds[type(value)]}


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema takes; text where it names no type. Each part of it is looked at once."""
    types: set[str] = set()
    seen: set[int] = set()
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            types.update(_own_types(part))
            left += _inner(part, root)
    return frozenset(types) or frozenset({"string"})


def _own_types(schema: Schema) -> Iterator[str]:
    """Yield the types that a schema itself names, or the types of its values."""
    if (named := schema.get("type")) is not None:
        for one in named if isinstance(named, list) else [named]:
            known = _ALIASES.get(one, one) if isinstance(one, str) else None
            if known in _TYPES:
                yield str(known)
        return
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    for value in values if isinstance(values, list) else ():
        yield from _type_of(value)


def _inner(schema: Schema, root: Schema) -> Iterator[Any]:
    """Yield what a schema refers to, and the parts of its unions if it names no type itself."""
    if isinstance(reference := schema.get("$ref"), str):
        yield _referred(reference, root)
    for union in ("anyOf", "oneOf", "allOf") if schema.get("type") is None else ():
        parts = schema.get(union)
        yield from parts if isinstance(parts, list) else ()


def _referred(reference: str, root: Schema) -> Any:
    """Return what a reference within the schema names; None for any other."""
    found: Any = root
    if not reference.startswith("#"):
        return None
    for key in filter(None, reference[1:].split("/")):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _properties(root: Schema) -> Mapping[str, Any]:
    properties = root.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def parameters_of(
    tool: Tool, add: Callable[[str], str], literal: Callable[[str], str], to_json: Callable[[Schema], str]
) -> str:
    """Return the expression of a tool's parameters: a strict tool's in the order of its schema.

    `add` makes a rule of an expression, `literal` and `to_json` an expression of a text and of a schema. The rule
    `xml_text` is any text with the end of its tag. Raises BadRequest for a strict schema that tags cannot hold.
    """
    if not tool.strict:
        return add('"<parameter=" /[^<>\\s]{1,64}/ ">\\n" xml_text') + "*"
    root = tool.parameters
    required = root.get("required")
    names = required if isinstance(required, list) else []
    if unknown := set(map(str, names)) - set(_properties(root)):
        raise _unheld(tool, f"requires {sorted(unknown)[0]}, which is not in its properties")
    out = []
    for name, schema in _properties(root).items():
        rule = add(f"{literal(f'<parameter={name}>')} {literal(chr(10))} {_argument(tool, schema, literal, to_json)}")
        out.append(rule if name in names else f"{rule}?")
    return " ".join(out) or '""'


def _argument(tool: Tool, schema: Any, literal: Callable[[str], str], to_json: Callable[[Schema], str]) -> str:
    """Return the expression of one argument, with the end of its tag."""
    root, end = tool.parameters, literal("\n</parameter>\n")
    if "string" not in types_of(schema, root):
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{to_json({**schema, **definitions})} {end}"
    if not isinstance(schema, Mapping):
        return "xml_text"
    words = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(words, list) and words and all(isinstance(one, str) for one in words):
        return f"({' | '.join(literal(one) for one in words)}) {end}"
    if schema.keys() - _ANNOTATIONS or schema.get("type") not in ("string", None):
        raise _unheld(tool, "has text that is more than text or one of a list")
    return "xml_text"


def _unheld(tool: Tool, why: str) -> BadRequest:
    return BadRequest(
        f"{tool.name} {why}; this model writes calls in XML, where a strict schema cannot hold that. Take it out, or "
        "strict.",
        code="unsupported_grammar",
        param="tools",
    )
