"""The order of an AG-UI run's events, as a state machine, and their shapes by the package's own models.

The laws are those of the client's `verifyEvents`, and ours: what is closed before the end, one terminal event, no empty
delta, ids that are used once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tests.support.checks.sse_reader import read_events

Event = dict[str, Any]
TERMINALS = ("RUN_FINISHED", "RUN_ERROR")
# type → what it opens or closes, the field of its id, and whether it must be open before (None: it opens).
_OPENERS = {
    "TEXT_MESSAGE_START": ("text", "messageId"),
    "REASONING_START": ("span", "messageId"),
    "REASONING_MESSAGE_START": ("reasoning", "messageId"),
    "TOOL_CALL_START": ("call", "toolCallId"),
    "STEP_STARTED": ("step", "stepName"),
}
_CLOSERS = {
    "TEXT_MESSAGE_END": ("text", "messageId"),
    "REASONING_END": ("span", "messageId"),
    "REASONING_MESSAGE_END": ("reasoning", "messageId"),
    "TOOL_CALL_END": ("call", "toolCallId"),
    "STEP_FINISHED": ("step", "stepName"),
}
_CONTENTS = {
    "TEXT_MESSAGE_CONTENT": ("text", "messageId"),
    "REASONING_MESSAGE_CONTENT": ("reasoning", "messageId"),
    "TOOL_CALL_ARGS": ("call", "toolCallId"),
}
_FREE = ("CUSTOM", "STATE_SNAPSHOT", "STATE_DELTA", "TOOL_CALL_RESULT")


def events_of(content: bytes) -> list[Event]:
    """Return the events of a response; their ids are in `check_run`'s second reader."""
    return [json.loads(one.data) for one in read_events(content)]


def is_run_event(data: str) -> bool:
    """Return whether the data of a frame is an event of AG-UI: its type is in capital letters."""
    return re.match(r'\{"type":"[A-Z_]+"', data) is not None


def check_run(events: Sequence[Event], *, is_part: bool = False, is_whole: bool = True) -> None:
    """Check a run's events: `is_part`, what a reader gets who resumes; `is_whole`: they end."""
    _check_shapes(events)
    opened: dict[str, set[str]] = {kind: set() for kind, _ in _OPENERS.values()}
    used: dict[str, set[str]] = {kind: set() for kind, _ in _OPENERS.values()}
    has_state, has_ended = is_part, False
    for index, event in enumerate(events):
        kind = event["type"]
        assert not has_ended, f"{kind} after the end"
        assert (kind == "RUN_STARTED") == (index == 0 and not is_part), f"{kind} at {index}"
        if kind in _OPENERS:
            what, name = _OPENERS[kind]
            assert event[name] not in opened[what], f"{event} is open"
            assert what == "step" or event[name] not in used[what], f"{event}: its id was used before"
            assert what in ("span", "reasoning", "step") or not any(
                opened[other] for other in ("text", "span", "call")
            ), f"{event} within another"
            opened[what].add(event[name])
            used[what].add(event[name])
        elif kind in _CLOSERS:
            what, name = _CLOSERS[kind]
            assert is_part or event[name] in opened[what], f"{event} is not open"
            opened[what].discard(event[name])
        elif kind in _CONTENTS:
            what, name = _CONTENTS[kind]
            assert is_part or event[name] in opened[what], f"{event} is not open"
            assert event["delta"], f"{event} is empty"
        elif kind in TERMINALS:
            assert not any(opened.values()), f"{kind} while {opened} are open"
            has_ended = True
        else:
            assert kind in ("RUN_STARTED", *_FREE), kind
        if kind == "STATE_DELTA":
            assert has_state, "a delta of no state"
        has_state = has_state or kind == "STATE_SNAPSHOT"
    assert has_ended or not is_whole, "the run has no end"


def _check_shapes(events: Sequence[Event]) -> None:
    """Check each event by the package's models, if it is installed: no field is unknown, none is lost."""
    try:
        from ag_ui.core import Event as AnyEvent
        from pydantic import TypeAdapter
    except ImportError:
        return
    adapter: TypeAdapter[Any] = TypeAdapter(AnyEvent)
    for event in events:
        read = adapter.validate_python(event)
        assert not read.model_extra, f"{event} has unknown fields"
        assert read.model_dump(mode="json", by_alias=True) == event


class Page:
    """What a client makes of a run's events: messages in their order, and the state. A plain twin of the client's."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.state: Any = None
        self.customs: list[tuple[str, Any]] = []
        self.steps: list[str] = []
        self.end: Event = {}

    def read(self, events: Sequence[Event]) -> Page:
        """Take events."""
        import jsonpatch

        for event in events:
            kind = event["type"]
            if kind == "TEXT_MESSAGE_START":
                self._message(event["messageId"], "assistant").setdefault("content", "")
            elif kind == "REASONING_MESSAGE_START":
                self._message(event["messageId"], "reasoning").setdefault("content", "")
            elif kind in ("TEXT_MESSAGE_CONTENT", "REASONING_MESSAGE_CONTENT"):
                self._message(event["messageId"], "")["content"] += event["delta"]
            elif kind == "TOOL_CALL_START":
                calls = self._message(event["parentMessageId"], "assistant").setdefault("toolCalls", [])
                calls.append({"id": event["toolCallId"], "name": event["toolCallName"], "arguments": ""})
            elif kind == "TOOL_CALL_ARGS":
                self._call(event["toolCallId"])["arguments"] += event["delta"]
            elif kind == "TOOL_CALL_RESULT":
                result = {"toolCallId": event["toolCallId"], "content": event["content"]}
                self.messages.append({"id": event["messageId"], "role": "tool", **result})
            elif kind == "STATE_SNAPSHOT":
                self.state = event["snapshot"]
            elif kind == "STATE_DELTA":
                self.state = jsonpatch.apply_patch(self.state, event["delta"])
            elif kind == "CUSTOM":
                self.customs.append((event["name"], event["value"]))
            elif kind == "STEP_STARTED":
                self.steps.append(event["stepName"])
            elif kind in TERMINALS:
                self.end = event
        return self

    @property
    def text(self) -> str:
        """The text of all messages."""
        return "".join(one.get("content", "") for one in self.messages if one["role"] == "assistant")

    def _message(self, id_: str, role: str) -> dict[str, Any]:
        for one in self.messages:
            if one["id"] == id_:
                return one
        self.messages.append({"id": id_, "role": role})
        return self.messages[-1]

    def _call(self, id_: str) -> dict[str, Any]:
        calls = (call for one in self.messages for call in one.get("toolCalls", ()))
        return next(call for call in calls if call["id"] == id_)
