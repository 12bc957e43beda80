"""Event ids on the wire, `log_id-seq`, request ids, and the ids of tool calls.

`log_id` is unique over all streams and `seq` is dense from 1, so an id alone is a reader's cursor. `Last-Event-ID` is a
caller's text: it either parses, or counts as no id at all.

In dialects that show one event in several frames, the frames before the last have ids of their own: `log_id-seq:c2` is
the second frame after event `seq`, in the dialect that `c` stands for; its reader has every event up to `seq`. Pure.
"""

from __future__ import annotations

import hashlib
import random
import re

_EVENT_ID = re.compile(r"([0-9A-Za-z_-]{1,40})-(0|[1-9][0-9]{0,14})(?::([a-z])([1-9][0-9]{0,3}))?")
_STREAM_ID = re.compile(r"[0-9a-f]{32}")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def event_id(log_id: str, seq: int) -> str:
    """Return the wire id of event `seq` of the log."""
    return f"{log_id}-{seq}"


def parse_event_id(text: str) -> tuple[str, int] | None:
    """Return `(log_id, seq)`, or None if `text` is not one of our event ids. `seq` 0 means nothing seen yet."""
    match = _EVENT_ID.fullmatch(text)
    return None if match is None else (match[1], int(match[2]))


def frame_id(log_id: str, seq: int, dialect: str, number: int) -> str:
    """Return the wire id of the frame with that number after event `seq`, which is not the last of its event."""
    return f"{log_id}-{seq}:{dialect}{number}"


def num_frames_seen(text: str, dialect: str) -> int:
    """Return how many frames after its event an id names; 0 for the id of an event, and for another dialect's."""
    match = _EVENT_ID.fullmatch(text)
    return int(match[4]) if match is not None and match[3] == dialect else 0


def is_stream_id(text: str) -> bool:
    """Return whether `text` can be the id of a stream: 128 random bits in hex."""
    return _STREAM_ID.fullmatch(text) is not None


def request_id_of(given: str) -> str:
    """Return the caller's `X-Request-Id` if it is well formed, else a random id, which is no secret."""
    return given if _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


def tool_call_id(answer: str, choice: int, index: int) -> str:
    """Return the id of the tool call in block `index`: always the same id, so that a resumed answer repeats it."""
    digest = hashlib.sha256(f"{answer}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"
