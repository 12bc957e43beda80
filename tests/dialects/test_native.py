"""Laws of the native dialect: the request that a body becomes, and the frames of a log."""

import json
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.dialects import native
from streamserve.dialects.encoder import coalesce
from streamserve.dialects.native import NativeEncoder, NativeRequest
from streamserve.protocol.errors import BadRequest, ErrorBody
from streamserve.protocol.events import (
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
    GoingAway,
    LoggedEvent,
    Meta,
    Snapshot,
    Status,
    Token,
    Unknown,
    Usage,
)
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import MODEL_DEFAULTS, GenerateRequest, Message, SamplingParams
from streamserve.protocol.sse import frame, one_line_json
from tests.support.bodies.event_logs import LOG_ID, blocks, failure, split_emoji, success, tok, two_choices
from tests.support.checks.sse_reader import read_events


def parse(**body: Any) -> NativeRequest:
    """Return the request that a body becomes."""
    return native.parse(body, Limits(), default_model="echo")


def parse_query(**query: str) -> NativeRequest:
    """Return the request that a query becomes."""
    return native.parse_query(query, Limits(), default_model="echo")


def wire(log: list[LoggedEvent]) -> bytes:
    """Return the whole log encoded."""
    encoder = NativeEncoder(LOG_ID)
    return b"".join(encoder.encode(logged) for logged in log)


def test_a_prompt_alone_is_enough():
    """Every field but the prompt has a default."""
    assert parse(prompt="Hi") == NativeRequest(
        generate=GenerateRequest(model="echo", prompt="Hi", unset=MODEL_DEFAULTS)
    )


def test_every_field_arrives():
    """All documented fields of one body are in the request."""
    sampling = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "seed": 7,
        "max_tokens": 64,
        "min_tokens": 2,
        "stop": ["\n\n", "END"],
        "stop_token_ids": [2, 3],
        "ignore_eos": True,
        "logprobs": 3,
    }
    around = {
        "n": 2,
        "chat_template_kwargs": {"enable_thinking": False},
        "timeout_seconds": 30,
        "model": "helpdesk",
        "latency_class": "document",
    }
    asked = parse(
        messages=[{"role": "user", "content": "Hi"}],
        on_disconnect="abort",
        format="native",
        metadata={"a": "b"},
        **sampling,
        **around,
    )
    expected = {**sampling, "stop": ("\n\n", "END"), "stop_token_ids": (2, 3)}
    assert asked == NativeRequest(
        generate=GenerateRequest(
            messages=(Message(role="user", content="Hi"),), sampling=SamplingParams(**expected), **around
        ),
        on_disconnect="abort",
        latency_class="document",
    )


@pytest.mark.parametrize(("field", "value"), [("seed", 2**63 - 1), ("seed", 0), ("n", 4), ("n", 1), ("logprobs", 20)])
@pytest.mark.parametrize(
    "extra", [{}, {"temperature": 2}, {"top_p": 1}, {"max_tokens": 16_384}, {"max_tokens": 5, "min_tokens": 5}]
)
def test_bounds_are_inclusive(field: str, value: int, extra: dict[str, Any]):
    """The largest and smallest allowed values pass."""
    assert parse(prompt="Hi", **{field: value}, **extra)


def test_null_is_absent():
    """A null field counts as absent: clients send null for fields that they do not set."""
    assert parse(prompt="Hi", messages=None, temperature=None, stop=None, format=None) == parse(prompt="Hi")


@pytest.mark.parametrize(("asked", "used"), [(0, 0.0), (-0.0, 0.0), (1e-320, 0.0), (0.0009, 0.0), (0.001, 0.001)])
def test_a_tiny_temperature_is_greedy(asked: float, used: float):
    """A temperature below 0.001 is 0: logits divided by less overflow."""
    assert parse(prompt="Hi", temperature=asked).generate.sampling.temperature == used


def test_a_query_spells_the_same_request():
    """Numbers, booleans and text of a query are typed by their field."""
    query = parse_query(prompt="42", temperature="0.5", max_tokens="8", ignore_eos="true", stop="1", model="true")
    assert query == parse(prompt="42", temperature=0.5, max_tokens=8, ignore_eos=True, stop="1", model="true")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "8.0"),
        ("max_tokens", ""),
        ("max_tokens", "٨"),
        ("temperature", "1e3"),
        ("temperature", "nan"),
        ("ignore_eos", "1"),
        ("messages", "[]"),
        ("metadata", "{}"),
        ("n", "+1"),
        ("seed", "9" * 30),
    ],
)
def test_a_query_value_of_another_type_is_refused(field: str, value: str):
    """A value that spells no number stays text, which the field refuses."""
    with pytest.raises(BadRequest) as caught:
        parse_query(prompt="Hi", **{field: value})
    assert (caught.value.code, caught.value.param) == ("invalid_type", field)


