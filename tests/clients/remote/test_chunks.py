"""Laws of `ChunkParser`: chunks of a completion become events that keep the grammar, and anything else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.clients.remote.chunks import ChunkParser
from streamserve.clients.remote.errors import UpstreamBroken, UpstreamError
from streamserve.protocol.events import (
    BlockStart,
    BlockStop,
    BlockText,
    ChoiceDone,
    Done,
    Event,
    Meta,
    Token,
    Usage,
)
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import ShownChoice

META = Meta(model="m", stream_id="s", created=1, has_token_ids=False)


def chunk(index: int = 0, finish_reason: str | None = None, **delta: Any) -> str:
    return json.dumps({"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}]})


def call(name: str | None = None, arguments: str | None = None, *, index: int = 0, id: str | None = None) -> str:
    function = {"name": name, "arguments": arguments}
    return chunk(tool_calls=[{"index": index, "id": id, "type": "function", "function": function}])


def events_of(*chunks: str, n: int = 1, shown: tuple[ShownChoice, ...] = ()) -> list[Event]:
    """Return the events of the chunks; they keep the grammar."""
    answer = ChunkParser(n, shown)
    events = [event for one in chunks for event in answer.feed(one)]
    if not shown:
        check_events([META, *events, Done(finish_reason=answer.finish_reason)])
    return events


def token(text: str, index: int = 0, choice: int = 0) -> Token:
    return Token(text=text, token_ids=(), index=index, choice=choice)


STOP = chunk(finish_reason="stop")


def test_plain_text_has_no_block_events() -> None:
    """A plain answer is tokens only, whatever empty deltas stand around it."""
    assert events_of(chunk(role="assistant", content=""), chunk(content="a"), chunk(content=None), STOP) == [token("a")]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_are_a_block_of_their_own(field: str) -> None:
    """Under both names; the text after them is a block that begins and ends."""
    events = events_of(chunk(**{field: "Hm"}), chunk(**{field: "m"}), chunk(content="Yes"), STOP)
    assert events == [
        BlockStart(choice=0, index=0, kind="thinking"),
        token("Hm"),
        token("m"),
        BlockStop(choice=0, index=0),
        BlockStart(choice=0, index=1, kind="text"),
        token("Yes", 1),
        BlockStop(choice=0, index=1),
    ]


def test_each_tool_call_is_a_block() -> None:
    """The id and the name begin it, the arguments are its tokens; text before it is the implied block 0."""
    events = events_of(
        chunk(content="Let me look."),
        call("get", "", id="c1"),
        call(None, '{"a":'),
        call(None, "1}"),
        call("put", "{}", index=1, id="c2"),
        chunk(finish_reason="tool_calls"),
    )
    assert events == [
        token("Let me look."),
        BlockStart(choice=0, index=1, kind="tool_use", id="c1", name="get"),
        token('{"a":', 1),
        token("1}", 1),
        BlockStop(choice=0, index=1),
        BlockStart(choice=0, index=2, kind="tool_use", id="c2", name="put"),
        token("{}", 2),
        BlockStop(choice=0, index=2),
    ]


def test_calls_that_all_say_index_0_are_told_apart_by_their_ids() -> None:
    """Some servers number every call 0."""
    events = events_of(call("get", "{}", id="c1"), call("put", "{}", id="c2"), chunk(finish_reason="tool_calls"))
    assert [event.name for event in events if isinstance(event, BlockStart)] == ["get", "put"]


def test_choices_end_one_by_one() -> None:
    """With several choices each has its own blocks and its own end."""
    events = events_of(chunk(1, content="b"), chunk(0, content="a"), chunk(1, "stop"), chunk(0, "length"), n=2)
    assert events == [
        token("b", choice=1),
        token("a"),
        ChoiceDone(choice=1, finish_reason="stop"),
        ChoiceDone(choice=0, finish_reason="length"),
    ]


def test_a_continued_answer_goes_on_in_its_block() -> None:
    """The implied text block does not begin again; tokens are counted on."""
    shown = (ShownChoice(blocks=(BlockText(index=0, kind="text", text="So ", is_open=True),), num_tokens=2),)
    answer = ChunkParser(1, shown)
    assert answer.feed(chunk(content="it goes")) == [token("it goes")]
    assert answer.feed(STOP) == []
    assert (answer.num_tokens, answer.has_begun, answer.is_text_only) == (3, True, True)
    counts = {"prompt_tokens": 12, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 11}}
    answer.feed(json.dumps({"choices": [], "usage": counts}))
    assert answer.total() == Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=10)


def calls_in(events: list[Event]) -> list[tuple[str | None, str]]:
    """Return name and arguments of each call."""
    starts = [event for event in events if isinstance(event, BlockStart) and event.kind == "tool_use"]
    tokens = [event for event in events if isinstance(event, Token)]
    return [(one.name, "".join(token.text for token in tokens if token.index == one.index)) for one in starts]


def test_an_empty_finish_reason_ends_nothing() -> None:
    """Some servers send "" in every delta until the last one."""
    answer = ChunkParser(1)
    events = [
        event for word in ("One", " two", " three") for event in answer.feed(chunk(finish_reason="", content=word))
    ]
    assert [event.text for event in events if isinstance(event, Token)] == ["One", " two", " three"]
    assert not answer.is_finished
    answer.feed(chunk(finish_reason="length"))
    assert (answer.is_finished, answer.finish_reason) == (True, "length")


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("STOP", "stop"),
        ("MAX_TOKENS", "length"),
        ("model_length", "length"),
        ("tool_use", "tool_calls"),
        ("eos", "stop"),
    ],
)
def test_finish_reasons_of_other_apis(given: str, ours: str) -> None:
    """Gemini's are in capitals, Mistral and Anthropic have names of their own."""
    answer = ChunkParser(1)
    answer.feed(chunk(finish_reason=given, content="a"))
    assert answer.finish_reason == ours


