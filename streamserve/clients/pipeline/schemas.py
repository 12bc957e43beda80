"""`checker_of`: what checks values by a JSON Schema that comes from elsewhere. Pure.

The check fetches nothing: a `$ref` to elsewhere is an error. `pattern`, by which a schema could keep this process busy
for ever, is not looked at: who gave the schema checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

EXTRA = 'pip install "streamserve[mcp]"'
_MAX_REASON_CHARS = 300


def checker_of(schema: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    """Return what raises ValueError for values that do not fit the schema. Raises ValueError for no JSON Schema.

    Raises RuntimeError where the package jsonschema is missing.
    """
    try:
        from jsonschema import exceptions, validators
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError:
        raise RuntimeError(f"JSON Schemas need the package jsonschema, which is not installed: {EXTRA}") from None

    base = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        base.check_schema(schema)
    except (exceptions.SchemaError, RecursionError):
        raise ValueError("the schema is no JSON Schema") from None
    validator = validators.extend(base, {"pattern": None})(schema, registry=Registry())

    def check(values: Mapping[str, Any]) -> None:
        try:
            wrong = exceptions.best_match(validator.iter_errors(values))
        except (Unresolvable, RecursionError) as error:
            raise ValueError(f"the schema cannot be followed: {type(error).__name__}") from None
        if wrong is not None:
            raise ValueError(f"{wrong.json_path}: {wrong.message}"[:_MAX_REASON_CHARS])

    return check
