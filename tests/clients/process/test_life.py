"""Kills, hangs and failures of engine processes, as their workers see them.

Every test starts real processes and waits for events, not for a fixed time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.link import SpawnFailed, spawn
from streamserve.engine.config import ModelConfig, Policy
from streamserve.protocol.engine import Park
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.events import Done, Token
from tests.support.engines.engine_processes import (
    ENGINE,
    LONG,
    SLOW,
    ask,
    asking,
    collect,
    connected,
    engine_of,
    ready,
    sign_of_life,
    spec_in,
    token_ids,
    until,
)
from tests.support.engines.poisoned_engine import CRASHES, RAISES, planted
from tests.support.processes import is_alive

pytestmark = [pytest.mark.proof, pytest.mark.alone]

HELPDESK = Path(__file__).resolve().parents[3] / "project/demo_model/helpdesk"


async def finish(client: ProcessClient, shown: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Submit as a stream does until the answer is whole; return all its tokens."""
    while True:
        await ready(client)
        try:
            generation = await client.generate(*asking(max_tokens=max_tokens, output_token_ids=(shown,)))
        except EngineUnavailable:
            continue
        events = await collect(generation)
        shown += token_ids(events)
        if generation.parked is None:
            assert isinstance(events[-1], Done)
            return shown


async def test_a_killed_engine_is_replaced_and_answers_continue(folder: Path) -> None:
    """kill -9 in mid-answer: the shown tokens are a prefix, and the next engine gives exactly the rest."""
    spec = spec_in(folder)
    async with connected(spec) as client:
        whole = token_ids(await collect(await client.generate(ask(max_tokens=60))))
        generation = await client.generate(ask(max_tokens=60))
        shown = token_ids([await anext(generation)])
        os.kill(old := engine_of(spec), signal.SIGKILL)
        shown += token_ids(await collect(generation))
        assert await finish(client, shown, 60) == whole
        await ready(client)
        assert engine_of(spec) != old
        await until(lambda: client.stats().lost_engines == 1)


async def test_open_answers_and_questions_end_as_lost(folder: Path) -> None:
    """Each generation ends as parked, without a terminal event, and open questions are refused."""
    spec = spec_in(folder, echo_step_seconds=SLOW)
    async with connected(spec) as client:
        generations = [await client.generate(ask(max_tokens=LONG, n=n)) for n in (1, 2)]
        await asyncio.gather(*(anext(one) for one in generations))
        os.kill(pid := engine_of(spec), signal.SIGSTOP)
        question = asyncio.create_task(client.generate(ask()))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        for generation in generations:
            events = await collect(generation)
            assert all(isinstance(event, Token) for event in events)
            assert generation.parked is not None
            assert generation.parked.reason == "lost"
            generation.cancel()
            generation.reader_at((1,))
        with pytest.raises(EngineUnavailable):
            await question


async def test_a_hung_engine_is_killed_and_replaced(folder: Path) -> None:
    """SIGSTOP: silence for `hang_seconds`, then its answers end as lost and another engine serves."""
    spec = spec_in(folder, echo_step_seconds=SLOW, hang_seconds=4.0)
    async with connected(spec) as client:
        generation = await client.generate(ask(max_tokens=LONG))
        await anext(generation)
        os.kill(old := engine_of(spec), signal.SIGSTOP)
        await collect(generation)
        assert generation.parked is not None
        assert generation.parked.reason == "lost"
        await until(lambda: not is_alive(old))
        await ready(client)
        assert engine_of(spec) != old


async def test_an_engine_that_only_waits_for_readers_is_not_hung(folder: Path) -> None:
    """The only answer is held at its lead for longer than a step may take, and goes on when its reader does."""
    spec = spec_in(
        folder, engine=replace(ENGINE, step_seconds=1.0, policy=Policy(stalled_seconds=600.0)), hang_seconds=2.0
    )
    async with connected(spec) as client:
        old = engine_of(spec)
        generation = await client.generate(*asking(max_tokens=LONG, reader_tokens=(0,)))
        await until(lambda: client.stats().steps >= ENGINE.lead_tokens)
        for _ in range(5):
            await sign_of_life(client)
        assert engine_of(spec) == old
        generation.reader_at((LONG,))
        assert len(token_ids(await collect(generation))) == LONG
        assert generation.parked is None


