"""Laws of thoughts and tool calls in the chat completion fold: shapes, order, and the official client's fold."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from streamserve.dialects.fold import Answer
from streamserve.dialects.openai.chat import REASONING_FIELDS, ChatEncoder, completion_json
from streamserve.protocol.events import BlockStart, BlockStop, ChoiceDone, Citation, Event, LoggedEvent
from streamserve.protocol.grammar import check_events
from tests.support.bodies.event_logs import IDENTITY, LOG_ID, USAGE, block, blocks, numbered, split_emoji, success, tok
from tests.support.checks.sse_reader import read_events


def frames(log: list[LoggedEvent], **options: Any) -> list[Any]:
    """Return the data of the whole log's frames, decoded; `[DONE]` as text."""
    encoder = ChatEncoder(LOG_ID, **options, **IDENTITY)
    wire = b"".join(encoder.encode(logged) for logged in log)
    return [one.data if one.data == "[DONE]" else json.loads(one.data) for one in read_events(wire)]


def completion_of(log: list[LoggedEvent], *, n: int = 1, **options: Any) -> dict[str, Any]:
    """Return the log's answer as it is when it is not streamed."""
    return completion_json(Answer.of(log, n), **options, **IDENTITY)


def deltas(log: list[LoggedEvent], choice: int = 0, **options: Any) -> list[dict[str, Any]]:
    """Return the deltas of one choice."""
    chunks = [chunk for chunk in frames(log, **options) if chunk != "[DONE]" and chunk["choices"]]
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == choice]


def cited(url: str, title: str, start: int, end: int) -> dict[str, Any]:
    """Return an annotation."""
    place = {"start_index": start, "end_index": end}
    return {"type": "url_citation", "url_citation": {"url": url, "title": title, **place}}


def call(index: int, id: str, name: str, *arguments: str, choice: int = 0) -> list[Event]:
    """Return a tool_use block."""
    return [
        BlockStart(choice=choice, index=index, kind="tool_use", id=id, name=name),
        *(tok(text, choice=choice, index=index) for text in arguments),
        BlockStop(choice=choice, index=index),
    ]


def test_each_block_has_its_deltas():
    """Role first, with null content; thought, text, annotation; the call's head, then its arguments; the reason."""
    function = {"name": "look_up", "arguments": ""}
    assert deltas(blocks()) == [
        {"role": "assistant", "content": None, "refusal": None},
        {"reasoning_content": "Hm", "reasoning": "Hm"},
        {"reasoning_content": ".", "reasoning": "."},
        {"content": "Hel"},
        {"content": "lo"},
        {"annotations": [{"index": 0, **cited("https://a", "A", 0, 5)}]},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {},
    ]
    assert frames(blocks())[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_whole_answer_has_each_block():
    """Thought, text and calls are fields of one message; reasoning tokens are counted."""
    whole = completion_of(blocks())
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello",
                "refusal": None,
                "reasoning_content": "Hm.",
                "reasoning": "Hm.",
                "annotations": [cited("https://a", "A", 0, 5)],
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"a":1}'}}
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize("setting", REASONING_FIELDS)
def test_the_field_of_thoughts_can_be_chosen(setting: str):
    """REASONING_FIELD names one field or both, in deltas and in whole answers."""
    log = success(*block(0, "thinking", "Hm", "."), *block(1, "text", "Hi"))
    names = ("reasoning_content", "reasoning") if setting == "both" else (setting,)
    assert deltas(log, reasoning_field=setting)[1] == dict.fromkeys(names, "Hm")
    (choice,) = completion_of(log, reasoning_field=setting)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hi", "refusal": None, **dict.fromkeys(names, "Hm.")}


def test_calls_are_numbered_in_their_choice():
    """Each choice counts its own calls from 0, whatever blocks stand between them."""
    log = success(
        *block(0, "thinking", "Hm"),
        *call(1, "call_a", "first", "{}"),
        *call(0, "call_x", "other", "{}", choice=1),
        *call(2, "call_b", "second", '{"b":', "2}"),
        ChoiceDone(choice=0, finish_reason="tool_calls"),
        ChoiceDone(choice=1, finish_reason="tool_calls"),
    )
    seen = [[one for delta in deltas(log, choice, n=2) for one in delta.get("tool_calls", [])] for choice in (0, 1)]
    assert [(one["index"], one.get("id")) for one in seen[0]] == [
        (0, "call_a"), (0, None), (1, "call_b"), (1, None), (1, None)
    ]  # fmt: skip
    assert [(one["index"], one.get("id")) for one in seen[1]] == [(0, "call_x"), (0, None)]
    for choice, ids in zip(completion_of(log, n=2)["choices"], (["call_a", "call_b"], ["call_x"]), strict=True):
        assert [one["id"] for one in choice["message"]["tool_calls"]] == ids
        assert choice["message"]["content"] is None


