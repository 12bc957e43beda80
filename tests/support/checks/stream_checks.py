"""The laws of every stream of the suite, checked on the bytes that a client has read.

The events keep the grammar (streamserve/protocol/grammar.py); ids are of one log, and dense; `[DONE]` follows success
and only that; no code point is broken. Each `check_*` returns what it has read, for the test's own assertions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.clients.thread.source import _ECHO_CHARS
from streamserve.protocol.events import (
    TEXT,
    Approval,
    BlockStart,
    BlockStop,
    BlockText,
    ChoiceDone,
    ChoiceText,
    Citation,
    Done,
    Error,
    Event,
    Meta,
    Snapshot,
    Status,
    Token,
    Unknown,
    Usage,
)
from streamserve.protocol.grammar import Grammar, GrammarError
from tests.support.checks.durable_checks import items_of
from tests.support.checks.mcp_checks import check_response
from tests.support.checks.message_checks import folded
from tests.support.checks.response_checks import LAST, ResponseGrammar, events_of
from tests.support.checks.run_checks import check_run, is_run_event
from tests.support.checks.ui_message_checks import Page

_ID = re.compile(r"([a-z0-9]{12})-(0|[1-9][0-9]*)(?::[a-z]([1-9][0-9]*))?")
_SUCCESS = {"stop", "length", "tool_calls", "content_filter"}
_TERMINAL = {"done", "error"}
# A notice that this server stops showing the stream: not logged, without an id, and the last frame.
_FAREWELL = "farewell"
_LATENCIES = ("latency", "latency_ms")
_LINE_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True)
class Frame:
    """One dispatched server-sent event. `id` is its own, "" if it has none."""

    event: str
    data: str
    id: str

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.data)
        assert isinstance(value, dict), self.data
        return value

    @property
    def log_id(self) -> str:
        return self._parts()[0]

    @property
    def seq(self) -> int:
        return int(self._parts()[1])

    @property
    def place(self) -> tuple[int, int]:
        """The event that the reader has with this frame, and how many frames after it."""
        return self.seq, int(self._parts()[2] or 0)

    def _parts(self) -> tuple[str, str, str | None]:
        match = _ID.fullmatch(self.id)
        assert match is not None, f"{self.id!r} is not an event id"
        return match[1], match[2], match[3]


_KEEPALIVE = Frame("keepalive", "{}", "")


def parse_sse(data: bytes) -> list[Frame]:
    """Return the whole events in `data` (WHATWG HTML 9.2.6); bytes that are not UTF-8 fail."""
    frames: list[Frame] = []
    for block in re.split(r"(?<=\n)\n|(?<=\r)\r|(?<=\r\n)\r\n", data.decode("utf-8"))[:-1]:
        fields: dict[str, list[str]] = {}
        for line in _LINE_END.split(block):
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
        if "data" in fields:
            event, own_id = fields.get("event", ["message"])[-1], fields.get("id", [""])[-1]
            frames.append(Frame(event, "\n".join(fields["data"]), own_id))
    return frames


def text_of(frames: list[Frame], choice: int = 0) -> str:
    """Return the text that native frames hold: of text blocks only; a snapshot's replaces all before it."""
    text, others = "", set[int]()  # other blocks are not text
    for frame in frames:
        data = frame.json
        if frame.event == "snapshot":
            choices = data.get("choices", [data])
            own = choices[choice] if choice < len(choices) else {"text": ""}
            text, others = own["text"], {one["index"] for one in own.get("blocks", ()) if one["kind"] != TEXT}
        elif frame.event == "block_start" and data["choice"] == choice and data["kind"] != TEXT:
            others.add(data["index"])
        elif frame.event == "token" and data["choice"] == choice and data.get("index", 0) not in others:
            text += data["text"]
    return text


def check_native(data: bytes, *, after: int = 0) -> list[Frame]:
    """Check a whole native stream that was requested after seq `after`."""
    frames = check_native_part(data, after=after)
    assert frames, "no events at all"
    assert frames[-1].event in _TERMINAL, f"no terminal event: the last is {frames[-1]}"
    return frames


