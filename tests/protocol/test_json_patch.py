"""Laws of JSON patches: what one value becomes another by, as the package `jsonpatch` applies it too."""

from __future__ import annotations

import copy
import random
from typing import Any

import jsonpatch
import pytest

from streamserve.protocol.json_patch import MAX_VALUE_CHARS, is_same, json_value, patch, patched

NAMES = ("a", "b/c", "d~e", "~1", "", "ä")


def some(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind < 5:
        return rng.choice([None, True, False, 0, 1, 1.0, -2, "", "x", "ü"])
    if kind < 7:
        return {name: some(rng, depth + 1) for name in rng.sample(NAMES, rng.randrange(4))}
    return [some(rng, depth + 1) for _ in range(rng.randrange(4))]


def changed(rng: random.Random, value: Any) -> Any:
    """Return a value that has some of the parts of another."""
    if rng.random() < 0.2:
        return some(rng)
    if isinstance(value, dict):
        kept = {name: changed(rng, item) for name, item in value.items() if rng.random() < 0.8}
        return kept | {name: some(rng, 2) for name in rng.sample(NAMES, rng.randrange(2))}
    if isinstance(value, list):
        return [changed(rng, item) for item in value if rng.random() < 0.8] + [some(rng, 2)] * rng.randrange(3)
    return value


def test_a_patch_changes_one_value_into_another() -> None:
    """Ours and the package's application of 2,000 random patches give the value that was meant, types and all."""
    rng = random.Random(5)
    for _ in range(2000):
        before = some(rng)
        after = changed(rng, before)
        operations = patch(before, after)
        theirs = jsonpatch.apply_patch(copy.deepcopy(before), copy.deepcopy(operations))
        assert is_same(theirs, after), (before, after, operations)
        assert is_same(patched(copy.deepcopy(before), copy.deepcopy(operations)), after), (before, after, operations)


def test_equal_values_have_an_empty_patch() -> None:
    """Nothing is told of what has not changed; 1, 1.0 and true are three values."""
    assert patch({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}) == []
    assert patch(1, True) == [{"op": "replace", "path": "", "value": True}]
    assert patch([1], [1.0]) == [{"op": "replace", "path": "/0", "value": 1.0}]


def test_an_item_at_the_end_of_a_list_is_one_operation() -> None:
    """What a run appends costs no more than what it appends."""
    assert patch({"a": list(range(99))}, {"a": list(range(100))}) == [{"op": "add", "path": "/a/-", "value": 99}]


def test_an_operation_of_others_is_refused() -> None:
    """`patched` takes what `patch` writes."""
    with pytest.raises(ValueError, match="move"):
        patched({"a": 1}, [{"op": "move", "from": "/a", "path": "/b"}])


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ({1: 2}, TypeError, "key 1"),
        ({"a": [object()]}, TypeError, r"state\['a'\]\[0\] is a object"),
        ({"a": float("nan")}, ValueError, "no JSON"),
        ({"a": "\ud800"}, ValueError, "no JSON"),
        ({"a": b"x"}, TypeError, "bytes"),
        ("x" * MAX_VALUE_CHARS, ValueError, "65,538 characters"),
    ],
)
def test_what_is_no_json_is_named(value: Any, error: type[Exception], words: str) -> None:
    """The message has the place of the wrong value."""
    with pytest.raises(error, match=words):
        json_value(value, "state")


def test_deep_values_are_refused() -> None:
    """A value that no reader could take apart is an error of ours, not of the interpreter's stack."""
    value: Any = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(ValueError, match="64 deep"):
        json_value(value, "state")
