"""Stored chat completions: `store: true`, the list, the messages, the metadata and the deletion, for their owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from django.test.utils import override_settings
from django.utils import timezone

from streamserve import Run, pipeline
from streamserve.api.call import Caller as Owner
from streamserve.asgi.application import StreamApp, anyone
from streamserve.clients.pipeline.client import forget
from streamserve.models import StoredCompletion
from streamserve.models import Stream as StreamRow
from streamserve.rows.completions import CompletionRows
from streamserve.rows.queries import delete_in_parts
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "/v1/chat/completions"
PARTS = [{"type": "text", "text": "How is "}, {"type": "text", "text": "the weather?"}]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
CALLING = '<think>\nI ask.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
MODELS = {"echo": {"PATH": "echo"}, "calls": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"weather": CALLING}}}


async def serve(tmp_path: Any, **conf: Any) -> AsyncIterator[None]:
    conf = {"MODELS": MODELS, "CLIENT": "thread", "STATE_DIR": tmp_path, "STORE": True, **conf}
    with override_settings(STREAMSERVE=conf):
        await until_ready()
        yield
        await site.reset()


@pytest.fixture(params=["file", "memory"])
async def stores(request: Any, tmp_path: Any, transactional_db: Any) -> AsyncIterator[None]:
    """A site that stores, with a log that processes share, or with one in memory."""
    async for _ in serve(tmp_path, LOG=request.param):
        yield


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": MESSAGES, "max_tokens": 5, "store": True, **fields}


async def made(caller: Caller, **fields: Any) -> Any:
    response = await caller.post(PATH, ask(**fields))
    assert response.status_code == 200, response.content
    return response.json()


async def ended() -> None:
    """Wait until every stream's end is in its row, and every completion is stored or given up."""
    running = StreamRow.objects.filter(state="running")
    unfilled = StoredCompletion.objects.filter(completion="", deleted_at=None)
    async with asyncio.timeout(60):
        while await running.aexists() or await unfilled.aexists():  # noqa: ASYNC110  (a row has no event)
            await asyncio.sleep(0.005)


async def ids(caller: Caller, query: str = "") -> list[str]:
    return [one["id"] for one in (await caller.get(f"{PATH}?{query}")).json()["data"]]


async def forget_events() -> None:
    """Drop the events of every stream, as their retention does."""
    await ended()
    streams = site.get_site().streams
    for row in [row async for row in StreamRow.objects.all()]:
        await streams.log.drop(row.log_id)
        streams.forget(row.pk)


async def test_a_stored_answer_outlives_its_events(stores: None, caller: Caller) -> None:
    """All of it, with thoughts, calls and choices, and its metadata; as a whole also where it was streamed."""
    whole = await made(caller, model="calls", tools=[TOOL], n=2, max_tokens=100, metadata={"topic": "weather"})
    assert whole["choices"][1]["message"]["tool_calls"]
    stored = {**whole, "metadata": {"topic": "weather"}}
    assert (await caller.get(f"{PATH}/{whole['id']}")).json() == stored
    response = await caller.post(PATH, ask(stream=True))
    streamed = f"chatcmpl-{response['X-Stream-Id']}"
    await body_of(response)
    await forget_events()
    assert (await caller.get(f"{PATH}/{whole['id']}")).json() == stored
    page = (await caller.get(PATH)).json()
    assert (page["object"], page["first_id"], page["last_id"]) == ("list", whole["id"], streamed)
    assert page["data"][0] == stored
    assert page["data"][1]["usage"]["completion_tokens"] == 5


async def test_messages_are_those_of_the_request(stores: None, caller: Caller) -> None:
    """As they were sent, parts too, a page at a time."""
    whole = await made(caller)
    path = f"{PATH}/{whole['id']}/messages"
    first, second = (await caller.get(path)).json()["data"]
    assert (first["role"], first["content"], first["content_parts"]) == ("system", "Be brief.", None)
    assert (second["role"], second["content"], second["content_parts"]) == ("user", None, PARTS)
    page = (await caller.get(f"{path}?limit=1")).json()
    assert (page["data"], page["has_more"]) == ([first], True)
    assert (await caller.get(f"{path}?after={first['id']}")).json()["data"] == [second]
    assert (await caller.get(f"{path}?order=desc")).json()["data"] == [second, first]
    assert (await caller.get(f"{path}?after=none")).json()["error"]["code"] == "message_not_found"
    prompted = await made(caller, messages=[], prompt="Say hello")
    (only,) = (await caller.get(f"{PATH}/{prompted['id']}/messages")).json()["data"]
    assert (only["role"], only["content"]) == ("user", "Say hello")


