"""JSON patches (RFC 6902) as the server writes them: `add`, `remove` and `replace` of members and items. Pure.

A patch is what changes one JSON value into another: `patched(before, patch(before, after)) == after`. Lists are
compared item by item from the front: what is added at the end of a list is one operation. It is not the shortest
patch; its order is the order of the values, so that equal values give equal patches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Operation = Mapping[str, Any]

MAX_VALUE_CHARS = 64 * 1024  # of a run's state as JSON, and of the value of an event of its own
_MAX_DEPTH = 64


def json_text(value: Any) -> str:
    """Return a JSON value as text. Raises ValueError and TypeError for what is none."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_value(value: Any, what: str) -> Any:
    """Return a copy of a JSON value. Raises TypeError and ValueError for what is none, or is too large."""
    plain = _plain(value, what, 0)
    try:
        text = json_text(plain)
        text.encode()
    except ValueError as error:
        raise ValueError(f"{what} is no JSON: {error}") from None
    if len(text) > MAX_VALUE_CHARS:
        raise ValueError(f"{what} has {len(text):,} characters as JSON; the limit is {MAX_VALUE_CHARS:,}")
    return json.loads(text)


def _plain(value: Any, what: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{what} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        wrong = next((name for name in value if not isinstance(name, str)), None)
        if wrong is not None:
            raise TypeError(f"{what} has the key {wrong!r}; the keys of JSON are text")
        return {str(name): _plain(item, f"{what}[{str(name)[:40]!r}]", depth + 1) for name, item in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, f"{what}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise TypeError(f"{what} is a {type(value).__name__}, which JSON does not have")


def is_same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal as JSON: true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def patch(before: Any, after: Any, path: str = "") -> list[dict[str, Any]]:
    """Return the operations that change `before` into `after`."""
    return list(_operations(before, after, path))


def _operations(before: Any, after: Any, path: str) -> Iterator[dict[str, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_object(before, after, path)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _of_list(before, after, path)
    elif not is_same(before, after):
        yield {"op": "replace", "path": path, "value": after}


def _of_object(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[dict[str, Any]]:
    for name in before:
        if name not in after:
            yield {"op": "remove", "path": _join(path, name)}
    for name, value in after.items():
        if name in before:
            yield from _operations(before[name], value, _join(path, name))
        else:
            yield {"op": "add", "path": _join(path, name), "value": value}


def _of_list(before: Sequence[Any], after: Sequence[Any], path: str) -> Iterator[dict[str, Any]]:
    num_both = min(len(before), len(after))
    for index in range(num_both):
        yield from _operations(before[index], after[index], f"{path}/{index}")
    for index in range(len(before) - 1, num_both - 1, -1):
        yield {"op": "remove", "path": f"{path}/{index}"}
    for value in after[num_both:]:
        yield {"op": "add", "path": f"{path}/-", "value": value}


def patched(value: Any, operations: Sequence[Operation]) -> Any:
    """Return `value` after the operations of `patch`; `value` itself changes too. Raises ValueError for others."""
    for one in operations:
        *parents, last = _names(one["path"])
        if last == "" and not parents:
            value = one["value"]
            continue
        target = value
        for name in parents[1:]:
            target = target[int(name)] if isinstance(target, list) else target[name]
        _apply(target, one, last)
    return value


def _apply(target: Any, one: Operation, name: str) -> None:
    """Apply an operation to the object or list that has its member or item."""
    op = one["op"]
    if op not in ("add", "remove", "replace"):
        raise ValueError(f"no operation of ours: {op!r}")
    key: Any = name
    if isinstance(target, list):
        key = len(target) if name == "-" else int(name)
    if op == "remove":
        del target[key]
    elif op == "add" and isinstance(target, list):
        target.insert(key, one["value"])
    else:
        target[key] = one["value"]


def _join(path: str, name: str) -> str:
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"


def _names(path: str) -> list[str]:
    """Return the parts of a pointer; the first is "" as a pointer begins with a slash."""
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]
