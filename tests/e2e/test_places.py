"""Many short calls at once by the official client: beyond its places they wait, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer

pytestmark = pytest.mark.django_db(transaction=True)

NUM_CALLS = 50
ASK: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "tell me"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def server(django_db_setup: None) -> Iterator[DaphneServer]:
    """A site with the limits that sites have, visitors, and an engine that takes its time."""
    with DaphneServer(settings={"STREAMSERVE": {"ECHO_STEP_SECONDS": 0.02, "ANONYMOUS": True}}) as server:
        yield server


@pytest.fixture
def key(transactional_db: Any) -> str:
    return ApiKey.objects.make(name="many", scopes=["chat", "ops"])[1]


@pytest.mark.parametrize("retries", [{}, {"max_retries": 0}], ids=["default retries", "no retries"])
async def test_fifty_calls_at_once_are_all_answered(server: DaphneServer, key: str, retries: dict[str, int]) -> None:
    """As whole answers and as streams, with the client's own retries and without: three times its places."""
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, http_client=http, **retries) as client:

        async def whole() -> str | None:
            return (await client.chat.completions.create(**ASK)).choices[0].message.content

        async def streamed() -> str | None:
            chunks = await client.chat.completions.create(**ASK, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])

        texts = await asyncio.gather(*(one() for _ in range(NUM_CALLS // 2) for one in (whole, streamed)))
    assert len(texts) == NUM_CALLS
    assert all(texts)


async def test_a_visitors_calls_wait_too(server: DaphneServer) -> None:
    """Fifty requests without a cookie from one address, which has four places."""
    body = {"prompt": "tell me", "max_tokens": 4}

    async def ask() -> int:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            return (await client.post(f"{server.url}/v1/completions", json=body)).status_code

    assert await asyncio.gather(*(ask() for _ in range(NUM_CALLS))) == [200] * NUM_CALLS


async def test_a_server_that_goes_down_sends_what_waits_elsewhere(key: str) -> None:
    """SIGTERM: a request that waits for its place gets 503 with Retry-After instead of a broken connection."""
    conf = {"ECHO_STEP_SECONDS": 0.02, "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 1}, "FLOW": {"DRAIN_SECONDS": 5}}
    long = {"prompt": "tell me", "max_tokens": 2000, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    with DaphneServer(settings={"STREAMSERVE": conf}) as server:
        async with (
            httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=60) as client,
            client.stream("POST", "/streams", json=long) as held,
        ):
            assert held.status_code == 200
            asking = asyncio.create_task(client.post("/v1/completions", json=long))
            while "streamserve_num_requests_queued 1" not in (await client.get("/metrics")).text:
                assert not asking.done()
            server._process.terminate()
            refused = await asking
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
