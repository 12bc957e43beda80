"""Laws of the field readers."""

from typing import Any

import pytest

from streamserve.dialects.fields import (
    Reader,
    boolean,
    integer,
    list_of,
    number,
    object_of,
    one_of,
    read,
    required,
    text,
)
from streamserve.protocol.errors import BadRequest

READERS: dict[str, Reader] = {
    "integer": integer(1, 4),
    "number": number(0, 2),
    "boolean": boolean,
    "text": text(1, 3),
    "word": one_of("a", "b"),
    "list": list_of(integer(0, 9), low=1, high=2),
    "object": object_of({"flag": boolean}),
}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("integer", 1, 1),
        ("integer", 4, 4),
        ("number", 0, 0.0),
        ("number", 2, 2.0),
        ("number", 1.5, 1.5),
        ("boolean", False, False),
        ("text", "abc", "abc"),
        ("word", "b", "b"),
        ("list", [0, 9], (0, 9)),
        ("object", {"flag": True}, {"flag": True}),
        ("object", {"flag": None}, {}),
    ],
)
def test_values_at_their_bounds_pass(name: str, value: Any, expected: Any):
    """Bounds are inclusive; numbers become floats, arrays tuples, and null counts as absent."""
    assert READERS[name](value, "it") == expected
    assert type(READERS[name](value, "it")) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("integer", True, "it must be an integer, not a boolean."),
        ("integer", 1.0, "it must be an integer, not a number."),
        ("integer", 10**4000, "it must be between 1 and 4."),
        ("number", False, "it must be a number, not a boolean."),
        ("number", 10**4000, "it must be between 0 and 2."),
        ("number", float("nan"), "it must be between 0 and 2."),
        ("boolean", 0, "it must be a boolean, not an integer."),
        ("text", "", "it must not be empty."),
        ("text", "abcd", "it has 4 characters; the limit is 3."),
        ("word", "c", "it must be one of: a, b."),
        ("word", [], "it must be a string, not an array."),
        ("list", "ab", "it must be an array, not a string."),
        ("list", [1, 2, 3], "it has 3 items; the limit is 2."),
        ("list", [1, None], "it[1] must be an integer, not null."),
        ("object", {"flag": 1}, "it.flag must be a boolean, not an integer."),
        ("object", {"flat": 1}, "Unknown field it.flat. The nearest known field is it.flag."),
    ],
)
def test_a_wrong_value_is_named_in_a_sentence(name: str, value: Any, message: str):
    """The message names the field, the rule and the value."""
    with pytest.raises(BadRequest) as caught:
        READERS[name](value, "it")
    assert caught.value.message == message


def test_minus_zero_is_zero():
    """A temperature of -0.0 is greedy like any other zero."""
    assert str(number(0, 2)(-0.0, "it")) == "0.0"


def test_a_missing_field_is_named_with_its_place():
    """Required fields are checked after reading, so that null counts as missing."""
    with pytest.raises(BadRequest) as caught:
        required(read({"role": None}, {"role": text(1, 9)}), "role", prefix="messages[3].")
    assert (caught.value.code, caught.value.param) == ("missing_field", "messages[3].role")


def test_a_caller_cannot_make_us_compare_for_long():
    """Names are cut before the nearest known one is searched: difflib is quadratic."""
    with pytest.raises(BadRequest) as caught:
        read({"a" * 10**6: 1}, {"temperature": boolean})
    assert len(caught.value.message) < 200
    assert caught.value.param == "a" * 48 + "…"
