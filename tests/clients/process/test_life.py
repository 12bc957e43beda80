"""Kills, hangs, races, idleness, drains and replacements of engine processes, as their workers see them.

Every test starts real processes and waits for events, not for a fixed time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.clients.base import Generation
from streamserve.clients.process.client import ProcessClient, SpawnFailed, spawn
from streamserve.clients.process.config import LaunchConfig, engine_paths, is_locked
from streamserve.engine.config import ModelConfig
from streamserve.protocol.engine import Park
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.events import Done, Event, Token
from tests.support.engines.engine_processes import ENGINE, ask, connected, is_alive, pid_of, ready, spec_in, until
from tests.support.engines.poisoned_engine import CRASHES, RAISES, planted

pytestmark = [pytest.mark.proof, pytest.mark.alone]

SLOW = 0.03  # seconds a step: a test can act before an answer ends
LONG = 400
HELPDESK = Path(__file__).resolve().parents[3] / "project/demo_model/helpdesk"


async def collect(generation: Generation) -> list[Event]:
    return [event async for event in generation]


def token_ids(events: list[Event]) -> tuple[int, ...]:
    return tuple(token_id for event in events if isinstance(event, Token) for token_id in event.token_ids)


def engine_of(spec: LaunchConfig) -> int:
    pid = pid_of(spec)
    assert pid is not None
    return pid


async def sign_of_life(client: ProcessClient) -> None:
    """Wait for the next heartbeat; they come a second apart."""
    seen = client.stats()
    await until(lambda: client.stats() is not seen)


async def finish(client: ProcessClient, shown: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Submit as a stream does until the answer is whole; return all its tokens."""
    while True:
        await ready(client)
        try:
            generation = await client.generate(ask(max_tokens=max_tokens, output_token_ids=(shown,)))
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


async def test_an_engine_that_hangs_while_it_loads_is_replaced_as_soon(folder: Path) -> None:
    """A stopped engine computes nothing: loading gives it no more time than `hang_seconds`."""
    pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")
    model = ModelConfig(alias="echo", path=str(HELPDESK), parity_probe=False, num_threads=1)
    spec = spec_in(folder, model=model, hang_seconds=4.0)
    client = ProcessClient(spec)
    client.start()
    try:
        await until(lambda: client.engine_pid is not None)
        assert client.describe().state == "loading"
        os.kill(old := engine_of(spec), signal.SIGSTOP)
        stopped_at = time.monotonic()
        await until(lambda: not is_alive(old))
        assert time.monotonic() - stopped_at < 4 * spec.hang_seconds  # it was six times that
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
        first = await client.generate(replace(ask(max_tokens=LONG), stream_id="first"))
        await anext(first)
        guilty = await client.generate(replace(ask(poison), stream_id="guilty"))
        waiting = await client.generate(replace(ask("w"), stream_id="waiting"))
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
        generation = await client.generate(replace(ask(max_tokens=LONG), stream_id="open"))
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
    before = children()
    client = ProcessClient(spec_in(folder, idle_seconds=0.1))
    client.start()
    await until(lambda: client.describe().stage == "starting")
    await client.aclose()
    assert children() <= before


def children() -> set[str]:
    """The ids of this process's children, including ended ones that are not reaped."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
