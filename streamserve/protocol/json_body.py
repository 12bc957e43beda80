"""Bytes of a request body → one JSON object, or a `BadRequest` that names the fault. Pure: no I/O, no framework.

`json.loads` alone takes too much (RFC 8259 leaves these open): NaN and Infinity, 1e999 as infinity, duplicate keys (it
keeps the last), lone surrogates that no encoder takes back, and nesting as deep as the text's. A mebibyte of `[],[],…`
would hold the event loop while 350,000 lists are made, so arrays and objects are counted before they are parsed. This
module knows nothing of fields; the dialects do.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from streamserve.protocol.errors import BadRequest, TooLarge, UnsupportedMedia
from streamserve.protocol.limits import Limits

# int() of a long text is quadratic. A model may write any number, and a client sends it back: as many as Python reads.
_MAX_INT_CHARS = 4_300
# A string, or the rest of the text where it does not end: else each of its quotes would be tried as a beginning.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = re.compile(r"[^\[\]{}]+")


def announced_bytes(content_length: str) -> int | None:
    """Return the header's number ("" if absent), None if it is none. Twenty digits behind zeros are enough."""
    if not (content_length.isascii() and content_length.isdigit()):
        return None
    return int(content_length.lstrip("0")[:20] or 0)


def check_encoding(content_encoding: str) -> None:
    """Raise if this header ("" if absent) shows that the body is compressed."""
    if content_encoding.lower() not in ("", "identity"):
        raise UnsupportedMedia("Compressed bodies are not read. Send the JSON as it is.", param="Content-Encoding")


def check_size(num_bytes: int, limits: Limits) -> None:
    """Raise TooLarge for more bytes of JSON than are parsed."""
    if num_bytes > limits.max_body_bytes:
        raise TooLarge(f"The body is over the limit of {limits.max_body_bytes:,} bytes. Send a shorter conversation.")


def file_too_large(max_bytes: int) -> TooLarge:
    """Return the error for a file over the limit."""
    message = f"The file is over the limit of {max_bytes:,} bytes. Split it into several."
    return TooLarge(message, code="file_too_large", param="file")


def decode_json(body: bytes, limits: Limits) -> dict[str, Any]:
    """Return the object in `body`. Raise `TooLarge`, or `BadRequest` with code `invalid_json` or `too_many_containers`.

    A leading byte order mark is ignored, as RFC 8259 section 8.1 allows.
    """
    check_size(len(body), limits)
    try:
        text = body.decode("utf-8-sig")
        if not text.strip(" \t\r\n"):
            raise _invalid("The body is empty; send a JSON object.")
        outside = _STRING.sub("", text)
        if _num_opening(outside) > limits.max_json_containers:
            raise too_many_containers("The body", limits)
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise _invalid(f"The body is not UTF-8 (at byte {error.start}).") from None
    except json.JSONDecodeError as error:
        raise _invalid(
            f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})."
        ) from None
    except UnicodeEncodeError:
        raise _invalid("A string holds half of a surrogate pair.") from None
    except RecursionError:
        raise _invalid("The body is nested too deeply.") from None
    if not isinstance(value, dict):
        raise _invalid("The body must be a JSON object.")
    if not _is_flat(outside, limits.max_json_depth):
        raise _invalid(f"The body is nested more than {limits.max_json_depth} levels deep.")
    return value


def num_containers(text: str) -> int:
    """Return how many arrays and objects JSON has, without parsing it.

    Of text that is no JSON, at least as many as a parser makes before it finds that.
    """
    return _num_opening(_STRING.sub("", text))


def too_many_containers(subject: str, limits: Limits, param: str | None = None) -> BadRequest:
    """Return the error for JSON with more arrays and objects than the limit."""
    message = f"{subject} has more than {limits.max_json_containers:,} arrays and objects, the limit of JSON here."
    way_out = "Send fewer, or send the data as text in a string."
    return BadRequest(f"{message} {way_out}", code="too_many_containers", param=param)


def loads_written(text: str) -> Any:
    """Return the value of JSON that a model has written. Raise ValueError for what no other JSON can hold.

    That are NaN, 1e999, half of a surrogate pair, and nesting that is too deep to read.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _invalid("An object has the same key twice.")
    return out


def _parse_int(text: str) -> int:
    if len(text) > _MAX_INT_CHARS:
        raise _invalid("A number has too many digits.")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _invalid("A number is too large.")
    return value


def _refuse_constant(name: str) -> Any:
    raise _invalid(f"{name} is not JSON.")


def _num_opening(outside: str) -> int:
    return outside.count("[") + outside.count("{")


def _is_flat(outside: str, max_depth: int) -> bool:
    """Return whether the brackets of valid JSON, given without its strings, nest at most `max_depth` deep.

    Each round removes the innermost level, at C speed: `[[][]]` → `[]` → "".
    """
    brackets = _NOT_BRACKETS.sub("", outside).replace("{", "[").replace("}", "]")
    for _ in range(max_depth):
        brackets = brackets.replace("[]", "")
    return not brackets


def _invalid(message: str) -> BadRequest:
    return BadRequest(message, code="invalid_json")