async def test_the_list_is_paged_and_filtered(stores: None, caller: Caller) -> None:
    """Oldest first as in the public API, by model, and by each pair of the metadata, of whatever characters."""
    odd = 'a"]%_\\ \0'
    kinds = [{}, {"1": "x"}, {"1": "x", odd: odd}, {"1": "y"}]
    first, second, third, fourth = [(await made(caller, metadata=one))["id"] for one in kinds]
    other = (await made(caller, model="calls"))["id"]
    await made(caller, store=False)
    await made(caller, store=None, metadata={"1": "x"})
    assert await ids(caller) == [first, second, third, fourth, other]
    assert await ids(caller, "order=desc&limit=2") == [other, fourth]
    assert await ids(caller, f"order=desc&after={fourth}") == [third, second, first]
    assert await ids(caller, f"after={second}&limit=1") == [third]
    assert await ids(caller, "model=calls") == [other]
    assert await ids(caller, "metadata[1]=x") == [second, third]
    quoted = "a%22%5D%25_%5C%20%00"
    assert await ids(caller, f"metadata[1]=x&metadata[{quoted}]={quoted}") == [third]
    assert await ids(caller, "metadata[1]=z") == []
    page = (await caller.get(f"{PATH}?limit=5")).json()
    assert page["has_more"] is False
    assert (await caller.get(f"{PATH}?limit=4")).json()["has_more"] is True


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("limit=0", 400, "limit"),
        ("limit=101", 400, "limit"),
        ("order=up", 400, "order"),
        ("purpose=batch", 400, "purpose"),
        ("model=%00", 400, "model"),
        (f"metadata[{'k' * 65}]=v", 400, "metadata"),
        ("after=none", 404, "after"),
        (f"after=chatcmpl-{'0' * 32}", 404, "after"),
    ],
)
async def test_a_wrong_query_is_named(caller: Caller, query: str, status: int, param: str) -> None:
    """A 400 or 404 that names the parameter."""
    response = await caller.get(f"{PATH}?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_metadata_is_replaced(stores: None, caller: Caller) -> None:
    """As a whole, for the list too; null clears it, and what is wrong changes nothing."""
    whole = await made(caller, metadata={"a": "1", "b": "2"})
    path = f"{PATH}/{whole['id']}"
    await ended()
    assert (await caller.post(path, {"metadata": {"a": "3"}})).json() == {**whole, "metadata": {"a": "3"}}
    assert await ids(caller, "metadata[a]=3") == [whole["id"]]
    assert await ids(caller, "metadata[b]=2") == []
    for wrong in ({"k" * 65: "v"}, {"k": "v" * 513}, {f"k{at}": "v" for at in range(17)}, {"k": 1}, []):
        for response in (await caller.post(path, {"metadata": wrong}), await caller.post(PATH, ask(metadata=wrong))):
            assert (response.status_code, response.json()["error"]["param"]) == (400, "metadata")
    assert (await caller.post(path, {})).json()["error"]["code"] == "missing_field"
    assert (await caller.post(path, {"model": "x"})).status_code == 400
    assert (await caller.get(path)).json()["metadata"] == {"a": "3"}
    full = {f"{at:064}": "v" * 512 for at in range(16)}
    assert (await caller.post(path, {"metadata": full})).json()["metadata"] == full
    assert (await caller.post(path, {"metadata": None})).json()["metadata"] == {}


async def test_a_deleted_completion_is_gone(stores: None, caller: Caller) -> None:
    """From every address: its answer, messages, text and events; a second deletion is a 404."""
    whole, other = await made(caller), await made(caller)
    path = f"{PATH}/{whole['id']}"
    await ended()
    deleted = (await caller.delete(path)).json()
    assert deleted == {"id": whole["id"], "object": "chat.completion.deleted", "deleted": True}
    for response in (
        await caller.get(path),
        await caller.get(f"{path}/messages"),
        await caller.post(path, {"metadata": {}}),
        await caller.delete(path),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "completion_not_found")
    assert await ids(caller) == [other["id"]]
    stream_id = whole["id"].removeprefix("chatcmpl-")
    assert (await caller.get(f"/v1/streams/{stream_id}/events")).status_code == 410
    assert (await StreamRow.objects.aget(pk=stream_id)).text == ""
    row = await StoredCompletion.objects.aget(stream_id=stream_id)
    assert (row.messages, row.completion, row.metadata, row.marks) == ("", "", "", "")


async def test_what_another_process_has_deleted_is_gone(tmp_path: Any, caller: Caller) -> None:
    """This process still keeps the stream in memory; it shows nothing of it, and its key starts another answer."""
    async for _ in serve(tmp_path, LOG="file"):
        first = await caller.post(PATH, ask(), **{"Idempotency-Key": "k"})
        stream_id = first.json()["id"].removeprefix("chatcmpl-")
        await ended()
        this = site.get_site()
        stream = this.streams.find(stream_id)
        assert stream is not None
        row = await StoredCompletion.objects.aget()
        elsewhere = CompletionRows(this.log, keeps=True, reasoning_field="reasoning")
        await elsewhere.delete(Owner("o", row.tenant), stream_id)
        for headers in ({}, {"Last-Event-ID": f"{stream.log_id}-2"}):
            response = await caller.get(f"/v1/streams/{stream_id}/events", **headers)
            assert response.status_code == 410
        again = await caller.post(PATH, ask(), **{"Idempotency-Key": "k"})
        assert again.json()["id"] != first.json()["id"]


async def test_others_see_none_of_it(stores: None, caller: Caller, lonely_key: str) -> None:
    """To another key the id is an unknown one, by every method, and its list is empty."""
    whole = await made(caller)
    await ended()
    other, path = Caller(key=lonely_key), f"{PATH}/{whole['id']}"
    for response in (
        await other.get(path),
        await other.get(f"{path}/messages"),
        await other.post(path, {"metadata": {}}),
        await other.delete(path),
        await other.get(f"{PATH}?after={whole['id']}"),
    ):
        assert response.status_code == 404
    assert await ids(other) == []
    assert await ids(caller) == [whole["id"]]


async def test_what_ends_badly_is_not_stored(stores: None, caller: Caller) -> None:
    """While it is made it is a 409 and not listed; stopped, nothing of its request stays."""
    response = await caller.post(PATH, ask(stream=True, ignore_eos=True, max_tokens=2000))
    chunks, stream_id = aiter(response), response["X-Stream-Id"]
    await anext(chunks)
    early = await caller.delete(f"{PATH}/chatcmpl-{stream_id}")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "answer_running")
    assert await ids(caller) == []
    await caller.post(f"/streams/{stream_id}/stop")
    async for _ in chunks:
        pass
    await ended()
    assert await StoredCompletion.objects.acount() == 0


