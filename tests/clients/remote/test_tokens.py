"""The tokens of a prompt for a server elsewhere: counted by its own tokenizer, or estimated, and never too few."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.pipeline.client import Pipeline, PipelineClient
from streamserve.clients.pipeline.run import Run, estimate
from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.events import Done
from streamserve.protocol.requests import GenerateRequest, SamplingParams, Tool
from tests.support.engines.clients import collect
from tests.support.servers.upstreams import (
    JSON,
    Asked,
    Upstream,
    chat,
    llama_server,
    never,
    raw,
    remote,
    response,
    until,
)

PROMPT = GenerateRequest(model="m", prompt="two words", sampling=SamplingParams(temperature=0.3, top_k=5))
ROOT = Path(__file__).resolve().parents[3]


def gives(value: Any, status: str = "200 OK") -> Any:
    return raw(response(status, json.dumps(value).encode(), JSON))


async def test_vllm_counts_beside_v1() -> None:
    """Its /tokenize gets the prompt, or the chat with all that its template shows; nothing of the sampling."""
    upstream = Upstream(gives({"count": 2, "max_model_len": 512, "tokens": [7, 8]}))
    request = chat("Hi", tools=(Tool(name="f", parameters={"type": "object"}),), chat_template_kwargs={"a": 1})
    async with remote(upstream) as client:
        assert await client.tokenize(PROMPT) == (7, 8)
        assert await client.tokenize(request) == (7, 8)
        assert await client.tokenize(GenerateRequest(model="m", prompt_token_ids=(1, 2, 3))) == (1, 2, 3)
    prompt, asked = upstream.posts
    assert (prompt.path, prompt.body) == ("/tokenize", {"model": "m", "prompt": "two words"})
    assert asked.body["messages"] == [{"role": "user", "content": "Hi"}]
    assert asked.body["tools"][0]["function"]["name"] == "f"
    assert asked.body["chat_template_kwargs"] == {"a": 1}
    assert asked.body.keys() == {"model", "messages", "tools", "chat_template_kwargs"}


@pytest.mark.parametrize(
    "answer",
    [
        gives({"detail": "Not Found"}, "404 Not Found"),
        gives({}, "401 Unauthorized"),
        gives([7, 8]),
        gives({"tokens": "two"}),
        gives({"tokens": [True]}),
        raw(response("200 OK", b"<html>", "Content-Type: text/html")),
        raw(response("200 OK", b"[" * 100_000, JSON)),
    ],
)
async def test_a_server_that_does_not_count_is_named(answer: Any) -> None:
    """An old version, a gateway that lets /v1 through only, and what is no answer: 400, and the model stays ready."""
    async with remote(Upstream(answer)) as client:
        with pytest.raises(BadRequest) as caught:
            await client.tokenize(PROMPT)
        assert caught.value.code == "unsupported_parameter"
        assert client.describe().state == "ready"


async def test_a_server_that_is_too_slow_does_not_count() -> None:
    """A busy one: a run does not fail by that."""
    async with remote(Upstream(never), connect_seconds=0.1) as client:
        assert await kept(client, ["a", "b"], 100) == ["a", "b"]


async def test_a_connection_that_breaks_is_no_answer() -> None:
    """Then the model is not available: it would not answer either."""
    async with remote(Upstream(raw(b"", keeps=False))) as client:
        with pytest.raises(EngineUnavailable):
            await client.tokenize(PROMPT)


PASSAGES = ["alpha " * 10, "beta " * 10, "gamma " * 50]


async def kept(client: RemoteClient, passages: list[str], max_tokens: int) -> list[str]:
    """Return what a pipeline over the client keeps of the passages."""
    found: list[list[str]] = []

    async def trims(run: Run) -> str:
        found.append(await run.trim(passages, max_tokens))
        return "Done."

    pipeline = PipelineClient(Pipeline(name="p", function=trims), {"m": client}, default_model="m")
    try:
        events = await collect(await pipeline.generate(GenerateRequest(model="p", prompt="x")))
    finally:
        await pipeline.aclose()
    assert isinstance(events[-1], Done), events
    return found[0]


async def words(asked: Asked, writer: Any) -> bool:
    """Answer /tokenize as a tokenizer does whose tokens are words."""
    tokens = [*range(len(asked.body["prompt"].split()))]
    writer.write(response("200 OK", json.dumps({"tokens": tokens}).encode(), JSON))
    await writer.drain()
    return True


async def test_a_pipeline_trims_by_the_servers_count() -> None:
    """20 words of 70 fit into 25."""
    upstream = Upstream(words)
    async with remote(upstream) as client:
        assert await kept(client, PASSAGES, 25) == PASSAGES[:2]
    assert {one.path for one in upstream.posts} == {"/tokenize"}


@pytest.mark.parametrize("owned_by", ["vllm", "org"])
async def test_a_pipeline_trims_by_an_estimate_elsewhere(owned_by: str) -> None:
    """A provider, or a gateway without the route: fewer passages than would fit, and the run does not fail."""
    upstream = Upstream(gives({}, "404 Not Found"), owned_by=owned_by)
    async with remote(upstream) as client:
        assert await kept(client, PASSAGES, 25) == []
        assert await kept(client, PASSAGES, 70) == PASSAGES[:2]
        assert await kept(client, PASSAGES, 500) == PASSAGES
    assert {one.path for one in upstream.posts} == ({"/tokenize"} if owned_by == "vllm" else set())


@pytest.mark.parametrize("name", ["README.md", "docs/remote.md", "docs/pipelines.md", "docs/tutorial.md"])
def test_the_estimate_is_not_short(name: str) -> None:
    """Of a page, whole and in its paragraphs: not even with the demo's vocabulary of 3,000, the smallest there is."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(ROOT / "project/demo_model/helpdesk/tokenizer.json"))
    page = (ROOT / name).read_text()
    prose = [part for part in page.split("\n\n") if part[:1].isalpha() and "`" not in part]
    assert prose
    for text in (page, *prose):
        assert len(tokenizer.encode(text).ids) <= estimate(text) <= 3 * len(text), text


@pytest.mark.parametrize(
    ("text", "num"),
    [("", 0), ("a word", 3), ("12,5", 4), ("é", 1), ("日本", 3), ("🙂", 4), ("a\n\n b", 3), ("\ud800", 1)],
)
def test_the_estimate_of_a_few_characters(text: str, num: int) -> None:
    """A token for two bytes of a word, each digit, each byte of a sign, and each break."""
    assert estimate(text) == 8 + num


@pytest.fixture(scope="module")
def llama_url(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with llama_server(tmp_path_factory.mktemp("gguf")) as url:
        yield url


@pytest.fixture
async def llama(llama_url: str) -> AsyncIterator[RemoteClient]:
    client = RemoteClient(RemoteConfig(alias="m", url=llama_url, max_concurrent=2))
    client.start()
    await until(lambda: client.describe().state != "loading")
    yield client
    await client.aclose()


@pytest.mark.parametrize("fields", [{}, {"messages": None, "prompt": "Once upon a time, é."}])
async def test_llama_server_counts_what_it_then_computes(llama: RemoteClient, fields: dict[str, Any]) -> None:
    """The number of ids of a chat and of a prompt is that of its usage."""
    request = chat("How are you?", max_tokens=2, **fields)
    events = await collect(await llama.generate(request))
    assert isinstance(events[-1], Done)
    assert len(await llama.tokenize(request)) == events[-1].usage.prompt_tokens