def check_native_part(data: bytes, *, after: int = 0) -> list[Frame]:
    """Check a native stream that may have been cut off: its events must be in order and without a gap.

    Notices (a going-away event, a status without an id, the second `meta`, a keepalive) are checked and left out: they
    are no events of the log.
    """
    frames, farewell = parse_sse(data), going_away_of(data)
    assert not any(frame.event in {*_TERMINAL, _FAREWELL} for frame in frames[:-1]), "something follows the end"
    frames = [frame for frame in frames if frame != _KEEPALIVE]
    frames = [frame for frame in _without_closing_meta(frames) if frame.id or frame.event not in ("status", _FAREWELL)]
    if farewell is not None:
        assert frames[-1].event not in _TERMINAL, "a farewell after the end"
        assert (farewell.id, farewell.json["event_id"]) == ("", frames[-1].id), farewell
        assert farewell.json["after"] == frames[-1].seq, farewell
    _check_ids(frames, after)
    order = EventOrder(after)
    for frame in frames:
        order.check(frame)
    for choice in {frame.json["choice"] for frame in frames if frame.event == "token"}:
        _check_code_points(text_of(frames, choice))
    return frames


def _without_closing_meta(frames: list[Frame]) -> list[Frame]:
    """Return the frames without the `meta` that is repeated before `done`: there only, with the same latency."""
    out: list[Frame] = []
    for place, frame in enumerate(frames):
        if frame.event != "meta" or frame.id:
            out.append(frame)
        elif place + 1 < len(frames):
            following = frames[place + 1]
            check_closing_meta(frame.json, following.event, following.json, frames[0])
    return out


def check_closing_meta(meta: dict[str, Any], event: str, data: Mapping[str, Any], first: Frame | None = None) -> None:
    """Check a `meta` without an id by the event after it, and by the stream's first event if that is here."""
    assert event == "done", f"{event} follows a meta without an id"
    assert [meta.get(name) for name in _LATENCIES] == [data.get(name, 0) for name in _LATENCIES], (meta, data)
    assert meta["prompt_tokens"] == data["usage"]["prompt_tokens"], (meta, data)
    if first is not None and first.event == "meta" and first.id:
        names = ("model", "stream_id", "created")
        assert [meta[name] for name in names] == [first.json[name] for name in names], (meta, first)


def going_away_of(data: bytes) -> Frame | None:
    """Return the going-away event that a native stream ends with, if it does."""
    frames = parse_sse(data)
    return frames[-1] if frames and frames[-1].event == _FAREWELL else None


class EventOrder:
    """The grammar, fed native frames in place of events. `after` is the seq that the reader resumed from."""

    def __init__(self, after: int) -> None:
        self._grammar = Grammar(is_part=after > 0)
        self._num_ids = 0

    def check(self, frame: Frame) -> None:
        """Check that the frame may follow those before it."""
        event = event_of(frame.event, frame.json)
        if isinstance(event, Token):
            self._num_ids += len(event.token_ids)
        elif isinstance(event, Done) and event.usage == Usage():  # made by hand, or by a scripted engine
            event = Done(finish_reason=event.finish_reason, usage=Usage(completion_tokens=self._num_ids))
        try:
            self._grammar.feed(event)
        except GrammarError as error:
            raise AssertionError(str(error)) from None


def event_of(name: str, data: Mapping[str, Any]) -> Event:
    """Return the event of a native frame, with the fields that the grammar checks."""
    match name:
        case "meta":
            return Meta(model="", stream_id="", created=0, has_token_ids=data.get("has_token_ids", True))
        case "status":
            return Status(status=data.get("status", ""))
        case "token":
            token_ids = tuple(data["token_ids"])
            return Token(text=data["text"], token_ids=token_ids, index=data.get("index", 0), choice=data["choice"])
        case "block_start":
            return BlockStart(**data)
        case "block_stop":
            return BlockStop(**data)
        case "citation":
            return Citation(**data)
        case "approval":
            return Approval(**data)
        case "choice_done":
            return ChoiceDone(**data)
        case "snapshot":
            choices = data.get("choices", [data])
            asked = tuple(Approval(**one) for one in data.get("approvals", ()))
            return Snapshot(seq=data["seq"], choices=tuple(map(_choice_of, choices)), approvals=asked)
        case "done":
            counts = data.get("usage", {})
            names = ("prompt_tokens", "completion_tokens")
            usage = Usage(**{name: counts.get(name, 0) for name in names})
            return Done(finish_reason=data.get("finish_reason", "stop"), usage=usage)
        case "error":
            return Error(code=data.get("code", ""), message="")
        case _:
            return Unknown(kind=name, fields=b"")