def test_the_wire_of_a_short_answer():
    """A short answer has exactly these bytes."""
    assert wire(success(tok("Hé", 5))).decode() == (
        f"event: meta\nid: {LOG_ID}-1\n"
        f'data: {{"model":"helpdesk","stream_id":"{"f" * 32}",'
        '"created":1700000000,"prompt_tokens":9,"cached_tokens":4}\n\n'
        f'event: status\nid: {LOG_ID}-2\ndata: {{"status":"prefill"}}\n\n'
        f'event: token\nid: {LOG_ID}-3\ndata: {{"text":"Hé","token_ids":[5],"index":0,"choice":0}}\n\n'
        f'event: meta\ndata: {{"model":"helpdesk","stream_id":"{"f" * 32}",'
        '"created":1700000000,"prompt_tokens":9,"cached_tokens":4,"latency":0.5,"latency_ms":500.0}\n\n'
        f"event: done\nid: {LOG_ID}-4\n"
        'data: {"finish_reason":"stop","totalTokens":2,"latency":0.5,"latency_ms":500.0,'
        '"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,"prompt_tokens_details":{"cached_tokens":4}},"breakdown":{"ttft":0.125}}\n\n'
    )


# As 0.1.0 writes them, which knows no block, citation, stop string or reasoning token.
GOLDEN: list[tuple[Event, str]] = [
    (
        Meta(model="m", stream_id="s", created=1, prompt_tokens=2, cached_tokens=3),
        '{"model":"m","stream_id":"s","created":1,"prompt_tokens":2,"cached_tokens":3}',
    ),
    (Status(status="queued", step=1, of=2, message="x"), '{"status":"queued","step":1,"of":2,"message":"x"}'),
    (Status(status="log_full", resumable=False), '{"status":"log_full","resumable":false}'),
    (Token(text="Hé", token_ids=(5, 300)), '{"text":"Hé","token_ids":[5,300],"index":0,"choice":0}'),
    (
        Token(text="", token_ids=(70000,), index=1, choice=2),
        '{"text":"","token_ids":[70000],"index":1,"choice":2}',
    ),
    (
        split_emoji(),
        '{"text":"🎉","token_ids":[11,12],"index":0,"choice":0,"logprobs":[{"token":"�","logprob":-0.25,'
        '"bytes":[240,159],"top_logprobs":[{"token":"�","logprob":-0.25,"bytes":[240,159]},{"token":"no",'
        '"logprob":-9999.0,"bytes":[110,111]}]},{"token":"��","logprob":-0.5,"bytes":[142,137],"top_logprobs":'
        '[{"token":"��","logprob":-0.5,"bytes":[142,137]},{"token":"no","logprob":-9999.0,"bytes":[110,111]}]}]}',
    ),
    (ChoiceDone(choice=1, finish_reason="length"), '{"choice":1,"finish_reason":"length"}'),
    (Error(code="c", message="m", retryable=True), '{"code":"c","message":"m","retryable":true}'),
    (
        Done(
            finish_reason="cancelled",
            usage=Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=4),
            latency=0.5,
            breakdown={"ttft": 0.125},
            kept_seq=3,
        ),
        '{"finish_reason":"cancelled","totalTokens":2,"latency":0.5,"latency_ms":500.0,"usage":{"prompt_tokens":9,"completion_tokens":2,'
        '"total_tokens":11,"prompt_tokens_details":{"cached_tokens":4}},"breakdown":{"ttft":0.125},"kept_seq":3}',
    ),
    (Snapshot(seq=9, choices=(ChoiceText(text="a"),)), '{"text":"a","seq":9}'),
    (
        Snapshot(seq=9, choices=(ChoiceText(text="a"), ChoiceText(text="b", finish_reason="stop"))),
        '{"text":"a","seq":9,"choices":[{"choice":0,"text":"a"},{"choice":1,"text":"b","finish_reason":"stop"}]}',
    ),
]
# Read by this release, and not yet written.
ADDED: list[tuple[Event, str]] = [
    (BlockStart(choice=1, index=2, kind="thinking"), '{"choice":1,"index":2,"kind":"thinking"}'),
    (
        BlockStart(choice=0, index=0, kind="tool_use", id="call_1", name="look_up"),
        '{"choice":0,"index":0,"kind":"tool_use","id":"call_1","name":"look_up"}',
    ),
    (BlockStop(choice=0, index=1), '{"choice":0,"index":1}'),
    (BlockStop(choice=0, index=1, signature="s"), '{"choice":0,"index":1,"signature":"s"}'),
    (Citation(source="docs", id="d"), '{"source":"docs","id":"d"}'),
    (
        Citation(source="docs", id="d", title="T", url="u", choice=0, index=1, start=0, end=4),
        '{"source":"docs","id":"d","title":"T","url":"u","choice":0,"index":1,"start":0,"end":4}',
    ),
    (
        Approval(id="call_1", name="pay", arguments='{"sum":5}'),
        '{"id":"call_1","name":"pay","arguments":"{\\"sum\\":5}"}',
    ),
    (
        Approval(id="call_1", name="pay", arguments="{}", message="Pay?"),
        '{"id":"call_1","name":"pay","arguments":"{}","message":"Pay?"}',
    ),
    (Unknown(kind="mood", fields=b"\x80"), '{"kind":"mood"}'),
    (
        ChoiceDone(choice=1, finish_reason="stop", stop_string="END"),
        '{"choice":1,"finish_reason":"stop","stop_string":"END"}',
    ),
    (
        Done(finish_reason="stop", usage=Usage(completion_tokens=3, reasoning_tokens=2), stop_string="END"),
        '{"finish_reason":"stop","totalTokens":3,"latency":0.0,"latency_ms":0.0,"usage":{"prompt_tokens":0,"completion_tokens":3,'
        '"total_tokens":3,"prompt_tokens_details":{"cached_tokens":0},'
        '"completion_tokens_details":{"reasoning_tokens":2}},"breakdown":{},"stop_string":"END"}',
    ),
    (
        Snapshot(
            seq=9,
            choices=(
                ChoiceText(
                    text="b",
                    blocks=(
                        BlockText(index=0, kind="thinking", text="a", signature="s"),
                        BlockText(index=1, kind="text", text="b", is_open=True),
                    ),
                ),
            ),
            citations=(Citation(source="docs", id="d"),),
        ),
        '{"text":"b","seq":9,"blocks":[{"index":0,"kind":"thinking","text":"a","signature":"s"},'
        '{"index":1,"kind":"text","text":"b","is_open":true}],"citations":[{"source":"docs","id":"d"}]}',
    ),
]


