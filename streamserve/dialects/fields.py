"""Typed, range-checked readers of body fields. A dialect is a table of names and readers; `read` applies it.

A reader takes a decoded JSON value and its name, and returns the checked value or raises `BadRequest` with that name in
`param`. Types are not converted: true is not 1, 3.0 is not 3, "1" is not 1. A reader is `described` where it is made,
by the bounds that it checks, as JSON Schema: `/openapi.json` is made of that. This module knows no dialect. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from streamserve.protocol.errors import BadRequest

Reader = Callable[[Any, str], Any]
Table = Mapping[str, Reader]
Schema = Mapping[str, Any]  # JSON Schema, in the dialect of OpenAPI 3.1
_R = TypeVar("_R", bound=Reader)


class Fields(dict[str, Reader]):
    """A table that names the fields that must be there: `read` raises where one is missing."""

    def __init__(self, readers: Table, *needed: str) -> None:
        super().__init__(readers)
        self.needed = needed


def described(schema: Schema | Callable[[], Schema]) -> Callable[[_R], _R]:
    """Have `schema_of` return this for a reader: what it takes, as far as JSON Schema can say it."""

    def mark(reader: _R) -> _R:
        vars(reader)["schema"] = schema
        return reader

    return mark


def schema_of(reader: Reader) -> dict[str, Any]:
    """Return what a reader takes. Raises TypeError for a reader that is not described."""
    schema = vars(reader).get("schema")
    if schema is None:
        raise TypeError(f"{reader} is not described: it has no schema")
    return dict(schema() if callable(schema) else schema)


def object_schema(table: Table, *, is_open: bool = False) -> dict[str, Any]:
    """Return the schema of an object that `read` reads by a table; `is_open`: other fields are left out, not refused.

    Null is absent, so a field that may be absent may be null.
    """
    needed = getattr(table, "needed", ())
    fields = {name: schema_of(reader) for name, reader in table.items()}
    out: dict[str, Any] = {
        "type": "object",
        "properties": {name: one if name in needed else nullable(one) for name, one in fields.items()},
    }
    if needed:
        out["required"] = list(needed)
    return out if is_open else {**out, "additionalProperties": False}


def nullable(schema: Schema) -> dict[str, Any]:
    """Return the schema of what `schema` takes, and of null."""
    if not schema or schema.get("type") == "null":
        return dict(schema)
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "title" in schema or not isinstance(schema.get("type"), str):
        return {"anyOf": [dict(schema), {"type": "null"}]}
    out = {**schema, "type": [schema["type"], "null"]}
    return {**out, "enum": [*schema["enum"], None]} if "enum" in schema else out


_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object"}
# A caller's long keys are cut before they are compared or shown: difflib is quadratic.
_MAX_SHOWN_CHARS = 48
_MAX_LISTED = 12  # fields in a message
NO_NUL = "^[^\\u0000]*$"
_CUTOFF = 0.6  # what is less alike than this is no slip of the pen


def read(body: Mapping[str, Any], table: Table, *, prefix: str = "") -> dict[str, Any]:
    """Return the checked values of the fields that are present. Null is absent; an unknown name raises."""
    if not body.keys() <= table.keys():
        refuse_unknown(body, table, prefix=prefix)
    values = {name: table[name](value, prefix + name) for name, value in body.items() if value is not None}
    for name in getattr(table, "needed", ()):
        required(values, name, prefix=prefix)
    return values


def refuse_unknown(body: Mapping[str, Any], table: Table, *, prefix: str = "") -> None:
    """Raise `BadRequest` for the first name that is not in `table`; the message has a similar name, or all."""
    for name in body:
        if name not in table:
            shown = shorten(name)
            nearest = difflib.get_close_matches(shown, list(table), n=1, cutoff=_CUTOFF)
            known = f"Known: {', '.join(table)}." if len(table) <= _MAX_LISTED else "docs/api.md has the known fields."
            raise BadRequest(
                f"Unknown field {prefix}{shown}. "
                + (f"The nearest known field is {prefix}{nearest[0]}." if nearest else known),
                code="unknown_field",
                param=prefix + shown,
            )


def shorten(text: str) -> str:
    """Return `text`, cut to a length that is safe to show."""
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def integer(low: int, high: int) -> Reader:
    """Read an int from `low` to `high`, both included."""

    @described({"type": "integer", "minimum": low, "maximum": high})
    def reader(value: Any, param: str) -> int:
        if type(value) is not int:
            wrong_type(value, param, "an integer")
        if not low <= value <= high:
            wrong_value(param, f"must be between {low} and {high}")
        return int(value)

    return reader


def number(low: float, high: float) -> Reader:
    """Read a finite float (or int) from `low` to `high`, both included; -0.0 becomes 0.0."""

    @described({"type": "number", "minimum": low, "maximum": high})
    def reader(value: Any, param: str) -> float:
        if type(value) not in (int, float):
            wrong_type(value, param, "a number")
        if not low <= value <= high:  # false for NaN too
            wrong_value(param, f"must be between {low:g} and {high:g}")
        return float(value) + 0.0

    return reader


@described({"type": "boolean"})
def boolean(value: Any, param: str) -> bool:
    """Read true or false."""
    if type(value) is not bool:
        wrong_type(value, param, "a boolean")
    return bool(value)


def text(low: int, high: int) -> Reader:
    """Read a string of `low` to `high` characters."""

    @described({"type": "string", **({"minLength": low} if low else {}), "maxLength": high})
    def reader(value: Any, param: str) -> str:
        if not isinstance(value, str):
            wrong_type(value, param, "a string")
        if low and not value:
            wrong_value(param, "must not be empty")
        if len(value) < low:
            wrong_value(param, f"has {len(value)} characters; it takes at least {low}")
        if len(value) > high:
            wrong_value(param, f"has {len(value):,} characters; the limit is {high:,}")
        return value

    return reader


def plain_text(low: int, high: int) -> Reader:
    """Read a string of `low` to `high` characters that a database takes: without NUL, which PostgreSQL refuses."""
    any_text = text(low, high)

    @described({**schema_of(any_text), "pattern": NO_NUL})
    def reader(value: Any, param: str) -> str:
        if "\0" in any_text(value, param):
            wrong_value(param, "must not have a NUL character")
        return str(value)

    return reader


def one_of(*names: str) -> Reader:
    """Read one of these words."""

    @described({"type": "string", "enum": list(names)})
    def reader(value: Any, param: str) -> str:
        if not isinstance(value, str):
            wrong_type(value, param, "a string")
        if value not in names:
            wrong_value(param, f"must be one of: {', '.join(names)}")
        return value

    return reader


def list_of(item: Reader, *, high: int, low: int = 0) -> Reader:
    """Read an array of `low` to `high` items; the `param` of item i is `param[i]`."""
    bounds = {**({"minItems": low} if low else {}), "maxItems": high}

    @described(lambda: {"type": "array", "items": schema_of(item), **bounds})
    def reader(value: Any, param: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            wrong_type(value, param, "an array")
        if len(value) < low:
            wrong_value(param, "must not be empty")
        if len(value) > high:
            wrong_value(param, f"has {len(value):,} items; the limit is {high:,}")
        return tuple(item(one, f"{param}[{index}]") for index, one in enumerate(value))

    return reader


def object_of(table: Table) -> Reader:
    """Read an object by a table of its own; the `param` of its fields is `param.name`."""

    @described(lambda: object_schema(table))
    def reader(value: Any, param: str) -> dict[str, Any]:
        return read(any_object(value, param), table, prefix=param + ".")

    return reader


@described({"type": "object"})
def any_object(value: Any, param: str) -> dict[str, Any]:
    """Read an object without checking its content."""
    if not isinstance(value, dict):
        wrong_type(value, param, "an object")
    return dict(value)


# What the messages between processes can hold of whole numbers (msgpack).
_LEAST_INT, _LARGEST_INT = -(2**63), 2**64 - 1


@described({"type": "object"})
def wire_object(value: Any, param: str) -> dict[str, Any]:
    """Read an object of which nothing is checked but that its whole numbers have at most 64 bits."""
    left: list[Any] = [any_object(value, param)]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            left += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int) and not _LEAST_INT <= one <= _LARGEST_INT:
            wrong_value(param, "has a whole number of more than 64 bits")
    return dict(value)


@described({"type": "array", "items": {}})
def any_list(value: Any, param: str) -> list[Any]:
    """Read an array without checking its content."""
    if not isinstance(value, list):
        wrong_type(value, param, "an array")
    return list(value)


@described({})
def anything(value: Any, param: str) -> Any:
    """Read any value."""
    return value


def nothing(way_out: str) -> Callable[[_R], _R]:
    """Describe the reader of a field that is known and refused: it may be null, which is absent."""
    return described({"type": "null", "description": way_out})


@described({"type": "boolean"})
def flag(value: Any, param: str) -> bool:
    """Read true or false, as a query spells them."""
    if value not in ("true", "false"):
        wrong_value(param, "is true or false")
    return bool(value == "true")


def digits(low: int, high: int) -> Reader:
    """Read a whole number that a query spells in digits."""
    most = len(str(high))

    @described({"type": "integer", "minimum": low, "maximum": high})
    def reader(value: Any, param: str) -> int:
        is_number = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= most
        if not is_number or not low <= int(value) <= high:
            wrong_value(param, f"is a number from {low} to {high}")
        return int(value)

    return reader


def required(values: Mapping[str, Any], name: str, *, prefix: str = "") -> Any:
    """Return a field that must be there."""
    if name not in values:
        raise BadRequest(f"{prefix}{name} is missing.", code="missing_field", param=prefix + name)
    return values[name]


def wrong_type(value: Any, param: str, wanted: str) -> NoReturn:
    """Raise: `param` is of the wrong JSON type."""
    kind = "null" if value is None else _KINDS.get(type(value), "something else")
    raise BadRequest(f"{param} must be {wanted}, not {kind}.", code="invalid_type", param=param)


def wrong_value(param: str, rule: str) -> NoReturn:
    """Raise: `param` is of the right type and breaks `rule`."""
    raise BadRequest(f"{param} {rule}.", code="invalid_value", param=param)


def conflict(message: str, param: str) -> BadRequest:
    """Return the error for two fields that cannot go together."""
    return BadRequest(message, code="conflicting_fields", param=param)