def _choice_of(data: Mapping[str, Any]) -> ChoiceText:
    blocks = tuple(BlockText(**block) for block in data.get("blocks", ()))
    return ChoiceText(text=data["text"], finish_reason=data.get("finish_reason"), blocks=blocks)


def notices_of(data: bytes) -> list[Frame]:
    """Return the frames without an id but a going-away event: statuses and errors that no log holds."""
    return [frame for frame in parse_sse(data) if not frame.id and frame.event in ("status", "error")]


def _check_ids(frames: list[Frame], after: int) -> None:
    """Check that ids are dense, except that a frame of joined tokens has the last one's, and a snapshot skips.

    Only an answer that the log has lost ends in an `error` without an id.
    """
    if frames and frames[-1].event == "error" and not frames[-1].id:
        assert frames[-1].json["code"] == "log_lost", frames[-1]
        frames = frames[:-1]
    assert len({frame.log_id for frame in frames}) <= 1, "ids of two logs in one stream"
    before, has_ids = after, any(frame.json["token_ids"] for frame in frames if frame.event == "token")
    for frame in frames:
        assert before < frame.seq <= before + _span(frame, before, has_ids=has_ids), (
            f"seq {frame.seq} after {before}: {frame}"
        )
        before = frame.seq


def _span(frame: Frame, before: int, *, has_ids: bool) -> int:
    """Return by how much the frame's id may be ahead of the last one. Without ids a token has a character at least.

    In an answer with ids, tokens without them are its echoed prompt, in events of _ECHO_CHARS, and the prompt's
    log-probabilities, in events of one position at least.
    """
    if frame.event == "snapshot":
        assert frame.seq == frame.json["seq"], frame
        return frame.seq - before
    if frame.event != "token":
        return 1
    num_ids, num_chars = len(frame.json["token_ids"]), len(frame.json["text"])
    if num_ids:
        return num_ids
    num_positions = len(frame.json.get("logprobs", ()))
    return max(1, -(-num_chars // _ECHO_CHARS) if has_ids else num_chars, num_positions)


def check_stream(data: bytes, *, after: int, is_whole: bool) -> None:
    """Check an event stream of any dialect. An unfinished one must be the beginning of a right one."""
    head = data[: data.rfind(b"\n\n") + 2]
    assert not is_whole or head == data, f"the last event is unfinished: {data[len(head) :]!r}"
    frames = parse_sse(head)
    if any(frame.data.startswith('{"jsonrpc"') or not frame.data for frame in frames):
        check_response([(frame.id, frame.data) for frame in frames], is_whole=is_whole)
        return
    if any(frame.event.startswith("response.") for frame in frames):
        _check_response(frames, after, is_whole)
        return
    if any(frame.event == "message" and is_run_event(frame.data) for frame in frames):
        _check_run(frames, after, is_whole)
        return
    if any(frame.event == "message" for frame in frames):
        if _is_ui_message(frames):
            _check_ui_message(frames, after, is_whole)
            return
        _check_messages(frames, after, is_whole)
        return
    if any(frame.event in ("data", "control") for frame in frames):
        _check_durable(frames, after, is_whole)
        return
    if any("type" in frame.json for frame in frames):
        _check_anthropic(head, frames, after, is_whole)
        return
    check_native_part(head, after=after)
    if is_whole:
        assert frames, "no events at all"
        assert frames[-1].event in {*_TERMINAL, _FAREWELL}, f"no terminal event: the last is {frames[-1]}"


def _is_ui_message(frames: list[Frame]) -> bool:
    """Return whether the frames are chunks of the AI SDK, whose types are words in lower case."""
    types = {str(frame.json.get("type", "")) for frame in frames if frame.data != "[DONE]"}
    return bool(types) and all(one.replace("data-", "").islower() or one.startswith("data-") for one in types)


def _check_ui_message(frames: list[Frame], after: int, is_whole: bool) -> None:
    """Check a stream of UI message chunks: ids rise, it has an end; its grammar, if it is there from the start."""
    places = [(after, 0), *(frame.place for frame in frames if frame.id)]
    assert places == sorted(set(places)), f"ids do not rise: {places}"
    assert not is_whole or frames[-1].data == "[DONE]" or frames[-1].json["type"] == "error", f"no end: {frames[-1]}"
    if after == 0 and frames[0].data != "[DONE]" and frames[0].json["type"] == "start":
        page = Page(is_part=True)
        for frame in frames:
            page.feed(frame.data)


def _check_durable(frames: list[Frame], after: int, is_whole: bool) -> None:
    """Check a Durable Streams connection: its own order, and that its items are the events of the log, none joined."""
    items = items_of([(frame.event, frame.data) for frame in frames], is_whole=is_whole)
    assert [item.seq for item in items] == list(range(after + 1, after + 1 + len(items))), items
    order = EventOrder(after)
    for item in items:
        order.check(Frame(item.type, json.dumps(item.data), f"{item.log_id}-{item.seq}"))


def _check_run(frames: list[Frame], after: int, is_whole: bool) -> None:
    """Check a stream of AG-UI: ids rise; the order of its events, and its end."""
    places = [(after, 0), *(frame.place for frame in frames if frame.id)]
    assert places == sorted(set(places)), f"ids do not rise: {places}"
    events = [frame.json for frame in frames]
    check_run(events, is_part=after > 0 or events[0]["type"] != "RUN_STARTED", is_whole=is_whole)


def _check_anthropic(data: bytes, frames: list[Frame], after: int, is_whole: bool) -> None:
    """Check a stream of the Messages API: its grammar, if it is there from the start; ids rise; it has one end."""
    shown = [frame for frame in frames if frame.event != "ping"]
    places = [(after, 0), *(frame.place for frame in shown if frame.id)]
    assert places == sorted(set(places)), f"ids do not rise: {places}"
    ends = [place for place, frame in enumerate(shown) if frame.event in ("message_stop", "error")]
    assert ends in ([], [len(shown) - 1]), "something follows the end"
    assert ends or not is_whole, "no end"
    if after == 0 and not (shown and shown[-1].event == "error"):
        folded(data)


def _check_response(frames: list[Frame], after: int, is_whole: bool) -> None:
    """Check a stream of the Responses API: its grammar, if it is there from the start; ids and numbers rise."""
    shown = [frame for frame in frames if frame.data != "[DONE]"]
    places = [(after, 0), *(frame.place for frame in shown if frame.id)]
    assert places == sorted(set(places)), f"ids do not rise: {places}"
    events = events_of(shown)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers)), f"sequence numbers do not rise: {numbers}"
    ends = [place for place, event in enumerate(events) if event["type"] in (*LAST, "error")]
    assert ends in ([], [len(shown) - 1]), "something follows the end"
    assert ends or not is_whole, "no end"
    is_success = bool(events) and events[-1]["type"] in LAST[:2]
    assert is_success or len(shown) == len(frames), "[DONE] follows no success"
    assert not is_whole or not is_success or frames[-1].data == "[DONE]", "no [DONE]"
    if events and events[0]["type"] == "response.created":
        grammar = ResponseGrammar()
        for event in events:
            if event["type"] != "error":
                grammar.feed(event)


