"""Laws of the Messages API's fold: the order of its events, blocks of quoted answers, resumes, citations, ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.dialects.anthropic.message import PING, MessageEncoder, message_json
from streamserve.dialects.fold import Answer
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import BlockStart, BlockStop, ChoiceDone, Citation, Done, Event, GoingAway, LoggedEvent
from tests.support.bodies.event_logs import LOG_ID, META, block, blocks, failure, numbered, success, tok, two_choices
from tests.support.checks.message_checks import check_message, events_in, folded

NAMED = {"message_id": "msg_1", "model": "helpdesk"}
DATA = Path(__file__).resolve().parents[2] / "data" / "formats"
SAMPLES = [
    (f"{path.stem}-{sample['name']}", sample["blocks"])
    for path in sorted(DATA.glob("*.json"))
    for sample in json.loads(path.read_text())["samples"]
]


def wire(log: list[LoggedEvent]) -> list[bytes]:
    """Return the frames of each event."""
    encoder = MessageEncoder(LOG_ID, **NAMED)
    return [encoder.encode(logged) for logged in log]


def whole(log: list[LoggedEvent]) -> dict[str, Any]:
    return message_json(Answer.of(log), **NAMED)


def streamed(log: list[LoggedEvent]) -> dict[str, Any]:
    return check_message(b"".join(wire(log)))


def cited(number: int, source: str, title: str | None = None) -> dict[str, Any]:
    place = {"start_block_index": 0, "end_block_index": 1}
    named = {"type": "search_result_location", "cited_text": "", "search_result_index": number}
    return {**named, "source": source, "title": title, **place}


def test_each_event_of_a_message():
    """A thought with its signature, text with its citations, a call with its input in pieces; one block at a time."""
    events = [data for _, data in events_in(b"".join(wire(blocks())))]
    assert [event["type"].removeprefix("content_block_") for event in events] == [
        "message_start",
        *("start", "delta", "delta", "delta", "stop"),
        *("start", "delta", "delta", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        "message_delta",
        "message_stop",
    ]
    assert [event["content_block"] for event in events if "content_block" in event] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "look_up", "input": {}},
    ]
    assert [event["delta"] for event in events if event["type"] == "content_block_delta"] == [
        {"type": "thinking_delta", "thinking": "Hm"},
        {"type": "thinking_delta", "thinking": "."},
        {"type": "signature_delta", "signature": "s1"},
        {"type": "citations_delta", "citation": cited(0, "docs/d0")},
        {"type": "text_delta", "text": "Hel"},
        {"type": "text_delta", "text": "lo"},
        {"type": "citations_delta", "citation": cited(1, "https://a", "A")},
        {"type": "input_json_delta", "partial_json": '{"a":'},
        {"type": "input_json_delta", "partial_json": "1}"},
    ]


def test_a_whole_message():
    """It is what the stream makes; input tokens do not count what was in the prefix cache."""
    message = whole(blocks())
    assert message == streamed(blocks())
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "s1"},
        {"type": "text", "text": "Hello", "citations": [cited(0, "docs/d0"), cited(1, "https://a", "A")]},
        {"type": "tool_use", "id": "call_1", "name": "look_up", "input": {"a": 1}},
    ]
    assert (message["id"], message["type"], message["role"], message["model"]) == (
        "msg_1", "message", "assistant", "helpdesk"
    )  # fmt: skip
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
    }


def log_of(sample: list[dict[str, Any]], cut: int | None = None) -> list[LoggedEvent]:
    """Return the log of a quoted answer; its characters, counted over all blocks, come in two pieces at `cut`."""
    events: list[Event] = []
    place = 0
    for index, one in enumerate(sample):
        text, at = one["text"], None if cut is None else cut - place
        place += len(text)
        pieces = [text] if at is None or not 0 <= at <= len(text) else [text[:at], text[at:]]
        name = one.get("name")
        events.append(
            BlockStart(choice=0, index=index, kind=one["kind"], id=f"call_{index}" if name else None, name=name)
        )
        events += [tok(piece, index=index) for piece in pieces]
        events.append(BlockStop(choice=0, index=index))
    return success(*events)


@pytest.mark.parametrize(("name", "sample"), SAMPLES, ids=[name for name, _ in SAMPLES])
def test_a_quoted_answer_is_the_same_at_every_cut(name: str, sample: list[dict[str, Any]]):
    """Blocks of real models' answers are blocks here, whole and streamed, wherever their text is cut."""
    message = whole(log_of(sample))
    shown = [one for one in sample if one["text"] or one["kind"] == "tool_use"]
    assert [one["type"] for one in message["content"]] == [one["kind"] for one in shown]
    for got, one in zip(message["content"], shown, strict=True):
        if one["kind"] != "tool_use":
            assert got[one["kind"]] == one["text"]
        elif got["input"] != {"partial_json": one["text"]}:
            assert got["input"] == json.loads(one["text"])
    assert streamed(log_of(sample)) == message
    for cut in range(sum(len(one["text"]) for one in sample) + 1):
        assert whole(log_of(sample, cut)) == message


def test_plain_text_is_one_block():
    """Text without a block of its own opens one, at its first character; an empty answer has no block."""
    assert streamed(success(tok(""), tok("Hi"), tok(" you")))["content"] == [{"type": "text", "text": "Hi you"}]
    assert streamed(success(tok("")))["content"] == whole(success())["content"] == []


def test_implied_text_before_a_call():
    """The implied block is closed where a call begins."""
    log = success(tok("So:"), *block(1, "tool_use"), reason="tool_calls")
    called = {"type": "tool_use", "id": "call_1", "name": "look_up", "input": {}}
    assert streamed(log)["content"] == whole(log)["content"] == [{"type": "text", "text": "So:"}, called]


