"""Laws of `Embedders`: requests wait for their model, and take no more places than their caller has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from streamserve.api.embedders import Embedders
from streamserve.clients.factory import make_embedder
from streamserve.clients.thread.embedder import ThreadEmbedder
from streamserve.engine.config import EmbedderConfig
from streamserve.protocol.embeddings import Embedded, EmbedRequest
from streamserve.protocol.errors import EngineUnavailable, Overloaded, QuotaExceeded
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import NO_CALLER, Admission

HI = EmbedRequest(model="search", inputs=("hi",))
LIMITS = Limits(max_streams_per_principal=2, max_streams_per_visitor=1, max_streams_anonymous=2)


@pytest.fixture
async def client() -> AsyncIterator[ThreadEmbedder]:
    client = make_embedder(EmbedderConfig(alias="search", path="echo"))
    yield client
    await client.aclose()


def embedders(client: ThreadEmbedder, seconds: float = 60.0) -> Embedders:
    return Embedders({"search": client}, LIMITS, wait_seconds=seconds)


def of(owner: str) -> Admission:
    return Admission(owner=owner, tenant=owner)


async def test_a_request_waits_while_its_engine_leaves(client: ThreadEmbedder) -> None:
    """For the next engine; where none comes in time, it is refused. A paused model refuses at once."""
    client.start()
    await client.control("drain")
    waits = asyncio.create_task(embedders(client).embed(HI, NO_CALLER))
    with pytest.raises(EngineUnavailable) as late:
        await embedders(client, 0.0).embed(HI, NO_CALLER)
    assert late.value.code == "engine_draining"
    assert not waits.done()
    await client.control("resume")
    assert isinstance(await waits, Embedded)
    await client.control("pause")
    with pytest.raises(EngineUnavailable) as paused:
        await embedders(client).embed(HI, NO_CALLER)
    assert paused.value.code == "engine_paused"


async def test_a_caller_has_its_places(client: ThreadEmbedder) -> None:
    """A user, a visitor, all visitors; rows of batches take none, and what has ended gives its place back."""
    client.start()
    await client.control("drain")
    service = embedders(client)

    async def begun(owner: str) -> asyncio.Task[Embedded]:
        task = asyncio.create_task(service.embed(HI, of(owner)))
        await asyncio.sleep(0)
        return task

    open_ = [await begun(owner) for owner in ("user:1", "user:1", "anon:a", "anon:b")]
    for owner, error in (("user:1", QuotaExceeded), ("anon:a", QuotaExceeded), ("anon:c", Overloaded)):
        with pytest.raises(error):
            await service.embed(HI, of(owner))
    row = asyncio.create_task(service.embed(EmbedRequest(model="search", inputs=("hi",), is_batch=True), of("user:1")))
    await client.control("resume")
    await asyncio.gather(row, *open_)
    assert isinstance(await service.embed(HI, of("user:1")), Embedded)
    assert not service._open
