"""The grammar of a Durable Streams connection: each `data` event is followed by its `control` event, offsets rise.

    control? (data control)*      the first control stands alone where the reader has all events so far

Only the last control may close the stream, behind the terminal event, and has no cursor then.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Item(NamedTuple):
    """An event of the log, as the protocol shows it."""

    log_id: str
    seq: int
    type: str
    data: dict[str, Any]


def items_of(frames: list[tuple[str, str]], *, is_whole: bool) -> list[Item]:
    """Return the items of (event, data) pairs after checking their order; a cut stream may lack the last control."""
    items, offset, is_closed = list[Item](), "", False
    rest = iter(frames)
    for name, data in rest:
        assert not is_closed, f"{name} follows the control that closed the stream"
        new, control = [], data
        if name == "data":
            new = json.loads(data)
            assert new, "a data event without items"
            name, control = next(rest, ("", ""))
            if not name:
                assert not is_whole, "a data event without its control event"
                return items
        assert name == "control", f"{name} in place of a control event"
        shown = json.loads(control)
        assert shown["streamNextOffset"] >= offset, f"{shown} after {offset}"
        assert new or not offset, "a control event of no data within the stream"
        offset, is_closed = shown["streamNextOffset"], shown.get("streamClosed", False)
        log_id, _, last = offset.partition("-")
        assert not new or new[-1]["seq"] == int(last), f"{offset} behind event {new[-1]['seq']}"
        assert ("streamCursor" in shown) is not is_closed, shown
        assert shown.get("upToDate") is True or not is_closed, shown
        items += [Item(log_id, item["seq"], item["type"], item["data"]) for item in new]
        ends = [item.type in ("done", "error") for item in items[-len(new) :]] if new else []
        assert not any(ends[:-1]), "an item follows the end"
        assert not new or ends[-1] is is_closed, f"{shown} behind {items[-1].type}"
    assert is_closed or not is_whole, "the stream is not closed at its end"
    return items