def test_empty_and_unknown_blocks_are_left_out():
    """The blocks that are shown are numbered without a gap."""
    log = success(*block(0, "thinking", ""), *block(1, "mood", "glad"), *block(2, "text"), *block(3, "text", "Hi"))
    assert streamed(log)["content"] == whole(log)["content"] == [{"type": "text", "text": "Hi"}]


@pytest.mark.parametrize(
    "arguments", ['{"city": "Os', "[1]", "NaN", '{"a": NaN}', '{"a": 1e999}', r'{"a": "\ud83d"}', "[" * 100_000]
)
def test_arguments_that_are_no_object_stay_text(arguments: str):
    """A call that was cut is no call without arguments; nor is one whose value no reply can hold."""
    (call,) = whole(success(*block(0, "tool_use", arguments), reason="length"))["content"]
    assert call["input"] == {"partial_json": arguments}


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
        ("content_filter", None, ("refusal", None)),
    ],
)
def test_stop_reasons(reason: str, stop: str | None, expected: tuple[str, str | None]):
    """Each reason of ours has one of theirs; a stop string is named."""
    log = numbered(META, tok("Hi"), Done(finish_reason=reason, stop_string=stop))
    message = streamed(log)
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert {name: whole(log)[name] for name in ("stop_reason", "stop_sequence")} == dict(
        zip(("stop_reason", "stop_sequence"), expected, strict=True)
    )


def test_the_first_of_several_choices_is_shown():
    """A log of two choices, resumed in this shape, shows the first with its own reason."""
    message = streamed(two_choices())
    assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": "AB"}], "end_turn")


@pytest.mark.parametrize(
    ("log", "kind", "code"),
    [
        (failure(tok("Hi")), "overloaded_error", "engine_unavailable"),
        (success(tok("Hi"), reason="cancelled"), "api_error", "cancelled"),
        (success(reason="abandoned"), "api_error", "abandoned"),
    ],
)
def test_an_end_without_success_is_an_error(log: list[LoggedEvent], kind: str, code: str):
    """One `error` event, and nothing after it; a whole message raises instead."""
    frames = b"".join(wire(log))
    last = json.loads(frames.rsplit(b"data: ", 1)[1])
    assert (last["type"], last["error"]["type"], last["error"]["code"]) == ("error", kind, code)
    assert last["error"]["details"] == {"error_code": code}
    assert b"message_stop" not in frames
    with pytest.raises(StreamserveError) as caught:
        whole(log)
    assert caught.value.code == code


def test_a_server_that_goes_down_is_an_error():
    """The official client takes a clean end for a whole answer."""
    (read, data), *none = events_in(
        MessageEncoder(LOG_ID, **NAMED).going_away(GoingAway(stream_id="s", seq=1, retry_ms=1))
    )
    assert (read.event, data["error"]["type"], none) == ("error", "overloaded_error", [])


def test_a_keepalive_is_a_ping():
    """An event that the official client skips, between any two."""
    log = blocks()
    assert check_message(b"".join(one + PING for one in wire(log))) == whole(log)
    assert PING == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_a_citation_waits_for_text():
    """What is cited before the text, or within a thought, is the next text's; without any it has an empty one."""
    one, two = Citation(source="docs", id="1", url="/1"), Citation(source="docs", id="2", title="Two", choice=0)
    log = success(one, *block(0, "thinking", "Hm"), two, *block(1, "text", "Hi"), one)
    content = streamed(log)["content"]
    assert content == whole(log)["content"]
    assert content[1]["citations"] == [cited(0, "/1"), cited(1, "docs/2", "Two"), cited(0, "/1")]
    alone = success(*block(0, "tool_use", "{}"), one)
    assert streamed(alone)["content"][1:] == [{"type": "text", "text": "", "citations": [cited(0, "/1")]}]
    other = success(tok("Hi"), Citation(source="docs", id="1", choice=1))
    assert streamed(other)["content"] == [{"type": "text", "text": "Hi"}]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
KINDS = st.sampled_from(["text", "thinking", "tool_use", "mood", "citation"])


@given(st.lists(st.tuples(KINDS, st.lists(TEXTS, max_size=3)), max_size=5), st.integers(0, 30))
def test_what_is_streamed_makes_the_whole_message(parts: list[tuple[str, list[str]]], cut: int):
    """Of any blocks, whole and as far as they have come."""
    events: list[Event] = []
    index = 0
    for kind, texts in parts:
        if kind == "citation":
            events += [Citation(source="docs", id=text, url=None) for text in texts]
            continue
        events += block(index, kind, *texts)
        index += 1
    log = success(*events, ChoiceDone(choice=0, finish_reason="stop"))
    assert streamed(log) == whole(log)
    sofar, is_over = folded(b"".join(wire(log[:cut])))
    assert is_over == (cut >= len(log))
    assert len(sofar.get("content", [])) <= len(whole(log)["content"])


def test_thoughts_without_their_text():
    """`display: omitted`: the block of the thought is there, with its signature, and is empty, streamed and whole."""
    log = success(*block(0, "thinking", "Hm", ".", signature="s1"), *block(1, "text", "Hi"))
    encoder = MessageEncoder(LOG_ID, shows_thinking=False, **NAMED)
    events = [event for _, event in events_in(b"".join(map(encoder.encode, log)))]
    assert [event["delta"] for event in events if event["type"] == "content_block_delta"] == [
        {"type": "signature_delta", "signature": "s1"}, {"type": "text_delta", "text": "Hi"}
    ]  # fmt: skip
    content = message_json(Answer.of(log), shows_thinking=False, **NAMED)["content"]
    assert content == [{"type": "thinking", "thinking": "", "signature": "s1"}, {"type": "text", "text": "Hi"}]