@pytest.mark.parametrize(("event", "data"), GOLDEN + ADDED, ids=lambda value: getattr(value, "type", ""))
def test_the_wire_of_each_event(event: Event, data: str):
    """Each event has exactly this frame; optional fields that are not given are left out."""
    frame_ = f"event: {event.type}\nid: {LOG_ID}-7\ndata: {data}\n\n"
    assert wire([LoggedEvent(seq=7, event=event)]) == frame_.encode()


def test_meta_comes_again_before_done_for_a_reader_in_the_middle():
    """An encoder that knows the stream does not need to have seen `meta`; an error has no second one."""

    class Known:
        id, model, created, has_token_ids, outline = "s" * 32, "helpdesk", 17, True, ()

    done = Done(finish_reason="stop", usage=Usage(prompt_tokens=9, cached_tokens=4), latency=1.25)
    frames = read_events([NativeEncoder(LOG_ID, Known()).encode(LoggedEvent(9, done))])
    assert [(one.event, one.id) for one in frames] == [("meta", ""), ("done", f"{LOG_ID}-9")]
    assert json.loads(frames[0].data) == {
        "model": "helpdesk",
        "stream_id": "s" * 32,
        "created": 17,
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "latency": 1.25,
        "latency_ms": 1250.0,
    }
    assert NativeEncoder(LOG_ID, Known()).encode(LoggedEvent(9, Error(code="c", message="m"))).count(b"event:") == 1


def test_the_notice_that_the_server_goes_away():
    """The notice has no id, so that an EventSource keeps that of the last event."""
    notice = GoingAway(stream_id="s", seq=12, retry_ms=870)
    assert NativeEncoder(LOG_ID).going_away(notice).decode() == (
        'event: farewell\nretry: 870\ndata: {"id":"s","after":12,"event_id":"abcdefghijkl-12","retry":870}\n\n'
    )


def test_a_failure_ends_in_an_error_event():
    """The last event has code, message, and whether to try again."""
    last = read_events(wire(failure(tok("Hi"))))[-1]
    assert last.event == "error"
    assert json.loads(last.data) == {
        "code": "engine_unavailable",
        "message": "The engine is gone.",
        "retryable": True,
    }


