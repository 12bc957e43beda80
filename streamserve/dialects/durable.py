"""The Durable Streams protocol, read side, in JSON mode: offsets, items, and frames of SSE (docs/durable-streams.md).

An item is an event of the log, never joined with another: `{"seq": 5, "type": "token", "data": {…}}`. An offset names
the last event that its reader has: `<log id>-<16 digits>`, so that offsets of a stream sort as texts. After each `data`
event of SSE stands a `control` event with the offset behind it. (The protocol: github.com/durable-streams.) Pure: the
caller passes the cursor, which counts intervals of time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from streamserve.dialects.fields import Table, described, one_of, read, wrong_value
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import GoingAway, LoggedEvent, is_terminal
from streamserve.protocol.sse import FIRST_BYTES, KEEPALIVE, one_line_json

START, NOW = "-1", "now"  # offsets before the first event, and behind the last
LONG_POLL, SSE = "long-poll", "sse"
# Cursors count intervals from a fixed day, as the protocol has it.
_EPOCH, _INTERVAL_SECONDS = datetime(2024, 10, 9, tzinfo=UTC).timestamp(), 20.0
_OFFSET = re.compile(r"([0-9a-z]{1,40})-([0-9]{16})")
_CURSOR = re.compile(r"[0-9]{1,15}")


@described({"type": "string", "pattern": f"^({START}|{NOW}|{_OFFSET.pattern})$"})
def _position(value: Any, param: str) -> tuple[str, int | None]:
    """Read an offset: the log's id and the last event that its reader has."""
    if value in (START, NOW):
        return "", None if value == NOW else 0
    match = _OFFSET.fullmatch(value)
    if match is None:
        wrong_value(param, f"is the Stream-Next-Offset of an earlier response, {START} or {NOW}")
    return match[1], int(match[2])


@described({"type": "string", "pattern": f"^{_CURSOR.pattern}$"})
def _cursor(value: Any, param: str) -> int:
    """Read what the last response had as Stream-Cursor."""
    if _CURSOR.fullmatch(value) is None:
        wrong_value(param, "is what the last response had as Stream-Cursor")
    return int(value)


QUERY: Table = {"offset": _position, "live": one_of(LONG_POLL, SSE), "cursor": _cursor}


class Tail(Protocol):
    """What names a log and its end, of a `Stream`."""

    log_id: str

    @property
    def last_seq(self) -> int:
        """The last event committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A checked query. `seq` is the last event that the reader has, None for NOW, of the log `log_id` ("": of any).

    `live`: "" (what is there), LONG_POLL or SSE.
    """

    seq: int | None
    log_id: str
    live: str
    cursor: int


def parse(query: Mapping[str, str]) -> Read:
    """Check the query of a read; unknown parameters count for nothing, as in the protocol. Raises BadRequest."""
    values = read({name: query[name] for name in QUERY if name in query}, QUERY)
    live = values.get("live", "")
    if live and "offset" not in query:
        message = f"live={live} needs an offset: {START} is the start, {NOW} the end."
        raise BadRequest(message, param="offset")
    log_id, seq = values.get("offset", ("", 0))
    return Read(seq=seq, log_id=log_id, live=live, cursor=values.get("cursor", 0))


def offset_of(log_id: str, seq: int) -> str:
    """Return the offset behind event `seq`."""
    return f"{log_id}-{seq:016d}"


def cursor_at(now: float, sent: int) -> str:
    """Return the cursor of a response at wall time `now`: past the cursor that the reader sent."""
    return str(max(int((now - _EPOCH) / _INTERVAL_SECONDS), sent + 1 if sent else 0))


def etag_of(log_id: str, after: int, until: int, *, is_closed: bool) -> str:
    """Return the entity tag of the items `after` to `until`: another tag once the stream is closed."""
    return f'"{log_id}-{after}-{until}{"-closed" if is_closed else ""}"'


def item_of(logged: LoggedEvent) -> str:
    """Return one event as JSON on one line."""
    event: Any = logged.event
    return one_line_json({"seq": logged.seq, "type": event.type, "data": event.payload()})


class LogEncoder:
    """Each frame is a `data` event, an array of items, and its `control` event. See `Encoder.encode_all`.

    A reader `after` the last event is sent a `control` event at once.
    """

    content_type = "text/event-stream"
    keepalive = keepalive_event = KEEPALIVE
    takes_snapshots = False

    def __init__(self, tail: Tail, after: int, cursor: str) -> None:
        self._tail, self._cursor = tail, cursor
        self.first_bytes = self.control(after) if after >= tail.last_seq else FIRST_BYTES

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the frame of one event."""
        return self.encode_all([logged])

    def encode_all(self, events: Sequence[LoggedEvent]) -> bytes:
        """Return the frame of these events; b"" for events that are in no log (seq 0)."""
        items = ",".join(item_of(logged) for logged in events if logged.seq)
        if not items:
            return b""
        last = events[-1]
        return f"event: data\ndata:[{items}]\n\n".encode() + self.control(last.seq, is_closed=is_terminal(last.event))

    def control(self, seq: int, *, is_closed: bool = False) -> bytes:
        """Return the control event behind event `seq`. A closed stream has no cursor."""
        out: dict[str, Any] = {"streamNextOffset": offset_of(self._tail.log_id, seq)}
        if is_closed:
            out |= {"upToDate": True, "streamClosed": True}
        else:
            out |= {"streamCursor": self._cursor, **({"upToDate": True} if seq >= self._tail.last_seq else {})}
        return f"event: control\ndata:{one_line_json(out)}\n\n".encode()

    def going_away(self, notice: GoingAway) -> bytes:
        """Return b"": after a connection that ends without `streamClosed` its reader connects again by itself."""
        return b""
