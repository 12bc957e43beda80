"""`/v1/responses` for its owner: created, streamed, in the background, retrieved, cancelled, deleted, continued."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from django.test.utils import override_settings
from openai.types.responses import Response

from streamserve.asgi.application import StreamApp, anyone
from streamserve.models import StoredResponse
from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.joined import with_joined_text
from tests.support.checks.response_checks import ResponseGrammar, check_response, events_of
from tests.support.checks.sse_reader import read_events
from tests.support.streams.hand_made import Gate

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "/v1/responses"
CALLING = (
    '<think>\nI ask.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
MODELS = {
    "echo": {"PATH": "echo", "ANSWERS": None},
    "calls": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"weather": CALLING}},
}


async def serve(tmp_path: Any, **conf: Any) -> AsyncIterator[None]:
    conf = {"MODELS": MODELS, "CLIENT": "thread", "STATE_DIR": tmp_path, **conf}
    with override_settings(STREAMSERVE=conf):
        await until_ready()
        yield
        await site.reset()


@pytest.fixture(params=["file", "memory"])
async def serves(request: Any, tmp_path: Any, transactional_db: Any, site_gate: Gate) -> AsyncIterator[None]:
    """A site with a log that processes share, or with one in memory."""
    async for _ in serve(tmp_path, LOG=request.param):
        yield


@pytest.fixture
async def shares(tmp_path: Any, transactional_db: Any, site_gate: Gate) -> AsyncIterator[None]:
    """A site with a log that processes share."""
    async for _ in serve(tmp_path, LOG="file"):
        yield


@pytest.fixture
async def stores(tmp_path: Any, transactional_db: Any) -> AsyncIterator[None]:
    """A site that stores answers."""
    async for _ in serve(tmp_path, LOG="file", STORE=True):
        yield


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "input": "How is the weather?", "max_output_tokens": 5, **fields}


async def made(caller: Caller, **fields: Any) -> dict[str, Any]:
    response = await caller.post(PATH, ask(**fields))
    assert response.status_code == 200, response.content
    return dict(response.json())


async def streamed(caller: Caller, path: str, body: Any = None) -> list[dict[str, Any]]:
    response = await (caller.get(path) if body is None else caller.post(path, body))
    assert response.status_code == 200, await body_of(response)
    return events_of(read_events(await body_of(response)))


async def refusal(response: Any) -> tuple[int, Any, Any]:
    error = json.loads(await body_of(response))["error"]
    return response.status_code, error["code"], error["param"]


async def test_a_response_repeats_what_was_asked(serves: None, caller: Caller) -> None:
    """With the items that the model has written, its counts, and the status of an answer that was cut short."""
    fields = {"instructions": "Be brief.", "metadata": {"topic": "weather"}, "temperature": 0.5, "user": "u1"}
    whole = await made(caller, **fields, text={"verbosity": "low"}, reasoning={"summary": "auto"}, tools=[TOOL])
    Response.model_validate(whole)
    assert {name: whole[name] for name in fields} == fields
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert whole["tools"] == [TOOL]
    (item,) = whole["output"]
    assert item["content"][0]["text"]
    assert whole["usage"]["output_tokens"] == 5


async def test_a_streamed_response_is_the_retrieved_one(serves: None, caller: Caller) -> None:
    """Also read again from its beginning: the same events but for how many tokens are joined in a delta."""
    response = await caller.post(PATH, ask(stream=True))
    wire = await body_of(response)
    whole = check_response(wire)
    path = f"{PATH}/{whole['id']}"
    assert (await caller.get(path)).json() == whole
    again = await body_of(await caller.get(f"{path}?stream=true"))
    assert check_response(again) == whole
    assert with_joined_text(again) == with_joined_text(wire)
    assert whole["id"] == f"resp_{response['X-Stream-Id']}"


async def test_a_reader_that_lost_its_connection_gets_the_rest(serves: None, caller: Caller) -> None:
    """After each number, and with `Last-Event-ID`; one that has all gets nothing; one that has more is told so."""
    wire = await body_of(await caller.post(PATH, ask(stream=True)))
    events, read = events_of(read_events(wire)), read_events(wire)
    path = f"{PATH}/{events[0]['response']['id']}?stream=true"
    for cut in range(1, len(events)):
        grammar = ResponseGrammar()
        for event in events[:cut]:
            grammar.feed(event)
        for event in await streamed(caller, f"{path}&starting_after={events[cut - 1]['sequence_number']}"):
            grammar.feed(event)
        assert grammar.response == events[-1]["response"]
    middle = await caller.get(path, **{"last-event-id": read[3].id})
    assert events_of(read_events(await body_of(middle)))[-1] == events[-1]
    last = events[-1]["sequence_number"]
    assert (await caller.get(f"{path}&starting_after={last}")).status_code == 204
    beyond = await refusal(await caller.get(f"{path}&starting_after={last + 1}"))
    assert beyond == (410, "unknown_event_id", "starting_after")


async def test_a_response_in_the_background_is_read_later(serves: None, caller: Caller, gate: Gate) -> None:
    """It is there at once, runs without a reader, and ends; its events can be followed from anywhere."""
    gate.allow(0)
    begun = await made(caller, background=True)
    assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
    path = f"{PATH}/{begun['id']}"
    assert (await caller.get(path)).json()["status"] == "in_progress"
    gate.open()
    follow = await streamed(caller, f"{path}?stream=true")
    whole = (await caller.get(path)).json()
    assert follow[-1]["response"] == whole
    assert whole["status"] == "incomplete"


async def test_the_background_needs_no_reader(shares: None, caller: Caller) -> None:
    """Nobody has read it when it ends."""
    begun = await made(caller, background=True)
    async with asyncio.timeout(60):
        while (found := (await caller.get(f"{PATH}/{begun['id']}")).json())["status"] == "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert found["usage"]["output_tokens"] == 5


async def test_cancelling_ends_a_response_where_it_is(serves: None, caller: Caller, gate: Gate) -> None:
    """Its status says so, for every reader; a second time changes nothing."""
    gate.allow(0)
    begun = await made(caller, background=True, max_output_tokens=500)
    path = f"{PATH}/{begun['id']}"
    cancelled = (await caller.post(f"{path}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    assert (await caller.post(f"{path}/cancel")).json() == cancelled
    assert (await caller.get(path)).json() == cancelled
    gate.open()


async def test_a_deleted_response_is_unknown(serves: None, caller: Caller, gate: Gate) -> None:
    """With its events, everywhere; one that runs is cancelled first."""
    gate.allow(0)
    running = await made(caller, background=True)
    assert (await refusal(await caller.delete(f"{PATH}/{running['id']}")))[0] == 409
    await caller.post(f"{PATH}/{running['id']}/cancel")
    gate.open()
    whole = await made(caller)
    path = f"{PATH}/{whole['id']}"
    await until_ended()
    assert (await caller.delete(path)).json() == {"id": whole["id"], "object": "response", "deleted": True}
    for again in (path, f"{path}?stream=true", f"{path}/input_items"):
        assert await refusal(await caller.get(again)) == (404, "response_not_found", "response_id")
    assert (await refusal(await caller.delete(path)))[0] == 404


async def until_ended() -> None:
    """Wait until every stream's end is in its row."""
    async with asyncio.timeout(60):
        while await StreamRow.objects.filter(state="running").aexists():  # noqa: ASYNC110  (a row has no event)
            await asyncio.sleep(0.005)


