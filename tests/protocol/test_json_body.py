"""Laws of `decode_json`: one object or one `BadRequest`, whatever the bytes."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.errors import BadRequest, StreamserveError, TooLarge
from streamserve.protocol.json_body import decode_json, num_containers
from streamserve.protocol.limits import Limits

LIMITS = Limits()


def nested(depth: int) -> bytes:
    """Return an object whose brackets nest `depth` deep."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_an_object_comes_back_as_it_is():
    """Escapes, scripts, numbers and nesting survive."""
    value = {"a": [1, -2.5, None, True, {"ü": "😀\u2028\0"}]}
    assert decode_json(json.dumps(value).encode(), LIMITS) == value
    assert decode_json(json.dumps(value, ensure_ascii=False).encode(), LIMITS) == value


def test_a_byte_order_mark_is_ignored():
    """Windows tools write one; RFC 8259 lets a parser ignore it."""
    assert decode_json(b'\xef\xbb\xbf{"a": 1}', LIMITS) == {"a": 1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b" \r\n\t", "empty"),
        (b"{", "not valid JSON"),
        (b"{} {}", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"1", "must be a JSON object"),
        (b'"a"', "must be a JSON object"),
        (b"NaN", "NaN is not JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": Infinity}', "Infinity is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -1e999}', "too large"),
        (b'{"a": ' + b"9" * 4_301 + b"}", "too many digits"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": 1, "a": 1}', "same key twice"),
        (b'{"a": {"b": 1, "b": 2}}', "same key twice"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": "\xff"}', "not UTF-8 (at byte 7)"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": "\n"}', "not valid JSON"),
        (nested(65), "more than 64 levels"),
        (nested(10_000), "nested"),
    ],
)
def test_what_is_not_one_clean_object_is_refused(body: bytes, message: str):
    """Each refusal has the code `invalid_json` and a message that names the fault."""
    with pytest.raises(BadRequest) as caught:
        decode_json(body, LIMITS)
    assert caught.value.code == "invalid_json"
    assert message in caught.value.message


def test_the_depth_limit_is_inclusive():
    """64 levels pass; brackets inside strings do not count."""
    assert decode_json(nested(64), LIMITS)
    assert decode_json(json.dumps({"a": "[" * 500 + '"\\' + "{" * 500}).encode(), LIMITS)


def test_a_surrogate_pair_is_a_character():
    """An escaped pair is one character: ASCII JSON writes emoji so."""
    assert decode_json(b'{"a": "\\ud83d\\ude00"}', LIMITS) == {"a": "😀"}


def test_a_body_over_the_limit_is_too_large():
    """The size is checked before anything is decoded."""
    with pytest.raises(TooLarge) as caught:
        decode_json(b"\xff" * (LIMITS.max_body_bytes + 1), LIMITS)
    assert caught.value.http_status == 413


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'["["],', b'{"a":"\\\\"},'])
def test_containers_are_counted_before_they_are_parsed(unit: bytes):
    """20,000 arrays and objects pass; with one more the refusal says how many may come, and the way out."""
    many = unit * (LIMITS.max_json_containers - 2)
    assert len(decode_json(b'{"zz":[' + many + b"0]}", LIMITS)["zz"]) == LIMITS.max_json_containers - 1
    with pytest.raises(BadRequest) as caught:
        decode_json(b'{"zz":[' + many + b"[]]}", LIMITS)
    assert caught.value.code == "too_many_containers"
    assert "20,000 arrays and objects" in caught.value.message
    assert "as text in a string" in caught.value.message


@pytest.mark.parametrize("body", [b"[" * 500_000, b'{"a":' * 100_000, b'{"a": ["' + b'x", {}, "' * 50_000])
def test_broken_json_is_counted_too(body: bytes):
    """A parser would make what comes before the fault."""
    with pytest.raises(BadRequest) as caught:
        decode_json(body, LIMITS)
    assert caught.value.code == "too_many_containers"


@pytest.mark.parametrize(
    "text", ['{"a": ["', '{"a": ["\\"', '{"a": ["\\"[[[', '{"a": ["\\"[\\', '{"a": ["' + '\\"' * 500_000]
)
def test_a_string_without_an_end_is_read_once(text: str):
    """It goes on to the end of the text: no quote in it begins another, so its brackets are none."""
    assert num_containers(text) == 2
    with pytest.raises(BadRequest) as caught:
        decode_json(text.encode(), LIMITS)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    "value",
    [
        list(range(100_000)),
        json.dumps([{"a": [1, [2]]}] * 20_000),
        "".join(f'"{row}",[1;2],{{x}}\n' for row in range(40_000)),
        "\\" * 200_001 + '"' + "[" * 200_000,
    ],
    ids=["token ids", "JSON", "CSV", "backslashes"],
)
def test_lists_of_numbers_and_texts_are_one_value(value: object):
    """However long, and whatever brackets a text has."""
    assert decode_json(json.dumps({"prompt": value}).encode(), LIMITS) == {"prompt": value}


@pytest.mark.parametrize("unit", [b'"\\"",', b"0,", b'"",', b'"[",'])
def test_the_worst_body_of_the_largest_size_costs_little(unit: bytes):
    """A mebibyte of tiny values takes about a second of one worker."""
    many = unit * ((LIMITS.max_body_bytes - 20) // len(unit))
    started = time.monotonic()
    decode_json(b'{"a": [' + many + b"0]}", LIMITS)
    assert time.monotonic() - started < 30, "the square of the length, or worse"


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:\\ud8e1e9-.0NaInfty \n', max_size=60).map(str.encode))
def test_no_bytes_raise_anything_but_ours(body: bytes):
    """No exception of the standard library leaves the decoder."""
    try:
        value = decode_json(body, LIMITS)
    except StreamserveError:
        return
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_text_without_an_end_is_read_once(end: bytes):
    """Half a million quotes that could each begin another text take as long as any other mebibyte."""
    body = b'{"a":"' + b'\\"' * (LIMITS.max_body_bytes // 2 - 8) + end
    with pytest.raises(BadRequest) as caught:
        decode_json(body, LIMITS)
    assert caught.value.code == "invalid_json"
    assert num_containers(body.decode() + "[[{") == 1
    assert num_containers('["[", {"a{": "') == 2
