"""Laws of the chat completion fold: golden frames, golden objects, and how each ending looks."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.dialects.fold import Answer
from streamserve.dialects.openai.chat import ChatEncoder, completion_json
from streamserve.dialects.openai.shapes import error_json, fingerprint, models_json
from streamserve.protocol.engine import ModelDescription
from streamserve.protocol.errors import Cancelled, EngineUnavailable, ErrorBody, StreamserveError
from streamserve.protocol.events import LoggedEvent
from tests.support.bodies.event_logs import IDENTITY, LOG_ID, failure, split_emoji, success, tok, two_choices
from tests.support.checks.sse_reader import read_events

HEAD = (
    '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"helpdesk",'
    f'"system_fingerprint":"{fingerprint("helpdesk")}","choices":['
)


def wire(log: list[LoggedEvent], **options: Any) -> bytes:
    """Return the whole log encoded."""
    encoder = ChatEncoder(LOG_ID, **options, **IDENTITY)
    return b"".join(encoder.encode(logged) for logged in log)


def chunks(log: list[LoggedEvent], **options: Any) -> list[Any]:
    """Return the frames' data, decoded; `[DONE]` as text."""
    return [one.data if one.data == "[DONE]" else json.loads(one.data) for one in read_events(wire(log, **options))]


def completion_of(log: list[LoggedEvent], *, n: int = 1, **options: Any) -> dict[str, Any]:
    """Return the log's answer as it is when it is not streamed."""
    return completion_json(Answer.of(log, n), **options, **IDENTITY)


def test_the_wire_of_a_short_answer():
    """A short answer has exactly these bytes: role, delta, finish, [DONE]; each frame has an id of its own."""
    nothing = '"logprobs":null,"finish_reason":null}]}'
    assert wire(success(tok("Hé"))).decode() == (
        f"id: {LOG_ID}-2:c1\n"
        f'data: {HEAD}{{"index":0,"delta":{{"role":"assistant","content":"","refusal":null}},{nothing}\n\n'
        f'id: {LOG_ID}-3\ndata: {HEAD}{{"index":0,"delta":{{"content":"Hé"}},{nothing}\n\n'
        f'id: {LOG_ID}-3:c1\ndata: {HEAD}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        f"id: {LOG_ID}-4\ndata: [DONE]\n\n"
    )


def test_two_choices_are_kept_apart():
    """Each choice has its own role chunk first and its own finish chunk last, with its own reason."""
    seen = [chunk["choices"][0] for chunk in chunks(two_choices(), n=2)[:-1]]
    by_choice = {index: [one for one in seen if one["index"] == index] for index in (0, 1)}
    for index, text, reason in ((0, "AB", "stop"), (1, "x", "length")):
        first, *deltas, last = by_choice[index]
        assert first["delta"]["role"] == "assistant"
        assert "".join(one["delta"]["content"] for one in deltas) == text
        assert {one["finish_reason"] for one in (first, *deltas)} == {None}
        assert (last["delta"], last["finish_reason"]) == ({}, reason)


def test_a_choice_without_tokens_is_finished_too():
    """An answer of no tokens still has its role and its finish chunk."""
    seen = [chunk["choices"][0] for chunk in chunks(success(reason="length"), n=2)[:-1]]
    assert [one["index"] for one in seen] == [0, 0, 1, 1]
    assert [one["finish_reason"] for one in seen] == [None, "length"] * 2


def test_usage_is_sent_when_asked_for():
    """One chunk without choices comes before [DONE]; every other chunk has null usage, as in the public API."""
    *others, last, done = chunks(success(tok("Hi")), include_usage=True)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert [chunk["usage"] for chunk in others] == [None] * 3
    assert all("usage" not in chunk for chunk in chunks(success(tok("Hi")))[:-1])


@pytest.mark.parametrize("text", ["a", "ab", "Hé", "x" * 70, '"\\"'])
def test_an_obfuscated_delta_has_a_round_size(text: str):
    """With `include_obfuscation` a delta's JSON has a multiple of 64 bytes, and is the same otherwise."""
    [_, delta, *_] = [one.data for one in read_events(wire(success(tok(text)), include_obfuscation=True))]
    assert len(delta.encode()) % 64 == 0
    decoded = json.loads(delta)
    assert set(decoded.pop("obfuscation")) <= {"0"}
    assert decoded == chunks(success(tok(text)))[1]


