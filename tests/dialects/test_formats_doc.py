"""docs/formats.md maps other projects' streams to fields that exist here."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_args

from streamserve.protocol import events

DOC = Path(__file__).parents[2] / "docs" / "formats.md"
# Names in `payload()` that differ from the class, or are added.
ADDED = {"snapshot": {"text"}}
FIELDS = {
    kind.type: {field.name for field in dataclasses.fields(kind)} | ADDED.get(kind.type, set())
    for kind in get_args(events.Event)
}


def rows() -> list[tuple[str, str]]:
    cells = [line.split(" | ") for line in DOC.read_text().splitlines() if line.startswith("| ")]
    return [(theirs, ours) for theirs, ours in cells if theirs != "| theirs"]


def test_every_field_that_the_page_names_exists() -> None:
    """`event.field` in the right column is a field of that event."""
    named = [pair for _, ours in rows() for pair in re.findall(r"`([a-z_]+)\.([a-z_]+)`", ours)]
    assert len(named) > 60
    assert [f"{event}.{field}" for event, field in named if field not in FIELDS.get(event, set())] == []


def test_no_row_is_empty() -> None:
    assert [theirs for theirs, ours in rows() if not ours.strip("| ")] == []