def test_a_call_without_text_has_null_content():
    """The content of an answer that only calls tools is null, streamed and whole; that of an empty answer is ""."""
    log = success(*call(0, "call_a", "first", "{}"), reason="tool_calls")
    assert deltas(log)[0]["content"] is None
    assert completion_of(log)["choices"][0]["message"]["content"] is None
    assert deltas(success())[0]["content"] == ""
    assert completion_of(success())["choices"][0]["message"]["content"] == ""


def test_logprobs_are_those_of_the_text():
    """Tokens of thoughts and calls have no log probabilities on the wire; those of the text are all there."""
    emoji = split_emoji()
    log = success(
        BlockStart(choice=0, index=0, kind="thinking"),
        replace(emoji, index=0),
        BlockStop(choice=0, index=0),
        BlockStart(choice=0, index=1, kind="text"),
        replace(emoji, index=1),
        BlockStop(choice=0, index=1),
        BlockStart(choice=0, index=2, kind="tool_use", id="c", name="n"),
        replace(emoji, index=2),
        BlockStop(choice=0, index=2),
    )
    chunks = [chunk["choices"][0] for chunk in frames(log) if chunk != "[DONE]"]
    with_logprobs = [chunk["delta"] for chunk in chunks if chunk["logprobs"]]
    assert with_logprobs == [{"content": "🎉"}]
    (choice,) = completion_of(log)["choices"]
    assert len(choice["logprobs"]["content"]) == 2


def test_a_block_of_a_later_release_is_not_shown():
    """A kind that this release does not know makes no chunk, and is in no message."""
    log = success(*block(0, "mood", "glad"), *block(1, "text", "Hi"))
    assert deltas(log) == [{"role": "assistant", "content": "", "refusal": None}, {"content": "Hi"}, {}]
    assert completion_of(log)["choices"][0]["message"]["content"] == "Hi"


@pytest.mark.parametrize("text", ["a", "Hé", "x" * 70])
def test_every_delta_can_be_obfuscated(text: str):
    """Deltas of thoughts and arguments have round sizes too."""
    log = success(*block(0, "thinking", text), *call(1, "call_a", "first", text))
    encoder = ChatEncoder(LOG_ID, include_obfuscation=True, **IDENTITY)
    data = [one.data for logged in log for one in read_events(encoder.encode(logged))]
    sizes = [len(one.encode()) for one in data if "obfuscation" in one]
    assert len(sizes) == 3
    assert all(size % 64 == 0 for size in sizes)


def test_annotations_say_where_in_the_content_their_words_are():
    """Characters are counted over all text blocks; without any the place is empty; the source stands for a title."""
    log = success(
        Citation(source="docs", id="1", url="/1"),
        *block(0, "text", "Hé", "llo"),
        *block(1, "thinking", "Hm"),
        *block(2, "text", "world"),
        Citation(source="docs", id="2", url="/2", title="Two", choice=0, index=2, start=1, end=3),
        Citation(source="docs", id="3", url="/3", choice=0, index=1, start=0, end=2),
        Citation(source="docs", id="4"),
    )
    (choice,) = completion_of(log)["choices"]
    assert choice["message"]["annotations"] == [
        cited("/1", "docs", 0, 0), cited("/2", "Two", 6, 8), cited("/3", "docs", 10, 10)
    ]  # fmt: skip
    streamed = [one for delta in deltas(log) for one in delta.get("annotations", [])]
    assert [one.pop("index") for one in streamed] == [0, 1, 2]
    assert streamed == choice["message"]["annotations"]


def test_a_source_of_the_whole_answer_is_in_each_choice():
    """Each counts its own annotations and characters."""
    log = success(
        tok("A", choice=0),
        Citation(source="docs", id="1", url="/1", choice=0),
        Citation(source="docs", id="2", url="/2"),
    )
    assert [delta["annotations"][0]["index"] for delta in deltas(log, n=2) if "annotations" in delta] == [0, 1]
    first, second = (one["message"]["annotations"] for one in completion_of(log, n=2)["choices"])
    assert (first, second) == ([cited("/1", "docs", 1, 1), cited("/2", "docs", 1, 1)], [cited("/2", "docs", 0, 0)])


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
KINDS = st.sampled_from(["text", "thinking", "tool_use", "citation"])