def check_tokens(data: bytes) -> str:
    """Check a whole `tokens` stream and return its text."""
    frames = parse_sse(data)
    _check_end(frames)
    text = "".join(frame.json.get("token", "") for frame in frames if frame.data != "[DONE]")
    _check_code_points(text)
    return text


def check_openai(data: bytes) -> list[dict[str, Any]]:
    """Check a whole OpenAI chat stream and return its chunks."""
    frames = parse_sse(data)
    _check_end(frames)
    chunks = [frame.json for frame in frames if frame.data != "[DONE]"]
    _check_texts(chunks)
    return chunks


def _check_messages(frames: list[Frame], after: int, is_whole: bool) -> None:
    """Check a stream of a dialect without event names: it ends in `[DONE]` or an error, and ids rise."""
    shown = [frame for frame in frames if frame.event != _FAREWELL]
    ids = [frame for frame in shown if frame.id]
    assert len({frame.log_id for frame in ids}) <= 1, "ids of two logs in one stream"
    places = [(after, 0), *(frame.place for frame in ids)]
    assert places == sorted(set(places)), f"ids do not rise: {places}"
    assert _FAREWELL not in [frame.event for frame in frames[:-1]], "something follows a farewell"
    if is_whole and shown == frames:
        _check_end(frames)
    assert not any(map(_is_end, frames[:-1])), "something follows the end"
    _check_texts([frame.json for frame in shown if not _is_end(frame)])


