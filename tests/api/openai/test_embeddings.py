"""`POST /v1/embeddings` as the official client calls it, on both sites that serve `ROUTES`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from django.test.utils import override_settings

from streamserve import routing
from streamserve.asgi import anyone, app
from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EmbedderConfig
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.sites.batch_runs import Tenant, jsonl, line

SITE = {
    "TESTING": True,
    "MODELS": {"echo": {"PATH": "echo", "ANSWERS": None}},
    "EMBEDDING_MODELS": {
        "search": {"PATH": "org/name"},
        "staff only": {"PATH": "echo", "PERMISSION": "staff"},
    },
    "LIMITS": {"MAX_EMBEDDING_INPUTS": 4, "MAX_PROMPT_CHARS": 1000, "MAX_STREAMS_PER_PRINCIPAL": 2},
}
TEXTS = ["How do I pause my subscription?", "the weather in spring"]


@pytest.fixture
async def served(transactional_db: Any) -> AsyncIterator[None]:
    """A site with two embedding models."""
    with override_settings(STREAMSERVE=SITE):
        await until_ready()
        yield
        await site.reset()


@pytest.fixture(params=["django", "asgi"])
async def client(request: pytest.FixtureRequest, served: None, lonely_key: str, echo: ThreadClient) -> Any:
    """The official client, on a site with the embedding model "search"."""
    embedders = {"search": EmbedderConfig(alias="search", path="echo")}
    async with app(models={"echo": echo}, embedding_models=embedders, authenticate=anyone) as ai:
        asgi: Any = ai if request.param == "asgi" else routing.application
        http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=asgi))
        async with openai.AsyncOpenAI(
            api_key=lonely_key, base_url="http://testserver/v1", max_retries=0, http_client=http_client
        ) as client:
            yield client


@pytest.fixture
def alices(alice_key: str) -> Caller:
    return Caller(key=alice_key)


async def test_the_official_client_gets_vectors(client: Any) -> None:
    """It asks for base64; as numbers they are the same. One text, several, and ids; tokens are counted."""
    packed = await client.embeddings.create(model="search", input=TEXTS)
    plain = await client.embeddings.create(model="search", input=TEXTS, encoding_format="float")
    ids = await client.embeddings.create(model="search", input=[list(TEXTS[0].encode())])
    one = await client.embeddings.create(model="search", input=TEXTS[0], dimensions=8)
    assert [item.index for item in packed.data] == [0, 1]
    assert [item.embedding for item in packed.data] == [item.embedding for item in plain.data]
    assert ids.data[0].embedding == packed.data[0].embedding
    assert (len(packed.data[0].embedding), len(one.data[0].embedding)) == (64, 8)
    assert sum(number * number for number in one.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(map(len, TEXTS))
    assert (packed.object, packed.model, packed.data[0].object) == ("list", "search", "embedding")


async def test_the_list_of_models_shows_their_kind(client: Any) -> None:
    """With the size of their vectors, also by its id."""
    models = {one.id: one async for one in client.models.list()}
    assert models.keys() == {"echo", "search"}
    search = await client.models.retrieve("search")
    assert (search.kind, search.dimensions, search.max_model_len) == ("embedding", 64, 8192)
    assert search == models["search"]
    assert not hasattr(models["echo"], "dimensions")


async def test_a_model_of_the_other_kind_is_a_400_that_names_the_way_out(client: Any) -> None:
    """Answers of an embedding model, and embeddings of a model that answers."""
    with pytest.raises(openai.BadRequestError, match=r"/v1/embeddings.*Answers come from: echo") as chat:
        await client.chat.completions.create(model="search", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match=r"no embeddings\. Embeddings come from: search") as embedding:
        await client.embeddings.create(model="echo", input="hi")
    for raised in (chat, embedding):
        assert (raised.value.code, raised.value.param) == ("wrong_kind_of_model", "model")


@pytest.mark.usefixtures("served")
async def test_a_model_that_is_hidden_does_not_exist(alices: Caller) -> None:
    """To embed, in the list, and for a chat; a request without a model is for the first that the caller may use."""
    for path, body in (("embeddings", {"input": "hi"}), ("chat/completions", {"messages": []})):
        response = await alices.post(f"/v1/{path}", {"model": "staff only", **body})
        hidden = await alices.post(f"/v1/{path}", {"model": "nothing", **body})
        if path == "embeddings":
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert response.status_code == hidden.status_code
    listed = (await alices.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == ["echo", "search"]
    assert (await alices.post("/v1/embeddings", {"input": "hi"})).json()["model"] == "search"


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_field", "input"),
        ({"input": ""}, "empty_prompt", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ["a", 1]}, "invalid_type", "input[1]"),
        ({"input": [1, -1]}, "invalid_value", "input[1]"),
        ({"input": [[1, 2**31]]}, "invalid_value", "input[0][1]"),
        ({"input": [[70_000]]}, "invalid_value", "input[0]"),
        ({"input": ["a"] * 5}, "invalid_value", "input"),
        ({"input": ["a" * 600] * 2}, "context_length_exceeded", "input"),
        ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "a", "dimensions": 65}, "invalid_value", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "stream": True}, "unknown_field", "stream"),
    ],
)
async def test_a_wrong_body_is_a_400_that_names_the_field(
    alices: Caller, body: dict[str, Any], code: str, param: str
) -> None:
    """Before anything is computed."""
    response = await alices.post("/v1/embeddings", {"model": "search", **body})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


@pytest.mark.usefixtures("served")
async def test_a_caller_has_so_many_requests_at_once(alices: Caller) -> None:
    """As many as streams: the next is a 429, and a place that is given back is there again."""
    embedders = site.get_site().services.answers.embedders
    (client,) = (one for alias, one in embedders.clients.items() if alias == "search")
    client.start()
    held, release = asyncio.Event(), asyncio.Event()
    embed = client.embed

    async def held_back(*args: Any) -> Any:
        held.set()
        await release.wait()
        return await embed(*args)

    client.embed = held_back  # type: ignore[method-assign]
    first = [asyncio.create_task(alices.post("/v1/embeddings", {"input": "hi"})) for _ in range(2)]
    await held.wait()
    async with asyncio.timeout(60):
        while embedders._open.total() < 2:  # noqa: ASYNC110  (a request has no event here)
            await asyncio.sleep(0.005)
    refused = await alices.post("/v1/embeddings", {"input": "hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert refused["Retry-After"]
    release.set()
    assert [response.status_code for response in await asyncio.gather(*first)] == [200, 200]
    assert (await alices.post("/v1/embeddings", {"input": "hi"})).status_code == 200


async def test_without_an_embedding_model_the_setting_is_named(engine: None, alices: Caller) -> None:
    """A 404."""
    response = await alices.post("/v1/embeddings", {"model": "search", "input": "hi"})
    assert response.status_code == 404
    assert "EMBEDDING_MODELS" in response.json()["error"]["message"]


@pytest.mark.usefixtures("served")
async def test_rows_of_a_batch_are_embedded(alice_key: str) -> None:
    """A wrong row is in the error file."""
    url = "/v1/embeddings"
    rows = [line("a", url, input=TEXTS[0]), line("b", url, input=""), line("c", url, input=TEXTS, dimensions=4)]
    tenant = Tenant(alice_key)
    batch = await tenant.run(jsonl(rows), url)
    output = {one["custom_id"]: one["response"]["body"] for one in await tenant.lines(batch["output_file_id"])}
    assert [len(item["embedding"]) for item in output["a"]["data"] + output["c"]["data"]] == [64, 4, 4]
    (failed,) = await tenant.lines(batch["error_file_id"])
    assert (failed["custom_id"], failed["response"]["body"]["error"]["code"]) == ("b", "empty_prompt")


@pytest.mark.usefixtures("served")
async def test_metrics_count_requests_and_tokens(alices: Caller, ops_key: str) -> None:
    """By model; and readiness names a model that is not ready."""
    await alices.post("/v1/embeddings", {"model": "search", "input": ["one", "two"]})
    metrics = (await body_of(await Caller(key=ops_key).get("/metrics"))).decode()
    for name, value in (("embedding_requests", 1), ("embedding_inputs", 2), ("prompt_tokens", 6)):
        assert f'streamserve_{name}_total{{model_name="search"}} {value}' in metrics.replace(".0\n", "\n")
    ready = await alices.get("/readyz")
    assert [one["alias"] for one in ready.json()["models"]] == ["echo", "search"]
