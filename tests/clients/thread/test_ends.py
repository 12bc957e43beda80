"""Laws of how a `ThreadClient` begins and ends: loading, failing, closing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from streamserve.clients.factory import echo_client
from streamserve.clients.thread.acceptance import LoadedEngine
from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.core import EngineCore
from streamserve.engine.plan import Progress
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.events import Done, Error, Event, Token
from tests.support.engines.clients import CONFIG, ask, collect, echo_runner, load_of, ready, serving, until
from tests.support.engines.runners import DEADLINE_SECONDS, DyingRunner, GatedRunner


async def test_engine_death_ends_everything_with_an_error() -> None:
    """Every open generation ends in one retryable error, and later requests are refused."""
    runner = GatedRunner(DyingRunner(echo_runner(), at_step=3))
    async with serving(runner) as client:
        generations = [await client.generate(ask(f"{number}", max_tokens=100)) for number in range(3)]
        runner.open()
        for events in await asyncio.gather(*map(collect, generations)):
            assert [event for event in events if not isinstance(event, Token)] == [events[-1]]
            assert isinstance(events[-1], Error)
            assert (events[-1].code, events[-1].retryable) == ("engine_died", True)
        assert client.describe().state == "failed"
        with pytest.raises(EngineUnavailable, match="not available"):
            await client.generate(ask())


async def test_failed_load_is_described() -> None:
    """The description names the failure without internals; requests are refused."""

    def load(progress: Progress) -> LoadedEngine:
        raise BadRequest("no model at /nowhere. Give a folder with config.json.")

    client = ThreadClient("broken", load)
    client.start()
    await until(lambda: client.describe().state == "failed")
    assert client.describe().message == "no model at /nowhere. Give a folder with config.json."
    with pytest.raises(EngineUnavailable, match=r"model broken is not available\.$"):
        await client.generate(ask())
    await client.aclose()


async def test_foreign_failure_is_not_shown() -> None:
    """The text of other libraries' exceptions goes to the log, not to clients."""

    def load(progress: Progress) -> LoadedEngine:
        raise OSError("/home/secret/path")

    client = ThreadClient("broken", load)
    client.start()
    await until(lambda: client.describe().state == "failed")
    assert "secret" not in client.describe().message
    assert "OSError" in client.describe().message
    await client.aclose()


async def test_first_request_begins_loading() -> None:
    """The first request starts an idle engine, and is refused with a Retry-After."""
    gate = threading.Event()

    def load(progress: Progress) -> LoadedEngine:
        progress("weights", 0.25)
        assert gate.wait(DEADLINE_SECONDS)
        return load_of(echo_runner())(progress)

    client = ThreadClient("echo", load, CONFIG)
    assert client.describe().state == "idle"
    for _ in range(2):
        with pytest.raises(EngineUnavailable) as caught:
            await client.generate(ask())
        assert (caught.value.code, caught.value.retry_after) == ("engine_loading", 2)
    await until(lambda: client.describe().fraction == 0.25)
    assert (client.describe().state, client.describe().stage) == ("loading", "weights")
    gate.set()
    await ready(client)
    assert client.describe().max_model_len == 512
    assert isinstance((await collect(await client.generate(ask())))[-1], Done)
    await client.aclose()


async def test_an_engine_that_loads_at_once_refuses_nobody() -> None:
    """`start` returns only after the load, so that its first request is taken; a load that fails blocks nobody."""
    returned = threading.Event()

    def load(progress: Progress) -> LoadedEngine:
        assert not returned.wait(0.2)
        return load_of(echo_runner())(progress)

    def fail(progress: Progress) -> LoadedEngine:
        raise OSError("/nowhere")

    client = ThreadClient("echo", load, CONFIG, loads_at_once=True)
    client.start()
    returned.set()
    assert isinstance((await collect(await client.generate(ask())))[-1], Done)
    await client.aclose()
    client = ThreadClient("echo", fail, loads_at_once=True)
    with pytest.raises(EngineUnavailable):
        await client.generate(ask())
    assert client.describe().state == "failed"
    await client.aclose()


async def test_closing_while_loading() -> None:
    """A load that is still running ends at its next progress report."""
    runner = echo_runner()
    entered, gate = threading.Event(), threading.Event()

    def load(progress: Progress) -> LoadedEngine:
        entered.set()
        assert gate.wait(DEADLINE_SECONDS)
        return load_of(runner)(progress)

    client = ThreadClient("echo", load)
    client.start()
    await asyncio.to_thread(entered.wait, DEADLINE_SECONDS)
    closing = asyncio.ensure_future(client.aclose())
    await until(lambda: client._thread._is_closing)
    gate.set()
    await closing
    assert client.describe().state == "failed"


async def test_close_ends_generations_and_frees_the_runner() -> None:
    """Every open generation gets an error, the thread ends, the runner is closed; later requests are refused."""
    runner = GatedRunner(echo_runner())
    client = await ready(ThreadClient("echo", load_of(runner), CONFIG))
    generation = await client.generate(ask())
    await runner.held()
    closing = asyncio.ensure_future(client.aclose())
    events = await collect(generation)
    runner.open()
    await closing
    assert [type(event) for event in events] == [Error]
    assert runner.is_closed
    with pytest.raises(EngineUnavailable):
        await client.generate(ask())
    await client.aclose()


async def test_accepted_in_the_moment_of_the_end() -> None:
    """A request that is accepted while the thread ends gets an error event."""
    client = await ready(ThreadClient("echo", load_of(echo_runner()), CONFIG))
    check_wait = client._admission.check_wait

    def end_first(core: EngineCore, latency_class: str, **how: Any) -> tuple[int, float]:
        client._thread.close()
        client._thread.join()
        return check_wait(core, latency_class, **how)

    client._admission.check_wait = end_first  # type: ignore[method-assign]
    events = await collect(await client.generate(ask()))
    assert [event.code for event in events if isinstance(event, Error)] == ["engine_closed"]
    await client.aclose()


async def test_close_before_start() -> None:
    """An engine that never ran can be closed, and then does not start."""
    client = echo_client()
    await client.aclose()
    client.start()
    assert client.describe().state == "failed"


def test_loops_come_and_go() -> None:
    """A loop that is closed with requests open costs nothing; the next loop is served."""
    client = ThreadClient("echo", load_of(echo_runner()), CONFIG)

    async def leave_open() -> None:
        await ready(client)
        await client.generate(ask(max_tokens=490))

    async def ask_again() -> Event:
        events = await collect(await client.generate(ask()))
        await until(lambda: client.stats().running == 0)
        await client.aclose()
        return events[-1]

    asyncio.run(leave_open())
    assert isinstance(asyncio.run(ask_again()), Done)
