"""Laws of `ProcessClient` with an undisturbed real engine process: it behaves like any other engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.base import Generation
from streamserve.clients.factory import echo_client
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Overloaded, PromptTooLong
from streamserve.protocol.events import Done, Error, Event, Token, Usage
from streamserve.protocol.history import History
from streamserve.protocol.requests import GenerateRequest, Message
from tests.support.engines.engine_processes import (
    ENGINE,
    LONG,
    SLOW,
    ask,
    asking,
    connected,
    pid_of,
    spec_in,
    until,
)
from tests.support.processes import is_alive, open_names


@pytest.fixture
async def client(shared_engine: LaunchConfig) -> AsyncIterator[ProcessClient]:
    async with connected(shared_engine) as client:
        yield client


@pytest.fixture
async def thread_client() -> AsyncIterator[ThreadClient]:
    client = echo_client("echo", ENGINE)
    client.start()
    await until(lambda: client.describe().state == "ready")
    yield client
    await client.aclose()


async def collect(generation: Generation) -> list[Event]:
    return [event async for event in generation]


def untimed(events: list[Event]) -> list[Event]:
    """Leave out times and what the prefix cache held; choice by choice."""
    out = [
        replace(event, latency=0.0, breakdown={}, phases=None, usage=Usage()) if isinstance(event, Done) else event
        for event in events
    ]
    return sorted(out, key=lambda event: getattr(event, "choice", 99))


CHAT = GenerateRequest(model="echo", messages=(Message(role="user", content="hello"),), sampling=ask().sampling)


@pytest.mark.parametrize(
    "request_",
    [
        ask(),
        ask(temperature=0.9, seed=3, max_tokens=40),
        ask(n=3, temperature=1.0),
        ask(logprobs=5),
        ask(stop=("e",)),
        CHAT,
    ],
)
async def test_events_are_those_of_the_thread_client(
    client: ProcessClient, thread_client: ThreadClient, request_: GenerateRequest
) -> None:
    """The process boundary changes no event."""
    expected = await collect(await thread_client.generate(request_))
    assert untimed(await collect(await client.generate(request_))) == untimed(expected)


async def test_acceptance_and_tokens_are_those_of_the_thread_client(
    client: ProcessClient, thread_client: ThreadClient
) -> None:
    """`accepted`, `tokenize` and the description are equal."""
    ours, theirs = [await one.generate(ask()) for one in (client, thread_client)]
    assert ours.accepted == theirs.accepted
    assert await client.tokenize(ask()) == await thread_client.tokenize(ask())
    assert client.describe().max_model_len == thread_client.describe().max_model_len
    ours.cancel()
    theirs.cancel()


async def test_a_warm_prompt_is_in_the_prefix_cache(client: ProcessClient) -> None:
    """`warm` generates nothing and leaves blocks behind."""
    prompt = "A prompt that nobody else has asked with"
    await client.warm(ask(prompt))
    generation = await client.generate(ask(prompt))
    done = (await collect(generation))[-1]
    assert isinstance(done, Done)
    assert done.usage.cached_tokens > 0
    assert generation.num_cached_tokens == done.usage.cached_tokens


async def test_refusals_keep_class_code_and_param(client: ProcessClient) -> None:
    """The refusal in the worker equals the one in the engine."""
    with pytest.raises(PromptTooLong) as too_long:
        await client.generate(ask("x" * 100_000))
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(BadRequest) as wrong_class:
        await client.generate(ask(latency_class="nonsense"))
    assert wrong_class.value.param == "latency_class"


async def test_what_no_frame_can_hold_is_refused_here(client: ProcessClient) -> None:
    """A request that is too large or holds a number beyond 64 bits is refused; the connection stays."""
    for request in (ask("a" * 17_000_000), ask(chat_template_kwargs={"a": 2**70})):
        with pytest.raises(BadRequest):
            await client.generate(request)
    assert len(await collect(await client.generate(ask()))) > 0


async def test_cancel_ends_the_sequence_in_the_engine(slow_engine: LaunchConfig) -> None:
    """Few of its tokens are ever made, and the iterator ends without a terminal event."""
    async with connected(slow_engine) as client:
        before = client.stats().generation_tokens
        generation = await client.generate(ask(max_tokens=400))
        await anext(generation)
        generation.cancel()
        generation.cancel()
        assert await collect(generation) == []
        await until(lambda: client.stats().generation_tokens > before and client.stats().running == 0)
        assert client.stats().generation_tokens < before + 400


async def test_a_cancel_before_acceptance_leaves_nothing(slow_engine: LaunchConfig) -> None:
    """Cancelled while it waits: the engine drops the request."""
    async with connected(slow_engine) as client:
        before = client.stats()
        tasks = [asyncio.create_task(client.generate(ask(max_tokens=400))) for _ in range(8)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in results)
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)
        await until(lambda: client.stats().steps > before.steps and client.stats().running == 0)
        assert client.stats().generation_tokens < before.generation_tokens + 8 * 400


async def test_ready_takes_what_has_come(client: ProcessClient) -> None:
    """All queued events, in order, without waiting; the rest follows."""
    expected = untimed(await collect(await client.generate(ask())))
    generation = await client.generate(ask())
    events = [await anext(generation)]
    events += generation.ready(2)
    events += generation.ready()
    events += await collect(generation)
    assert untimed(events) == expected
    assert generation.ready() == []


async def test_a_reader_that_stops_reading_parks_the_answer(client: ProcessClient) -> None:
    """No more than the lead is decoded; the resumed answer equals an answer read without a pause."""
    whole = await collect(await client.generate(ask(max_tokens=400)))
    generation = await client.generate(*asking(max_tokens=400, reader_tokens=(0,)))
    first = await collect(generation)
    assert generation.parked is not None
    assert generation.parked.reason == "lead"
    ids = token_ids(first)
    assert len(ids) == ENGINE.lead_tokens
    rest = await collect(await client.generate(*asking(max_tokens=400, output_token_ids=(ids,))))
    assert ids + token_ids(rest) == token_ids(whole)


async def test_a_reader_that_keeps_up_never_parks_the_answer(folder: Path) -> None:
    """`reader_at` reaches the engine in time: 64 steps take well over a second."""
    spec = spec_in(folder, engine=replace(ENGINE, lead_tokens=64), echo_step_seconds=0.02)
    async with connected(spec) as client:
        generation = await client.generate(*asking(max_tokens=80, reader_tokens=(0,)))
        generation.reader_at((80,))
        generation.reader_at(None)
        events = await collect(generation)
    assert generation.parked is None
    assert isinstance(events[-1], Done)


def token_ids(events: list[Event]) -> tuple[int, ...]:
    return tuple(token_id for event in events if isinstance(event, Token) for token_id in event.token_ids)


async def test_two_workers_share_one_engine(shared_engine: LaunchConfig, client: ProcessClient) -> None:
    """Their answers do not mix, and both see the whole load."""
    async with connected(shared_engine) as other:
        mine, theirs = await asyncio.gather(
            *(one.generate(ask(text, max_tokens=30)) for one, text in ((client, "one"), (other, "two")))
        )
        a, b = await asyncio.gather(collect(mine), collect(theirs))
        assert token_ids(a) != token_ids(b)
        await until(lambda: other.stats().steps == client.stats().steps > 0)


async def test_all_workers_have_the_same_history(shared_engine: LaunchConfig, client: ProcessClient) -> None:
    """The engine keeps it: a worker that connects is given what was before, and then each gets the same reports."""
    await collect(await client.generate(ask("one", max_tokens=30)))
    await until(lambda: client.stats().steps > 0 and client.stats().running == 0)
    before = client.stats().point(0.0)
    async with connected(shared_engine) as other:
        past = other.stats().past
        assert [
            point for point in past if point.slot == before.slot and point.computed_tokens >= before.computed_tokens
        ]
        mine, theirs = History(client.stats().past), History(past)
        seen = 0
        while seen < 2:  # reports that both have
            await until(lambda: other.stats().reported_at == client.stats().reported_at > mine.points()[-1].at)
            mine.note(client.stats().point(0.0))
            theirs.note(other.stats().point(0.0))
            seen += 1
        assert mine.points()[-1] == theirs.points()[-1]
        assert other.stats().past is past  # it stays; only the first report brings it


async def test_what_an_operator_does_holds_for_all_workers(slow_engine: LaunchConfig) -> None:
    """A pause parks all generations of all workers and refuses requests; resume ends it."""
    async with connected(slow_engine) as client, connected(slow_engine) as other:
        generation = await other.generate(ask(max_tokens=400))
        await anext(generation)
        await client.control("pause")
        assert client.describe().state == "paused"
        await collect(generation)
        assert generation.parked is not None
        assert generation.parked.reason == "paused"
        with pytest.raises(EngineUnavailable) as refused:
            await other.generate(ask())
        assert refused.value.code == "engine_paused"
        await other.control("resume")
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)
        with pytest.raises(BadRequest):
            await client.control("nonsense")


async def test_a_full_queue_takes_back_what_was_accepted_once(folder: Path) -> None:
    """The engine process refuses a new request, and takes an answer that it has parked or that another has begun."""
    engine = replace(ENGINE, max_num_seqs=1, max_waiting=1)
    async with connected(spec_in(folder, engine=engine, echo_step_seconds=SLOW)) as client:
        running = [await client.generate(ask(max_tokens=LONG)) for _ in range(2)]
        with pytest.raises(Overloaded):
            await client.generate(ask())
        begun = asking(output_token_ids=((5, 6),))
        waiting = [await client.generate(*one) for one in (begun, asking(was_admitted=True))]
        for generation in running:
            generation.cancel()
        for generation in waiting:
            assert isinstance((await collect(generation))[-1], Done)


async def test_a_lost_worker_leaves_nothing_running(slow_engine: LaunchConfig) -> None:
    """Its requests are cancelled when its connection ends."""
    async with connected(slow_engine) as client:
        before = client.stats().generation_tokens
        async with connected(slow_engine) as other:
            for one in [await other.generate(ask(max_tokens=400)) for _ in range(4)]:
                await anext(one)
        await until(lambda: client.stats().generation_tokens > before and client.stats().running == 0)
        assert client.stats().generation_tokens < before + 4 * 400
        assert client.stats().blocks_used == 0


async def test_closing_leaves_nothing_here_and_the_engine_alone(shared_engine: LaunchConfig) -> None:
    """No task, thread or descriptor stays; open generations end with an error; the engine process stays."""
    pid = pid_of(shared_engine)
    tasks, threads, names = asyncio.all_tasks(), set(threading.enumerate()), set(open_names("self"))
    async with connected(shared_engine) as client:
        generation = await client.generate(ask(max_tokens=490))
    *_, last = await collect(generation)
    assert isinstance(last, Error)
    assert last.code == "engine_closed"
    assert asyncio.all_tasks() <= tasks
    assert set(threading.enumerate()) <= threads
    assert set(open_names("self")) <= names
    assert pid is not None
    assert is_alive(pid)
    with pytest.raises(EngineUnavailable):
        await client.generate(ask())


def test_a_worker_never_imports_torch() -> None:
    """The client, the server and their imports work without torch."""
    code = "import sys, streamserve.clients.process.client as _, streamserve.clients.process.server as _; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_unanswered_questions_are_refused_when_the_client_closes(shared_engine: LaunchConfig) -> None:
    """Open questions are refused."""
    async with connected(shared_engine) as client:
        task: asyncio.Task[Any] = asyncio.create_task(client.generate(ask()))
        await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable):
        await task
