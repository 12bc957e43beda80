"""Several engines under one budget: who loads, who sleeps, who waits. The rules first, then real engine processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from django.test import AsyncClient

from streamserve.api.ops import render_metrics
from streamserve.clients.base import until_loaded
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig, engine_paths, locked
from streamserve.clients.process.embedder import ProcessEmbedder
from streamserve.clients.process.link import NoEngine
from streamserve.clients.process.memory import Entry, HostMemory, may_load, must_sleep, queue
from streamserve.engine.capacity import ECHO_BYTES, GIB
from streamserve.engine.config import EmbedderConfig, ModelConfig
from streamserve.engine.plan import no_progress
from streamserve.protocol.embeddings import EmbedRequest
from streamserve.protocol.engine import TOO_LARGE
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.events import Done
from streamserve.web import site
from tests.support.engines.engine_processes import (
    DEADLINE_SECONDS,
    LONG,
    SLOW,
    ask,
    collect,
    end_engine,
    pid_of,
    spec_in,
    until,
)
from tests.support.processes import is_alive, resident_bytes

NOW = 100.0


def waiting(num_bytes: int, since: float) -> Entry:
    return Entry(state="waiting", num_bytes=num_bytes, since=since)


def held(num_bytes: int, free_from: float | None = None, *, state: str = "held") -> Entry:
    return Entry(state=state, num_bytes=num_bytes, since=0.0, free_from=free_from)


# The rules


def test_an_engine_loads_where_it_fits() -> None:
    """What is held, and what is leaving and not gone yet, is taken."""
    table = {"a": held(4), "b": held(2, state="leaving"), "c": waiting(4, 1.0)}
    assert may_load(table, "c", 10, NOW)
    assert not may_load(table, "c", 9, NOW)


def test_the_queue_is_in_the_order_of_arrival() -> None:
    """The first to wait is the first to load."""
    table = {"a": waiting(3, 2.0), "b": waiting(3, 1.0), "c": held(3, 50.0)}
    assert queue(table) == ["b", "a"]
    assert may_load(table, "b", 6, NOW)
    assert not may_load(table, "a", 6, NOW)


def test_a_small_engine_passes_a_large_engine_that_cannot_load() -> None:
    """But not where the large engine only has to wait until idle engines have left."""
    table = {"large": waiting(8, 1.0), "small": waiting(2, 2.0), "busy": held(6)}
    assert may_load(table, "small", 10, NOW)
    table["busy"] = held(6, free_from=50.0)
    assert not may_load(table, "small", 10, NOW)


def test_the_least_recently_used_engine_sleeps() -> None:
    """One, if that is enough, and none that answers or was used a moment ago."""
    table = {
        "new": waiting(4, 1.0),
        "old": held(4, 10.0),
        "older": held(4, 5.0),
        "busy": held(4),
        "just": held(4, 101.0),
    }
    assert [name for name in table if must_sleep(table, name, 16, NOW)] == ["older"]
    table["older"] = held(4, 5.0, state="leaving")
    assert not any(must_sleep(table, name, 16, NOW) for name in table)


def test_no_engine_sleeps_in_vain() -> None:
    """Where all idle engines together do not make room, they stay."""
    table = {"new": waiting(9, 1.0), "idle": held(4, 5.0), "busy": held(6)}
    assert not any(must_sleep(table, name, 10, NOW) for name in table)


def test_nothing_sleeps_while_nothing_waits() -> None:
    """Memory that no engine asks for stays in use."""
    assert not must_sleep({"idle": held(4, 5.0)}, "idle", 4, NOW)


# Real processes

TWO = 2 * ECHO_BYTES + ECHO_BYTES // 2  # bytes: two echo engines, and no third


def spec(folder: Path, alias: str, **fields: object) -> LaunchConfig:
    model = ModelConfig(alias=alias, path="echo")
    return spec_in(folder, **{"model": model, "memory_bytes": TWO, **fields})


@asynccontextmanager
async def clients(folder: Path, *aliases: str, **fields: object) -> AsyncIterator[list[ProcessClient]]:
    """Clients of echo engines, which end with the test."""
    specs = [spec(folder, alias, **fields) for alias in aliases]
    async with AsyncExitStack() as stack:
        made = [ProcessClient(one) for one in specs]
        for one, client in zip(specs, made, strict=True):
            stack.callback(end_engine, one)
            stack.push_async_callback(client.aclose)
            client.start()
        yield made


async def answer(client: ProcessClient, **fields: object) -> None:
    """Ask as a stream does: again while the model is loaded."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                generation = await client.generate(ask(**fields))
            except EngineUnavailable:
                await until_loaded(client, 5.0)
                continue
            assert isinstance((await collect(generation))[-1], Done)
            return