@pytest.mark.parametrize("content", [[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["a", "b"]])
def test_content_as_parts_is_text(content: list[Any]) -> None:
    """Each part is a piece of the text."""
    assert events_of(chunk(content=content), STOP) == [token("a"), token("b")]


def test_a_thought_among_the_parts_is_a_block() -> None:
    """Mistral's thoughts are parts whose text is a list of parts; a reference to a source has no text."""
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    events = events_of(chunk(content=[thought]), chunk(content=[{"type": "reference"}]), chunk(content="Yes"), STOP)
    assert [(one.index, one.text) for one in events if isinstance(one, Token)] == [(0, "Hm."), (1, "Yes")]
    assert [one.kind for one in events if isinstance(one, BlockStart)] == ["thinking", "text"]


def test_a_refusal_is_text() -> None:
    """OpenAI's `refusal` is what the model says instead of an answer."""
    assert events_of(chunk(content=None, refusal="I cannot."), STOP) == [token("I cannot.")]


def test_the_text_null_is_text() -> None:
    """Numbers may be strings; words that look like another value stay text."""
    assert events_of(chunk(content="null"), chunk(content="true"), STOP) == [token("null"), token("true")]
    assert ChunkParser(1).feed('{"choices": [{"text": "null"}]}') == [token("null")]
    assert calls_in(events_of(call("null", "null", id="null"), STOP)) == [("null", "null")]


def test_arguments_as_an_object_are_json() -> None:
    """Some servers give the object itself, whole."""
    delta = {"tool_calls": [{"index": None, "id": 7, "function": {"name": "get", "arguments": {"city": "Málaga"}}}]}
    assert calls_in(events_of(chunk(**delta), STOP)) == [("get", '{"city":"Málaga"}')]


def test_a_function_call_of_old_is_a_call() -> None:
    """What OpenAI had before tool calls, and some gateways still give."""
    chunks = [chunk(function_call=one) for one in ({"name": "get", "arguments": ""}, {"arguments": "{}"})]
    assert calls_in(events_of(*chunks, chunk(finish_reason="function_call"))) == [("get", "{}")]


def test_whole_calls_without_number_and_id_are_told_apart() -> None:
    """Some servers give each call at once and number none; a name that is repeated under a number begins nothing."""
    calls = [{"function": {"name": name, "arguments": "{}"}, "id": ""} for name in ("get", "get", "put")]
    assert calls_in(events_of(chunk(tool_calls=calls), STOP)) == [("get", "{}"), ("get", "{}"), ("put", "{}")]
    assert calls_in(events_of(call("get", '{"a":'), call("get", "1}"), STOP)) == [("get", '{"a":1}')]


def test_numbers_as_strings_and_nulls_are_read() -> None:
    """Missing, null and textual numbers mean what they say."""
    value = {"choices": [{"index": "1", "delta": {"content": "b"}}, {"index": None, "delta": {"content": "a"}}]}
    assert ChunkParser(2).feed(json.dumps(value)) == [token("b", choice=1), token("a")]


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": "9", "completion_tokens": 2.0, "prompt_tokens_details": None}, (9, 2, 0, 0)),
        ({"prompt_tokens": None, "completion_tokens": 2, "completion_tokens_details": []}, (0, 2, 0, 0)),
        (
            {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4},
             "output_tokens_details": {"reasoning_tokens": 1}},
            (9, 2, 4, 1),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 3}, (9, 2, 3, 0)),
        ({"prompt_tokens": -1, "completion_tokens": "many"}, (0, 0, 0, 0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_in_choice", [False, True])
def test_usage_in_other_forms(usage: dict[str, Any], expected: tuple[int, ...], is_in_choice: bool) -> None:
    """Null details, strings, other APIs' names, and a usage within the choice are read; what is no count is 0."""
    answer = ChunkParser(1)
    answer.feed(json.dumps({"choices": [{"usage": usage}]} if is_in_choice else {"usage": usage}))
    total = answer.total()
    assert (total.prompt_tokens, total.completion_tokens, total.cached_tokens, total.reasoning_tokens) == expected


def test_a_usage_that_is_none_leaves_the_count() -> None:
    """An empty text or list where the usage should be says nothing."""
    answer = ChunkParser(1)
    answer.feed(chunk(content="a"))
    for nothing in ("", [], None):
        answer.feed(json.dumps({"choices": [], "usage": nothing}))
    assert answer.total() == Usage(completion_tokens=1)


def test_log_probabilities_that_are_no_numbers_are_none() -> None:
    """A null, and what JSON has no number for."""
    content = [{"token": "a", "logprob": None}, {"token": "b", "logprob": "nan"}]
    value = {"choices": [{"delta": {"content": "ab"}, "logprobs": {"content": content}}]}
    [event] = ChunkParser(1).feed(json.dumps(value))
    assert isinstance(event, Token)
    assert [one.chosen.logprob for one in event.logprobs or ()] == [None, None]


def test_usage_is_the_servers() -> None:
    """Counts come from the server, in any chunk, the last one counts; without any the tokens are counted."""
    answer = ChunkParser(1)
    answer.feed(chunk(content="a"))
    assert answer.total() == Usage(completion_tokens=1)
    details = {"prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 2}}
    answer.feed(json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}))
    answer.feed(json.dumps({"choices": None, "usage": {"prompt_tokens": 9, "completion_tokens": 7, **details}}))
    assert answer.total() == Usage(prompt_tokens=9, completion_tokens=7, cached_tokens=4, reasoning_tokens=2)


def test_log_probabilities_come_through() -> None:
    """Candidates keep their bytes; a token without an id has 0."""
    top = [{"token": "b", "logprob": -2.0, "bytes": [98]}]
    logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top}]}
    value = {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": logprobs}]}
    [event] = ChunkParser(1).feed(json.dumps(value))
    assert isinstance(event, Token)
    assert event.logprobs is not None
    assert event.logprobs[0].as_json() == {
        "token": "a", "logprob": -0.5, "bytes": [97],
        "top_logprobs": [{"token": "b", "logprob": -2.0, "bytes": [98]}],
    }  # fmt: skip


def test_log_probabilities_of_tokens_without_text_wait_for_text() -> None:
    """Of half a code point, say; before another block, and at the end, they come without."""

    def piece(content: str, token: str, finish_reason: str | None = None) -> str:
        logprobs = {"content": [{"token": token, "logprob": -1.0, "bytes": [*token.encode()]}]}
        choice = {"index": 0, "delta": {"content": content}, "logprobs": logprobs, "finish_reason": finish_reason}
        return json.dumps({"choices": [choice]})

    events = events_of(
        piece("", "a"), chunk(reasoning_content="Hm"), piece("", "b"), piece("bc", "c"), piece("", "d", "stop")
    )
    tokens = [event for event in events if isinstance(event, Token)]
    assert [(one.index, one.text) for one in tokens] == [(0, ""), (1, "Hm"), (2, "bc"), (2, "")]
    named = [[position.chosen.token for position in one.logprobs or ()] for one in tokens]
    assert named == [["a"], [], ["b", "c"], ["d"]]


def test_text_completions() -> None:
    """`text` of a completion is a delta of text."""
    value = {"choices": [{"index": 0, "text": "abc", "finish_reason": None}]}
    assert ChunkParser(1).feed(json.dumps(value)) == [token("abc")]


def test_the_stop_string_is_named() -> None:
    """vLLM's `stop_reason` names it; the id of an end token there is none."""
    answer = ChunkParser(1)
    value: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "###"}
    answer.feed(json.dumps({"choices": [value]}))
    assert (answer.finish_reason, answer.stop_string) == ("stop", "###")


