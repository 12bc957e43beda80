"""Starts, idleness, drains and replacements of engine processes, as their workers see them.

Every test starts real processes and waits for events, not for a fixed time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import engine_paths, is_locked
from streamserve.clients.process.link import spawn
from streamserve.protocol.engine import Park
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.events import Done
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
from tests.support.processes import children_of, is_alive

pytestmark = [pytest.mark.proof, pytest.mark.alone]


async def test_workers_that_start_together_get_one_engine(folder: Path) -> None:
    """The race for the lock has one winner; the losers use its engine."""
    spec = spec_in(folder)
    clients = [ProcessClient(spec) for _ in range(4)]
    try:
        await asyncio.gather(*map(ready, clients))
        answers = [token_ids(await collect(await client.generate(ask()))) for client in clients]
        assert len(set(answers)) == 1
        assert (folder / "engine-echo.log").read_text().count("Traceback") == 0
        await until(lambda: all(client.stats().prompt_tokens == 4 * len("The quiet river") for client in clients))
    finally:
        await asyncio.gather(*(client.aclose() for client in clients))


async def test_a_stale_socket_is_replaced(folder: Path) -> None:
    """The socket file of a killed engine is replaced."""
    spec = spec_in(folder)
    (folder / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(engine_paths(spec).socket))
    async with connected(spec) as client:
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)


async def test_an_idle_engine_ends_and_is_started_again(folder: Path) -> None:
    """After its last client; its files but the lock are gone, and that is no failure."""
    spec = spec_in(folder, idle_seconds=0.5, max_failures=1)
    async with connected(spec):
        old = engine_of(spec)
    await until(lambda: not is_alive(old))
    assert [path.suffix for path in (folder / "run").iterdir()] == [".lock"]
    async with connected(spec):
        assert engine_of(spec) != old


async def test_an_engine_is_not_idle_while_a_worker_is_there(folder: Path) -> None:
    """However few its requests are: it lives longer than `idle_seconds`."""
    spec = spec_in(folder, idle_seconds=1.0)
    async with connected(spec) as client:
        old = engine_of(spec)
        for _ in range(3):
            await sign_of_life(client)
        assert engine_of(spec) == old


async def test_sigterm_drains(folder: Path) -> None:
    """Begun answers end properly, new requests are refused, the process ends; that is no failure."""
    spec = spec_in(folder, echo_step_seconds=SLOW, max_failures=1, autostart=False)
    await spawn(spec)
    async with connected(spec) as client:
        generation = await client.generate(ask(max_tokens=50))
        await anext(generation)
        os.kill(old := engine_of(spec), signal.SIGTERM)
        await until(lambda: client.describe().state == "draining")
        with pytest.raises(EngineUnavailable) as refused:
            await client.generate(ask())
        assert refused.value.code == "engine_draining"
        assert isinstance((await collect(generation))[-1], Done)
        await until(lambda: not is_alive(old))
        await until(lambda: not client.is_connected)
        assert client.describe().state != "failed"


async def test_a_drain_does_not_wait_for_ever(folder: Path) -> None:
    """After `drain_seconds` the open answers end as lost, not by their fault, and continue in the next engine."""
    spec = spec_in(folder, echo_step_seconds=SLOW, drain_seconds=0.2)
    async with connected(spec) as client:
        generation = await client.generate(*asking(max_tokens=LONG, stream_id="open"))
        await anext(generation)
        await client.control("stop")
        await collect(generation)
        assert generation.parked == Park(reason="lost", is_counted=False)


async def test_ctrl_c_does_not_end_an_engine_that_a_worker_started(folder: Path) -> None:
    """It has a session of its own, and ignores any SIGINT that still reaches it."""
    async with connected(spec_in(folder)) as client:
        pid = engine_of(spec_in(folder))
        assert os.getsid(pid) != os.getsid(0)
        os.kill(pid, signal.SIGINT)
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)
        assert is_alive(pid)


async def test_younger_settings_replace_the_engine(folder: Path) -> None:
    """The old engine finishes its answers and ends; the worker with older settings uses the new one."""
    old_spec = spec_in(folder, echo_step_seconds=SLOW, made_at=1.0)
    new_spec = replace(old_spec, engine=replace(ENGINE, max_model_len=256), made_at=2.0)
    async with connected(old_spec) as old:
        generation = await old.generate(ask(max_tokens=40))
        await anext(generation)
        pid = engine_of(old_spec)
        async with connected(new_spec) as new:
            assert isinstance((await collect(generation))[-1], Done)
            assert not is_alive(pid)
            await until(lambda: old.is_connected and old.describe().max_model_len == 256)
            assert new.describe().max_model_len == 256
            assert engine_of(new_spec) != pid


async def test_a_replacement_is_announced_while_the_old_engine_drains(folder: Path) -> None:
    """A worker that meets a draining engine of other settings describes a coming engine until that serves."""
    old_spec = spec_in(folder, echo_step_seconds=SLOW, drain_seconds=60.0, made_at=1.0)
    new_spec = replace(old_spec, engine=replace(ENGINE, max_model_len=256), made_at=2.0)
    async with connected(old_spec) as old:
        generation = await old.generate(ask(max_tokens=LONG))
        await anext(generation)
        new = ProcessClient(new_spec)
        new.start()
        seen = []
        while new.describe().state != "ready":
            if new.describe().stage == "replacing":
                generation.cancel()  # the drain has nothing left to wait for
            if new.describe().stage != "connecting":
                seen.append(new.describe())
            await asyncio.sleep(0.01)
        assert seen[0].stage == "replacing"
        assert {(model.state, model.was_ready) for model in seen} == {("loading", True)}
        assert isinstance((await collect(await new.generate(ask())))[-1], Done)
        await new.aclose()


async def test_older_settings_make_do_with_the_engine(folder: Path) -> None:
    """A worker that has not been restarted yet does not replace the engine of those that have."""
    new_spec = spec_in(folder, made_at=2.0)
    old_spec = replace(new_spec, engine=replace(ENGINE, max_model_len=256), made_at=1.0)
    async with connected(new_spec) as new:
        pid = engine_of(new_spec)
        async with connected(old_spec) as old:
            assert old.describe().max_model_len == new.describe().max_model_len == 512
            assert engine_of(new_spec) == pid


async def test_an_operator_takes_the_engine_as_it_is(folder: Path) -> None:
    """`visiting` replaces nothing, however young its settings, and starts nothing."""
    spec = spec_in(folder, made_at=1.0)
    async with connected(spec):
        pid = engine_of(spec)
        visitor = ProcessClient.visiting(replace(spec, engine=replace(ENGINE, max_model_len=256), made_at=9.0))
        await ready(visitor)
        assert engine_of(spec) == pid
        await visitor.control("stop")
        await until(lambda: not is_alive(pid))
        await visitor.aclose()


async def test_without_autostart_no_engine_is_started(folder: Path) -> None:
    """The client's message names the command, and it connects once the engine runs."""
    spec = spec_in(folder, autostart=False)
    client = ProcessClient(spec)
    with pytest.raises(EngineUnavailable) as refused:
        await client.generate(ask())
    assert refused.value.code == "engine_loading"
    try:
        await until(lambda: client.describe().state == "failed")
        with pytest.raises(EngineUnavailable) as refused:
            await client.generate(ask())
        command = f"manage.py streamserve_engine {spec.model.alias}"
        assert refused.value.message == f"No engine runs for the model {spec.model.alias!r}. Start it with: {command}"
        assert (refused.value.code, refused.value.http_status) == ("no_engine", 503)
        assert not is_locked(engine_paths(spec))
        await spawn(spec)
        await ready(client)
    finally:
        await client.aclose()


async def test_two_sites_of_one_user_keep_apart(folder: Path) -> None:
    """The same alias, the same folder for sockets, two engines."""
    one, two = (spec_in(folder, site=site) for site in ("one", "two"))
    async with connected(one), connected(two):
        pids = {engine_of(one), engine_of(two)}
        assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


async def test_closing_while_an_engine_starts_leaves_no_child(folder: Path) -> None:
    """The starter is reaped."""
    before = children_of("self")
    client = ProcessClient(spec_in(folder, idle_seconds=0.1))
    client.start()
    await until(lambda: client.describe().stage == "starting")
    await client.aclose()
    assert children_of("self") <= before
