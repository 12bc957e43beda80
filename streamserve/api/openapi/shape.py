"""`shape_of`: the JSON Schema of what values look like, so that no reply is described by hand. Pure.

    shape_of({"id": "a", "text": None}, {"id": "b", "text": "Hi", "usage": {"total": 3}})
    {"type": "object", "properties": {"id": {"type": "string"}, "text": {"type": ["string", "null"]}, "usage": …},
     "required": ["id", "text"]}

A field that one of the values lacks may be absent; a field that is null in all may be anything. Objects are open: a
later release adds fields. Of an object whose keys are data (MAPS) the values are described alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamserve.dialects.fields import nullable

# The names of fields whose keys are data: names of phases, the caller's own notes, token ids.
MAPS = frozenset(
    {"phases", "breakdown", "metadata", "state", "arguments", "categories", "category_scores", "logit_bias", "input"}
    | {"category_applied_input_types", "properties", "snapshot", "value", "result", "progress", "run_state"}
)
SCORES = frozenset({"top_logprobs"})  # of text completions token → number, elsewhere an object of a token's fields
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def shape_of(*values: Any, name: str = "") -> dict[str, Any]:
    """Return the schema that all of these JSON values match; `name` is that of the field that they stand in."""
    kinds: dict[str, list[Any]] = {}
    for value in values:
        if value is not None:
            kinds.setdefault(_NAMES[type(value)], []).append(value)
    if "number" in kinds:
        kinds["number"] += kinds.pop("integer", [])
    found = [_shape(kind, same, name) for kind, same in kinds.items()]
    if not found:
        return {}
    schema = found[0] if len(found) == 1 else {"anyOf": found}
    return nullable(schema) if None in values else schema


def _shape(kind: str, values: Sequence[Any], name: str) -> dict[str, Any]:
    if kind == "array":
        return {"type": kind, "items": shape_of(*(item for value in values for item in value), name=name)}
    if kind == "object":
        is_map = name in MAPS or (
            name in SCORES and all(type(one) is float for value in values for one in value.values())
        )
        return {"type": kind} if is_map else _object(values)
    return {"type": kind}


def _object(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for value in values for name in value))
    properties = {name: shape_of(*(one[name] for one in values if name in one), name=name) for name in names}
    required = [name for name in names if all(name in value for value in values)]
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}
