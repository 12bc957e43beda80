"""`/v1` answers whose caller can resume are as durable as native ones, and are replayed as chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.stream_checks import check_native, parse_sse, text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("shared")]

KEY = {"Idempotency-Key": "a-key-of-the-caller"}
SHARED = {"MODELS": {"echo": {"PATH": "echo"}}, "ECHO_STEP_SECONDS": 0.01}


def ask(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"messages": messages, "max_tokens": 40, "seed": 7, "ignore_eos": True, "stream": True, **fields}


async def read_some(response: Any, num_chunks: int) -> bytes:
    """Read until that many chunks have come, and leave."""
    out = b""
    chunks = aiter(response)
    while out.count(b"\nid: ") + out.startswith(b"id: ") < num_chunks:
        out += await anext(chunks)
    await chunks.aclose()
    return out[: out.rindex(b"\n\n") + 2]


def content(body: bytes) -> str:
    """Return the text of a run of chunks."""
    chunks = [json.loads(frame.data) for frame in parse_sse(body) if frame.data != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


async def state_of(caller: Caller, stream_id: str) -> tuple[str, str | None]:
    state = (await caller.get(f"/streams/{stream_id}")).json()
    return state["state"], state["finish_reason"]


@pytest.mark.parametrize(
    ("fields", "headers", "parks"),
    [
        ({}, {}, False),
        ({}, KEY, True),
        ({"on_disconnect": "park"}, {}, True),
        ({"on_disconnect": "abort"}, KEY, False),
    ],
)
async def test_a_reader_that_leaves_parks_or_stops_the_answer(
    caller: Caller, fields: dict[str, Any], headers: dict[str, str], parks: bool
) -> None:
    """By default closing stops the answer, as in the public API; a key or a field changes that."""
    response = await caller.post("/v1/chat/completions", ask(max_tokens=400, **fields), **headers)
    await read_some(response, 3)
    [stream] = site.get_site().streams.all()
    if parks:
        await until(lambda: stream.state == "parked")
        assert await state_of(caller, stream.id) == ("parked", None)
    else:
        await until(stream.ended.is_set)
        assert await state_of(caller, stream.id) == ("finished", "abandoned")


async def test_another_process_continues_in_chunks(caller: Caller) -> None:
    """Cut after some chunks, the process gone: the rest comes after the last id, and the parts are the whole."""
    whole = await body_of(await caller.post("/v1/chat/completions", ask(), **KEY))
    response = await caller.post("/v1/chat/completions", ask(), **{"Idempotency-Key": "another"})
    part = await read_some(response, 4)
    await site.reset()
    await until_ready()
    last_id = [frame.id for frame in parse_sse(part)][-1]
    address = f"/v1/streams/{response['X-Stream-Id']}/events"
    rest = await body_of(await caller.get(address, **{"last-event-id": last_id}))
    assert content(part) + content(rest) == content(whole)
    assert parse_sse(rest)[-1].data == "[DONE]"
    assert b"event: " not in rest


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_replay_is_the_answer_again(caller: Caller, fields: dict[str, Any], elsewhere: bool) -> None:
    """The same chunks with the same ids, here and in another process, in any format."""
    response = await caller.post("/v1/chat/completions", ask(**fields), **KEY)
    whole = await body_of(response)
    if elsewhere:
        await site.reset()
        await until_ready()
    usage = "?include_usage=true" if "stream_options" in fields else ""
    again = await body_of(await caller.get(f"/v1/streams/{response['X-Stream-Id']}/events{usage}"))
    assert by_choice(again) == by_choice(whole)
    assert parse_sse(again)[-1].id == parse_sse(whole)[-1].id


def by_choice(body: bytes) -> tuple[dict[int, str], list[Any]]:
    """Return each choice's text, and all else in order: a replay joins tokens that came one by one."""
    texts: dict[int, str] = {}
    others: list[Any] = []
    for frame in parse_sse(body):
        chunk = frame.data if frame.data == "[DONE]" else json.loads(frame.data)
        delta = chunk["choices"][0]["delta"] if chunk != "[DONE]" and chunk["choices"] else {}
        if delta.get("content"):
            index = chunk["choices"][0]["index"]
            texts[index] = texts.get(index, "") + delta["content"]
        else:
            others.append(chunk)
    return texts, sorted(others, key=str)


async def test_the_format_can_be_chosen(caller: Caller) -> None:
    """`format=native` under /v1, `format=openai` under /streams; another word is refused in the address's shape."""
    response = await caller.post("/v1/chat/completions", ask(), **KEY)
    whole = await body_of(response)
    stream_id = response["X-Stream-Id"]
    native = await body_of(await caller.get(f"/v1/streams/{stream_id}/events?format=native"))
    assert text_of(check_native(native)) == content(whole)
    chunks = await body_of(await caller.get(f"/streams/{stream_id}/events?format=openai"))
    assert content(chunks) == content(whole)
    for query in ("format=xml", "include_usage=1"):
        error = (await caller.get(f"/v1/streams/{stream_id}/events?{query}")).json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", query.partition("=")[0])
    missing = await caller.get(f"/v1/streams/{'0' * 32}/events")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
