"""`/v1/messages` through Django alone: shapes, errors, resumes, counts, models; a pipeline's citations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve import Run, pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.message_checks import check_message, events_in, folded
from tests.support.streams.hand_made import Gate

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

VERSION = {"anthropic-version": "2023-06-01"}
KEY = {"Idempotency-Key": "a-key-of-the-caller"}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 7, **fields}


async def test_streamed_and_whole_are_the_same_message(caller: Caller) -> None:
    """One log, two shapes; the same text as in the native stream; the id is the stream's."""
    response = await caller.post("/v1/messages", ask())
    whole = response.json()
    streamed = await caller.post("/v1/messages", ask(stream=True))
    assert streamed["Content-Type"] == "text/event-stream; charset=utf-8"
    message = check_message(await body_of(streamed))
    native = (await caller.post("/v1/chat/completions", ask())).json()
    assert whole["content"] == message["content"]
    assert whole["content"] == [{"type": "text", "text": native["choices"][0]["message"]["content"]}]
    assert whole["stop_reason"] == message["stop_reason"] == "max_tokens"
    assert whole["id"] == f"msg_{response['X-Stream-Id']}"
    usage = whole["usage"]
    assert usage["output_tokens"] == 8
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == native["usage"]["prompt_tokens"]
    assert response["Request-Id"] == response["X-Request-Id"]
    assert streamed["Request-Id"] == streamed["X-Request-Id"]


async def test_a_stop_sequence_is_named(caller: Caller) -> None:
    """The answer ends before it, and says which one it was."""
    text = (await caller.post("/v1/messages", ask())).json()["content"][0]["text"]
    stop = text[2:5]
    message = (await caller.post("/v1/messages", ask(stop_sequences=["never here", stop]))).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]


async def test_a_prefill_is_continued(caller: Caller) -> None:
    """The prompt ends in the assistant's words, and no turn of its own is opened after them."""
    prefill = {"role": "assistant", "content": "The answer is"}
    messages = [{"role": "user", "content": "hi"}, prefill]
    chat = ask(messages=messages, continue_final_message=True)
    expected = (await caller.post("/v1/chat/completions", chat)).json()["choices"][0]["message"]["content"]
    assert (await caller.post("/v1/messages", ask(messages=messages))).json()["content"][0]["text"] == expected


async def test_x_api_key_is_taken(alice_key: str) -> None:
    """As older clients of this API send it; without a key or with a wrong one it is a 401 in this shape."""
    nobody = Caller()
    assert (await nobody.post("/v1/messages", ask(), **{"x-api-key": alice_key})).status_code == 200
    for headers, code in (({}, "unauthorized"), ({"x-api-key": "sk-wrong"}, "invalid_api_key")):
        refused = await nobody.post("/v1/messages", ask(), **headers)
        error = refused.json()
        assert (refused.status_code, error["error"]["type"]) == (401, "authentication_error")
        assert error["error"]["code"] == code


async def test_errors_are_in_anthropics_shape(caller: Caller) -> None:
    """type, message, request id; and our code and param beside."""
    refused = await caller.post("/v1/messages", ask(temperature=9))
    body = refused.json()
    message = body["error"].pop("message")
    assert message.endswith(".")
    assert body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "code": "invalid_value",
            "param": "temperature",
            "details": {"error_code": "invalid_value"},
        },
        "request_id": refused["Request-Id"],
    }
    unknown = await caller.post("/v1/messages", ask(model="nope"))
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    wrong_verb = await caller.get("/v1/messages")
    assert (wrong_verb.status_code, wrong_verb.json()["type"], wrong_verb["Allow"]) == (405, "error", "POST")


