"""Laws of the ids of frames: in the dialects that show one event in several, a reader resumes after any frame."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.dialects.anthropic.message import MessageEncoder
from streamserve.dialects.encoder import Encoder, FrameIds, coalesce
from streamserve.dialects.openai.chat import ChatEncoder
from streamserve.dialects.openai.completions import CompletionEncoder
from streamserve.protocol.events import (
    BlockStart,
    BlockStop,
    ChoiceDone,
    Citation,
    Event,
    LoggedEvent,
    PositionLogprobs,
    Status,
    Token,
    TokenLogprob,
)
from streamserve.protocol.ids import num_frames_seen, parse_event_id
from streamserve.protocol.requests import GenerateRequest, SamplingParams
from tests.support.bodies.event_logs import IDENTITY, LOG_ID, failure, success
from tests.support.checks.stream_checks import Frame, parse_sse


@dataclass
class Named:
    """What an encoder of text completions asks of a stream."""

    id: str = "s"
    log_id: str = LOG_ID
    model: str = "helpdesk"
    created: int = 1
    request: GenerateRequest = field(
        default_factory=lambda: GenerateRequest(
            model="helpdesk", n=2, echo=True, sampling=SamplingParams(logprobs=0, prompt_logprobs=0)
        )
    )


Make = Callable[..., Encoder]
MAKERS: dict[str, tuple[str, Make]] = {
    "chat": ("c", lambda **place: ChatEncoder(LOG_ID, n=2, include_usage=True, **IDENTITY, **place)),
    "counting": (
        "c",
        lambda **place: ChatEncoder(
            LOG_ID, n=2, include_usage=True, continuous_usage=True, return_token_ids=True, **IDENTITY, **place
        ),
    ),
    "completions": (
        "t",
        lambda **place: CompletionEncoder(Named(), include_usage=True, **place),
    ),
    "completions with ids": (
        "t",
        lambda **place: CompletionEncoder(Named(), return_token_ids=True, **place),
    ),
    "messages": ("m", lambda **place: MessageEncoder(LOG_ID, message_id="msg_1", model="m", **place)),
    "omitted": (
        "m",
        lambda **place: MessageEncoder(LOG_ID, message_id="msg_1", model="m", shows_thinking=False, **place),
    ),
}


def token(text: str, *, choice: int = 0, index: int = 0) -> Token:
    return Token(text=text, token_ids=(7,), choice=choice, index=index)


def scored(number: int) -> Token:
    """Return the event that shows one token of the prompt."""
    chosen = TokenLogprob(token_id=number, token="a", bytes_=b"a", logprob=-1.0)
    return Token(text="", token_ids=(), logprobs=(PositionLogprobs(chosen=chosen, top=()),))


ANSWER: list[Event] = [
    Status(status="generating"),
    BlockStart(choice=0, index=0, kind="thinking"),
    *(token(text) for text in ("", "Hm", ".", " So")),
    BlockStop(choice=0, index=0),
    Citation(source="docs", id="1", url="/1"),
    BlockStart(choice=0, index=1, kind="text"),
    *(token(text, index=1) for text in ("", "He", "llo", "")),
    *(token(text, choice=1) for text in ("Sal", "ut")),
    Citation(source="docs", id="2", url="/2", choice=0),
    BlockStop(choice=0, index=1),
    BlockStart(choice=0, index=2, kind="tool_use", id="call_1", name="look_up"),
    *(token(text, index=2) for text in ('{"a":', "1}")),
    BlockStop(choice=0, index=2),
    ChoiceDone(choice=0, finish_reason="tool_calls"),
    ChoiceDone(choice=1, finish_reason="stop"),
]
PLAIN: list[Event] = [scored(1), scored(2), *(token(text, choice=choice) for text in "abc" for choice in (0, 1))]
LOGS = {
    "blocks": success(*ANSWER),
    "plain": success(*PLAIN),
    "empty": success(),
    "failed": failure(*ANSWER[:9]),
}


def joined(log: list[LoggedEvent], most: int) -> list[LoggedEvent]:
    return coalesce(log, max_tokens=most)


def frames_of(encoder: Encoder, log: list[LoggedEvent], after: int = 0) -> list[Frame]:
    """Return what a reader gets who has the events up to `after`: the encoder is fed from the beginning."""
    wire = b"".join(frame for logged in log if (frame := encoder.encode(logged)) and logged.seq > after)
    return parse_sse(wire)


def token_ids_of(frames: list[Frame]) -> dict[int, list[int]]:
    """Return the token ids of each choice."""
    out: dict[int, list[int]] = {}
    for one in frames:
        for choice in json.loads(one.data).get("choices", ()) if one.data != "[DONE]" else ():
            out.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    return out


def content(frames: list[Frame]) -> list[Any]:
    """Return what frames say: neighbours that add to one text as one, without counts and ids, which joining changes."""
    out: list[Any] = []
    for one in frames:
        data = one.data if one.data == "[DONE]" else json.loads(one.data)
        if isinstance(data, dict) and "usage" in data and data.get("choices"):
            del data["usage"]
        choices = data.get("choices") if isinstance(data, dict) else None
        if choices and choices[0].get("delta") == {} and choices[0]["finish_reason"] is None:
            continue  # it has ids alone
        where, text = _text_of(data)
        if out and text is not None and where == out[-1][0]:
            out[-1] = where, out[-1][1] + text
        else:
            out.append((where, text))
    return out


def _text_of(data: Any) -> tuple[str, Any]:
    """Return a frame without the text that it adds, and this; None where it adds none."""
    text: Any = None
    if isinstance(data, dict) and data.get("type") == "content_block_delta":
        names = [name for name in ("text", "thinking", "partial_json") if name in data["delta"]]
        text = data["delta"].pop(names[0]) if names else None
    elif isinstance(data, dict) and data.get("choices"):
        choice = data["choices"][0]
        choice.pop("token_ids", None)
        delta, reason = choice.get("delta", {}), choice["finish_reason"]
        if "text" in choice and not choice["logprobs"] and reason is None:
            text = choice.pop("text")
        elif "reasoning" in delta:
            text = delta.pop("reasoning")
            del delta["reasoning_content"]
        elif "content" in delta and "role" not in delta:
            text = delta.pop("content")
        elif "tool_calls" in delta and "id" not in delta["tool_calls"][0]:
            text = delta["tool_calls"][0]["function"].pop("arguments")
    return json.dumps(data), text


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
@pytest.mark.parametrize("most", [1, 3, 64])
def test_a_cut_after_any_frame_loses_and_repeats_nothing(name: str, log: list[LoggedEvent], most: int) -> None:
    """Cut after each frame, resume by its id, tokens joined in other ways: both parts are the whole, frame by frame."""
    dialect, make = MAKERS[name]
    whole = frames_of(make(), joined(log, most))
    assert [one for one in whole if not one.id] == []
    for place, one in enumerate(whole):
        after = one.seq
        assert num_frames_seen(one.id, dialect) == int(one.id.partition(f":{dialect}")[2] or 0)
        rest = [logged for logged in log if logged.seq > after]
        seen = [logged for logged in log if logged.seq <= after]
        same = [logged for logged in joined(log, most) if logged.seq > after]
        exact = frames_of(make(last_id=one.id), [*seen, *same], after)
        assert exact == whole[place + 1 :]
        for other in (1, 2, 64):
            tail = frames_of(make(last_id=one.id), [*seen, *joined(rest, other)], after)
            assert content([*whole[: place + 1], *tail]) == content(whole)
            assert token_ids_of([*whole[: place + 1], *tail]) == token_ids_of(whole)


@pytest.mark.parametrize("name", MAKERS)
def test_ids_differ_and_rise(name: str) -> None:
    """No two frames have one id; the last frame of each event has the event's."""
    _, make = MAKERS[name]
    encoder, seen = make(), []
    for logged in LOGS["blocks"]:
        ids = re.findall(r"^id: (.*)$", encoder.encode(logged).decode(), re.MULTILINE)
        assert not ids or ids[-1] == f"{LOG_ID}-{logged.seq}"
        seen += ids
    assert len(set(seen)) == len(seen)


