"""Laws of parking through a `ThreadClient`: when a generation parks, and that a new request gives the same answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import LatencyClass, Policy
from streamserve.protocol.events import ChoiceDone, Done, Error, Event
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
from tests.support.engines.runners import FakeClock, GatedRunner

# A reader that stands still counts as gone at once: what is held parks.
LEAD_4 = replace(CONFIG, lead_tokens=4, policy=Policy(stalled_seconds=0.0))


OVERLAPS = pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlapped steps"])


async def read_all(client: ThreadClient, n: int = 1, **fields: Any) -> tuple[list[Event], int]:
    """Resume repeatedly, as a stream does whose reader has read all events; return the events and how often."""
    events: list[Event] = []
    for num_parks in range(100):
        shown = tuple(ids(events, choice) for choice in range(n))
        readers = tuple(map(len, shown))
        generation = await client.generate(*asking(n=n, output_token_ids=shown, reader_tokens=readers, **fields))
        over = {event.choice for event in events if isinstance(event, ChoiceDone)}
        events += [event for event in await collect(generation) if getattr(event, "choice", None) not in over]
        if generation.parked is None:
            return events, num_parks
    raise AssertionError("it never ended")


@OVERLAPS
async def test_a_reader_that_reads_nothing_parks_the_generation_at_the_lead_limit(overlap: bool) -> None:
    """Exactly `lead_tokens` come, then the iterator ends, and the engine holds nothing."""
    async with serving(echo_runner(can_overlap=overlap), LEAD_4) as client:
        generation = await client.generate(*asking(reader_tokens=(0,)))
        events = await collect(generation)
        await until(lambda: client.stats().running == client.stats().blocks_used == 0)
        assert client.stats().parks == 1
        assert client.stats().unknown_ids == 0
    assert len(ids(events)) == 4
    assert generation.parked is not None
    assert (generation.parked.reason, generation.parked.resume_at_lead) == ("lead", 2)


async def test_a_reader_that_advances_moves_the_limit() -> None:
    """After three tokens are read, the engine generates three more before it parks."""
    runner = GatedRunner(echo_runner(), hold_from=3)
    async with serving(runner, LEAD_4) as client:
        generation = await client.generate(*asking(reader_tokens=(0,)))
        await runner.held()
        generation.reader_at((3,))
        runner.open()
        assert len(ids(await collect(generation))) == 7


async def test_without_a_reader_nothing_parks() -> None:
    """A generation without a reader, from the start or later, never parks."""
    runner = GatedRunner(echo_runner(), hold_from=3)
    async with serving(runner, LEAD_4) as client:
        released = await client.generate(*asking(reader_tokens=(0,)))
        never = await client.generate(ask("another"))
        await runner.held()
        released.reader_at(None)
        runner.open()
        ends = [(await collect(generation))[-1] for generation in (released, never)]
    assert all(isinstance(end, Done) for end in ends)


@OVERLAPS
@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "n": 3}, {"temperature": 1.0, "n": 2, "stop": ("a", "e")}],
    ids=["greedy", "seeded", "choices", "stop strings"],
)
async def test_parked_again_and_again_is_the_same_answer(fields: dict[str, Any], overlap: bool) -> None:
    """The text and the tokens of every choice, and the usage, are those of the run that never parked."""
    fields = {"max_tokens": 30, **fields}
    n = fields.get("n", 1)
    async with serving(echo_runner(can_overlap=overlap), LEAD_4) as client:
        whole = await collect(await client.generate(ask(**fields)))
        parts, num_parks = await read_all(client, **fields)
    assert num_parks >= 1
    assert [text(parts, choice) for choice in range(n)] == [text(whole, choice) for choice in range(n)]
    assert [ids(parts, choice) for choice in range(n)] == [ids(whole, choice) for choice in range(n)]
    ends = [events[-1] for events in (parts, whole)]
    assert all(isinstance(end, Done) for end in ends)
    assert ends[0].usage.completion_tokens == ends[1].usage.completion_tokens


async def test_one_choice_that_parks_takes_the_others_along() -> None:
    """Only one reader position is far behind; nothing of the generation is left in the engine."""
    async with serving(config=LEAD_4) as client:
        generation = await client.generate(*asking(n=3, temperature=1.0, reader_tokens=(1000, 0, 1000)))
        await collect(generation)
        assert generation.parked is not None
        await until(lambda: client.stats().running == client.stats().blocks_used == 0)
        await until(lambda: is_idle(client))


async def test_a_wait_beyond_the_limit_is_an_error_event() -> None:
    """A request that had no step within its class's queue time ends in a retryable `queue_timeout`."""
    clock, runner = FakeClock(), GatedRunner(echo_runner(), hold_from=1)
    client = await ready(ThreadClient("echo", load_of(runner), replace(CONFIG, max_num_seqs=1), clock=clock))
    first, second = [await client.generate(ask(prompt)) for prompt in ("first", "second")]
    await runner.held()
    runner.release()
    await runner.held()  # by now the second is in the engine's queue
    clock.advance(30.5)
    runner.open()
    events, waited = await asyncio.gather(collect(first), collect(second))
    stats = client.stats()
    await client.aclose()
    assert isinstance(events[-1], Done)
    assert [(event.code, event.retryable) for event in waited if isinstance(event, Error)] == [("queue_timeout", True)]
    assert (stats.refused, stats.classes["chat"]["refused"]) == (0, 1)  # it was refused, and not at once


async def test_a_class_may_have_a_timeout() -> None:
    """A request without a timeout has its class's; one with a timeout keeps it."""
    clock, runner = FakeClock(), GatedRunner(echo_runner(), hold_from=2)
    config = replace(CONFIG, classes={**CONFIG.classes, "chat": LatencyClass(ttft_seconds=0.5, timeout_seconds=5.0)})
    client = await ready(ThreadClient("echo", load_of(runner), config, clock=clock))
    late, patient = [await client.generate(ask(timeout_seconds=seconds)) for seconds in (None, 60.0)]
    await runner.held()
    clock.advance(6.0)
    runner.open()
    events, others = await asyncio.gather(collect(late), collect(patient))
    await client.aclose()
    assert [event.code for event in events if isinstance(event, Error)] == ["timeout"]
    assert isinstance(others[-1], Done)


async def test_reruns_do_not_count_as_answers() -> None:
    """Latencies are of whole answers; a run of one that parked counts only for its running time."""
    async with serving(config=LEAD_4) as client:
        await read_all(client)
        assert len(client._times._breakdowns) == 0
        assert len(client._times._running_seconds) == 3
