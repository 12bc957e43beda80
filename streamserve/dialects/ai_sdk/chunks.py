"""An answer as the chunks of a UI message stream, which a page's `useChat` puts together to one message. Pure.

    start start-step (data-… | source-… | part | finish-step start-step)* finish-step finish [DONE]
    part:  text-start text-delta* text-end  |  reasoning-start reasoning-delta* reasoning-end
        |  tool-input-start tool-input-delta* (tool-input-available | tool-input-error)
        |  tool-output-available | tool-output-error | tool-output-denied | tool-approval-request

One part is open at a time, and an empty text has none. A step is one answer of a model with the results of its calls.
Calls of a pipeline's own functions are `providerExecuted`: the page does not run them. A status is a transient
`data-status`, which is shown and not kept; the state of a run is `data-state`, an event of its own `data-NAME`. A stop
is `abort` and `finish` with `interrupted`; any other failure is `error`, after which the client raises. `[DONE]` is the
last frame of each, as the package's own servers send it.

The shapes are the package's `uiMessageChunkSchema`; message.py shows the same parts whole, request.py reads bodies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from streamserve.dialects.ai_sdk.message import (
    SERVER_TOOL_USE,
    TOOL_RESULT,
    called,
    custom_json,
    is_refusal,
    metadata_json,
    output_of,
    source_json,
    state_json,
    tool_name,
)
from streamserve.dialects.encoder import Frame, FrameIds, PieceEncoder
from streamserve.dialects.fold import (
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
    state_after,
)
from streamserve.dialects.named import NamedStream
from streamserve.protocol.events import INTERRUPT, TEXT, Approval, Custom, Done, GoingAway, Meta, State, Status
from streamserve.protocol.sse import frame, one_line_json

HEADER = {"x-vercel-ai-ui-message-stream": "v1"}
_DIALECT = "u"  # in the ids of frames
_PARTS = {TEXT: "text", THINKING: "reasoning"}
_CALLS = (TOOL_USE, SERVER_TOOL_USE)
_STOPPED = ("cancelled", "abandoned")
_REASONS = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool-calls",
    "content_filter": "content-filter",
    # The page's `sendAutomaticallyWhen` does not run after `interrupted`, and here it has to: it sends the approval.
    INTERRUPT: "tool-calls",
}
_LEAVING = "The server restarts, and the answer continues: reload the page, or call resumeStream()."

Chunk = dict[str, Any]


def encoder_for(stream: NamedStream, *, message_id: str = "", before: bytes = b"", last_id: str = "") -> ChunkEncoder:
    """Return the encoder of that stream. `message_id` is the message's, by default the stream's.

    `before`: frames of what the message had before this stream, for a reader who rebuilds it (`replay_frames`).
    """
    return ChunkEncoder(
        stream.log_id,
        message_id=message_id or stream.id,
        n=stream.request.n,
        last_id=last_id,
        before=before,
    )


@dataclass(slots=True)
class _Part:
    """The open part: the text so far of a call, whose input is shown whole at its end, and of a result."""

    block: Block
    id: str
    text: StringIO = field(default_factory=StringIO)


class ChunkEncoder(PieceEncoder):
    """One reader's chunks: of the first choice, as a message has one answer."""

    keepalive_event = frame(one_line_json({"type": "data-keepalive", "data": None, "transient": True}))

    def __init__(
        self,
        log_id: str,
        *,
        message_id: str,
        n: int = 1,
        last_id: str = "",
        before: bytes = b"",
    ) -> None:
        super().__init__(FrameIds(log_id, _DIALECT, last_id), n=n)
        self.first_bytes = PieceEncoder.first_bytes + before
        self._message_id = message_id
        self._open: _Part | None = None
        self._has_result = False  # of a call of this step: what follows is the next step's
        self._unanswered: dict[str, None] = {}  # calls of the run's functions without a result yet
        self._sources: set[str] = set()
        self._reason = ""
        self._state: Any = None

    def show(self, piece: Piece) -> Sequence[Frame]:
        """Return the piece's chunks, and `[DONE]` after the last of the stream."""
        frames = [Frame(one_line_json(chunk)) for chunk in self._chunks(piece)]
        return [*frames, Frame("[DONE]")] if isinstance(piece, Succeeded | Failed) else frames

    def going_away(self, notice: GoingAway) -> bytes:
        """Return an error: the client takes a clean end for a whole answer. Without `[DONE]`: it is not over."""
        return frame(one_line_json({"type": "error", "errorText": _LEAVING}))

    def _chunks(self, piece: Piece) -> list[Chunk]:
        match piece:
            case Delta(block, token) if block.choice == 0 and token.text:
                return self._delta(block, token.text)
            case BlockBegun(block) if block.choice == 0:
                return [*self._close(), *(self._begin(block) if block.kind in _CALLS else [])]
            case BlockEnded(block, signature) if block.choice == 0:
                if block.kind == TOOL_RESULT and self._open is None:  # of an empty result
                    self._begin(block)
                return self._close(signature=signature, is_whole=True)
            case Cited(citation, places) if 0 in places:
                source = source_json(citation.payload())
                is_new = source["sourceId"] not in self._sources
                self._sources.add(source["sourceId"])
                return [source] if is_new else []
            case Approval():
                asked = {} if piece.message is None else {"reason": piece.message}
                return [{"type": "tool-approval-request", "approvalId": piece.id, "toolCallId": piece.id, **asked}]
            case State():
                self._state = state_after(self._state, piece)
                return [state_json(self._state)]
            case Custom():
                value = piece.payload()
                return [custom_json(value["name"], value["value"])]
            case Status():
                return [{"type": "data-status", "data": piece.payload(), "transient": True}]
            case ChoiceEnded(choice, reason) if choice == 0:
                self._reason = reason
                return self._close(is_whole=True)
            case Meta():
                metadata = {"model": piece.model, "streamId": piece.stream_id, "created": piece.created}
                start = {"type": "start", "messageId": self._message_id, "messageMetadata": metadata}
                return [start, {"type": "start-step"}]
            case Succeeded(done):
                return [*self._hidden_results(), *self._finish(_REASONS.get(self._reason, "other"), done)]
            case Failed(code, message):
                return [*self._close(), *self._failed(code, message)]
        return []

    def _delta(self, block: Block, text: str) -> list[Chunk]:
        begun = self._begin(block)
        part = self._open
        if part is None:
            return []
        if block.kind in _PARTS:
            return [*begun, {"type": f"{_PARTS[block.kind]}-delta", "id": part.id, "delta": text}]
        part.text.write(text)
        if block.kind in _CALLS:
            return [*begun, {"type": "tool-input-delta", "toolCallId": part.id, "inputTextDelta": text}]
        return begun

    def _begin(self, block: Block) -> list[Chunk]:
        """Open the block's part, unless it is open. A block of a kind that messages lack has none."""
        if self._open is not None:
            return []
        if block.kind == TOOL_RESULT:
            self._open = _Part(block, block.id or "")
            return []
        if block.kind in _PARTS:
            name = _PARTS[block.kind]
            self._open = _Part(block, f"{name}-{block.index}")
            return [*self._next_step(), {"type": f"{name}-start", "id": self._open.id}]
        if block.kind in _CALLS:
            self._open = _Part(block, block.id or f"call_{block.index}")
            start = {"type": "tool-input-start", "toolCallId": self._open.id, "toolName": tool_name(block.name)}
            return [*self._next_step(), {**start, **_executed(block)}]
        return []

    def _next_step(self) -> list[Chunk]:
        """Begin the next step after results: the model was asked again."""
        if not self._has_result:
            return []
        self._has_result = False
        return [{"type": "finish-step"}, {"type": "start-step"}]

    def _close(self, *, signature: str | None = None, is_whole: bool = False) -> list[Chunk]:
        """Close the open part, if there is one. A call or a result that is not whole was cut off."""
        part, self._open = self._open, None
        if part is None:
            return []
        kind = part.block.kind
        if kind in _PARTS:
            signed = {} if signature is None else {"providerMetadata": {"streamserve": {"signature": signature}}}
            return [{"type": f"{_PARTS[kind]}-end", "id": part.id, **signed}]
        if kind == TOOL_RESULT:
            return self._result(part) if is_whole else []
        return [self._input(part, is_whole=is_whole)]

    def _input(self, part: _Part, *, is_whole: bool) -> Chunk:
        """Return the whole input of a call."""
        found = called(part.text.getvalue(), is_whole=is_whole)
        is_right = found.pop("state") == "input-available"
        if is_right and part.block.kind == SERVER_TOOL_USE:
            self._unanswered[part.id] = None
        kind = "tool-input-available" if is_right else "tool-input-error"
        named = {"toolCallId": part.id, "toolName": tool_name(part.block.name)}
        return {"type": kind, **named, **found, **_executed(part.block)}

    def _result(self, part: _Part) -> list[Chunk]:
        self._has_result, text = True, part.text.getvalue()
        is_of_before = part.id not in self._unanswered  # only such a call can have waited for its user
        self._unanswered.pop(part.id, None)
        if is_of_before and is_refusal(text):
            return [{"type": "tool-output-denied", "toolCallId": part.id}]
        return [_output_chunk(part.id, text)]

    def _hidden_results(self) -> list[Chunk]:
        """Return the ends of calls whose results readers do not see: else a page would wait for them."""
        hidden, self._unanswered = self._unanswered, {}
        if self._reason == INTERRUPT:
            return []
        return [{"type": "tool-output-available", "toolCallId": id_, "output": None, **_EXECUTED} for id_ in hidden]

    def _finish(self, reason: str, done: Done | None) -> list[Chunk]:
        metadata = metadata_json(self.fold.usage if done is None else done.usage, done)
        return [{"type": "finish-step"}, {"type": "finish", "finishReason": reason, "messageMetadata": metadata}]

    def _failed(self, code: str, message: str) -> list[Chunk]:
        if code in _STOPPED:
            return [{"type": "abort", "reason": message}, *self._finish("interrupted", None)]
        return [{"type": "error", "errorText": message, "code": code}]


