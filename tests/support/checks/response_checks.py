"""A reader of the events of a response: the grammar that they keep as a state machine, and the response they make.

    response.created response.in_progress (item*) response.completed | response.incomplete | response.failed

    item:  output_item.added  (part.added delta* done part.done | delta* done)  output_item.done

By the rules of the official client (openai 3.52, `lib/streaming/responses`) and the Open Responses specification: each
event stands on an `event:` line with its type, numbers grow, an item is open once, and what was streamed of an item is
what its end and the whole response say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.checks.sse_reader import read_events

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LAST = ("response.completed", "response.incomplete", "response.failed")
# Of each type of item: its deltas, and the field of their end; where it has parts, the names of their events.
_GROWS: Mapping[str, tuple[str, str, str]] = {
    "message": ("response.output_text", "text", "response.content_part"),
    "reasoning": ("response.reasoning_summary_text", "text", "response.reasoning_summary_part"),
    "function_call": ("response.function_call_arguments", "arguments", ""),
    "custom_tool_call": ("response.custom_tool_call_input", "input", ""),
    "mcp_call": ("response.mcp_call_arguments", "arguments", ""),
}


class _Item:
    """An item that is open."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.item, self.text, self.annotations, self.logprobs = item, "", list[Any](), list[Any]()
        self.name, self.field, self.part = _GROWS[item["type"]]
        self.state = "part.added" if self.part else "delta"

    def feed(self, event: Mapping[str, Any]) -> None:
        """Take an event of the item's content. Each state names what may come."""
        kind = event["type"]
        assert event["item_id"] == self.item["id"]
        if kind == f"{self.part}.added":
            assert self.state == "part.added"
            assert event["part"]["text"] == ""
            self.state = "delta"
        elif kind == f"{self.name}.delta":
            assert self.state == "delta"
            self.text += event["delta"]
            self.logprobs += event.get("logprobs", [])
        elif kind == "response.output_text.annotation.added":
            assert self.state == "delta"
            assert event["annotation_index"] == len(self.annotations)
            self.annotations.append(event["annotation"])
        elif kind == f"{self.name}.done":
            assert self.state == "delta"
            assert event[self.field] == self.text
            self.state = "part.done" if self.part else "done"
        elif kind == f"{self.part}.done":
            assert self.state == "part.done"
            assert event["part"]["text"] == self.text
            self.state = "done"
        elif kind == "response.mcp_call.completed":
            assert self.state == "done"
            self.state = "answered"
        else:
            assert kind == "response.mcp_call.in_progress", kind

    def end(self, item: Mapping[str, Any]) -> None:
        """Compare the item's end with what was streamed of it."""
        assert self.state in ("done", "answered")
        assert {name: item[name] for name in ("id", "type")} == {name: self.item[name] for name in ("id", "type")}
        match item["type"]:
            case "message":
                (part,) = item["content"]
                assert part["text"] == self.text
                assert part["annotations"] == self.annotations
                assert part["logprobs"] == self.logprobs
            case "reasoning":
                assert item["summary"] == [{"type": "summary_text", "text": self.text}]
            case _:
                assert item[self.field] == self.text


class ResponseGrammar:
    """Is fed each event of a response, from its first."""

    def __init__(self) -> None:
        self.state, self.number, self.response_id = "start", -1, ""
        self.open: dict[int, _Item] = {}
        self.items: list[dict[str, Any]] = []
        self.response: dict[str, Any] | None = None

    def feed(self, event: Mapping[str, Any]) -> None:
        """Take an event."""
        _EVENT.validate_python(event)
        assert event["sequence_number"] > self.number
        self.number = event["sequence_number"]
        kind = event["type"]
        if self.state in ("start", "created"):
            expected = {"start": "response.created", "created": "response.in_progress"}[self.state]
            assert kind == expected
            assert event["response"]["output"] == []
            assert event["response"]["status"] == "in_progress"
            self.response_id = event["response"]["id"]
            self.state = "created" if self.state == "start" else "running"
        elif kind in LAST:
            self._end(event)
        else:
            assert self.state == "running"
            self._item(kind, event)

    def _item(self, kind: str, event: Mapping[str, Any]) -> None:
        place = event["output_index"]
        if kind == "response.output_item.added":
            assert place == len(self.items)
            self.items.append({})
            self.open[place] = _Item(event["item"])
        elif kind == "response.output_item.done":
            self.open.pop(place).end(event["item"])
            self.items[place] = event["item"]
        else:
            self.open[place].feed(event)

    def _end(self, event: Mapping[str, Any]) -> None:
        self.response, self.state = event["response"], "ended"
        assert self.response is not None
        assert self.open == {}
        assert self.response["id"] == self.response_id
        assert self.response["output"] == self.items
        statuses = {"failed": ("failed", "cancelled")}
        name = event["type"].removeprefix("response.")
        assert self.response["status"] in statuses.get(name, (name,))
        Response.model_validate(self.response)


def check_response(wire: bytes | Iterable[bytes]) -> dict[str, Any]:
    """Return the response that a whole stream ends in."""
    grammar = ResponseGrammar()
    for event in events_of(read_events(wire)):
        grammar.feed(event)
    assert grammar.response is not None
    return grammar.response


class Dispatched(Protocol):
    """An event of a stream that a client has read."""

    @property
    def event(self) -> str: ...
    @property
    def data(self) -> str: ...


def events_of(read: Iterable[Dispatched]) -> list[dict[str, Any]]:
    """Return the JSON of the events, before `[DONE]`."""
    found = []
    for one in read:
        if one.data == "[DONE]":
            break
        event: dict[str, Any] = json.loads(one.data)
        assert one.event == event["type"]
        found.append(event)
    return found