async def test_an_engine_that_hangs_while_it_loads_is_replaced_as_soon(folder: Path) -> None:
    """A stopped engine computes nothing: loading gives it no more time than `hang_seconds`."""
    pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")
    model = ModelConfig(alias="echo", path=str(HELPDESK), parity_probe=False, num_threads=1)
    spec = spec_in(folder, model=model, hang_seconds=6.0)
    client = ProcessClient(spec)
    client.start()
    try:
        await until(lambda: client.engine_pid is not None)
        assert client.describe().state == "loading"
        os.kill(old := engine_of(spec), signal.SIGSTOP)
        stopped_at = time.monotonic()
        await until(lambda: not is_alive(old))
        assert time.monotonic() - stopped_at < 5 * spec.hang_seconds  # it was six times that
        await ready(client)
        assert engine_of(spec) != old
    finally:
        await client.aclose()


async def test_a_worker_that_finds_a_hung_engine_replaces_it(folder: Path) -> None:
    """A connection without a heartbeat ends after `hang_seconds`, and the engine is killed."""
    spec = spec_in(folder, hang_seconds=1.0)
    async with connected(spec):
        os.kill(old := engine_of(spec), signal.SIGSTOP)
    async with connected(spec):
        assert not is_alive(old)
        assert engine_of(spec) != old


async def test_a_request_that_kills_engines_cannot_do_so_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that raises ends the process. After `max_failures` the model counts as failed; later it is tried again."""
    planted(monkeypatch)
    spec = spec_in(folder, max_failures=1, failure_seconds=2.0)
    async with connected(spec) as client:
        generation = await client.generate(ask(RAISES))
        assert await collect(generation) == []
        assert generation.parked is not None
        assert generation.parked.reason == "lost"
        await until(lambda: client.describe().state == "failed")
        with pytest.raises(EngineUnavailable) as refused:
            await client.generate(ask())
        assert refused.value.code == "engine_died"
        await ready(client)
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)


async def test_sampling_that_a_door_has_missed_ends_no_engine(folder: Path) -> None:
    """The engine's own process checks it again, and refuses it with the name of the field."""
    async with connected(spec_in(folder)) as client:
        pid = client.engine_pid
        with pytest.raises(BadRequest, match="top_k") as refused:
            await client.generate(ask(top_k=-1000))
        assert refused.value.param == "top_k"
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)
        assert client.engine_pid == pid


@pytest.mark.parametrize("poison", [RAISES, CRASHES], ids=["raises", "crashes"])
async def test_a_loss_is_counted_for_what_was_in_the_step(
    folder: Path, poison: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the engine outlives it: its last step held one answer, and another one only waited."""
    planted(monkeypatch)
    spec = spec_in(folder, engine=replace(ENGINE, max_num_seqs=1), echo_step_seconds=SLOW)
    async with connected(spec) as client:
        first = await client.generate(*asking(max_tokens=LONG, stream_id="first"))
        await anext(first)
        guilty = await client.generate(*asking(poison, stream_id="guilty"))
        waiting = await client.generate(*asking("w", stream_id="waiting"))
        first.cancel()  # its end would race with the step after it, which ends the engine
        for one in (guilty, waiting):
            await collect(one)
        assert guilty.parked == Park(reason="lost", is_counted=True, was_alone=True)
        assert waiting.parked == Park(reason="lost", is_counted=False, was_alone=False)


async def test_a_model_that_cannot_be_loaded_names_the_reason(folder: Path) -> None:
    """The reason reaches the worker, and the load is not repeated."""
    model = ModelConfig(alias="echo", path=str(folder / "no-such-model"))
    client = ProcessClient(spec_in(folder, model=model))
    client.start()
    try:
        await until(lambda: client.describe().state == "failed" and not client.is_connected)
        assert "no-such-model" in client.describe().message
        with pytest.raises(EngineUnavailable) as refused:
            await client.generate(ask())
        assert refused.value.code == "engine_died"
        assert refused.value.retry_after > 1
    finally:
        await client.aclose()


async def test_an_engine_that_cannot_start_is_given_up(folder: Path) -> None:
    """An engine that ends before it listens is a SpawnFailed, and the client stops trying."""
    (folder / "run").mkdir(mode=0o755)
    with pytest.raises(SpawnFailed):
        await spawn(spec_in(folder))
    assert "0700" in (folder / "engine-echo.log").read_text()
    client = ProcessClient(spec_in(folder, max_failures=2))
    client.start()
    await until(lambda: client.describe().state == "failed")
    await client.aclose()
