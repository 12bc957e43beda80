"""`GET /v1/chat/completions/{id}`: an answer again, as a whole, for its owner."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.web import site
from tests.conftest import Caller, until, until_ready
from tests.support.checks.stream_checks import parse_sse
from tests.support.streams.hand_made import Gate

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
CALLING = '<think>\nI ask.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
SHARED = {
    "MODELS": {
        "echo": {"PATH": "echo"},
        "scripted": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"weather": CALLING}},
    },
}


def ask(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "How is the weather?"}]
    return {"model": "echo", "messages": messages, "max_tokens": 200, "seed": 7, **fields}


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"model": "scripted", "tools": [TOOL]}],
    ids=["plain", "n", "logprobs", "calls"],
)
async def test_a_whole_answer_is_the_same_again(shared: None, caller: Caller, fields: dict[str, Any]) -> None:
    """Thoughts, calls, choices, log-probabilities and counts, here and in another process."""
    whole = (await caller.post(PATH, ask(max_tokens=100, **fields))).json()
    assert (await caller.get(f"{PATH}/{whole['id']}")).json() == whole
    await site.reset()
    await until_ready()
    again = await caller.get(f"{PATH}/{whole['id']}")
    assert again.json() == whole


async def test_a_streamed_answer_is_there_as_a_whole(shared: None, caller: Caller, site_gate: Gate) -> None:
    """The id of its chunks finds it: a 409 while it is made, which official clients try again, then all of it."""
    site_gate.allow(4)
    response = await caller.post(PATH, ask(stream=True, ignore_eos=True))
    chunks = aiter(response)
    read = await anext(chunks)
    while not parse_sse(read):
        read += await anext(chunks)
    path = f"{PATH}/{parse_sse(read)[0].json['id']}"
    early = await caller.get(path)
    assert (early.status_code, early.json()["error"]["code"]) == (409, "answer_running")
    site_gate.open()
    read += b"".join([chunk async for chunk in chunks])
    [stream] = site.get_site().streams.all()
    await until(stream.ended.is_set)
    deltas = [json.loads(frame.data)["choices"][0]["delta"] for frame in parse_sse(read) if frame.data != "[DONE]"]
    whole = (await caller.get(path)).json()
    assert whole["choices"][0]["message"]["content"] == "".join(delta.get("content") or "" for delta in deltas)


async def test_only_its_owner_finds_it(shared: None, caller: Caller, lonely_key: str) -> None:
    """Another key gets the 404 of an id that is none, in the shape of this API."""
    whole = (await caller.post(PATH, ask(max_tokens=5))).json()
    other = await Caller(key=lonely_key).get(f"{PATH}/{whole['id']}")
    none = await caller.get(f"{PATH}/chatcmpl-{'0' * 32}")
    assert other.status_code == none.status_code == 404
    assert other.json()["error"]["code"] == none.json()["error"]["code"] == "stream_not_found"
    assert (await caller.get(f"{PATH}/nonsense")).json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize("stores", [True, False])
async def test_the_text_is_there_where_the_site_stores_it(caller: Caller, stores: bool) -> None:
    """Once the events are dropped there is the text with its counts, or a 410."""
    with override_settings(STREAMSERVE={"TESTING": True, "STORE": stores}):
        await until_ready()
        body = ask(max_tokens=8)
        del body["model"]
        whole = (await caller.post(PATH, body)).json()
        await site.reset()
        again = await caller.get(f"{PATH}/{whole['id']}")
        await site.reset()
    if stores:
        assert again.json() == whole
    else:
        assert again.status_code == 410


async def test_an_answer_that_was_stopped_is_no_completion(shared: None, caller: Caller, site_gate: Gate) -> None:
    """It ended in an error for its reader, and does so again: half an answer never looks whole."""
    site_gate.allow(4)
    response = await caller.post(PATH, ask(stream=True, ignore_eos=True))
    chunks = aiter(response)
    await anext(chunks)
    stream_id = response["X-Stream-Id"]
    await caller.post(f"/streams/{stream_id}/stop")
    site_gate.open()
    await body_of_rest(chunks)
    again = await caller.get(f"{PATH}/chatcmpl-{stream_id}")
    assert again.status_code >= 400
    assert again.json()["error"]["code"] == "cancelled"


async def body_of_rest(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])