async def test_a_response_that_is_not_stored_is_unknown(serves: None, caller: Caller, bob: Any) -> None:
    """And so is another user's, and anything that is no id."""
    other_caller = await asyncio.to_thread(Caller, bob)
    hidden = await made(caller, store=False)
    assert hidden["store"] is False
    other = await made(caller)
    assert (await refusal(await caller.get(f"{PATH}/{hidden['id']}")))[:2] == (404, "response_not_found")
    assert (await refusal(await other_caller.get(f"{PATH}/{other['id']}")))[:2] == (404, "response_not_found")
    assert (await refusal(await caller.get(f"{PATH}/resp_nothing")))[:2] == (404, "response_not_found")


async def test_the_items_of_the_input_are_listed(serves: None, caller: Caller) -> None:
    """The newest first unless asked otherwise, in pages, each with an id of its own."""
    items = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B.", "id": "msg_mine"},
        {"role": "user", "content": [{"type": "input_text", "text": "C?"}]},
    ]
    whole = await made(caller, input=items)
    path = f"{PATH}/{whole['id']}/input_items"
    found = (await caller.get(f"{path}?order=asc")).json()
    assert [one["content"][0]["text"] for one in found["data"]] == ["A?", "B.", "C?"]
    assert found["data"][1]["id"] == "msg_mine"
    assert found["has_more"] is False
    first = (await caller.get(f"{path}?limit=1")).json()
    assert (first["data"][0]["content"][0]["text"], first["has_more"]) == ("C?", True)
    second = (await caller.get(f"{path}?limit=5&after={first['last_id']}")).json()
    assert [one["content"][0]["text"] for one in second["data"]] == ["B.", "A?"]
    assert (await refusal(await caller.get(f"{path}?after=msg_none")))[:2] == (404, "item_not_found")