_EXECUTED = {"providerExecuted": True}


def _executed(block: Block) -> Mapping[str, bool]:
    return _EXECUTED if block.kind == SERVER_TOOL_USE else {}


def _output_chunk(call_id: str, text: str) -> Chunk:
    output = output_of(text)
    kind = "tool-output-error" if "errorText" in output else "tool-output-available"
    return {"type": kind, "toolCallId": call_id, **output, **_EXECUTED}


def replay_frames(message: Mapping[str, Any]) -> bytes:
    """Return the frames by which a reader rebuilds a UI message, up to where its next stream continues it."""
    chunks: list[Chunk] = [{"type": "start", "messageId": message["id"], "messageMetadata": message["metadata"]}]
    for number, part in enumerate(message["parts"]):
        chunks += _part_chunks(part, number)
    return b"".join(frame(one_line_json(chunk)) for chunk in [*chunks, {"type": "finish-step"}])


def _part_chunks(part: Mapping[str, Any], number: int) -> list[Chunk]:
    kind: str = part["type"]
    if kind == "step-start":
        return [{"type": "finish-step"}] * (number > 0) + [{"type": "start-step"}]
    if kind in ("text", "reasoning"):
        id_ = f"before-{number}"
        ends: list[Chunk] = [{"type": f"{kind}-{name}", "id": id_} for name in ("start", "end")]
        return [ends[0], {"type": f"{kind}-delta", "id": id_, "delta": part["text"]}, ends[1]]
    if not kind.startswith("tool-"):
        return [dict(part)]
    executed = {"providerExecuted": True} if part.get("providerExecuted") else {}
    called = {"toolCallId": part["toolCallId"], "toolName": kind.removeprefix("tool-")}
    chunks: list[Chunk] = [{"type": "tool-input-available", **called, "input": part["input"], **executed}]
    state, call_id = part["state"], {"toolCallId": part["toolCallId"]}
    approval = part.get("approval")
    if approval is not None:
        reason = {"reason": approval["requestReason"]} if "requestReason" in approval else {}
        chunks.append({"type": "tool-approval-request", "approvalId": approval["id"], **call_id, **reason})
        if "approved" in approval:
            chunks.append(
                {"type": "tool-approval-response", "approvalId": approval["id"], "approved": approval["approved"]}
            )
    if state == "output-available":
        chunks.append({"type": "tool-output-available", **call_id, "output": part["output"], **executed})
    elif state == "output-error":
        chunks.append({"type": "tool-output-error", **call_id, "errorText": part["errorText"], **executed})
    elif state == "output-denied":
        chunks.append({"type": "tool-output-denied", **call_id})
    return chunks