async def test_a_run_without_messages_is_stored(stores: None, caller: Caller) -> None:
    """A pipeline that was sent its `input` alone has no message to show."""

    async def greeting(run: Run) -> None:
        await run.say(f"Hi {run.input['name']}")

    pipeline("greeting")(greeting)
    try:
        await site.reset()
        await until_ready()
        response = await caller.post(PATH, {"model": "greeting", "input": {"name": "Ann"}, "store": True})
        assert response.status_code == 200, response.content
        await ended()
        assert await ids(caller) == [response.json()["id"]]
        assert (await caller.get(f"{PATH}/{response.json()['id']}/messages")).json()["data"] == []
    finally:
        forget("greeting")


async def test_a_request_that_is_sent_again_is_stored_once(stores: None, caller: Caller) -> None:
    """With its Idempotency-Key it is the same completion."""
    first = (await caller.post(PATH, ask(), **{"idempotency-key": "order-17"})).json()
    again = (await caller.post(PATH, ask(), **{"idempotency-key": "order-17"})).json()
    assert first["id"] == again["id"]
    assert await ids(caller) == [first["id"]]


async def test_it_goes_with_the_row_of_its_stream(stores: None, caller: Caller) -> None:
    """KEEP_STREAMS_DAYS holds for what is stored, messages too."""
    await made(caller)
    await ended()
    assert StoredCompletion._meta.get_field("stream").remote_field.on_delete.__name__ == "CASCADE"
    num = await _dropped()
    assert (num, await StoredCompletion.objects.acount()) == (1, 0)


async def _dropped() -> int:
    from asgiref.sync import sync_to_async

    rows = StreamRow.objects.finished_before(timezone.now() + timedelta(days=1))
    return await sync_to_async(delete_in_parts)(rows)


async def test_a_site_that_does_not_store_keeps_nothing(tmp_path: Any, transactional_db: Any, caller: Caller) -> None:
    """`store: true` is accepted there and changes nothing: no row, no list, no messages."""
    async for _ in serve(tmp_path, STORE=False):
        whole = await made(caller, metadata={"a": "1"})
        path = f"{PATH}/{whole['id']}"
        await ended()
        assert await StoredCompletion.objects.acount() == 0
        assert await ids(caller) == []
        assert (await caller.get(path)).json() == whole
        assert (await caller.get(f"{path}/messages")).json()["error"]["code"] == "completion_not_found"
        assert (await caller.post(path, {"metadata": {}})).status_code == 404
        assert (await caller.delete(path)).status_code == 404


async def test_an_app_without_a_database_has_no_such_addresses() -> None:
    """The answer can be asked for there; the rest is a 404 as any unknown address."""
    app = StreamApp(models={"echo": "echo"}, authenticate=anyone)
    async with app, httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        await until(lambda: app.clients["echo"].describe().state == "ready")
        whole = (await client.post(PATH, json=ask())).json()
        path = f"{PATH}/{whole['id']}"
        assert (await client.get(path)).json() == whole
        for response in (
            await client.get(PATH),
            await client.get(f"{path}/messages"),
            await client.post(path, json={"metadata": {}}),
            await client.delete(path),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
