"""Laws of the pipelines' routes: the same run as JSON, as a stream, over a WebSocket, under /v1 and from Python."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator
from django.core.exceptions import ImproperlyConfigured
from django.test.utils import override_settings

from streamserve import Run, pipeline, routing, run_pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import check_native, parse_sse, text_of
from tests.support.sites.rows import in_row

pytestmark = pytest.mark.django_db(transaction=True)

PROMPT = {"messages": [{"role": "user", "content": "Where is my bill?"}], "seed": 7}


async def bills(run: Run) -> None:
    """Answer a question about a bill."""
    question = run.question or run.input["question"]
    found = await run.step("Looking it up", _search, question, of=1, phase="retrieval")
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


async def test_a_run_s_state_and_events_are_on_every_way(caller: Caller) -> None:
    """As JSON, as a stream, over a WebSocket and from Python; the state begins with the request's."""

    async def stateful(run: Run) -> None:
        run.state["seen"] = run.state["page"] + 1
        run.emit("chart", [1, 2])
        run.state["over"] = True
        await run.say("text")

    pipeline("stateful")(stateful)
    await site.reset()
    await until_ready()
    body = {"prompt": "hi", "state": {"page": 3}}
    state, customs = {"page": 3, "seen": 4, "over": True}, [{"name": "chart", "value": [1, 2]}]
    events = [
        ("state", {"snapshot": {"page": 3, "seen": 4}}),
        ("custom", customs[0]),
        ("state", {"delta": [{"op": "add", "path": "/over", "value": True}]}),
    ]
    try:
        whole = (await caller.post("/pipelines/stateful", body)).json()
        assert (whole["state"], whole["customs"]) == (state, customs)
        frames = check_native(await body_of(await caller.post("/streams", {**body, "model": "stateful"})))
        assert [(one.event, one.json) for one in frames if one.event in ("state", "custom")] == events
        told = await messages_of(caller, {"type": "start", "request": {**body, "model": "stateful"}})
        assert [(one["event"], one["data"]) for one in told if one.get("event") in ("state", "custom")] == events
        result = await run_pipeline("stateful", "hi", state={"page": 3}, tenant="site")
        assert (result.state, list(result.customs)) == (state, customs)
        refused = await caller.post("/pipelines/stateful", {"prompt": "hi", "state": {"a": "x" * 70_000}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "state")
    finally:
        forget("stateful")


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
    messages = await messages_of(caller, {"type": "start", "request": {**PROMPT, "model": "bills"}})
    return "".join(one["data"]["text"] for one in messages if one.get("event") == "token")


async def messages_of(caller: Caller, start: dict[str, Any]) -> list[dict[str, Any]]:
    """Send one message; return those that come until the answer ends."""
    headers = [(b"host", b"testserver"), (b"authorization", caller.headers["authorization"].encode())]
    socket = WebsocketCommunicator(routing.application, "/ws/streams", headers=headers)
    assert (await socket.connect())[0]
    await socket.send_json_to(start)
    messages: list[dict[str, Any]] = [{}]
    while messages[-1].get("event") not in ("done", "error"):
        messages.append(json.loads(await socket.receive_from(timeout=30)))
    await socket.disconnect()
    return messages[1:]


async def test_input_without_a_conversation(caller: Caller) -> None:
    """A pipeline takes a JSON object of its own; a model refuses it."""
    whole = (await caller.post("/pipelines/bills", {"input": {"question": "Why?"}})).json()
    assert whole["text"]
    refused = await caller.post("/streams", {"prompt": "a", "input": {"question": "Why?"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert (await caller.post("/pipelines/bills", {})).status_code == 400


async def test_the_list_and_an_unknown_one(caller: Caller) -> None:
    """Names, titles, models, descriptions; an unknown name is a 404 that has the known ones; a model is no pipeline."""
    listed = (await caller.get("/pipelines")).json()["pipelines"]
    description = "Answer a question about a bill."
    assert listed == [{"name": "bills", "title": "Bills", "model": "echo", "description": description}]
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

    row = await in_row(stream_id, state="finished")
    assert (row.model, row.completion_tokens) == ("bills", 8)


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


async def test_where_the_time_went_is_in_done_the_state_and_the_row(caller: Caller) -> None:
    """`phases` of JSON, of GET /streams/{id} and of the row are one; they add up, and know when the client sent."""
    sent = {"x-request-start": f"t={time.time() - 0.2:.6f}"}
    response = await caller.post("/pipelines/bills", PROMPT, **sent)
    whole, stream_id = response.json(), response["X-Stream-Id"]
    state = (await caller.get(f"/streams/{stream_id}")).json()
    assert state["phases"] == whole["phases"]
    row = await in_row(stream_id, state="finished")
    assert row.phases == whole["phases"]
    phases = dict(whole["phases"])
    assert 0.2 <= phases.pop("network_in") < 30.0
    assert {"auth", "intake", "retrieval", "generation"} <= phases.keys()
    assert sum(phases.values()) == pytest.approx(whole["latency"], abs=1e-3)
    assert state["latency"] == pytest.approx(whole["latency"], abs=1e-3)


async def test_where_the_time_went_of_a_run_that_fails(caller: Caller) -> None:
    """The row and GET /streams/{id} have the run's own phases up to its failure; they add up to the latency."""

    async def slow(run: Run) -> None:
        await run.step("Looking", asyncio.sleep, 0.05, phase="retrieval")
        raise ValueError("broken")

    pipeline("slow")(slow)
    try:
        await site.reset()
        await until_ready()
        response = await caller.post("/streams", {**PROMPT, "model": "slow"})
        assert b"pipeline_failed" in await body_of(response)
        row = await in_row(response["X-Stream-Id"], state="finished")
        state = (await caller.get(f"/streams/{row.pk}")).json()
        assert row.phases["retrieval"] >= 0.05
        assert state["phases"] == row.phases
        assert sum(row.phases.values()) == pytest.approx(state["latency"], abs=1e-3)
    finally:
        forget("slow")


async def test_a_plain_answer_s_times_over_the_socket(caller: Caller) -> None:
    """A message has no headers: `sent_at` is the client's clock in milliseconds."""
    request = {"prompt": "a", "max_tokens": 2, "model": "echo"}
    start = {"type": "start", "request": request, "sent_at": int(time.time() * 1000) - 200}
    done = (await messages_of(caller, start))[-1]["data"]
    phases = dict(done["phases"])
    assert 0.199 <= phases.pop("network_in") < 30.0
    assert {"auth", "intake"} <= phases.keys()
    assert sum(phases.values()) == pytest.approx(done["latency"], abs=1e-3)


async def test_what_trim_cut_is_in_meta_and_the_outline_in_the_state(caller: Caller) -> None:
    """The second `meta` names it, in a stream, over the socket and in JSON; the state has steps and citations."""

    async def trimmed(run: Run) -> None:
        run.cite("help", id="1")
        kept = await run.trim(["a", "b " * 40, "c"], 20)
        await run.step("Answering", run.say, f"kept {len(kept)}")

    pipeline("trimmed")(trimmed)
    try:
        await site.reset()
        await until_ready()
        whole = (await caller.post("/pipelines/trimmed", PROMPT)).json()
        (cut,) = whole["meta"]["trimmed"]
        assert (cut["kept"], cut["of"], whole["text"]) == (1, 3, "kept 1")
        assert "20 tokens" in cut["message"]
        frames = parse_sse(await body_of(await caller.post("/pipelines/trimmed", {**PROMPT, "stream": True})))
        first, second = (frame.json for frame in frames if frame.event == "meta")
        assert "trimmed" not in first
        assert second["trimmed"] == [cut]
        again = {"accept": "text/event-stream", "last-event-id": frames[-2].id or frames[-3].id}
        resumed = parse_sse(await body_of(await caller.get(f"/streams/{first['stream_id']}/events", **again)))
        assert [frame.json["trimmed"] for frame in resumed if frame.event == "meta"] == [[cut]]
        messages = await messages_of(caller, {"type": "start", "request": {**PROMPT, "model": "trimmed"}})
        assert messages[-2]["data"]["trimmed"] == [cut]
        state = (await caller.get(f"/streams/{whole['id']}")).json()
        assert state["steps"] == whole["steps"]
        assert [step["status"] for step in state["steps"]] == ["trimmed", "step"]
        assert state["citations"] == whole["citations"] == [{"source": "help", "id": "1"}]
        plain = await caller.post("/streams", {"prompt": "a", "max_tokens": 2, "model": "echo"})
        await body_of(plain)
        assert not {"steps", "citations"} & (await caller.get(f"/streams/{plain['X-Stream-Id']}")).json().keys()
    finally:
        forget("trimmed")
