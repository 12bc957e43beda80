"""A response: an answer as its events (`response.created` … `response.completed`), or whole. Pure.

    text      message             output_item.added, content_part.added, output_text.delta*, output_text.done, …
    thinking  reasoning           reasoning_summary_part.added, reasoning_summary_text.delta*, …
    tool_use  function_call       function_call_arguments.delta*, …; custom_tool_call for a custom tool
    server_tool_use               mcp_call: it stays open until its result, which is its `output`

`Output` is fed pieces (fold.py), keeps the items, and returns the events of each piece; the whole response is what it
holds at the end. So both views are one. Shapes as the official client's types have them (openai 3.52,
`types/responses`) and as the Open Responses specification requires them.

**Sequence numbers** do not depend on how tokens are joined, so that a reader can resume from each of them anywhere: an
event of the log takes one number for each frame that opens or closes something, and one for each of its tokens,
shown or not. What opens with a block has its numbers from the block's first token on. So there may be gaps, and the
frames of one reader may have numbers that another reader's lack, but a number always has the same place in the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Protocol

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
    Fold,
    Piece,
    Succeeded,
)
from streamserve.dialects.named import NamedStream
from streamserve.dialects.openai.responses.items import INPUT
from streamserve.protocol.errors import to_body
from streamserve.protocol.events import TEXT, Citation, LoggedEvent, Meta, PositionLogprobs, Token, Usage
from streamserve.protocol.sse import KEEPALIVE, frame, one_line_json

PREFIX = "resp_"
_DIALECT = "r"  # in the ids of frames
# Kinds of blocks that only pipelines write: a call that the server answers itself, and what its function returned.
SERVER_TOOL_USE, TOOL_RESULT = "server_tool_use", "tool_result"
SERVER_LABEL = "streamserve"
_OBFUSCATED_CHARS = 64
# The reasons of an answer that is cut short, as this API names them.
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_DONE = frame("[DONE]")


class BegunStream(Protocol):
    """What names a response, of a stream."""

    @property
    def id(self) -> str: ...
    @property
    def created(self) -> int: ...


def response_id(stream_id: str) -> str:
    """Return the id of a stream's response."""
    return f"{PREFIX}{stream_id}"


def response_json(
    log: Sequence[LoggedEvent], stream: BegunStream, head: Mapping[str, Any], *, status: str = "in_progress"
) -> dict[str, Any]:
    """Return the whole response of a log. `status` is that of a response whose log has no end yet."""
    output, fold = Output(stream, head, status=status), Fold(1)
    for logged in log:
        for piece in fold.feed(logged.event):
            output.feed(piece)
    return output.response()


def encoder_for(stream: NamedStream, head: Mapping[str, Any], **options: Any) -> ResponseEncoder:
    """Return the encoder of that stream: the same bytes for a reader of the answer and for a reader who resumes it.

    `head` are the fields that repeat what was asked; `options` are the options of `ResponseEncoder`.
    """
    return ResponseEncoder(stream.log_id, Output(stream, head), **options)


def seq_before(log: Sequence[LoggedEvent], stream: NamedStream, head: Mapping[str, Any], number: int) -> int | None:
    """Return the last event of which a reader has everything whose last sequence number is `number`.

    None where the log has no such number yet.
    """
    encoder, seq = encoder_for(stream, head), 0
    for logged in log:
        encoder.encode(logged)
        if encoder.number > number:
            return seq
        seq = logged.seq
    return seq if encoder.number == number else None


@dataclass(slots=True)
class _Item:
    """An item so far. `shown` is its JSON without what grows, `number` its place in the output."""

    block: Block
    number: int
    shown: dict[str, Any]
    status: str = "in_progress"
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    result: str | None = None
    text: StringIO = field(default_factory=StringIO)

    def as_json(self) -> dict[str, Any]:
        """Return the item as the output has it."""
        text, kind = self.text.getvalue(), self.shown["type"]
        if kind == "message":
            return {**self.shown, "status": self.status, "content": [self.part(text)]}
        if kind == "reasoning":
            return {**self.shown, "status": self.status, "summary": [{"type": "summary_text", "text": text}]}
        if kind == "function_call":
            return {**self.shown, "arguments": text, "status": self.status}
        if kind == "custom_tool_call":
            return {**self.shown, INPUT: _free_text(text)}
        return {**self.shown, "arguments": text, "output": self.result, "error": None, "status": self.status}

    def begun(self) -> dict[str, Any]:
        """Return the item as it begins."""
        kind = self.shown["type"]
        own: Mapping[str, Any] = {
            "message": {"status": "in_progress", "content": []},
            "reasoning": {"status": "in_progress", "summary": []},
            "function_call": {"arguments": "", "status": "in_progress"},
            "custom_tool_call": {INPUT: ""},
            "mcp_call": {"arguments": "", "output": None, "error": None, "status": "in_progress"},
        }
        return {**self.shown, **own[kind]}

    def part(self, text: str) -> dict[str, Any]:
        """Return the content part of a message."""
        logprobs = [one.as_json() for one in self.logprobs]
        return {"type": "output_text", "text": text, "annotations": list(self.annotations), "logprobs": logprobs}


