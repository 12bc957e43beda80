"""A remote client against our own endpoint in another process: a site whose model is another site's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from streamserve.asgi import anyone, app
from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig, Upstream
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import BlockText, Done, Event
from streamserve.protocol.requests import ShownChoice
from tests.support.engines.clients import collect, text
from tests.support.servers.upstreams import chat, chatting, until
from tests.support.servers.web_servers import Server, uvicorn


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with uvicorn("tests.support.servers.own_upstream:application") as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[RemoteClient]:
    client = RemoteClient(RemoteConfig(alias="here", url=f"{server.url}/v1", remote_model="m"))
    client.start()
    await until(lambda: client.describe().state != "loading")
    yield client
    await client.aclose()


async def ask(client: RemoteClient, question: str, **fields: object) -> list[Event]:
    return await collect(await client.generate(*chatting(question, **fields)))  # type: ignore[arg-type]


async def test_the_answer_of_the_other_site(client: RemoteClient) -> None:
    """Every character of it, and its usage."""
    assert client.describe().dtype == "streamserve"
    question = "Grüße, 😀 and\nall the rest: it goes on for a while, so that there are many tokens."
    events = await ask(client, question, max_tokens=200)
    assert text(events) == question
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "stop"
    assert events[-1].usage.completion_tokens == len(question.encode()) + 1  # a token for each byte, and the end


async def test_its_refusal_is_the_callers(client: RemoteClient) -> None:
    """A prompt that is too long there is too long here, in its words and with its param."""
    with pytest.raises(BadRequest, match="this model takes") as caught:
        await client.generate(chat("x" * 9000))
    assert caught.value.param == "prompt"


async def test_choices(client: RemoteClient) -> None:
    """Several choices come through, each whole."""
    events = await ask(client, "Twice", n=2)
    assert [text(events, choice) for choice in (0, 1)] == ["Twice", "Twice"]


async def test_a_stop_ends_the_answer_there(client: RemoteClient) -> None:
    """The other site takes the next request although it serves few."""
    for _ in range(40):  # more than MAX_STREAMS_PER_PRINCIPAL
        generation = await client.generate(chat("Stop me, " * 100, max_tokens=900))
        await anext(generation)
        generation.cancel()
        await until(lambda: client.stats().running == 0)
    assert text(await ask(client, "Still there?")) == "Still there?"


async def test_a_site_serves_the_other_sites_model(server: Server) -> None:
    """Through both sites, in both dialects; the first event says that there are no token ids."""
    here = app(models={"here": RemoteConfig(alias="", url=f"{server.url}/v1", remote_model="m")}, authenticate=anyone)
    transport = httpx.ASGITransport(app=here)
    question = {"messages": [{"role": "user", "content": "Pass it on."}]}
    async with here, httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        whole = await http.post("/v1/chat/completions", json={"model": "here", **question})
        assert whole.json()["choices"][0]["message"]["content"] == "Pass it on."
        assert whole.json()["usage"]["completion_tokens"] == 12
        stream = await http.post("/streams", json=question)
        frames = [line.removeprefix("data: ") for line in stream.text.split("\n") if line.startswith("data: ")]
        events = [json.loads(frame) for frame in frames]
        assert events[0]["has_token_ids"] is False
        assert "".join(event.get("text", "") for event in events) == "Pass it on."
        refused = await http.post("/v1/chat/completions", json={**question, "min_tokens": 9, "max_tokens": 5})
        assert refused.status_code == 400
        too_long = {"messages": [{"role": "user", "content": "x" * 9000}]}
        refused = await http.post("/streams", json=too_long)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "upstream_refused")


async def test_a_site_over_two_sites_outlives_either() -> None:
    """Of two sites that serve its model the first is killed; every answer of the third is whole."""
    site = "tests.support.servers.own_upstream:application"
    with uvicorn(site) as one, uvicorn(site) as two:
        servers = tuple(Upstream(url=f"{server.url}/v1", remote_model="m") for server in (one, two))
        here = app(models={"here": RemoteConfig(alias="", upstreams=servers)}, authenticate=anyone)
        async with here, httpx.AsyncClient(transport=httpx.ASGITransport(app=here), base_url="http://here") as http:

            async def answers(number: int) -> str:
                body = {"messages": [{"role": "user", "content": f"Pass on {number}."}]}
                whole = (await http.post("/v1/chat/completions", json=body, timeout=60)).json()
                return str(whole["choices"][0]["message"]["content"])

            whole = [f"Pass on {number}." for number in range(8)]
            assert [await answers(number) for number in range(8)] == whole
            one.process.kill()
            assert [await answers(number) for number in range(8)] == whole


async def test_the_messages_api_of_a_server_without_a_switch(server: Server) -> None:
    """A model without template variables is asked without them, unless the caller names thinking; then it is a 400."""
    config = RemoteConfig(alias="", url=f"{server.url}/v1", remote_model="m", server="openai")
    here = app(models={"here": config}, authenticate=anyone)
    body = {"max_tokens": 64, "messages": [{"role": "user", "content": "Pass it on."}]}
    async with here, httpx.AsyncClient(transport=httpx.ASGITransport(app=here), base_url="http://here") as http:
        whole = (await http.post("/v1/messages", json=body)).json()
        assert whole["content"] == [{"type": "text", "text": "Pass it on."}]
        assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("end_turn", 12)
        for fields in ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"output_config": {"effort": "low"}}):
            refused = await http.post("/v1/messages", json={**body, **fields})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking")
        uncounted = await http.post("/v1/messages/count_tokens", json=body)
        assert (uncounted.status_code, uncounted.json()["error"]["code"]) == (400, "unsupported_parameter")


async def test_a_continued_answer(client: RemoteClient) -> None:
    """The other site takes up the text so far; what was shown is no part of the prompt's count."""
    question = "Continue this sentence."
    so_far = (ShownChoice(blocks=(BlockText(index=0, kind="text", text="Continue ", is_open=True),), num_tokens=9),)
    events = await ask(client, question, max_tokens=60, shown=so_far)
    assert text(events) == "this sentence."
    assert isinstance(events[-1], Done)
    assert events[-1].usage.completion_tokens == len(question) + 1
