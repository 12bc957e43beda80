"""Laws of an operator's controls of a `ThreadClient`: pause, resume, drain."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.plan import Flight, Progress, StepPlan
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.events import Done, Token
from tests.support.engines.clients import (
    CONFIG,
    ask,
    asking,
    collect,
    echo_runner,
    ids,
    is_idle,
    load_of,
    ready,
    serving,
    text,
    until,
)
from tests.support.engines.runners import DEADLINE_SECONDS, GatedRunner


async def refused(client: ThreadClient, **fields: Any) -> str:
    """Return the code of the refusal."""
    with pytest.raises(EngineUnavailable) as caught:
        await client.generate(*asking(**fields))
    assert 1 <= caught.value.retry_after <= 120
    return caught.value.code


async def test_pause_parks_all_and_refuses_all() -> None:
    """Once `control` returns every generation has parked, the engine is empty and accepts nothing."""
    runner = GatedRunner(echo_runner(), hold_from=3)
    async with serving(runner) as client:
        running = await client.generate(ask(max_tokens=100))
        await runner.held()
        waiting = await client.generate(ask("another"))
        runner.open()
        await client.control("pause")
        assert (running.is_open, waiting.is_open) == (False, False)
        assert [one.parked.reason for one in (running, waiting) if one.parked] == ["paused", "paused"]
        assert (client.describe().state, client.stats().is_paused, client.stats().blocks_used) == ("paused", True, 0)
        assert await refused(client) == "engine_paused"
        assert await refused(client, output_token_ids=((65,),)) == "engine_paused"
        await until(lambda: is_idle(client))


async def test_resume_continues_the_same_answer() -> None:
    """After a pause in the middle, a new request gives the rest."""
    runner = GatedRunner(echo_runner(), hold_from=3)
    async with serving(runner) as client:
        generation = await client.generate(ask(max_tokens=40))
        await runner.held()
        runner.open()
        await client.control("pause")
        before = await collect(generation)
        await client.control("resume")
        assert (client.describe().state, client.stats().is_paused) == ("ready", False)
        after = await collect(await client.generate(*asking(max_tokens=40, output_token_ids=(ids(before),))))
        whole = await collect(await client.generate(ask(max_tokens=40)))
    assert text(before) + text(after) == text(whole)
    assert all(isinstance(event, Token) for event in before)


async def test_drain_lets_those_that_run_end() -> None:
    """Running answers end, begun ones may resume, new ones are refused until `resume`."""
    runner = GatedRunner(echo_runner(), hold_from=3)
    async with serving(runner) as client:
        generation = await client.generate(ask())
        await runner.held()
        runner.open()
        await client.control("drain")
        assert client.describe().state == "draining"
        assert await refused(client) == "engine_draining"
        assert await refused(client, output_token_ids=((),)) == "engine_draining"
        assert isinstance((await collect(generation))[-1], Done)
        again = await client.generate(*asking(output_token_ids=((65,),)))
        assert isinstance((await collect(again))[-1], Done)
        await client.control("resume")
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)


async def test_drain_ends_a_pause_for_those_that_had_begun() -> None:
    """Paused, then draining: parked answers may resume and end."""
    async with serving() as client:
        await client.control("pause")
        await client.control("drain")
        assert isinstance((await collect(await client.generate(*asking(output_token_ids=((65,),)))))[-1], Done)


async def test_tokenize_needs_no_open_door() -> None:
    """Counting tokens needs no capacity of the engine."""
    async with serving() as client:
        await client.control("pause")
        assert await client.tokenize(ask("hi")) == (104, 105)


async def test_repeated_and_unknown_actions() -> None:
    """The same action twice is as once; an unknown one is named and changes nothing."""
    async with serving() as client:
        for _ in range(2):
            await client.control("pause")
        with pytest.raises(BadRequest, match="pause, resume, drain"):
            await client.control("explode")
        assert client.describe().state == "paused"
        await client.control("resume")
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)


async def test_paused_while_loading_comes_up_paused() -> None:
    """An operator's action on an engine that still loads takes effect once it is loaded."""
    gate = threading.Event()

    def load(progress: Progress) -> Any:
        assert gate.wait(DEADLINE_SECONDS)
        return load_of(echo_runner())(progress)

    client = ThreadClient("echo", load, CONFIG)
    client.start()
    await client.control("pause")
    assert client.describe().state == "loading"
    gate.set()
    await until(lambda: client.describe().state == "paused")
    assert await refused(client) == "engine_paused"
    await client.control("resume")
    assert isinstance((await collect(await client.generate(ask())))[-1], Done)
    await client.aclose()


async def test_an_engine_that_is_gone_cannot_be_controlled() -> None:
    """A control ends with the engine, before or after its step."""
    runner = GatedRunner(echo_runner(), hold_from=2)
    async with serving(runner) as client:
        await client.generate(ask())
        await runner.held()
        pausing = asyncio.ensure_future(client.control("pause"))
        await asyncio.sleep(0)
        client._thread.close()
        runner.open()
        with pytest.raises(EngineUnavailable):
            await pausing
        with pytest.raises(EngineUnavailable):
            await client.control("resume")


async def test_a_client_may_leave_while_it_waits() -> None:
    """An operator's cancelled call still takes effect, and breaks nothing."""
    runner = GatedRunner(echo_runner(), hold_from=2)
    async with serving(runner) as client:
        generation = await client.generate(ask(max_tokens=100))
        await runner.held()
        pausing = asyncio.ensure_future(client.control("pause"))
        await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        runner.open()
        await collect(generation)
        assert generation.parked is not None
        await client.control("resume")
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)


async def test_each_step_is_announced_and_ended() -> None:
    """`on_step` gets how long a step may take before it runs, and None after it."""
    flights: list[Flight] = []
    armed: list[bool] = []

    def on_plan(plan: StepPlan) -> None:
        armed.append(bool(flights) and (flights[-1].seconds_allowed or 0) > 0)

    client = ThreadClient("echo", load_of(echo_runner()), CONFIG, on_plan=on_plan, on_step=flights.append)
    await ready(client)
    await collect(await client.generate(ask(max_tokens=3)))
    await client.aclose()
    assert armed == [True] * 3
    assert flights[-1].seconds_allowed is None