class Output:
    """A response that grows. Each method returns the events to show, without their numbers."""

    def __init__(self, stream: BegunStream, head: Mapping[str, Any], *, status: str = "in_progress") -> None:
        self.id, self._stream, self._head = response_id(stream.id), stream, head
        self._customs = {tool["name"] for tool in head.get("tools", ()) if tool["type"] == "custom"}
        self.items: list[_Item] = []
        self._open: _Item | None = None  # the item of the newest block; text stays open for what is cited after it
        self._unshown: Block | None = None  # a block of text that has begun, and has no text yet
        self._waiting: dict[str, _Item] = {}  # calls that the server answers, by id
        self._held: list[Cited] = []  # citations that wait for a text
        self._status, self._ended = status, ""
        self._error: dict[str, Any] | None = None
        self._usage: Usage | None = None
        self._completed_at: int | None = None

    def feed(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the events of a piece. The response is then as after it."""
        match piece:
            case Delta(block, token) if block.choice == 0:
                return self._delta(block, token)
            case BlockBegun(block) if block.choice == 0:
                return [*self._close(), *(self._begin(block) if _shows_at_once(block) else [])]
            case BlockEnded(block) if block.choice == 0 and block.kind != TEXT:
                return self._result(block) if block.kind == TOOL_RESULT else self._close()
            case Cited(citation, places) if 0 in places and citation.url is not None:
                self._held.append(piece)
                if self._unshown is not None:
                    return self._begin(self._unshown)
                return self._cite() if self._open is not None and self._open.block.kind == TEXT else []
            case ChoiceEnded(choice, reason) if choice == 0:
                self._ended = reason
            case Meta():
                return [self._life("response.created"), self._life("response.in_progress")]
            case Succeeded(done):
                return self._succeed(done.usage, done.latency)
            case Failed():
                return self._fail(piece)
        return []

    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        reason = _INCOMPLETE.get(self._ended) if self._status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._stream.created,
            "completed_at": self._completed_at,
            "status": self._status,
            "error": self._error,
            "incomplete_details": None if reason is None else {"reason": reason},
            **self._head,
            "output": [item.as_json() for item in self.items],
            "usage": None if self._usage is None else usage_json(self._usage),
        }

    def _life(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "response": self.response()}

    def _delta(self, block: Block, token: Token) -> list[dict[str, Any]]:
        if block.kind == TOOL_RESULT:
            waiting = self._waiting.get(block.id or "")
            if waiting is not None:
                waiting.result = (waiting.result or "") + token.text
            return []
        if block.kind not in _TYPES:
            return []
        is_open = self._open is not None and self._open.block.index == block.index
        if not (token.text or (token.logprobs and block.kind == TEXT)):
            self._unshown = block if block.kind == TEXT and not is_open else self._unshown
            return []
        begun = [] if is_open else self._begin(block)
        item = self._open
        assert item is not None
        item.text.write(token.text)
        if block.kind == TEXT and token.logprobs is not None:
            item.logprobs.extend(token.logprobs)
        if item.shown["type"] == "custom_tool_call":  # its text is within the JSON of the arguments
            return begun
        shown = {"delta": token.text, **self._place(item)}
        if block.kind == TEXT:
            shown["logprobs"] = [one.as_json() for one in token.logprobs or ()]
        return [*begun, {"type": f"response.{_DELTAS[item.shown['type']]}.delta", **shown}]

    def num_opening(self, block: Block) -> int:
        """Return how many events will open the item of a block whose first token comes now."""
        if block.kind == TEXT:
            return 2 + len(self._held)
        return 2 if block.kind == THINKING else 0

    def _place(self, item: _Item) -> dict[str, Any]:
        kind = item.shown["type"]
        inner = {"message": {"content_index": 0}, "reasoning": {"summary_index": 0}}.get(kind, {})
        return {"item_id": item.shown["id"], "output_index": item.number, **inner}

    def _begin(self, block: Block) -> list[dict[str, Any]]:
        """Open the item of a block."""
        item = self._open = _Item(block, len(self.items), self._shown(block))
        self._unshown = None
        self.items.append(item)
        added = {"type": "response.output_item.added", "output_index": item.number, "item": item.begun()}
        place = self._place(item)
        match item.shown["type"]:
            case "message":
                return [added, {"type": "response.content_part.added", **place, "part": item.part("")}, *self._cite()]
            case "reasoning":
                part = {"type": "summary_text", "text": ""}
                return [added, {"type": "response.reasoning_summary_part.added", **place, "part": part}]
            case "mcp_call":
                self._waiting[block.id or ""] = item
                return [added, {"type": "response.mcp_call.in_progress", **place}]
        return [added]

    def _shown(self, block: Block) -> dict[str, Any]:
        """Return what the item of a block is from its beginning."""
        kind = "custom_tool_call" if block.kind == TOOL_USE and block.name in self._customs else _TYPES[block.kind]
        shown: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{self._stream.id}_{block.index}", "type": kind}
        if kind == "message":
            return {**shown, "role": "assistant"}
        if kind == "mcp_call":
            return {**shown, "server_label": SERVER_LABEL, "name": block.name or ""}
        return shown if kind == "reasoning" else {**shown, "call_id": block.id or shown["id"], "name": block.name or ""}

    def _cite(self) -> list[dict[str, Any]]:
        """Show the citations that waited in the open text."""
        item, held = self._open, self._held
        assert item is not None
        self._held, events = [], []
        for cited in held:
            start, end = cited.places[0]
            begin, length = item.block.begin or 0, len(item.text.getvalue())
            annotation = annotation_json(cited.citation, *(max(0, min(one - begin, length)) for one in (start, end)))
            shown = {"annotation_index": len(item.annotations), "annotation": annotation}
            item.annotations.append(annotation)
            events.append({"type": "response.output_text.annotation.added", **self._place(item), **shown})
        return events

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Close the open item, if any: no more of it follows."""
        item, self._open, self._unshown = self._open, None, None
        if item is None:
            return []
        place, text, kind = self._place(item), item.text.getvalue(), item.shown["type"]
        if kind == "mcp_call":
            return [{"type": "response.mcp_call_arguments.done", **place, "arguments": text}]
        item.status = status
        ended = {"type": "response.output_item.done", "output_index": item.number, "item": item.as_json()}
        if kind == "message":
            part = item.part(text)
            done = {"type": "response.output_text.done", **place, "text": text, "logprobs": part["logprobs"]}
            return [done, {"type": "response.content_part.done", **place, "part": part}, ended]
        if kind == "reasoning":
            part = {"type": "summary_text", "text": text}
            done = {"type": "response.reasoning_summary_text.done", **place, "text": text}
            return [done, {"type": "response.reasoning_summary_part.done", **place, "part": part}, ended]
        if kind == "custom_tool_call":
            free = _free_text(text)
            delta = {"type": "response.custom_tool_call_input.delta", **place, "delta": free}
            return [delta, {"type": "response.custom_tool_call_input.done", **place, INPUT: free}, ended]
        return [{"type": "response.function_call_arguments.done", **place, "arguments": text}, ended]

    def _result(self, block: Block) -> list[dict[str, Any]]:
        """Close the call that a result answers."""
        item = self._waiting.pop(block.id or "", None)
        if item is None:
            return []
        item.status, item.result = "completed", item.result or ""
        ended = {"type": "response.output_item.done", "output_index": item.number, "item": item.as_json()}
        return [{"type": "response.mcp_call.completed", **self._place(item)}, ended]

    def _abandon_calls(self) -> list[dict[str, Any]]:
        """Close the calls that got no result."""
        events = []
        for item in self._waiting.values():
            item.status = "incomplete"
            ended = {"type": "response.output_item.done", "output_index": item.number, "item": item.as_json()}
            events.append(ended)
        self._waiting.clear()
        return events

    def _succeed(self, usage: Usage, latency: float) -> list[dict[str, Any]]:
        is_whole = self._ended not in _INCOMPLETE
        closed = self._close("completed" if is_whole else "incomplete")
        if self._held:
            closed += [*self._begin(Block(choice=0, index=self._next_index, begin=0)), *self._close()]
        closed += self._abandon_calls()
        self._status, self._usage = "completed" if is_whole else "incomplete", usage
        self._completed_at = self._stream.created + int(latency) if is_whole else None
        return [*closed, self._life("response.completed" if is_whole else "response.incomplete")]

    @property
    def _next_index(self) -> int:
        """The number of a block that the answer lacks."""
        return max((item.block.index for item in self.items), default=-1) + 1

    def _fail(self, failed: Failed) -> list[dict[str, Any]]:
        closed = [*self._close("incomplete"), *self._abandon_calls()]
        self._status = "cancelled" if failed.code == "cancelled" else "failed"
        known = "rate_limit_exceeded" if failed.error().http_status == 429 else "server_error"
        self._error = {"code": known, "message": failed.message, "type": failed.code}
        if self._status == "cancelled":
            self._error = None
        return [*closed, self._life("response.failed")]


_TYPES = {TEXT: "message", THINKING: "reasoning", TOOL_USE: "function_call", SERVER_TOOL_USE: "mcp_call"}
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "mcp_call": "mcp",
}
_DELTAS = {
    "message": "output_text",
    "reasoning": "reasoning_summary_text",
    "function_call": "function_call_arguments",
    "mcp_call": "mcp_call_arguments",
}


