"""Laws of `ProcessEmbedder` with a real process: long requests in parts, withdrawal, and what a kill leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from streamserve.api.embedders import Embedders
from streamserve.clients.factory import make_embedder
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig, config_from_json, config_to_json
from streamserve.clients.process.embedder import ProcessEmbedder
from streamserve.engine.config import EmbedderConfig, ModelConfig
from streamserve.protocol.embeddings import EmbedRequest
from streamserve.protocol.engine import EMBEDS
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import NO_CALLER, GenerateRequest
from streamserve.protocol.spelling import Spell
from tests.support.engines.engine_processes import SLOW, ask, end_engine, engine_of, spec_in, until

MODEL = EmbedderConfig(alias="search", path="echo", max_batch_tokens=256)


def asked(*inputs: str | tuple[int, ...]) -> EmbedRequest:
    return EmbedRequest(model="search", inputs=inputs)


def spec_of(folder: Path, **fields: float) -> LaunchConfig:
    return spec_in(folder, model=ModelConfig(alias="search", path=""), embedder=MODEL, **fields)


@asynccontextmanager
async def serving(spec: LaunchConfig) -> AsyncIterator[ProcessEmbedder]:
    client = ProcessEmbedder(spec)
    client.start()
    try:
        await until(lambda: client.describe().state == "ready")
        yield client
    finally:
        await client.aclose()
        end_engine(spec)


async def test_it_gives_what_the_model_gives_in_this_process(tmp_path: Path) -> None:
    """In order, also of more inputs than go into one message; an error names the input by its place in all."""
    texts = [f"text {number}" for number in range(600)]
    here = make_embedder(MODEL)
    expected = await here.embed(asked(*texts))
    await here.aclose()
    async with serving(spec_of(tmp_path)) as client:
        found = await client.embed(asked(*texts))
        assert found == expected
        model = client.describe()
        assert (model.kind, model.dimensions, model.max_model_len) == (EMBEDS, 64, 8192)
        assert await client.tokenize(GenerateRequest(model="search", prompt="ab")) == (97, 98)
        assert (await client.spell(Spell(token_ids=(97, 98), is_apart=True))).texts == ("a", "b")
        with pytest.raises(BadRequest) as raised:
            await client.embed(asked(*texts, (10_000,)))
        assert raised.value.param == "input[600]"
        await until(lambda: client.stats().embedded_inputs >= 600)


async def test_a_client_that_leaves_withdraws_its_request(tmp_path: Path) -> None:
    """The process computes nothing more of it."""
    async with serving(spec_of(tmp_path, echo_step_seconds=SLOW)) as client:
        left = asyncio.create_task(client.embed(asked(*["a" * 200] * 256)))
        await until(lambda: client.stats().rows > 0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await until(lambda: client.stats().rows == 0 and client.stats().waiting == 0)
        assert client.stats().embedded_inputs < 256
        assert len((await client.embed(asked("b"))).vectors) == 1


async def test_a_request_survives_its_process(tmp_path: Path) -> None:
    """It is asked again of the next process, and has the same vectors."""
    texts = ["a" * 200] * 64
    spec = spec_of(tmp_path, echo_step_seconds=SLOW)
    async with serving(spec) as client:
        embedders = Embedders({"search": client}, Limits(), wait_seconds=90.0)
        task = asyncio.create_task(embedders.embed(asked(*texts), NO_CALLER))
        await until(lambda: client.stats().rows > 0)
        os.kill(engine_of(spec), signal.SIGKILL)
        found = await task
        assert len(set(found.vectors)) == 1
        assert len(found.vectors) == len(texts)
        assert client.stats().lost_engines == 1


async def test_an_answer_is_not_asked_of_an_embedding_model(tmp_path: Path) -> None:
    """A client whose settings are of the time before the model's kind has changed is refused for now."""
    spec = spec_of(tmp_path)
    async with serving(spec):
        old = ProcessClient.visiting(spec)
        old.start()
        await until(lambda: old.is_connected)
        with pytest.raises(EngineUnavailable, match="another kind"):
            await old.generate(ask())
        await old.aclose()


def test_a_config_travels_whole() -> None:
    """The process that is started gets what the settings have."""
    spec = LaunchConfig(model=ModelConfig(alias="search", path=""), embedder=MODEL)
    assert config_from_json(config_to_json(spec)) == spec
