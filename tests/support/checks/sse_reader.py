"""A small reader of server-sent events, strictly by WHATWG HTML 9.2.6, that reads our own bytes back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# The only line ends of SSE; `str.splitlines` has nine more.
_LINE_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True)
class Read:
    """One dispatched event. `id` is the last one that was read, of this event or an earlier one."""

    event: str
    data: str
    id: str


def read_events(chunks: bytes | Iterable[bytes]) -> list[Read]:
    """Return the events in `chunks`, wherever they are cut, without an unfinished last one (as the specification)."""
    whole = chunks if isinstance(chunks, bytes) else b"".join(chunks)
    lines = _LINE_END.split(whole.decode("utf-8", "replace").removeprefix("\ufeff"))[:-1]
    events, data, event, last_id = [], [], "", ""
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append(Read(event or "message", "\n".join(data), last_id))
            data, event = [], ""
        elif name == "data":
            data.append(value)
        elif name == "event":
            event = value
        elif name == "id" and "\0" not in value:
            last_id = value
    return events