def _shows_at_once(block: Block) -> bool:
    """Return whether a block is shown before its first text: calls may have no arguments."""
    return block.kind in (TOOL_USE, SERVER_TOOL_USE)


def _free_text(arguments: str) -> str:
    """Return the text of a custom tool's call; arguments that were cut stay as they are."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    value = found.get(INPUT) if isinstance(found, dict) else None
    return value if isinstance(value, str) else arguments


def annotation_json(citation: Citation, start: int, end: int) -> dict[str, Any]:
    """Return a source with a url as an annotation of a text."""
    cited = {"url": citation.url, "title": citation.title or citation.source}
    return {"type": "url_citation", **cited, "start_index": start, "end_index": end}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the counts."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseEncoder(PieceEncoder):
    """One reader's events, each with its name on an `event:` line and a sequence number.

    `starting_after`: the number of the last event that the reader has. After a success follows `[DONE]`, as the Open
    Responses specification has it; the official clients stop there.
    """

    keepalive_event = KEEPALIVE

    def __init__(
        self,
        log_id: str,
        output: Output,
        *,
        starting_after: int = -1,
        include_obfuscation: bool = False,
        last_id: str = "",
    ) -> None:
        super().__init__(FrameIds(log_id, _DIALECT, last_id))
        self._output, self._after, self._obfuscates = output, starting_after, include_obfuscation
        self.number = -1  # of the last event, shown or not
        self._seq = 0
        self._opened: dict[int, int] = {}  # block → the number before what opens it
        self._is_over = False

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the frames that the reader lacks of an event."""
        frames = self._frames(logged)
        shown = [frame(one.data, event=one.event, id=id) for one, id in frames]
        return b"".join([*shown, _DONE] if self._is_over and frames else shown)

    def _frames(self, logged: LoggedEvent) -> list[tuple[Frame, str | None]]:
        num_events = max(1, logged.seq - self._seq)  # of tokens, as many as are joined here
        self._seq = logged.seq or self._seq
        numbered: list[tuple[int, dict[str, Any]]] = []
        for piece in self.fold.feed(logged.event):
            if isinstance(piece, Delta):
                numbered += self._numbered_delta(piece, num_events)
            else:
                events = self._output.feed(piece)
                numbered += enumerate(events, self.number + 1)
                self.number += len(events)
            self._is_over = isinstance(piece, Succeeded)
        lacking = sum(number > self._after for number, _ in numbered)
        shown = self._ids.of(logged.seq, [self._frame(number, event) for number, event in numbered])
        return shown[max(0, len(shown) - lacking) :]

    def _numbered_delta(self, delta: Delta, num_events: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the events of a delta with their numbers; see the top of this file."""
        block = delta.block
        if block.choice == 0 and block.index not in self._opened:
            self._opened[block.index] = self.number
            self.number += self._output.num_opening(block)
        self.number += num_events
        *opening, last = self._output.feed(delta) or [{}]
        if not last:
            return []
        return [*enumerate(opening, self._opened[block.index] + 1), (self.number, last)]

    def _frame(self, number: int, event: dict[str, Any]) -> Frame:
        shown = {"type": event["type"], "sequence_number": number, **event}
        if self._obfuscates and "delta" in event:
            num_bytes = len(one_line_json({**shown, "obfuscation": ""}).encode())
            shown["obfuscation"] = "0" * (-num_bytes % _OBFUSCATED_CHARS)
        return Frame(one_line_json(shown), event=event["type"])

    def show(self, piece: Piece) -> Sequence[Frame]:
        """Return the end of a reader's connection: an error, after which the response goes on."""
        assert isinstance(piece, Failed)
        body = to_body(piece.error())
        error = {"type": "error", "code": body.code, "message": body.message, "param": None}
        return [self._frame(self.number + 1, error)]