def test_logprobs_carry_split_code_points():
    """The bytes of the tokens join to the text; minus infinity is -9999."""
    chunk = chunks(success(split_emoji()))[1]["choices"][0]
    assert chunk["delta"] == {"content": "🎉"}
    first, second = chunk["logprobs"]["content"]
    assert chunk["logprobs"]["refusal"] is None
    assert bytes(first["bytes"] + second["bytes"]).decode() == "🎉"
    assert first["top_logprobs"][0] == {"token": "�", "logprob": -0.25, "bytes": [240, 159]}
    assert first["top_logprobs"][1]["logprob"] == -9999.0


def test_a_token_without_text_makes_no_frame_unless_it_has_logprobs():
    """Half a code point makes no chunk; its log probability does."""
    position = split_emoji().logprobs
    assert position is not None
    assert len(chunks(success(tok("")))) == 3
    assert chunks(success(tok("", logprobs=position[:1])))[1]["choices"][0]["delta"] == {"content": ""}


@pytest.mark.parametrize(
    ("log", "code", "kind"),
    [
        (failure(tok("Hi")), "engine_unavailable", "server_error"),
        (failure(), "engine_unavailable", "server_error"),
        (success(tok("Hi"), reason="cancelled"), "cancelled", "invalid_request_error"),
        (success(tok("Hi"), reason="abandoned"), "abandoned", "invalid_request_error"),
    ],
)
def test_only_success_is_done(log: list[LoggedEvent], code: str, kind: str):
    """A stream that did not succeed ends in one error frame, without finish chunk, usage or [DONE]."""
    *deltas, last = chunks(log, include_usage=True)
    assert set(last) == {"error"}
    assert (last["error"]["code"], last["error"]["type"], last["error"]["param"]) == (code, kind, None)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in deltas)


@given(st.lists(st.tuples(st.text(), st.integers(0, 1)), max_size=12))
def test_stream_and_collected_agree(pieces: list[tuple[str, int]]):
    """The deltas of each choice join to its collected content; both end with the same reason."""
    log = success(*[tok(text, choice=choice) for text, choice in pieces])
    whole = completion_of(log, n=2)
    *seen, _, done = chunks(log, n=2, include_usage=True)
    assert done == "[DONE]"
    for choice in whole["choices"]:
        mine = [one["choices"][0] for one in seen if one["choices"][0]["index"] == choice["index"]]
        assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


def test_a_collected_answer():
    """A whole answer is exactly this object."""
    assert completion_of(two_choices(), n=2) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "helpdesk",
        "system_fingerprint": fingerprint("helpdesk"),
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, text, reason in ((0, "AB", "stop"), (1, "x", "length"))
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_collected_logprobs_join():
    """A whole answer has the positions of all tokens in order."""
    (choice,) = completion_of(success(split_emoji(), split_emoji()))["choices"]
    assert bytes(byte for one in choice["logprobs"]["content"] for byte in one["bytes"]).decode() == "🎉🎉"


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (failure(tok("Hi")), EngineUnavailable),
        (success(tok("Hi"), reason="cancelled"), Cancelled),
        (success(tok("Hi"), reason="abandoned"), Cancelled),
    ],
)
def test_collecting_a_failure_raises_it(log: list[LoggedEvent], error: type[StreamserveError]):
    """A failure raises: half an answer is never a 200."""
    with pytest.raises(error):
        completion_of(log)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_error_objects_have_a_type(status: int, kind: str):
    """Each status has the type that clients branch on."""
    body = ErrorBody(code="c", message="m", param="p", http_status=status)
    assert error_json(body) == {"error": {"message": "m", "type": kind, "param": "p", "code": "c"}}


def test_the_models_list():
    """A model has its alias as id, and its context length where it is known."""
    ready = ModelDescription(alias="helpdesk", state="ready", created=5, max_model_len=1024)
    model = {"object": "model", "owned_by": "streamserve"}
    found = models_json([ready, ModelDescription(alias="other", state="idle")])
    assert found["object"] == "list"
    assert found["data"] == [
        {"id": "helpdesk", "created": 5, "max_model_len": 1024, **model},
        {"id": "other", "created": 0, **model},
    ]
