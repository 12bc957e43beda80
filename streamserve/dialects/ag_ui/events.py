"""An answer as the events of AG-UI 1.0, the protocol of CopilotKit and other agent front ends. Pure.

    RUN_STARTED (STEP_… | STATE_… | CUSTOM | text | reasoning | call | TOOL_CALL_RESULT)* (RUN_FINISHED | RUN_ERROR)
    text:       TEXT_MESSAGE_START TEXT_MESSAGE_CONTENT+ TEXT_MESSAGE_END
    reasoning:  REASONING_START REASONING_MESSAGE_START REASONING_MESSAGE_CONTENT+ REASONING_MESSAGE_END REASONING_END
    call:       TOOL_CALL_START TOOL_CALL_ARGS* TOOL_CALL_END

Everything is closed before the run ends. A text and the calls after it are one message of the client's, up to their
results: the first has the answer's id, each further message `<id>:<n>`, and a result, a thought likewise. A step lasts
until the next begins. Statuses and citations are CUSTOM, under names of ours. A stopped run is finished with the
outcome `cancelled`, a run that asks its user with `interrupt`; any other failure is RUN_ERROR.

The shapes are the models of the package `ag-ui-protocol` 1.0; request.py reads bodies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from streamserve.dialects.encoder import Frame, FrameIds, PieceEncoder
from streamserve.dialects.fold import (
    STEP,
    THINKING,
    TOOL_USE,
    Block,
    BlockBegun,
    BlockEnded,
    ChoiceEnded,
    Cited,
    Delta,
    Failed,
    Piece,
    Succeeded,
)
from streamserve.dialects.named import NamedStream
from streamserve.protocol.errors import ErrorBody
from streamserve.protocol.events import INTERRUPT, TEXT, Approval, Custom, Done, Meta, State, Status, Usage
from streamserve.protocol.sse import one_line_json

PROTOCOL_VERSION = "1.0"
# The names of our own CUSTOM events; a pipeline's have the names that it gives.
CITATION, STATUS = "streamserve.citation", "streamserve.status"
# Separates a stream's id from a call's, in the id of an interrupt: the answer to it names both.
PIECE = ":"
_DIALECT = "g"  # in the ids of frames
_SERVER_TOOL_USE, _TOOL_RESULT = "server_tool_use", "tool_result"
_CALLS = (TOOL_USE, _SERVER_TOOL_USE)
_CANCELLED = "cancelled"
# What the answer to an interrupt is: a form for it.
_RESPONSE_SCHEMA = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "message": {"type": "string"}},
    "required": ["approved"],
}

Event = dict[str, Any]


def error_json(body: ErrorBody) -> Event:
    """Return the body of an error response: the event that a run would have ended in."""
    metadata = {"param": body.param, "requestId": body.request_id or None}
    return {"type": "RUN_ERROR", "message": body.message, "code": body.code, "metadata": metadata}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIds:
    """The ids of a run: its client's own of the thread and the run, and that of the answer's message."""

    thread_id: str
    run_id: str
    message_id: str


def ids_of(stream: NamedStream) -> RunIds:
    """Return the ids of an answer that is not read as a run of a thread: the stream's."""
    return RunIds(thread_id=stream.id, run_id=stream.id, message_id=stream.id)


def encoder_for(stream: NamedStream, *, ids: RunIds | None = None, last_id: str = "") -> RunEncoder:
    """Return the encoder of that stream: the same events for each reader with the same ids."""
    return RunEncoder(stream, ids or ids_of(stream), last_id=last_id)