@given(st.lists(st.tuples(KINDS, st.lists(TEXTS, max_size=3)), max_size=5))
def test_the_clients_accumulator_makes_the_whole_answer(parts: list[tuple[str, list[str]]]):
    """What the official client folds from the chunks is the answer that is not streamed."""
    events: list[Event] = []
    index = 0
    for kind, texts in parts:
        if kind == "citation":
            events += [Citation(source="docs", id=text, url="/" + text) for text in texts]
            continue
        events += call(index, f"call_{index}", "tool", *texts) if kind == "tool_use" else block(index, kind, *texts)
        index += 1
    log = success(*events, reason="tool_calls" if any(kind == "tool_use" for kind, _ in parts) else "stop")
    num_ids = sum(len(event.token_ids) for event in events if hasattr(event, "token_ids"))
    done = replace(log[-1].event, usage=replace(USAGE, completion_tokens=num_ids))  # type: ignore[type-var]
    check_events([*(one.event for one in log[:-1]), done])
    log = numbered(*(one.event for one in log[:-1]), done)

    whole = completion_of(log)
    ChatCompletion.model_validate(whole, strict=True)
    state: Any = ChatCompletionStreamState()
    for chunk in frames(log, include_usage=True):
        if chunk != "[DONE]":
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
    folded = state.current_completion_snapshot.to_dict()
    message, expected = folded["choices"][0]["message"], whole["choices"][0]["message"]
    assert (message["content"] or "") == (expected["content"] or "")
    assert message.get("reasoning_content", "") == expected.get("reasoning_content", "")
    calls, annotations = (
        [{name: value for name, value in one.items() if name != "index"} for one in message.get(field) or []]
        for field in ("tool_calls", "annotations")
    )
    for one in calls:
        one["function"].pop("parsed_arguments", None)
    assert calls == expected.get("tool_calls", [])
    assert annotations == expected.get("annotations", [])
    assert folded["usage"] == whole["usage"]


def test_thoughts_can_be_left_out():
    """`include_reasoning` false: no field of a delta or a message has them, and they still count."""
    log = success(*block(0, "thinking", "Hm", "."), *block(1, "text", "Hi"))
    first, text, last = deltas(log, include_reasoning=False)
    assert (first["content"], text, last) == ("", {"content": "Hi"}, {})
    whole = completion_of(log, include_reasoning=False)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
    assert whole["usage"] == completion_of(log)["usage"]


def test_counts_stand_in_every_chunk():
    """`continuous_usage_stats`: the prompt's tokens at once, the answer's as far as it has come, thoughts apart."""
    log = success(*block(0, "thinking", "Hm", "."), *block(1, "text", "Hi"))
    chunks = [chunk["usage"] for chunk in frames(log, include_usage=True, continuous_usage=True) if chunk != "[DONE]"]
    assert [one["prompt_tokens"] for one in chunks] == [9] * 6
    assert [one["completion_tokens"] for one in chunks] == [0, 1, 2, 3, 3, 2]  # the last one is what `done` says
    assert [one["completion_tokens_details"]["reasoning_tokens"] for one in chunks[:-1]] == [0, 1, 2, 2, 2]
    assert [one["prompt_tokens_details"]["cached_tokens"] for one in chunks] == [4] * 6


def test_ids_of_tokens_are_vllms():
    """`return_token_ids`: the prompt's in the first chunk; the answer's in their chunks, those without text too."""
    log = success(*block(0, "thinking", "Hm", ""), tok("Hi", 5, 6, index=1), tok("", 2, index=1), tok("x", 9, choice=1))
    options = {"return_token_ids": True, "prompt_token_ids": (1, 2, 3)}
    chunks = [chunk for chunk in frames(log, n=2, include_reasoning=False, **options) if chunk != "[DONE]"]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2, 3], *[None] * (len(chunks) - 1)]
    ids = [(one["index"], number) for chunk in chunks for one in chunk["choices"] for number in one["token_ids"]]
    assert ids == [(0, 7), (0, 7), (0, 5), (0, 6), (0, 2), (1, 9)]
    whole = completion_of(log, n=2, **options)
    assert whole["prompt_token_ids"] == [1, 2, 3]
    assert [one["token_ids"] for one in whole["choices"]] == [[7, 7, 5, 6, 2], [9]]
    assert "token_ids" not in completion_of(log, n=2)["choices"][0]


def test_log_probabilities_of_thoughts_alone_are_an_empty_list():
    """Asked for, and every token is of a thought: there are none to show, which is not the same as not asked for."""
    emoji = split_emoji()
    thought = [BlockStart(choice=0, index=0, kind="thinking"), emoji, BlockStop(choice=0, index=0)]
    assert completion_of(success(*thought))["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    assert completion_of(success(*block(0, "thinking", "Hm")))["choices"][0]["logprobs"] is None
