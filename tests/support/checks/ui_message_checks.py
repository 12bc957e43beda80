"""The laws of a UI message stream, checked on the bytes that a page has read: a state machine, and what the page makes.

    START ─ start ─► BEGUN ─ start-step ─► STEP ─ finish-step ─► BETWEEN ─ finish ─► FINISHED ─ [DONE] ─► OVER
      ▲                                     ▲                       │ │
      └───────── start, of the same message ┼── start-step ─────────┘ └─ error, also from BEGUN and STEP ─► FINISHED

In STEP one part is open at a time. Written from the client's reader (ai 7.0, `process-ui-message-stream.ts`), not from
our encoder; tests/e2e/frontends asks that reader itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any

from tests.support.checks.sse_reader import read_events


class State(StrEnum):
    """Where a stream is."""

    START = auto()
    BEGUN = auto()
    STEP = auto()
    BETWEEN = auto()
    FINISHED = auto()
    OVER = auto()


NEXT: dict[State, dict[str, State]] = {
    State.START: {"start": State.BEGUN},
    State.BEGUN: {"start-step": State.STEP, "error": State.FINISHED},
    State.STEP: {"finish-step": State.BETWEEN, "error": State.FINISHED},
    State.BETWEEN: {
        "start-step": State.STEP,
        "start": State.BEGUN,
        "finish": State.FINISHED,
        "error": State.FINISHED,
    },
    State.FINISHED: {"[DONE]": State.OVER},
    State.OVER: {},
}
_EMPTY = {"id": "", "role": "assistant"}
_RUNNING = (State.BEGUN, State.STEP, State.BETWEEN)
_OUTPUTS = ("tool-output-available", "tool-output-error", "tool-output-denied")
_REASONS = {"stop", "length", "content-filter", "tool-calls", "error", "interrupted", "other"}


@dataclass
class Page:
    """A page that reads one stream: its message so far. It raises AssertionError at a chunk out of order.

    `message`: what it had before, for a stream that continues that; with `is_part` that is not known here.
    """

    message: dict[str, Any] = field(
        default_factory=lambda: {"id": "", "role": "assistant", "metadata": {}, "parts": []}
    )
    state: State = State.START
    error: str = ""
    reason: str = ""
    data: list[dict[str, Any]] = field(default_factory=list)
    _open: tuple[str, str, str] | None = None  # kind, id, text
    is_part: bool = False
    _is_aborted: bool = False

    @property
    def is_over(self) -> bool:
        return self.state is State.OVER

    def feed(self, data: str) -> None:
        """Take the data of a frame."""
        chunk = {"type": data} if data == "[DONE]" else json.loads(data)
        kind = chunk["type"]
        after = NEXT[self.state].get(kind)
        if after is not None:
            if kind != "error":
                assert self._open is None, f"{kind} while {self._open} is open"
            self.state = after
            self._change(kind, chunk)
        elif kind.startswith("data-"):
            assert self.state in _RUNNING, (kind, self.state)
            self._data(chunk)
        else:
            assert self.state is State.STEP, f"{kind} in a stream that is {self.state}"
            self._part(kind, chunk)

    def _change(self, kind: str, chunk: dict[str, Any]) -> None:
        if kind == "start":
            assert self.message["id"] in ("", chunk["messageId"])
            self.message["id"] = chunk["messageId"]
        elif kind == "start-step":
            self.message["parts"].append({"type": "step-start"})
        elif kind == "error":
            self.error = chunk["errorText"]
            assert self.error
        elif kind == "finish":
            self.reason = chunk["finishReason"]
            assert self.reason in _REASONS
            assert (self.reason == "interrupted") == self._is_aborted
        self.message["metadata"] |= chunk.get("messageMetadata", {})

    def _data(self, chunk: dict[str, Any]) -> None:
        self.data.append(chunk)
        if not chunk.get("transient"):
            part = {name: chunk[name] for name in ("type", "id", "data") if name in chunk}
            same = [one for one in self.message["parts"] if "id" in part and one.get("id") == part["id"]]
            if same:
                same[0]["data"] = part["data"]
            else:
                self.message["parts"].append(part)

    def _part(self, kind: str, chunk: dict[str, Any]) -> None:
        parts = self.message["parts"]
        if kind in ("source-url", "source-document"):
            assert chunk["sourceId"] not in [one.get("sourceId") for one in parts]
            parts.append(chunk)
        elif kind == "abort":
            assert chunk["reason"]
            self._is_aborted = True
        elif kind in ("text-start", "reasoning-start"):
            self._begin(kind.removesuffix("-start"), chunk["id"])
            parts.append({"type": kind.removesuffix("-start"), "text": "", "state": "streaming"})
        elif kind in ("text-delta", "reasoning-delta"):
            assert self._is_open(kind.removesuffix("-delta"), chunk["id"])
            assert chunk["delta"]
            self._streaming()["text"] += chunk["delta"]
        elif kind in ("text-end", "reasoning-end"):
            assert self._is_open(kind.removesuffix("-end"), chunk["id"])
            self._streaming()["state"], self._open = "done", None
        else:
            self._tool(kind, chunk)

    def _tool(self, kind: str, chunk: dict[str, Any]) -> None:
        call_id = chunk["toolCallId"] if "toolCallId" in chunk else chunk["approvalId"]  # they are the same here
        if kind == "tool-input-start":
            self._begin("tool", call_id)
            self._add_call(chunk, state="input-streaming")
            return
        if kind == "tool-input-delta":
            assert self._open is not None
            assert self._is_open("tool", call_id)
            self._open = (*self._open[:2], self._open[2] + chunk["inputTextDelta"])
            return
        if kind in ("tool-input-available", "tool-input-error"):
            self._end_input(kind, chunk)
            return
        assert self._open is None
        part = self._call(call_id)
        if kind == "tool-approval-request":
            assert part["state"] == "input-available"
            asked = {"requestReason": chunk["reason"]} if "reason" in chunk else {}
            part |= {"state": "approval-requested", "approval": {"id": chunk["approvalId"], **asked}}
        elif kind == "tool-approval-response":
            assert part["state"] == "approval-requested"
            part["state"] = "approval-responded"
            part["approval"]["approved"] = chunk["approved"]
        else:
            assert kind in _OUTPUTS, kind
            assert part["state"] in ("input-available", "approval-responded"), part
            assert kind != "tool-output-denied" or part["state"] == "approval-responded" or self.is_part
            part["state"] = kind.removeprefix("tool-")
            part |= {name: chunk[name] for name in ("output", "errorText") if name in chunk}

    def _end_input(self, kind: str, chunk: dict[str, Any]) -> None:
        if self._open is None:  # whole at once, as of an answer before
            self._add_call(chunk, state="")
            text = None
        else:
            assert self._is_open("tool", chunk["toolCallId"])
            text, self._open = self._open[2], None
        part = self._call(chunk["toolCallId"])
        part["input"] = chunk["input"]
        if kind == "tool-input-error":
            assert text is None or chunk["input"] == text
            part |= {"state": "output-error", "errorText": chunk["errorText"]}
        else:
            assert text is None or chunk["input"] == json.loads(text or "{}")
            part["state"] = "input-available"

    def _add_call(self, chunk: dict[str, Any], *, state: str) -> None:
        call = {"type": f"tool-{chunk['toolName']}", "toolCallId": chunk["toolCallId"], "state": state}
        assert chunk["toolName"]
        assert chunk["toolCallId"] not in [one.get("toolCallId") for one in self.message["parts"]]
        executed = {"providerExecuted": True} if chunk.get("providerExecuted") else {}
        self.message["parts"].append({**call, **executed})

    def _call(self, call_id: str) -> dict[str, Any]:
        part: dict[str, Any]
        found = [one for one in self.message["parts"] if one.get("toolCallId") == call_id]
        if not found and self.is_part:
            found = [{"toolCallId": call_id, "state": "input-available"}]
        (part,) = found
        return part

    def _streaming(self) -> dict[str, Any]:
        part: dict[str, Any]
        (part,) = [one for one in self.message["parts"] if one.get("state") == "streaming"]
        return part

    def _begin(self, kind: str, id_: str) -> None:
        assert self._open is None, f"{kind} {id_} while {self._open} is open"
        self._open = (kind, id_, "")

    def _is_open(self, kind: str, id_: str) -> bool:
        return self._open is not None and self._open[:2] == (kind, id_)


def read_chunks(body: bytes, message: dict[str, Any] | None = None) -> Page:
    """Return the page that has read these bytes, which may end anywhere."""
    page = Page() if message is None else Page(message=message)
    for one in read_events(body):
        assert one.event == "message"
        page.feed(one.data)
    return page


def check_chunks(body: bytes, message: dict[str, Any] | None = None) -> Page:
    """Return the page that has read a whole stream."""
    page = read_chunks(body, message)
    assert page.is_over, page.state
    return page
