"""docs/reference/events.md: every event of a native stream, from its class, with what it looks like on the wire."""

from __future__ import annotations

import json
from typing import get_args

from docs.generate.meanings import annotations_of, meanings_of
from docs.generate.text import head, linked, table
from streamserve.api.openapi.samples import EVENTS
from streamserve.protocol.events import Event

_INTRO = """
Every event of a native stream: its fields, and the `data` of an example. [Events](../events.md) has the order that they
keep, statuses, snapshots and the farewell. A field that is absent has its default. Clients ignore events and fields
that they do not know.
"""
_TYPES = {"str": "text", "int": "integer", "bool": "boolean", "float": "number", "Usage": "object"}


def page() -> str:
    """Return the page."""
    parts = [head("Reference: events", _INTRO, "the classes of streamserve/protocol/events.py")]
    for event in EVENTS:
        text = linked((type(event).__doc__ or "").partition("\n\n")[0])
        data = json.dumps(event.payload(), indent=2)
        parts.append(f"\n## {event.type}\n\n{text}\n\n{_table(type(event))}\n```json\n{data}\n```\n")
    return "".join(parts)


def kinds_without_example() -> set[type]:
    """Return the kinds of events that the page lacks."""
    return set(get_args(Event)) - {type(event) for event in EVENTS}


def _table(cls: type) -> str:
    annotations = annotations_of(cls)
    rows = [[f"`{name}`", _type(annotations[name]), linked(text)] for name, text in meanings_of(cls).items()]
    return table(["field", "type", "meaning"], rows)


def _type(annotation: str) -> str:
    first, *rest = (part.strip() for part in annotation.split("|"))
    word = _TYPES.get(first) or ("list" if first.startswith("tuple") else "object")
    return f"{word}, may be absent" if "None" in rest else word
