"""A request that ends every engine which computes it ends alone; other answers and the circuit breaker do not."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from streamserve.clients.process.config import LaunchConfig
from streamserve.engine.config import EngineConfig
from streamserve.protocol.engine import SUSPECT_LOSSES
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.requests import GenerateRequest
from tests.proofs.support.killing import STEADY, Readers
from tests.support.engines.engine_processes import ask, connected, spec_in, until
from tests.support.engines.poisoned_engine import CRASHES, RAISES, planted

pytestmark = [pytest.mark.timeout(400)]

ENGINE = EngineConfig(block_size=4, num_blocks=2048, max_num_seqs=16, max_model_len=1024)
SEATS = sorted(STEADY)[:6]


def poisoned_spec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchConfig:
    planted(monkeypatch)
    spec = spec_in(folder, engine=ENGINE, echo_step_seconds=0.02)
    assert spec.max_failures == 5  # the default: one request costs fewer engines than that
    return spec


async def code_of(readers: Readers, seat: int, request: GenerateRequest) -> str:
    """Return the error of an answer: where its engine ends before it is known to be taken, that of a refusal."""
    try:
        end = (await readers.read(seat, request)).end
    except EngineUnavailable as refused:
        return refused.code
    assert end is not None
    return str(end[1]["code"])


@pytest.mark.parametrize("poison", [CRASHES, RAISES], ids=["crashes", "raises"])
async def test_a_poisonous_request_ends_alone(folder: Path, poison: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes two engines with it beside others, and one alone: then it ends in an error, and no other answer does."""
    spec = poisoned_spec(folder, monkeypatch)
    requests = [ask(f"reader {seat}", temperature=seat % 2, seed=seat, max_tokens=150) for seat in SEATS]
    async with connected(spec) as client:
        readers = Readers(client, random.Random(0))
        calm = await asyncio.gather(*map(readers.read, SEATS, requests))
        seen, guilty = await asyncio.gather(
            asyncio.gather(*map(readers.read, SEATS, requests)),
            code_of(readers, SEATS[0], ask(f"{poison} and so on", max_tokens=20)),
        )
        num_lost = client.stats().lost_engines
        assert guilty == "engine_died"
        assert [one.answer for one in seen] == [one.answer for one in calm]
        assert num_lost == SUSPECT_LOSSES + 1
        assert all(one.statuses == ["waiting", "resumed"] * (len(one.statuses) // 2) for one in seen)
        # The circuit breaker is closed: the model serves on, with its present engine.
        pid, again = client.engine_pid, await asyncio.gather(*map(readers.read, SEATS, requests))
        assert [one.answer for one in again] == [one.answer for one in calm]
        assert (client.engine_pid, client.stats().lost_engines) == (pid, num_lost)
        await readers.streams.aclose()


async def test_two_poisonous_requests_end_and_the_rest_is_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both end in an error. The breaker stays closed: a loss that a lone suspect has caused is not counted."""
    spec = poisoned_spec(folder, monkeypatch)
    healthy = ask("reader", seed=1, max_tokens=200)
    async with connected(spec) as client:
        readers = Readers(client, random.Random(0))
        calm = await readers.read(SEATS[0], healthy)
        seen, *guilty = await asyncio.gather(
            readers.read(SEATS[0], healthy),
            *(code_of(readers, seat, ask(f"{CRASHES} {seat}", max_tokens=20)) for seat in SEATS[1:3]),
        )
        assert guilty == ["engine_died"] * 2
        assert seen.end is not None
        assert seen.end[0] == "done", seen.end
        assert seen.answer == calm.answer
        await until(lambda: client.describe().state == "ready")  # the second one may have come after the whole answer
        assert client.stats().lost_engines <= 2 * (SUSPECT_LOSSES + 1)
        await readers.streams.aclose()


async def test_a_model_that_serves_nobody_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no engine has computed a token, every loss is counted, a lone suspect's too: the breaker opens."""
    spec = poisoned_spec(folder, monkeypatch)
    async with connected(spec) as client:
        readers = Readers(client, random.Random(0))
        guilty = await asyncio.gather(
            *(code_of(readers, seat, ask(f"{CRASHES} {seat}", max_tokens=20)) for seat in SEATS[:4]),
        )
        assert guilty == ["engine_died"] * 4
        assert client.describe().state == "failed"
        assert client.stats().lost_engines == spec.max_failures
        await readers.streams.aclose()