def state(client: ProcessClient) -> str:
    return client.describe().state


async def test_a_model_sleeps_until_it_is_asked(folder: Path) -> None:
    """No process runs for it, and that is no failure."""
    async with clients(folder, "a") as [a]:
        await until(lambda: state(a) == "asleep")
        assert a.describe().is_served
        assert pid_of(spec(folder, "a")) is None
        await answer(a)
        assert state(a) == "ready"


async def test_the_least_recently_used_model_makes_room(folder: Path) -> None:
    """Its process has ended before the next engine loads, and it wakes when it is asked."""
    async with clients(folder, "a", "b", "c") as [a, b, c]:
        await answer(a)
        await answer(b)
        pid = a.engine_pid
        assert pid is not None
        await answer(c)
        assert resident_bytes(pid) == 0
        await until(lambda: state(a) == "asleep")
        assert state(b) == "ready"
        await answer(a)
        await until(lambda: state(b) == "asleep")


async def test_a_model_that_answers_stays(folder: Path) -> None:
    """The next model waits, with its place in the queue; it loads once the answer is over."""
    async with clients(folder, "a", "b", memory_bytes=ECHO_BYTES, echo_step_seconds=SLOW) as [a, b]:
        await answer(a)
        generation = await a.generate(ask(max_tokens=LONG))
        b.wake()
        await until(lambda: "1st in the queue" in b.describe().stage)
        with pytest.raises(EngineUnavailable, match="1st in the queue") as refused:
            await b.generate(ask())
        assert (refused.value.code, refused.value.retry_after) == ("model_waiting_for_memory", 5)
        assert b.describe().is_served
        assert generation.is_open
        generation.cancel()
        await answer(b)
        await until(lambda: state(a) == "asleep")


async def test_a_killed_engine_leaves_no_reservation(folder: Path) -> None:
    """Its memory is free at once."""
    async with clients(folder, "a", memory_bytes=ECHO_BYTES) as [a]:
        await answer(a)
        assert a.engine_pid is not None
        await a.aclose()
        os.kill(pid_of(spec(folder, "a")) or 0, signal.SIGKILL)
        async with clients(folder, "b", memory_bytes=ECHO_BYTES) as [b]:
            await answer(b)