async def test_a_response_continues_the_one_before(serves: None, caller: Caller) -> None:
    """Its prompt has the items of both, word for word as if the client had sent them, with the calls and results."""
    asked = {"model": "calls", "tools": [TOOL], "max_output_tokens": 200}
    first = await made(caller, **asked)
    thought, call = first["output"]
    assert (thought["type"], call["type"], call["name"]) == ("reasoning", "function_call", "get_weather")
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny"}
    then = {**asked, "previous_response_id": first["id"], "input": [result]}
    second = await made(caller, **then)
    assert second["previous_response_id"] == first["id"]
    sent = [{"role": "user", "content": "How is the weather?"}, *first["output"], result]
    alone = await made(caller, **{**asked, "input": sent})
    assert second["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
    third = await made(caller, **asked, previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


async def test_what_cannot_be_continued_is_refused(serves: None, caller: Caller, gate: Gate) -> None:
    """A response that is unknown, not stored or unfinished; the result of a call that was not made."""
    hidden = await made(caller, store=False)
    for previous in (hidden["id"], "resp_x"):
        refused = await refusal(await caller.post(PATH, ask(previous_response_id=previous)))
        assert refused == (400, "previous_response_not_found", "previous_response_id")
    result = {"type": "function_call_output", "call_id": "call_none", "output": "Sunny"}
    assert await refusal(await caller.post(PATH, ask(input=[result]))) == (400, "invalid_value", "input[0].call_id")
    gate.allow(0)
    running = await made(caller, background=True)
    assert (await refusal(await caller.post(PATH, ask(previous_response_id=running["id"]))))[0] == 409
    gate.open()


async def test_a_key_starts_one_response(serves: None, caller: Caller) -> None:
    """Sent again it shows the same events."""
    body = ask(stream=True)
    first, again = [await body_of(await caller.post(PATH, body, **{"Idempotency-Key": "k1"})) for _ in range(2)]
    assert with_joined_text(again) == with_joined_text(first)
    reused = await refusal(await caller.post(PATH, ask(), **{"Idempotency-Key": "k1"}))
    assert reused[0] == 422


async def test_the_prompt_is_counted(serves: None, caller: Caller) -> None:
    """As a response of the same body would have it, with what came before."""
    whole = await made(caller, instructions="Be brief.")
    count = {"model": "echo", "input": "How is the weather?", "instructions": "Be brief."}
    counted = (await caller.post(f"{PATH}/input_tokens", count)).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": whole["usage"]["input_tokens"]}
    more = (await caller.post(f"{PATH}/input_tokens", {**count, "previous_response_id": whole["id"]})).json()
    assert more["input_tokens"] > counted["input_tokens"]


async def test_structured_output_matches_its_schema(serves: None, caller: Caller) -> None:
    """The schema stands beside its type, without a wrapper."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    whole = await made(caller, text={"format": form}, max_output_tokens=60)
    assert whole["text"]["format"] == {**form, "description": None}
    refused = await caller.post(PATH, ask(text={"format": {"type": "json_schema", "name": "x"}}))
    assert await refusal(refused) == (400, "missing_field", "text.format.schema")


async def test_log_probabilities_are_included(serves: None, caller: Caller) -> None:
    """In the deltas, and in the text as a whole."""
    body = ask(include=["message.output_text.logprobs"], top_logprobs=2, stream=True)
    whole = check_response(await body_of(await caller.post(PATH, body)))
    logprobs = whole["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 5
    assert all(one["top_logprobs"] for one in logprobs)


async def test_a_custom_tool_is_called_with_free_text(tmp_path: Any, transactional_db: Any, caller: Caller) -> None:
    """Which goes back into the next prompt as it came."""
    calling = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls -l"}}\n</tool_call>'
    models = {"calls": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"files": calling}}}
    async for _ in serve(tmp_path, LOG="memory", MODELS=models):
        tool = {"type": "custom", "name": "shell", "description": "Run a command"}
        asked = {"model": "calls", "input": "Which files?", "tools": [tool], "max_output_tokens": 100}
        whole = check_response(await body_of(await caller.post(PATH, {**asked, "stream": True})))
        (item,) = whole["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "shell", "ls -l")
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "a.txt"}
        then = await made(caller, **{**asked, "input": [result], "previous_response_id": whole["id"]})
        assert then["status"] in ("completed", "incomplete")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": None}, "missing_field", "input"),
        ({"input": ""}, "empty_prompt", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": 3}, "invalid_type", "input"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user"}]}, "missing_field", "input[0].content"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "unsupported_content", "input[0]"),
        ({"input": [{"id": "msg_1"}]}, "unsupported_content", "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "video"}]}]}, "unsupported_content", "input[0].content[0]"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "unsupported_parameter", "tool_choice.type"),
        ({"tool_choice": "required"}, "conflicting_fields", "tool_choice"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"previous_response_id": "resp_a", "conversation": "conv_b"}, "conflicting_fields", "conversation"),
        ({"background": True, "store": False}, "conflicting_fields", "store"),
        ({"stream_options": {"include_obfuscation": True}}, "conflicting_fields", "stream_options"),
        ({"messages": []}, "unknown_field", "messages"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"include": ["everything"]}, "invalid_value", "include[0]"),
    ],
)
async def test_a_wrong_body_is_refused(engine: None, caller: Caller, body: Any, code: str, param: str) -> None:
    """With the field that is wrong, before anything begins."""
    sent = {name: value for name, value in {"input": "Hi", **body}.items() if value is not None}
    assert await refusal(await caller.post(PATH, sent)) == (400, code, param)
    assert not await StreamRow.objects.aexists()


async def test_another_process_serves_the_rest(shares: None, caller: Caller) -> None:
    """A response is whole there, and can be followed from any number."""
    wire = await body_of(await caller.post(PATH, ask(stream=True)))
    whole = check_response(wire)
    await until_ended()
    await site.reset()
    await until_ready()
    assert (await caller.get(f"{PATH}/{whole['id']}")).json() == whole
    events = events_of(read_events(wire))
    rest = await streamed(caller, f"{PATH}/{whole['id']}?stream=true&starting_after={events[3]['sequence_number']}")
    assert with_joined_text(rest) == with_joined_text(events[4:])


async def test_a_stored_response_outlives_its_events(stores: None, caller: Caller) -> None:
    """Whole, and it can be continued; its events are gone."""
    whole = await made(caller)
    await until_ended()
    await until_filled()
    streams = site.get_site().streams
    for row in [row async for row in StreamRow.objects.all()]:
        await streams.log.drop(row.log_id)
        streams.forget(row.pk)
    assert (await caller.get(f"{PATH}/{whole['id']}")).json() == whole
    assert (await refusal(await caller.get(f"{PATH}/{whole['id']}?stream=true")))[0] == 410
    assert (await made(caller, previous_response_id=whole["id"]))["previous_response_id"] == whole["id"]


async def until_filled() -> None:
    """Wait until each response is in its row."""
    async with asyncio.timeout(60):
        while await StoredResponse.objects.filter(whole="").aexists():  # noqa: ASYNC110  (a row has no event)
            await asyncio.sleep(0.005)


async def test_what_was_asked_goes_with_the_events(shares: None, caller: Caller, monkeypatch: Any) -> None:
    """Where the site does not store: no text of a caller stays in the database."""
    whole = await made(caller)
    await until_ended()
    rows = site.get_site().services.responses
    monkeypatch.setattr(rows, "_purge_before", lambda now: now - 1000)
    await rows.purge()  # type: ignore[union-attr]
    assert (await caller.get(f"{PATH}/{whole['id']}")).status_code == 200
    monkeypatch.setattr(rows, "_purge_before", lambda now: now + 1000)
    await rows.purge()  # type: ignore[union-attr]
    assert not await StoredResponse.objects.aexists()
    assert (await refusal(await caller.get(f"{PATH}/{whole['id']}")))[:2] == (404, "response_not_found")


async def test_an_app_without_a_database_keeps_responses_too() -> None:
    """For as long as their streams."""
    app = StreamApp(models={"echo": "echo"}, authenticate=anyone)
    async with app, httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        await until(lambda: app.clients["echo"].describe().state == "ready")
        whole = (await client.post(PATH, json=ask())).json()
        assert (await client.get(f"{PATH}/{whole['id']}")).json() == whole
        then = (await client.post(PATH, json=ask(previous_response_id=whole["id"]))).json()
        assert then["usage"]["input_tokens"] > whole["usage"]["input_tokens"]
        assert (await client.delete(f"{PATH}/{whole['id']}")).json()["deleted"]
        assert (await client.get(f"{PATH}/{whole['id']}")).status_code == 404


async def test_a_whole_answer_that_fails_is_an_error(serves: None, caller: Caller, gate: Gate) -> None:
    """As for a chat completion: the status says what went wrong."""
    gate.allow(0)
    asking = asyncio.create_task(caller.post(PATH, ask(max_output_tokens=500)))
    streams = site.get_site().streams
    await until(lambda: [one for one in streams.all() if one.terminal is None])
    (stream,) = [one for one in streams.all() if one.terminal is None]
    await stream.stop()
    response = await asking
    assert response.status_code == 499
    gate.open()
