"""docs/reference/events.md: every event of a native stream, from its class, with what it looks like on the wire."""

from __future__ import annotations

import json
from typing import get_args

from docs.generate.meanings import annotations_of, meanings_of
from docs.generate.text import head, linked, table
from streamserve.protocol import events
from streamserve.protocol.events import Event

_INTRO = """
Every event of a native stream: its fields, and the `data` of an example. [Events](../events.md) has the order that they
keep, statuses, snapshots and the farewell. A field that is absent has its default. Clients ignore events and fields
that they do not know.
"""
_USAGE = events.Usage(prompt_tokens=12, completion_tokens=2, cached_tokens=0)
# One of each kind.
EXAMPLES: tuple[Event, ...] = (
    events.Meta(model="helpdesk", stream_id="0" * 31 + "1", created=1795651200, prompt_tokens=12),
    events.Status(status="queued", step=3),
    events.BlockStart(choice=0, index=0, kind="tool_use", id="call_1", name="find_invoice"),
    events.Token(text="Hel", token_ids=(1012,)),
    events.BlockStop(choice=0, index=0),
    events.Citation(source="billing", id="pause", title="Pause your subscription", choice=0, index=0, start=0, end=9),
    events.Approval(id="call_1", name="cancel_invoice", arguments='{"number": 1042}', message="Cancel invoice 1042?"),
    events.State(delta='[{"op":"replace","path":"/progress","value":2}]'),
    events.Custom(name="chart", value='{"points":[1,2]}'),
    events.ChoiceDone(choice=1, finish_reason="stop"),
    events.Snapshot(seq=640, choices=(events.ChoiceText(text="Hello, and"),)),
    events.Done(
        finish_reason="stop",
        usage=_USAGE,
        latency=0.25,
        breakdown={"ttft": 0.1, "tpot": 0.05},
        phases={"intake": 0.02, "prefill": 0.08, "generation": 0.15},
    ),
    events.Error(code="queue_timeout", message="The engine was too busy.", retryable=True),
    events.Unknown(kind="a_later_event", fields=b""),
)
_TYPES = {"str": "text", "int": "integer", "bool": "boolean", "float": "number", "Usage": "object"}


def page() -> str:
    """Return the page."""
    parts = [head("Reference: events", _INTRO, "the classes of streamserve/protocol/events.py")]
    for event in EXAMPLES:
        text = linked((type(event).__doc__ or "").partition("\n\n")[0])
        data = json.dumps(event.payload(), indent=2)
        parts.append(f"\n## {event.type}\n\n{text}\n\n{_table(type(event))}\n```json\n{data}\n```\n")
    return "".join(parts)


def kinds_without_example() -> set[type]:
    """Return the kinds of events that the page lacks."""
    return set(get_args(Event)) - {type(event) for event in EXAMPLES}


def _table(cls: type) -> str:
    annotations = annotations_of(cls)
    rows = [[f"`{name}`", _type(annotations[name]), linked(text)] for name, text in meanings_of(cls).items()]
    return table(["field", "type", "meaning"], rows)


def _type(annotation: str) -> str:
    first, *rest = (part.strip() for part in annotation.split("|"))
    word = _TYPES.get(first) or ("list" if first.startswith("tuple") else "object")
    return f"{word}, may be absent" if "None" in rest else word
