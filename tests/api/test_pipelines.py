"""Laws of the pipelines' routes: the same run as JSON, as a stream, over a WebSocket, under /v1 and from Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator
from django.core.exceptions import ImproperlyConfigured
from django.test.utils import override_settings

from streamserve import Run, pipeline, routing, run_pipeline
from streamserve.clients.pipeline.registry import forget
from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.stream_checks import check_native, parse_sse, text_of

pytestmark = pytest.mark.django_db(transaction=True)

PROMPT = {"messages": [{"role": "user", "content": "Where is my bill?"}], "seed": 7}


async def bills(run: Run) -> None:
    """Answer a question about a bill."""
    found = await run.step("Looking it up", _search, run.question or run.input["question"], of=1)
    run.cite("help", id="7", title="Bills", url="/help/7/")
    await run.generate(f"{found}", max_tokens=8, seed=7, ignore_eos=True)


def _search(question: str) -> str:
    return f"{question} {StreamRow.objects.count() >= 0}"  # a query, as a retrieval makes


@pytest.fixture
async def caller(transactional_db: Any, alice_key: str) -> AsyncIterator[Caller]:
    pipeline("bills")(bills)
    try:
        await until_ready()
        yield Caller(key=alice_key)
        await site.reset()
    finally:
        forget("bills")


async def test_json_stream_socket_openai_and_python_are_the_same_answer(caller: Caller) -> None:
    """One pipeline, five deliveries, one text; JSON and Python have the steps and the citations."""
    whole = (await caller.post("/pipelines/bills", PROMPT)).json()
    assert whole["text"]
    assert whole["steps"] == [{"status": "step", "step": 1, "of": 1, "message": "Looking it up"}]
    assert whole["citations"] == [{"source": "help", "id": "7", "title": "Bills", "url": "/help/7/"}]
    assert (whole["pipeline"], whole["finish_reason"], whole["usage"]["completion_tokens"]) == ("bills", "length", 8)

    streamed = check_native(await body_of(await caller.post("/pipelines/bills", {**PROMPT, "stream": True})))
    accepted = check_native(await body_of(await caller.post("/pipelines/bills", PROMPT, accept="text/event-stream")))
    native = check_native(await body_of(await caller.post("/streams", {**PROMPT, "model": "bills"})))
    assert text_of(streamed) == text_of(accepted) == text_of(native) == whole["text"]
    assert [frame.event for frame in streamed if frame.event in ("status", "citation")] == ["status", "citation"]

    chat = (await caller.post("/v1/chat/completions", {**PROMPT, "model": "bills"})).json()
    assert chat["choices"][0]["message"]["content"] == whole["text"]
    cited = {"url": "/help/7/", "title": "Bills", "start_index": 0, "end_index": 0}
    assert chat["choices"][0]["message"]["annotations"] == [{"type": "url_citation", "url_citation": cited}]
    chunks = parse_sse(
        await body_of(await caller.post("/v1/chat/completions", {**PROMPT, "model": "bills", "stream": True}))
    )
    shown = [one for chunk in chunks[:-1] for one in chunk.json["choices"][0]["delta"].get("annotations", [])]
    assert shown == [{"index": 0, "type": "url_citation", "url_citation": cited}]
    assert "bills" in [model["id"] for model in (await caller.get("/v1/models")).json()["data"]]

    result = await run_pipeline("bills", "Where is my bill?", tenant="site", seed=7)
    assert (str(result), result.citations[0]["id"], len(result.steps)) == (whole["text"], "7", 1)
    assert await over_websocket(caller) == whole["text"]


async def over_websocket(caller: Caller) -> str:
    headers = [(b"host", b"testserver"), (b"authorization", caller.headers["authorization"].encode())]
    socket = WebsocketCommunicator(routing.application, "/ws/streams", headers=headers)
    assert (await socket.connect())[0]
    await socket.send_json_to({"type": "start", "request": {**PROMPT, "model": "bills"}})
    text, event = "", ""
    while event not in ("done", "error"):
        message = json.loads(await socket.receive_from(timeout=30))
        event = message.get("event", "")
        text += message["data"]["text"] if event == "token" else ""
    await socket.disconnect()
    return text


async def test_input_without_a_conversation(caller: Caller) -> None:
    """A pipeline takes a JSON object of its own; a model refuses it."""
    whole = (await caller.post("/pipelines/bills", {"input": {"question": "Why?"}})).json()
    assert whole["text"]
    refused = await caller.post("/streams", {"prompt": "a", "input": {"question": "Why?"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert (await caller.post("/pipelines/bills", {})).status_code == 400


async def test_the_list_and_an_unknown_one(caller: Caller) -> None:
    """Names, models and descriptions; an unknown name is a 404 that has the known ones; a model is no pipeline."""
    listed = (await caller.get("/pipelines")).json()["pipelines"]
    assert listed == [{"name": "bills", "model": "echo", "description": "Answer a question about a bill."}]
    for name in ("nosuch", "echo"):
        missing = await caller.post(f"/pipelines/{name}", PROMPT)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "pipeline_not_found")
        assert "bills" in missing.json()["error"]["message"]
    assert (await Caller().post("/pipelines/bills", PROMPT)).status_code == 401


async def test_a_link_starts_a_run_where_the_site_allows_it(caller: Caller) -> None:
    """The query is the input, as text; access logs have it, so the setting is off by default."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "PROMPT_IN_URL": False}):
        refused = await caller.get("/pipelines/bills?question=Why")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "prompt_in_url_off")
        await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "PROMPT_IN_URL": True}):
        await until_ready()
        whole = (await caller.get("/pipelines/bills?question=Why")).json()
        streamed = await caller.get("/pipelines/bills?question=Why", accept="text/event-stream")
        frames = check_native(await body_of(streamed))
        assert (text_of(frames), frames[-1].event) == (whole["text"], "done")
        again = {"accept": "text/event-stream", "last-event-id": frames[-2].id}
        rest = parse_sse(await body_of(await caller.get("/pipelines/bills", **again)))
        assert [frame.event for frame in rest] == ["meta", "done"]
        await site.reset()


