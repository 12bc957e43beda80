"""Laws of a Django site whose model runs on a server elsewhere: answers, errors, probes and metrics of its routes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.test.utils import override_settings

from streamserve.protocol.metrics import METRICS, PREFIX
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.servers.upstreams import DONE, JSON, WHOLE, Upstream, delta, raw, response, says, usage

pytestmark = pytest.mark.django_db(transaction=True)

ASK = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 8}
CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@pytest.fixture
async def upstream(transactional_db: object, tmp_path: Path) -> AsyncIterator[Upstream]:
    """The server elsewhere, and this site with its model."""
    upstream = Upstream(says(*WHOLE))
    await upstream.start()
    conf = {"MODELS": {"big": {"URL": upstream.url, "REMOTE_MODEL": "m"}}, "CLIENT": "thread", "LOG": "memory"}
    with override_settings(STREAMSERVE={**conf, "STATE_DIR": str(tmp_path)}):
        await until_ready()
        yield upstream
        await site.reset()
    await upstream.stop()


async def test_both_dialects_answer(upstream: Upstream, alice_key: str) -> None:
    """A stream without token ids, and a whole chat completion; the server gets its own name of the model."""
    alice = Caller(key=alice_key)
    shown = (await body_of(await alice.post("/streams", ASK))).decode()
    assert '"has_token_ids":false' in shown
    texts = [json.loads(data)["text"] for data in re.findall(r"event: token\nid: .*\ndata: (.*)", shown)]
    assert "".join(texts) == "Hello."
    whole = json.loads(await body_of(await alice.post("/v1/chat/completions", ASK)))
    assert (whole["model"], whole["choices"][0]["message"]["content"]) == ("big", "Hello.")
    assert whole["usage"]["completion_tokens"] == 3
    assert [asked.body["model"] for asked in upstream.posts] == ["m", "m"]


async def test_a_tool_call_comes_through_both_sites(upstream: Upstream, alice_key: str) -> None:
    """From the caller's tools to the server, and back as a call with the server's id and arguments."""
    upstream.answers = [says(delta(tool_calls=[CALL]), delta(finish_reason="tool_calls"), usage(), DONE)]
    answer = await Caller(key=alice_key).post("/v1/chat/completions", {**ASK, "tools": [TOOL]})
    choice = json.loads(await body_of(answer))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": '{"a": 1}'}
    assert upstream.posts[0].body["tools"][0]["function"]["name"] == "look_up"


async def test_a_refusal_is_the_callers(upstream: Upstream, alice_key: str) -> None:
    """With the server's message and param, in OpenAI's shape, and no row of a stream that never ran."""
    upstream.answers = [raw(response("400 Bad", b'{"error":{"message":"too warm","param":"temperature"}}', JSON))]
    answer = await Caller(key=alice_key).post("/v1/chat/completions", ASK)
    assert answer.status_code == 400
    error = json.loads(await body_of(answer))["error"]
    assert (error["message"], error["code"], error["param"]) == ("too warm", "upstream_refused", "temperature")


async def test_an_answer_that_its_server_cannot_continue_is_a_400(upstream: Upstream, alice_key: str) -> None:
    """The error names `continue`, the field that was sent; nothing is added to the conversation, or asked."""
    alice = Caller(key=alice_key)
    await site.reset()
    models = {"big": {"URL": upstream.url, "REMOTE_MODEL": "m", "SERVER": "openai"}}
    kept = {"CONVERSATIONS": True, "TITLES": "words", "MODELS": models}
    with override_settings(STREAMSERVE={**settings.STREAMSERVE, **kept}):
        await until_ready()
        upstream.answers = [says(delta(content="Hel"), delta(finish_reason="length"), usage(), DONE)]
        head = f"/conversations/{(await alice.post('/conversations', {})).json()['id']}"
        first = await alice.post(f"{head}/messages", {"content": "Hello?"})
        await body_of(first)
        async with asyncio.timeout(60):
            while (await alice.get(head)).json()["running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        refused = await alice.post(f"{head}/messages", {"continue": first["X-Message-Id"]})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "continue")
        assert len((await alice.get(f"{head}/messages")).json()["messages"]) == 2
        assert len(upstream.posts) == 1
        await site.reset()


async def test_a_busy_server_is_a_retry(upstream: Upstream, alice_key: str) -> None:
    """Its Retry-After is passed on."""
    upstream.answers = [raw(response("429 Slow down", b"", "Retry-After: 9"))]
    answer = await Caller(key=alice_key).post("/streams", ASK)
    assert (answer.status_code, answer["Retry-After"]) == (503, "9")


async def test_a_model_is_ready_while_one_of_its_servers_is(upstream: Upstream, alice_key: str, ops_key: str) -> None:
    """/readyz says so, its answers come, and `upstream_up` tells the servers apart."""
    await site.reset()
    servers = [{"URL": upstream.url, "NAME": "here"}, {"URL": "http://127.0.0.1:9/v1", "NAME": "gone"}]
    models = {"big": {"UPSTREAMS": servers, "REMOTE_MODEL": "m"}}
    with override_settings(STREAMSERVE={**settings.STREAMSERVE, "MODELS": models}):
        await until_ready()
        for _ in range(3):
            whole = json.loads(await body_of(await Caller(key=alice_key).post("/v1/chat/completions", ASK)))
            assert whole["choices"][0]["message"]["content"] == "Hello."
        assert (await Caller().get("/readyz")).status_code == 200
        text = (await Caller(key=ops_key).get("/metrics")).content.decode()
        for name, up in (("here", 1), ("gone", 0)):
            assert f'{PREFIX}upstream_up{{model_name="big",upstream="{name}"}} {up}' in text
        await site.reset()


async def test_its_metrics_are_scraped(upstream: Upstream, alice_key: str, ops_key: str) -> None:
    """Every metric of upstreams is there for the model."""
    await body_of(await Caller(key=alice_key).post("/streams", ASK))
    text = (await Caller(key=ops_key).get("/metrics")).content.decode()
    labels = f'{{model_name="big",upstream="{urlsplit(upstream.url).netloc}"}}'
    for name in (name for name in METRICS if name.startswith("upstream_")):
        assert re.search(rf"^{PREFIX}{name}(_total)?{re.escape(labels)} \d", text, re.MULTILINE), name
    assert f"{PREFIX}upstream_requests_total{labels} 1" in text
    assert (await Caller().get("/readyz")).status_code == 200