@pytest.mark.parametrize(
    "data",
    [
        "{",
        "[1]",
        "null",
        '{"choices": 3}',
        '{"choices": [{"index": 1, "delta": {"content": "x"}}]}',
        '{"choices": [{"index": -1, "delta": {"content": "x"}}]}',
        '{"choices": [{"index": 0, "delta": {"content": 5}}]}',
        '{"choices": [{"index": 0, "delta": {"content": [{"type": "image"}]}}]}',
        '{"choices": [{"index": 0, "delta": {"content": "\\ud800"}}]}',
        '{"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]}',
        '{"a":' * 100_000,
        '{"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": 1,'
        ' "bytes": [300]}]}}]}',
    ],
    ids=lambda data: data[:40],
)
def test_what_is_no_chunk_is_refused(data: str) -> None:
    """Whatever the server sends, the outcome is one named error."""
    with pytest.raises(UpstreamBroken):
        ChunkParser(1).feed(data)


def test_blocks_without_end_are_refused() -> None:
    """An answer has a bounded number of blocks."""
    answer = ChunkParser(1)
    for number in range(256):
        answer.feed(call("f", "{}", index=number, id=str(number)))
    with pytest.raises(UpstreamBroken, match="256 blocks"):
        answer.feed(call("f", "{}", index=256, id="256"))