def _check_texts(messages: list[dict[str, Any]]) -> None:
    texts: dict[int, str] = {0: "".join(message.get("token", "") for message in messages)}
    for message in messages:
        for choice in message.get("choices", ()):
            assert choice["finish_reason"] in _SUCCESS | {None}, choice
            new = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + new
    for text in texts.values():
        _check_code_points(text)


def _is_end(frame: Frame) -> bool:
    return frame.data == "[DONE]" or (frame.event != _FAREWELL and "error" in frame.json)


def _check_end(frames: list[Frame]) -> None:
    """Check that there is exactly one of `[DONE]` and an error, and that it is the last."""
    ends = [frame for frame in frames if _is_end(frame)]
    assert len(ends) == 1, f"{len(ends)} ends"
    assert frames[-1] is ends[0], "something follows the end"


def _check_code_points(text: str) -> None:
    assert "\ufffd" not in text, f"a broken code point in {text!r}"


def check_relay(messages: list[dict[str, Any]]) -> None:
    """Check the messages of one WebSocket, both ways: the events of each stream in order and without a gap.

    Only a client's `resume` may begin anywhere or again, once; nothing else follows a terminal event.
    """
    before: dict[str, int | None] = {}  # None: after the terminal event
    resumed: dict[str, list[int]] = {}
    orders: dict[str, EventOrder] = {}
    texts: dict[tuple[str, int], str] = {}
    with_ids = {one["id"] for one in messages if one.get("event") == "token" and one["data"]["token_ids"]}
    for place, message in enumerate(messages):
        own_id = message["id"]
        if message["type"] == "resume":
            resumed.setdefault(own_id, []).append(message.get("after", 0))
            continue
        if "seq" not in message:
            if message["event"] == "meta":
                after = next(one for one in messages[place + 1 :] if one["id"] == own_id)
                check_closing_meta(message["data"], after["event"], after["data"])
                continue
            assert message["event"] == "status" or message["data"]["code"] == "log_lost", message
            continue
        frame = Frame(message["event"], json.dumps(message["data"]), message["event_id"])
        assert frame.seq == message["seq"], message
        starts = [*resumed.get(own_id, ()), before.get(own_id, 0)]
        has_ids = own_id in with_ids
        known = [start for start in starts if start is not None]
        fits = [start for start in known if start < frame.seq <= start + _span(frame, start, has_ids=has_ids)]
        assert fits, f"seq {frame.seq} of {own_id} after {starts}: {frame}"
        if fits[0] in resumed.get(own_id, ()):
            resumed[own_id].remove(fits[0])
            orders[own_id] = EventOrder(fits[0])
        orders.setdefault(own_id, EventOrder(0)).check(frame)
        before[own_id] = None if frame.event in _TERMINAL else frame.seq
        if frame.event == "token":
            texts[own_id, frame.json["choice"]] = texts.get((own_id, frame.json["choice"]), "") + frame.json["text"]
    for text in texts.values():
        _check_code_points(text)
