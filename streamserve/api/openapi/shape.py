"""`shape_of`: the JSON Schema of what values look like, so that no reply is described by hand. Pure.

    shape_of({"id": "a", "text": None}, {"id": "b", "text": "Hi", "usage": {"total": 3}})
    {"type": "object", "properties": {"id": {"type": "string"}, "text": {"type": ["string", "null"]}, "usage": …},
     "required": ["id", "text"]}

A field that one of the values lacks may be absent. Objects are open: a later release adds fields. Of an object whose
keys are data (MAPS) the values are described alone, and what is the site's own (FREE) may be any JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamserve.dialects.fields import nullable

# The names of fields whose keys are data: names of phases, the caller's own notes, token ids.
MAPS = frozenset(
    {"phases", "breakdown", "metadata", "categories", "category_scores", "category_applied_input_types", "logit_bias"}
    | {"prompt_logprobs"}
)
SCORES = frozenset({"top_logprobs"})  # of text completions token → number, elsewhere an object of a token's fields
_OF_SITE, _AS_SENT = "Any JSON: the site's own code makes it.", "A JSON Schema, as it was sent."
# The names of fields whose objects are not streamserve's, and whose they are.
FREE: Mapping[str, str] = {
    **dict.fromkeys(("state", "run_state", "snapshot", "value", "result", "progress"), _OF_SITE),
    "input": "Any JSON: a tool's arguments.",
    **dict.fromkeys(("parameters", "schema"), _AS_SENT),
    "inputSchema": "The JSON Schema of the pipeline's input.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Which fields of a reply are maps, and which are anybody's own."""

    maps: Collection[str] = MAPS
    free: Mapping[str, str] = field(default_factory=lambda: FREE)


USUAL = Names()
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def shape_of(*values: Any, name: str = "", names: Names = USUAL) -> dict[str, Any]:
    """Return the schema that all of these JSON values match; `name` is that of the field that they stand in."""
    kinds: dict[str, list[Any]] = {}
    for value in values:
        if value is not None:
            kinds.setdefault(_NAMES[type(value)], []).append(value)
    if name in names.free and "object" in kinds:
        return {"description": names.free[name]}
    if "number" in kinds:
        kinds["number"] += kinds.pop("integer", [])
    found = [_shape(kind, same, name, names) for kind, same in kinds.items()]
    if not found:
        return {"type": "null"} if values else {}
    schema = found[0] if len(found) == 1 else {"anyOf": found}
    return nullable(schema) if None in values else schema


def _shape(kind: str, values: Sequence[Any], name: str, names: Names) -> dict[str, Any]:
    if kind == "array":
        return {"type": kind, "items": shape_of(*(item for value in values for item in value), name=name, names=names)}
    if kind == "object":
        if name in names.maps or (
            name in SCORES and all(type(one) is float for value in values for one in value.values())
        ):
            return {
                "type": kind,
                "additionalProperties": shape_of(*(one for value in values for one in value.values())),
            }
        return _object(values, names)
    return {"type": kind}


def _object(values: Sequence[Mapping[str, Any]], names: Names) -> dict[str, Any]:
    fields = list(dict.fromkeys(name for value in values for name in value))
    properties = {
        name: shape_of(*(one[name] for one in values if name in one), name=name, names=names) for name in fields
    }
    required = [name for name in fields if all(name in value for value in values)]
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}
