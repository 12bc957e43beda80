"""The events of a stream with neighbouring deltas joined, in any dialect.

How many tokens a delta holds depends on the pace of its reader. So two reads of a stream are equal in what
`with_joined_text` returns: the same text, the same numbers at its ends, and the same events else. A test whose reader
cannot join (`coalesce_tokens=0`, or each token let through a gate and read) compares what it has read as it is.

Nothing here knows a dialect: two neighbours are deltas of one text if they differ in what grows and what numbers only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tests.support.checks.sse_reader import Read
from tests.support.checks.stream_checks import Frame, parse_sse

# The fields that a longer delta has more of, and those of which it has the last delta's.
_GROWING = {
    *("text", "delta", "content", "reasoning", "reasoning_content", "thinking", "arguments", "partial_json"),
    *("inputTextDelta", "token", "token_ids", "logprobs", "tokens", "token_logprobs", "top_logprobs", "text_offset"),
}
_NUMBERING = {"sse_id", "event_id", "seq", "sequence_number", "usage"}


class _ApartError(Exception):
    """Two values are not of one text."""


def with_joined_text(stream: bytes | Iterable[Frame | Read | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a stream's events with neighbouring deltas joined. It is given as bytes, as frames or as their JSON."""
    joined: list[dict[str, Any]] = []
    for event in map(_as_dict, parse_sse(stream) if isinstance(stream, bytes) else stream):
        try:
            if not (joined and _is_delta(event)):
                raise _ApartError
            joined[-1] = _join("", joined[-1], event)
        except _ApartError:
            joined.append(event)
    return joined


def _as_dict(event: Frame | Read | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(event, Mapping):
        return dict(event)
    data = json.loads(event.data) if event.data.startswith("{") else event.data
    # An id within an event ("-4:c1") names the event before it, which may be a token without text of its own.
    place = event.id.partition(":")
    return {"event": event.event, "sse_id": place[2] or place[0], "data": data}


def _is_delta(event: dict[str, Any]) -> bool:
    """Return whether something of the event grows: it is another value if it is joined with itself."""
    return _join("", event, event) != event


def _join(name: str, one: Any, other: Any) -> Any:
    if name in _NUMBERING:
        return other
    if name in _GROWING and isinstance(one, str | list) and type(one) is type(other):
        return one + other
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {key: _join(key, one[key], other[key]) for key in one}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_join("", *pair) for pair in zip(one, other, strict=True)]
    if one == other:
        return one
    raise _ApartError