async def test_the_row_is_the_pipeline_s(caller: Caller) -> None:
    """It is listed by its own name, and counts its tokens."""
    response = await caller.post("/pipelines/bills", PROMPT)
    stream_id = response["X-Stream-Id"]

    async def is_finished() -> bool:
        row = await StreamRow.objects.aget(pk=stream_id)
        return row.state == "finished" and (row.model, row.completion_tokens) == ("bills", 8)

    for _ in range(200):
        if await is_finished():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the row is not finished")


async def test_a_key_sent_again_is_shown_the_same_run(caller: Caller) -> None:
    """An Idempotency-Key starts one run."""
    first = (await caller.post("/pipelines/bills", PROMPT, **{"idempotency-key": "a1"})).json()
    again = (await caller.post("/pipelines/bills", PROMPT, **{"idempotency-key": "a1"})).json()
    assert first["id"] == again["id"]


async def test_a_name_that_a_model_has_is_refused(transactional_db: Any) -> None:
    """A request could reach only one of the two; a model that the site lacks would fail each run."""
    for name, options, match in (("echo", {}, "name of a model"), ("p", {"model": "nosuch"}, "nosuch")):
        pipeline(name, **options)(bills)
        try:
            with pytest.raises(ImproperlyConfigured, match=match):
                site.get_site()
        finally:
            forget(name)
            await site.reset()


async def test_json_has_the_error_of_the_run(caller: Caller) -> None:
    """A run that fails has the status of its error, not a 200 with half an answer."""

    async def failing(run: Run) -> None:
        await run.say("half")
        raise RuntimeError("why")

    pipeline("failing")(failing)
    try:
        await site.reset()
        await until_ready()
        response = await caller.post("/pipelines/failing", PROMPT)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "pipeline_failed")
        assert b"half" not in response.content
    finally:
        forget("failing")