def test_another_dialects_frames_are_not_counted() -> None:
    """The id of a chat chunk, sent for another format, is that of the event before: nothing is left out."""
    assert (num_frames_seen("abc-4:c2", "c"), num_frames_seen("abc-4:c2", "m")) == (2, 0)
    assert (num_frames_seen("abc-4", "c"), num_frames_seen("no id", "c")) == (0, 0)
    assert parse_event_id("abc-4:c2") == ("abc", 4)
    assert [parse_event_id(f"abc-4{tail}") for tail in (":", ":c", ":c0", ":2", ":c12345", ":C1")] == [None] * 6


@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 12))
def test_the_last_frame_is_always_sent(num_frames: int, seq: int, num_seen: int) -> None:
    """Whatever number a caller makes up, it is sent the frame that ends the event."""
    ids = FrameIds(LOG_ID, "c", f"{LOG_ID}-0:c{num_seen}" if num_seen else "")
    sent = ids.of(seq, list(range(num_frames)))
    assert [number for number, _ in sent][-1:] == list(range(num_frames))[-1:]


def test_what_is_in_no_log_has_no_id() -> None:
    """A notice, whose seq is 0, is no place to resume from."""
    assert FrameIds(LOG_ID, "c").of(0, ["a", "b"]) == [("a", None), ("b", None)]