class RunEncoder(PieceEncoder):
    """One reader's events. `event:` lines are not used: the type is in the data."""

    keepalive_event = PieceEncoder.keepalive

    def __init__(self, stream: NamedStream, ids: RunIds, *, last_id: str = "") -> None:
        super().__init__(FrameIds(stream.log_id, _DIALECT, last_id))
        self._stream_id, self._model, self._run_ids = stream.id, stream.model, ids
        self._messages = _Messages(ids.message_id)
        self._open: Block | None = None  # the block that is shown
        self._open_id = ""  # of its message, thought or call
        self._result = StringIO()  # of the block of a result
        self._step: str | None = None
        self._num_thoughts = 0
        self._pending: list[str] = []  # calls that the client answers
        self._asked: list[Approval] = []

    def show(self, piece: Piece) -> Sequence[Frame]:
        """Return the piece's events."""
        return [Frame(one_line_json(event)) for event in self._events(piece)]

    def _events(self, piece: Piece) -> list[Event]:
        match piece:
            case Delta(block, token) if block.choice == 0 and token.text:
                return self._delta(block, token.text)
            case BlockBegun(block) if block.choice == 0:
                return [*self._close(), *(self._begin(block) if block.kind in _CALLS else [])]
            case BlockEnded(block) if block.choice == 0:
                return self._result_of(block) if block.kind == _TOOL_RESULT else self._close()
            case Cited(citation):
                return [_custom(CITATION, citation.payload())]
            case Meta():
                return [self._started()]
            case Status():
                return self._status(piece)
            case State():
                return [_state(piece)]
            case Custom(name=name, value=value):
                return [_custom(name, json.loads(value))]
            case Approval():
                self._asked.append(piece)
            case ChoiceEnded(choice) if choice == 0:
                return self._close()
            case Succeeded(done):
                return [*self._close(), *self._end_step(), self._finished(done)]
            case Failed():
                return [*self._close(), *self._end_step(), self._failed(piece)]
        return []

    def _started(self) -> Event:
        return {
            "type": "RUN_STARTED",
            **self._run(),
            "protocolVersion": PROTOCOL_VERSION,
            "metadata": {"streamId": self._stream_id, "model": self._model},
        }

    def _run(self) -> Event:
        return {"threadId": self._run_ids.thread_id, "runId": self._run_ids.run_id}

    # Blocks

    def _delta(self, block: Block, text: str) -> list[Event]:
        if block.kind == _TOOL_RESULT:
            self._result.write(text)
            return []
        if block.kind not in (TEXT, THINKING, *_CALLS):
            return []
        return [*self._begin(block), self._content(block, text)]

    def _begin(self, block: Block) -> list[Event]:
        """Open a block, unless it is open."""
        if self._open is not None:
            return []
        self._open = block
        if block.kind == TEXT:
            self._open_id = self._messages.of_text()
            return [{"type": "TEXT_MESSAGE_START", "messageId": self._open_id, "role": "assistant"}]
        if block.kind == THINKING:
            self._num_thoughts += 1
            self._open_id = _thought_id(self._run_ids.message_id, self._num_thoughts)
            span = {"messageId": self._open_id}
            return [
                {"type": "REASONING_START", **span},
                {"type": "REASONING_MESSAGE_START", **span, "role": "reasoning"},
            ]
        self._open_id = _call_id(block)
        if block.kind == TOOL_USE:
            self._pending.append(self._open_id)
        start = {"toolCallId": self._open_id, "toolCallName": block.name or ""}
        return [{"type": "TOOL_CALL_START", **start, "parentMessageId": self._messages.of_call()}]

    def _content(self, block: Block, text: str) -> Event:
        if block.kind == TEXT:
            return {"type": "TEXT_MESSAGE_CONTENT", "messageId": self._open_id, "delta": text}
        if block.kind == THINKING:
            return {"type": "REASONING_MESSAGE_CONTENT", "messageId": self._open_id, "delta": text}
        return {"type": "TOOL_CALL_ARGS", "toolCallId": self._open_id, "delta": text}

    def _close(self) -> list[Event]:
        """Close the open block, if any."""
        block, self._open = self._open, None
        if block is None:
            return []
        if block.kind == TEXT:
            return [{"type": "TEXT_MESSAGE_END", "messageId": self._open_id}]
        if block.kind == THINKING:
            span = {"messageId": self._open_id}
            return [{"type": "REASONING_MESSAGE_END", **span}, {"type": "REASONING_END", **span}]
        return [{"type": "TOOL_CALL_END", "toolCallId": self._open_id}]

    def _result_of(self, block: Block) -> list[Event]:
        """Show a result, whole: the message of the calls before it ends with it."""
        content, self._result = self._result.getvalue(), StringIO()
        call_id = _call_id(block)
        self._messages.end()
        message_id = _result_id(self._run_ids.message_id, self._messages.next_result())
        result = {"messageId": message_id, "toolCallId": call_id, "content": content, "role": "tool"}
        return [{"type": "TOOL_CALL_RESULT", **result}]

    # Beside the blocks

    def _status(self, status: Status) -> list[Event]:
        if status.status != STEP:
            return [_custom(STATUS, status.payload())]
        ended = self._end_step()
        self._step = status.message or f"Step {status.step}"
        return [*ended, {"type": "STEP_STARTED", "stepName": self._step}]

    def _end_step(self) -> list[Event]:
        name, self._step = self._step, None
        return [] if name is None else [{"type": "STEP_FINISHED", "stepName": name}]

    # The end

    def _finished(self, done: Done) -> Event:
        return {
            "type": "RUN_FINISHED",
            **self._run(),
            "outcome": self._outcome(done),
            "usage": [_usage(self._model, done.usage)],
            "metadata": {"finishReason": done.finish_reason, "latency": round(done.latency, 4)},
        }

    def _outcome(self, done: Done) -> Event:
        if done.finish_reason == INTERRUPT:
            return {"type": "interrupt", "interrupts": [interrupt_json(self._stream_id, one) for one in self._asked]}
        pending = {"pendingToolCallIds": self._pending} if self._pending else {}
        return {"type": "success", **pending}

    def _failed(self, failed: Failed) -> Event:
        usage = [_usage(self._model, self.fold.usage)]
        if failed.code == _CANCELLED:
            return {"type": "RUN_FINISHED", **self._run(), "outcome": {"type": "cancelled"}, "usage": usage}
        metadata = {"retryable": failed.retryable}
        return {
            "type": "RUN_ERROR",
            "message": failed.message,
            "code": failed.code,
            "usage": usage,
            "metadata": metadata,
        }