@pytest.mark.parametrize(
    "log", [two_choices(), success(split_emoji()), failure(), blocks()], ids=["n2", "logprobs", "failure", "blocks"]
)
def test_nothing_is_lost_on_the_wire(log: list[LoggedEvent]):
    """Every event comes back with its type, payload and number, over SSE and over WebSocket."""
    read = [(one.event, json.loads(one.data), one.id) for one in read_events(wire(log))]
    read = [one for one in read if one[0] != "meta" or "latency" not in one[1]]  # the one that `done` makes
    payloads = [json.loads(json.dumps(logged.event.payload())) for logged in log]
    assert read == [
        (logged.event.type, payload, f"{LOG_ID}-{logged.seq}") for logged, payload in zip(log, payloads, strict=True)
    ]
    frames = [json.loads(json.dumps(native.websocket_message("s1", LOG_ID, logged), allow_nan=False)) for logged in log]
    assert [(one["event"], one["data"], one["event_id"]) for one in frames] == read
    assert {(one["type"], one["id"]) for one in frames} == {("event", "s1")}


def test_split_code_points_keep_their_bytes():
    """Logprobs have each token's own bytes, though its text comes whole; a masked token has a finite number."""
    (token,) = [json.loads(one.data) for one in read_events(wire(success(split_emoji()))) if one.event == "token"]
    assert token["text"] == "🎉"
    assert bytes(byte for position in token["logprobs"] for byte in position["bytes"]).decode() == "🎉"
    assert token["logprobs"][0]["top_logprobs"][1] == {"token": "no", "logprob": -9999.0, "bytes": [110, 111]}


@given(st.lists(st.tuples(st.text(), st.integers(0, 1)), max_size=20), st.integers(1, 8))
def test_coalescing_loses_no_text(pieces: list[tuple[str, int]], max_tokens: int):
    """However tokens are joined, each choice's text and ids are the same, and ids rise."""
    log = success(*[tok(text, number, choice=choice) for number, (text, choice) in enumerate(pieces)])
    joined = coalesce(log, max_tokens=max_tokens)

    def texts(events: list[LoggedEvent]) -> list[tuple[str, list[int]]]:
        tokens = [json.loads(one.data) for one in read_events(wire(events)) if one.event == "token"]
        by_choice = [[token for token in tokens if token["choice"] == choice] for choice in (0, 1)]
        return [("".join(t["text"] for t in ts), [i for t in ts for i in t["token_ids"]]) for ts in by_choice]

    assert texts(joined) == texts(log)
    assert [one.seq for one in joined] == sorted({one.seq for one in joined})


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1)), max_size=20), st.integers(1, 8))
def test_coalescing_joins_all_it_may(pieces: list[tuple[int, int]], max_tokens: int):
    """Neighbours of one choice stay apart only where together they would be too many."""
    log = success(*[tok("x", *range(num_ids), choice=choice) for num_ids, choice in pieces])
    tokens = [one.event for one in coalesce(log, max_tokens=max_tokens) if isinstance(one.event, Token)]
    sizes = [len(token.token_ids) for token in tokens]
    assert all(size <= max_tokens or token.text == "x" for size, token in zip(sizes, tokens, strict=True))
    firsts = [pieces[place][0] for place in _places(tokens)]  # of the pieces that each begins with
    for place in range(1, len(tokens)):
        if tokens[place - 1].choice == tokens[place].choice:
            assert sizes[place - 1] + firsts[place] > max_tokens


def _places(tokens: list[Token]) -> list[int]:
    """Return how many pieces lie before each token."""
    return list(accumulate((len(token.text) for token in tokens[:-1]), initial=0)) if tokens else []


def test_coalescing_keeps_blocks_apart():
    """Tokens of two blocks are never joined, and every other event keeps its place."""
    joined = coalesce(blocks())
    assert [one.event.type for one in joined if one.event.type != "token"] == [
        one.event.type for one in blocks() if one.event.type != "token"
    ]
    tokens = [one.event for one in joined if isinstance(one.event, Token)]
    assert [(token.index, token.text) for token in tokens] == [(0, "Hm."), (1, "Hello"), (2, '{"a":1}')]


@given(st.text(), st.lists(st.integers(0, 2**31), max_size=6), st.integers(0, 3), st.integers(0, 9))
def test_a_token_is_framed_like_any_event(text: str, token_ids: list[int], choice: int, index: int):
    """The written-out encoding of a token gives the bytes of the general one, whatever the text."""
    event = Token(text=text, token_ids=tuple(token_ids), choice=choice, index=index)
    logged = LoggedEvent(seq=7, event=event)
    assert wire([logged]) == frame(one_line_json(event.payload()), event="token", id=f"{LOG_ID}-7")


def test_an_error_response_has_three_fields():
    """An error response is code, message and param."""
    body = ErrorBody(code="model_not_found", message="No.", param="model", http_status=404)
    assert native.error_json(body) == {"error": {"code": "model_not_found", "message": "No.", "param": "model"}}