TEXTS = st.none() | st.text(max_size=3)
FUNCTIONS = st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS})
CALLS = st.fixed_dictionaries({"index": st.integers(0, 2), "id": TEXTS, "function": st.none() | FUNCTIONS})
DELTAS = st.fixed_dictionaries(
    {}, optional={"content": TEXTS, "reasoning": TEXTS, "tool_calls": st.none() | st.lists(CALLS, max_size=2)}
)
REASONS = st.sampled_from([None, None, None, "stop", "length", "tool_calls", "function_call", "eos"])
CHOICES = st.fixed_dictionaries({"index": st.integers(0, 1), "delta": st.none() | DELTAS, "finish_reason": REASONS})


@given(chunks=st.lists(st.fixed_dictionaries({"choices": st.lists(CHOICES, max_size=2)}), max_size=12))
def test_any_chunks_keep_the_grammar_or_are_refused(chunks: list[dict[str, Any]]) -> None:
    """Blocks open, close and are numbered as the law says, whatever a server sends in which order."""
    answer, events = ChunkParser(2), [META]
    try:
        for one in chunks:
            events += answer.feed(json.dumps(one))
    except UpstreamBroken:
        pass
    else:
        assert answer.num_tokens == sum(isinstance(event, Token) for event in events)
    check_events([*events, Done(finish_reason="stop" if answer.is_finished else "cancelled")])


@pytest.mark.parametrize(
    "data",
    [
        '{"error": {"message": "out of memory", "code": 500}}',
        '{"error": "out of memory"}',
        '{"error": [{"message": "out of memory"}]}',
        '{"detail": "out of memory"}',
        '{"detail": [{"loc": ["body"], "msg": "out of memory"}]}',
        '{"message": "out of memory", "type": "server_error"}',
        '{"object": "error", "message": "out of memory", "code": 500}',
    ],
)
def test_an_error_of_the_server_is_no_chunk(data: str) -> None:
    """In OpenAI's shape, in vLLM's older one, as a text, a list or FastAPI's `detail`; its message is for the log."""
    with pytest.raises(UpstreamError, match="out of memory"):
        ChunkParser(1).feed(data)


@pytest.mark.parametrize("reason", ["abort", "ERROR"])
def test_an_error_may_be_a_finish_reason(reason: str) -> None:
    """SGLang's, and others', for an answer that the server has given up."""
    with pytest.raises(UpstreamError, match=reason.lower()):
        ChunkParser(1).feed(chunk(finish_reason=reason))


@pytest.mark.parametrize("nothing", [None, "", {}, False])
def test_an_error_that_says_nothing_is_none(nothing: Any) -> None:
    """Some servers have the field in every chunk."""
    value = {"choices": [{"index": 0, "delta": {"content": "a"}}], "error": nothing}
    assert ChunkParser(1).feed(json.dumps(value)) == [token("a")]


@pytest.mark.parametrize(
    ("last", "queue", "prefill"),
    [
        ({"timings": {"prompt_n": 9, "prompt_ms": 250.5, "predicted_ms": 9}}, None, 0.2505),
        ({"usage": {"prompt_tokens": 1, "queue_time": 0.037}}, 0.037, None),
        ({"x_groq": {"id": "r", "usage": {"queue_time": 0.5}}}, 0.5, None),
        ({"timings": {"prompt_ms": "fast"}, "usage": {"queue_time": True}, "x_groq": {"usage": None}}, None, None),
        ({"timings": {"prompt_ms": -1}, "usage": {"queue_time": None}, "x_groq": []}, None, None),
        ({"timings": [], "usage": None}, None, None),
    ],
)
def test_times_that_a_server_tells(last: dict[str, Any], queue: float | None, prefill: float | None) -> None:
    """llama-server's prefill, Groq's queue; what is no time is nothing."""
    answer = ChunkParser(1)
    answer.feed(json.dumps({"choices": [], **last}))
    assert (answer.queue_seconds, answer.prefill_seconds) == (queue, prefill)