def interrupt_json(stream_id: str, asked: Approval) -> dict[str, Any]:
    """Return what a run asks its user. The id of its stream is in the id, so that the answer names both."""
    return {
        "id": f"{stream_id}{PIECE}{asked.id}",
        "reason": "tool_call",
        "message": asked.message or f"Allow {asked.name}?",
        "toolCallId": asked.id,
        "responseSchema": _RESPONSE_SCHEMA,
        "metadata": {"name": asked.name, "arguments": asked.arguments},
    }


def answer_messages(answer_id: str, blocks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of an answer that is kept, under the ids that its events had."""
    ids, out, num_thoughts = _Messages(answer_id), list[dict[str, Any]](), 0
    for block in blocks:
        kind, words = block["kind"], block["text"]
        if kind == TEXT and words:
            out.append({"id": ids.of_text(), "role": "assistant", "content": words})
        elif kind == THINKING and words:
            num_thoughts += 1
            out.append({"id": _thought_id(answer_id, num_thoughts), "role": "reasoning", "content": words})
        elif kind in _CALLS:
            function = {"name": block.get("name") or "", "arguments": words}
            call = {"id": block.get("id") or f"call_{block['index']}", "type": "function", "function": function}
            _holder(out, ids.of_call()).setdefault("toolCalls", []).append(call)
        elif kind == _TOOL_RESULT:
            ids.end()
            result = {"toolCallId": block.get("id") or "", "content": words}
            out.append({"id": _result_id(answer_id, ids.next_result()), "role": "tool", **result})
    return out


def _holder(messages: list[dict[str, Any]], id_: str) -> dict[str, Any]:
    """Return the message of that id, which this adds if it is new."""
    found = next((one for one in messages if one["id"] == id_), None)
    if found is None:
        found = {"id": id_, "role": "assistant"}
        messages.append(found)
    return found


def _thought_id(answer_id: str, number: int) -> str:
    return f"{answer_id}{PIECE}thought-{number}"


def _result_id(answer_id: str, number: int) -> str:
    return f"{answer_id}{PIECE}result-{number}"


class _Messages:
    """The ids of an answer's messages. A message has a text, then calls; their results end it."""

    def __init__(self, first_id: str) -> None:
        self._first_id, self._num, self._num_results = first_id, 0, 0
        self._is_begun = False

    @property
    def _id(self) -> str:
        return f"{self._first_id}{PIECE}{self._num}" if self._num else self._first_id

    def of_text(self) -> str:
        """Return the id of a new text's message."""
        if self._is_begun:
            self._num += 1
        self._is_begun = True
        return self._id

    def of_call(self) -> str:
        """Return the id of the message that a call is of."""
        self._is_begun = True
        return self._id

    def end(self) -> None:
        """End the message with a result; what follows is another."""
        if self._is_begun:
            self._num += 1
        self._is_begun = False

    def next_result(self) -> int:
        """Count a result."""
        self._num_results += 1
        return self._num_results


def _call_id(block: Block) -> str:
    return block.id or f"call_{block.index}"


def _custom(name: str, value: Any) -> Event:
    return {"type": "CUSTOM", "name": name, "value": value}


def _state(state: State) -> Event:
    if state.snapshot is not None:
        return {"type": "STATE_SNAPSHOT", "snapshot": json.loads(state.snapshot)}
    return {"type": "STATE_DELTA", "delta": json.loads(state.delta or "[]")}


def _usage(model: str, usage: Usage) -> Event:
    """Return the counts as the protocol has them: the parts are parts of the totals."""
    counts = {
        "inputTokens": usage.prompt_tokens,
        "outputTokens": usage.completion_tokens,
        "totalTokens": usage.prompt_tokens + usage.completion_tokens,
    }
    parts = {"reasoningTokens": usage.reasoning_tokens, "cachedInputTokens": usage.cached_tokens}
    return {"model": model, **counts, **{name: count for name, count in parts.items() if count}}