async def test_a_model_larger_than_the_budget_is_refused(folder: Path) -> None:
    """With both sizes."""
    async with clients(folder, "a", memory_bytes=ECHO_BYTES // 2) as [a]:
        a.wake()
        await until(lambda: state(a) == "failed" and not a.is_connected)
        with pytest.raises(EngineUnavailable, match=r"a takes 0\.06 GiB, .* have 0\.03 GiB") as refused:
            await a.generate(ask())
        assert refused.value.code == "model_too_large"


async def test_a_refusal_keeps_its_reason(folder: Path) -> None:
    """Also where the next try finds that the refused engine has not ended yet."""
    async with clients(folder, "a", memory_bytes=ECHO_BYTES // 2) as [a]:
        a.wake()
        await until(lambda: state(a) == "failed" and not a.is_connected)
        a._link._wait(NoEngine("Another engine is starting or ending."))
        with pytest.raises(EngineUnavailable, match=r"a takes 0\.06 GiB, .* have 0\.03 GiB"):
            await a.generate(ask())


@pytest.mark.parametrize("autostart", [True, False])
def test_what_the_machine_has_bounds_the_budget(autostart: bool, folder: Path) -> None:
    """A model that is larger is refused with both sizes; engines of a service of their own have the whole budget."""
    memory = HostMemory(spec(folder, "a", autostart=autostart), 8 * GIB, limit=2 * GIB)
    assert memory.budget == 2 * GIB
    stages: list[str] = []
    with pytest.raises(EngineUnavailable, match=r"a takes 3\.00 GiB, .* container, has 2\.00 GiB") as refused:
        memory.reserve(3 * GIB, lambda stage, *_: stages.append(stage))
    assert (refused.value.code, stages) == (TOO_LARGE, [TOO_LARGE])
    other = HostMemory(spec(folder, "b", autostart=autostart), 8 * GIB, limit=2 * GIB)
    with locked(engine_paths(spec(folder, "a", autostart=autostart))):
        memory.reserve(2 * GIB, no_progress)
        if autostart:
            with pytest.raises(TimeoutError, match="1st in the queue"):
                other.reserve(GIB, refuse)
        else:
            other.reserve(GIB, refuse)


def refuse(stage: str, *_: object) -> None:
    raise TimeoutError(stage)


async def test_an_idle_model_sleeps_by_itself(folder: Path) -> None:
    """After `sleep_after_seconds`, also without a budget; the next question wakes it."""
    async with clients(folder, "a", memory_bytes=None, sleep_after_seconds=0.5) as [a]:
        await answer(a)
        await until(lambda: state(a) == "asleep")
        await answer(a)


async def test_an_operator_sends_a_model_to_sleep(folder: Path) -> None:
    """Not while it answers; and without a budget, too."""
    async with clients(folder, "a", memory_bytes=None, echo_step_seconds=SLOW) as [a]:
        await answer(a)
        generation = await a.generate(ask(max_tokens=LONG))
        with pytest.raises(EngineUnavailable) as refused:
            await a.control("sleep")
        assert refused.value.code == "engine_busy"
        generation.cancel()
        await until(lambda: a.stats().running == 0)
        pid = a.engine_pid
        assert pid is not None
        await a.control("sleep")
        await until(lambda: state(a) == "asleep" and not is_alive(pid))
        with pytest.raises(EngineUnavailable) as refused:
            await a.control("pause")
        assert refused.value.code == "engine_asleep"
        await a.control("wake")
        await until(lambda: state(a) == "ready")


async def test_workers_that_wake_a_model_together_get_one_engine(folder: Path) -> None:
    """And one reservation: the budget holds no second engine."""
    async with clients(folder, *["a"] * 4, memory_bytes=ECHO_BYTES) as all_of_a:
        await asyncio.gather(*map(answer, all_of_a))
        assert len({client.engine_pid for client in all_of_a}) == 1


@pytest.mark.usefixtures("transactional_db")
async def test_a_site_whose_model_sleeps_is_ready(folder: Path) -> None:
    """/readyz names the state, and wakes nothing; the site is ready while the model wakes, too."""
    async with clients(folder, "a") as [a]:
        ops = site.get_site().services.ops
        ops.clients = {"a": a}
        try:
            await until(lambda: state(a) == "asleep")
            assert (await AsyncClient().get("/readyz")).status_code == 200
            await until(lambda: state(a) == "asleep")
            assert await ops.control("a", "wake") == "loading"
            assert (await AsyncClient().get("/readyz")).status_code == 200
            await until(lambda: state(a) == "ready")
            text = render_metrics({"a": a}, site.get_site().streams)
            assert 'engine_asleep{model_name="a"} 0' in text
        finally:
            await site.reset()


async def test_an_embedding_model_counts(folder: Path) -> None:
    """It sleeps for a model that answers, and wakes for a text."""
    made = EmbedderConfig(alias="search", path="echo")
    config = replace(spec(folder, "search", memory_bytes=ECHO_BYTES), embedder=made)
    embedder, request = ProcessEmbedder(config), EmbedRequest(model="search", inputs=("a quiet river",))
    try:
        async with clients(folder, "a", memory_bytes=ECHO_BYTES) as [a]:
            await until_loaded(embedder, DEADLINE_SECONDS)
            before = await embedder.embed(request)
            await answer(a)
            await until(lambda: embedder.describe().state == "asleep")
            await until_loaded(embedder, DEADLINE_SECONDS)
            assert await embedder.embed(request) == before
    finally:
        await embedder.aclose()
        end_engine(config)
