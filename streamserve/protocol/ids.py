"""Event ids on the wire: `log_id-seq`; and the ids that requests are asked about by.

`log_id` is unique over all streams, `seq` dense from 1, so an id alone says where a reader stands. What comes back in
`Last-Event-ID` is a caller's text: it either parses, or is treated as no id at all.
"""

from __future__ import annotations

import re
import secrets

_EVENT_ID = re.compile(r"([0-9A-Za-z_-]{1,40})-(0|[1-9][0-9]{0,14})")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def event_id(log_id: str, seq: int) -> str:
    """Return the wire id of event `seq` of the log."""
    return f"{log_id}-{seq}"


def parse_event_id(text: str) -> tuple[str, int] | None:
    """Return `(log_id, seq)`, or None if `text` is not an event id of ours. `seq` 0 means nothing seen yet."""
    match = _EVENT_ID.fullmatch(text)
    return None if match is None else (match[1], int(match[2]))


def request_id_of(given: str) -> str:
    """Return the caller's `X-Request-Id` if it is a sane one, else a random id."""
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
