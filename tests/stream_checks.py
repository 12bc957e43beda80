"""What every stream of the suite must satisfy, checked on the bytes a client has read.

Exactly one terminal event and nothing after it; ids of one log, dense; `[DONE]` after success and only then; no broken
code point. Each `check_*` returns what it has read, so that a test goes on from there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_ID = re.compile(r"([a-z0-9]{12})-([1-9][0-9]*)")
_SUCCESS = {"stop", "length", "tool_calls", "content_filter"}
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

    def _parts(self) -> tuple[str, str]:
        match = _ID.fullmatch(self.id)
        assert match is not None, f"{self.id!r} is not an event id"
        return match[1], match[2]


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
    """Return the text that native frames hold: what a snapshot says stands for all before it."""
    text = ""
    for frame in frames:
        if frame.event == "snapshot":
            texts = [one["text"] for one in frame.json.get("choices", [frame.json])]
            text = texts[choice] if choice < len(texts) else ""
        elif frame.event == "token" and frame.json["choice"] == choice:
            text += frame.json["text"]
    return text


def check_native(data: bytes, *, after: int = 0) -> list[Frame]:
    """Check a whole native stream that was asked for after seq `after`."""
    frames = check_native_part(data, after=after)
    assert frames, "no events at all"
    assert frames[-1].event in {"done", "error"}, f"no terminal event: the last is {frames[-1]}"
    return frames


def check_native_part(data: bytes, *, after: int = 0) -> list[Frame]:
    """Check a native stream that may have been cut off, or let go: what came must be in order and without a gap.

    A farewell is checked and left out: it is no event of the log. See `farewell_of`.
    """
    frames, farewell = parse_sse(data), farewell_of(data)
    if farewell is not None:
        del frames[-1]
        assert frames[-1].event not in {"done", "error"}, "a farewell after the end"
        assert (farewell.id, farewell.json["event_id"]) == ("", frames[-1].id), farewell
        assert farewell.json["after"] == frames[-1].seq, farewell
    _check_ids(frames, after)
    assert not any(frame.event in {"done", "error"} for frame in frames[:-1]), "something follows a terminal event"
    if after == 0 and frames:
        assert frames[0].event == "meta", f"the first event is {frames[0].event}"
    _check_code_points(text_of(frames))
    return frames


def farewell_of(data: bytes) -> Frame | None:
    """Return the farewell that a native stream ends with, if it does."""
    frames = parse_sse(data)
    return frames[-1] if frames and frames[-1].event == "farewell" else None


def _check_ids(frames: list[Frame], after: int) -> None:
    """Ids are dense, but that joined tokens, or a snapshot, take the id of the last event that they stand for."""
    assert len({frame.log_id for frame in frames}) <= 1, "ids of two logs in one stream"
    before = after
    for frame in frames:
        if frame.event == "snapshot":
            assert before < frame.seq == frame.json["seq"], f"snapshot {frame.seq} after {before}"
        else:
            most = max(1, len(frame.json["token_ids"])) if frame.event == "token" else 1
            assert before < frame.seq <= before + most, f"seq {frame.seq} after {before}: {frame}"
        before = frame.seq


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
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            assert choice["finish_reason"] in _SUCCESS | {None}, choice
            _check_code_points(choice["delta"].get("content") or "")
    return chunks


def _check_end(frames: list[Frame]) -> None:
    """Exactly one of `[DONE]` and an error, and it is the last."""
    ends = [frame for frame in frames if frame.data == "[DONE]" or "error" in frame.json]
    assert len(ends) == 1, f"{len(ends)} ends"
    assert frames[-1] is ends[0], "something follows the end"


def _check_code_points(text: str) -> None:
    assert "\ufffd" not in text, f"a broken code point in {text!r}"