async def test_under_v1_the_version_header_chooses_the_shape(caller: Caller) -> None:
    """An unknown address and an unknown model are errors of the API that the client speaks, or whose address it is."""
    for path in ("/v1/messages/nowhere", "/v1/models/nope", "/v1/nowhere"):
        theirs = (await caller.get(path, **VERSION)).json()
        assert (theirs["type"], theirs["error"]["type"]) == ("error", "not_found_error")
        assert ("type" in (await caller.get(path)).json()) is path.startswith("/v1/messages/")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_the_engine_refuses_is_named_by_its_own_field(caller: Caller, is_stream: bool) -> None:
    """A schema that cannot be compiled, and a tool that cannot be forced."""
    schema = {"type": "strange"}
    refused = await caller.post(
        "/v1/messages", ask(stream=is_stream, output_config={"format": {"type": "json_schema", "schema": schema}})
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "output_config.format")
    long = await caller.post("/v1/messages", ask(stream=is_stream, max_tokens=16_384, messages=[
        {"role": "user", "content": "hi " * 60_000}]))  # fmt: skip
    assert (long.status_code, long.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_an_engine_that_dies_is_an_error(caller: Caller) -> None:
    """Whole: a 503 in this shape. Streamed: one `error` event, and no `message_stop`."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        response = await caller.post("/v1/messages", ask(max_tokens=1000, stream=True))
        chunks = aiter(response)
        body = await anext(chunks)
        while b"text_delta" not in body:
            body += await anext(chunks)
        await site.get_site().clients["echo"].aclose()
        async for chunk in chunks:
            body += chunk
        *_, (read, last) = events_in(body)
        assert (read.event, last["error"]["type"]) == ("error", "overloaded_error")
        assert b"message_stop" not in body
        refused = await caller.post("/v1/messages", ask())
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        assert refused["Retry-After"]
        await site.reset()


async def test_a_message_is_resumed(caller: Caller, site_gate: Gate) -> None:
    """With an Idempotency-Key it is parked when its reader leaves; the rest comes after the last id, in any shape."""
    whole = check_message(await body_of(await caller.post("/v1/messages", ask(max_tokens=40, stream=True))))
    await site.reset()
    await until_ready()
    site_gate.allow(8)
    response = await caller.post("/v1/messages", ask(max_tokens=40, stream=True), **KEY)
    chunks = aiter(response)
    part = b""
    while b"text_delta" not in part:
        part += await anext(chunks)
    await chunks.aclose()
    part = part[: part.rindex(b"\n\n") + 2]
    [stream] = site.get_site().streams.all()
    await until(lambda: stream.state == "parked")
    site_gate.open()
    _, is_over = folded(part)
    assert not is_over
    last_id = [read.id for read, _ in events_in(part)][-1]
    path = f"/v1/streams/{response['X-Stream-Id']}/events"
    rest = await body_of(await caller.get(path, **VERSION, **{"Last-Event-ID": last_id}))
    message = check_message(part + rest)
    assert (message["content"], message["usage"]["output_tokens"]) == (whole["content"], 40)
    again = await body_of(await caller.post("/v1/messages", ask(max_tokens=40, stream=True), **KEY))
    assert check_message(again)["id"] == message["id"]
    shown = await body_of(await caller.get(f"/streams/{response['X-Stream-Id']}/events?format=anthropic"))
    assert check_message(shown)["content"] == whole["content"]
    assert (await caller.post("/v1/messages", ask(max_tokens=41), **KEY)).status_code == 422
    await site.reset()


async def test_without_a_key_leaving_stops_the_answer(caller: Caller) -> None:
    """As in the public API."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        response = await caller.post("/v1/messages", ask(max_tokens=1000, stream=True))
        chunks = aiter(response)
        await anext(chunks)
        [stream] = site.get_site().streams.all()
        await chunks.aclose()
        await until(stream.ended.is_set)
        assert stream.summary().finish_reason == "abandoned"
        await site.reset()


async def test_tokens_are_counted(caller: Caller) -> None:
    """As many as the message's usage has, and nothing is generated."""
    prompt = {name: one for name, one in ask(system="Be brief.").items() if name in ("model", "messages", "system")}
    counted = await caller.post("/v1/messages/count_tokens", prompt)
    usage = (await caller.post("/v1/messages", ask(system="Be brief."))).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert len(site.get_site().streams.all()) == 1
    unknown = await caller.post("/v1/messages/count_tokens", {**prompt, "model": "nope"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.fixture
def own_system() -> Iterator[None]:
    """A site that has a system prompt of its own."""
    conf = {"TESTING": True, "MODELS": {"echo": {"PATH": "echo", "SYSTEM": "You are the help desk of a shop."}}}
    with override_settings(STREAMSERVE=conf):
        yield


async def test_the_sites_own_system_prompt_is_counted(own_system: None, caller: Caller) -> None:
    """A count is that of the prompt that the model gets."""
    await site.reset()
    await until_ready()
    usage = (await caller.post("/v1/messages", ask())).json()["usage"]
    prompt = {"model": "echo", "messages": ask()["messages"]}
    counted = (await caller.post("/v1/messages/count_tokens", prompt)).json()["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    given = (await caller.post("/v1/messages/count_tokens", {**prompt, "system": "Hi."})).json()["input_tokens"]
    assert given < counted
    await site.reset()


async def test_models_in_anthropics_shape(caller: Caller) -> None:
    """With the version header; in pages, as its clients read them."""
    listed = (await caller.get("/v1/models", **VERSION)).json()
    (model,) = listed["data"]
    assert (model["type"], model["id"], model["display_name"], model["lifecycle"]) == (
        "model",
        "echo",
        "echo",
        "active",
    )
    assert model["created_at"].endswith("Z")
    assert {name: listed[name] for name in ("has_more", "first_id", "last_id")} == {
        "has_more": False, "first_id": "echo", "last_id": "echo"
    }  # fmt: skip
    assert (await caller.get("/v1/models/echo", **VERSION)).json() == model
    after = (await caller.get("/v1/models?after_id=echo&limit=1", **VERSION)).json()
    assert after == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("before_id=nope", "before_id")):
        refused = await caller.get(f"/v1/models?{query}", **VERSION)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await caller.get("/v1/models")).json()["object"] == "list"


async def bills(run: Run) -> None:
    """Answer a question about a bill."""
    await run.step("Looking it up", _found, of=1)
    run.cite("help", id="7", title="Bills", url="/help/7/")
    run.cite("help", id="8")
    await run.generate("bills", max_tokens=8, seed=7, ignore_eos=True)


def _found() -> str:
    return "found"


@pytest.fixture
async def with_pipeline(caller: Caller) -> AsyncIterator[None]:
    await site.reset()
    pipeline("bills")(bills)
    try:
        await until_ready()
        yield
        await site.reset()
    finally:
        forget("bills")


async def test_a_pipelines_citations_are_its_texts(caller: Caller, with_pipeline: None) -> None:
    """An alias of a pipeline is a model; its citations are in Anthropic's shape, and its steps are left out."""
    whole = (await caller.post("/v1/messages", ask(model="bills"))).json()
    streamed = check_message(await body_of(await caller.post("/v1/messages", ask(model="bills", stream=True))))
    (text,) = whole["content"]
    assert streamed["content"] == [text]
    place = {"cited_text": "", "start_block_index": 0, "end_block_index": 1}
    assert text["citations"] == [
        {"type": "search_result_location", "search_result_index": 0, "source": "/help/7/", "title": "Bills", **place},
        {"type": "search_result_location", "search_result_index": 1, "source": "help/8", "title": None, **place},
    ]
    assert text["text"]
    assert "Looking" not in json.dumps(whole)
