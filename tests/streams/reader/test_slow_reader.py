"""Readers that do not read and engines that park, on the echo engine: the text is that of never parking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from streamserve.clients.base import EngineClient
from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import Policy
from streamserve.protocol.engine import Park
from streamserve.protocol.events import Done, LoggedEvent, Status, Token
from streamserve.protocol.requests import Admission, GenerateRequest
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import Follow, collect, follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.proofs.support.pairs import PATIENT
from tests.support.streams.hand_made import Gate, ParkingClient, ask, started_echo, until

LEAD_TOKENS = 16
NUM_TOKENS = 60
REQUESTS = {
    "greedy": ask(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0),
    "two choices": ask(max_tokens=NUM_TOKENS, n=2),
    "three choices, stop strings": ask(max_tokens=30, n=3, stop=(" the", "w")),
    "stop strings": ask(max_tokens=200, stop=(". ", ",")),
    "logprobs": ask(max_tokens=30, logprobs=2),
}
# No test waits for the clock: "ahead" resumes at once, "lead" when all is read.
PARKS = [Park(reason="lead"), Park(reason="ahead"), Park(reason="paused"), Park(reason="lost")]

each_request = pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)


@asynccontextmanager
async def echo_with(gate: Gate | None = None, **config: object) -> AsyncIterator[tuple[ThreadClient, Streams]]:
    """Return an echo engine with that config, and a directory over it."""
    client = await started_echo(gate, **config)
    streams = Streams({"echo": client}, MemoryLog())
    yield client, streams
    if gate is not None:
        gate.open()
    await streams.aclose()
    await client.aclose()


async def begin(streams: Streams, request: GenerateRequest) -> Stream:
    return await streams.start(request, Admission(owner="u1", tenant="t1"))


def answer(logged: list[LoggedEvent], n: int = 1) -> tuple[list[tuple[str, list[int]]], str, int]:
    """Return text and ids of each choice, the finish reason, and how many tokens were counted."""
    end = logged[-1].event
    assert isinstance(end, Done)
    tokens = [entry.event for entry in logged if isinstance(entry.event, Token)]
    texts = ["".join(token.text for token in tokens if token.choice == choice) for choice in range(n)]
    ids = [[id_ for token in tokens if token.choice == choice for id_ in token.token_ids] for choice in range(n)]
    return list(zip(texts, ids, strict=True)), end.finish_reason, end.usage.completion_tokens


async def read_all(reading: Follow) -> list[LoggedEvent]:
    async with aclosing(reading):
        return [logged async for logged in reading]


def num_sampled(gate: Gate, seq_id: int) -> int:
    """Count the steps that made a token of a sequence."""
    chunks = [chunk for plan in gate.plans for chunk in plan.chunks]
    return sum(chunk.seq_id == seq_id and bool(chunk.samples) for chunk in chunks)


async def test_the_engine_decodes_no_further_than_the_lead(gate: Gate) -> None:
    """For a reader that takes one event the engine runs up to the lead; on its return the text is the same."""
    request = ask(max_tokens=NUM_TOKENS, ignore_eos=True)
    async with echo_with(gate, lead_tokens=LEAD_TOKENS, policy=Policy(stalled_seconds=0.0)) as (client, streams):
        reference = answer(await collect(streams, await begin(streams, request)))
        num_plans = len(gate.plans)
        stream = await begin(streams, request)
        reading = follow(streams, stream)
        first = await anext(reading)
        await until(lambda: stream.state == "parked", "the engine parks it")
        seq_id = gate.plans[num_plans].chunks[0].seq_id
        assert num_sampled(gate, seq_id) == LEAD_TOKENS
        assert (stream.summary().lead, stream.summary().park_reason) == (LEAD_TOKENS, "lead")
        assert (client.stats().running, client.stats().waiting, client.stats().blocks_used) == (0, 0, 0)
        events = [first, *await read_all(reading)]
        assert answer(events) == reference
        assert not any(isinstance(logged.event, Status) for logged in events)
        assert stream.engine.parking.num_parks > 0


async def test_an_idle_reader_does_not_block_another() -> None:
    """With one seat, a second request runs beside the first, which is not read: its reader is hungrier."""
    slow, fast = ask(max_tokens=NUM_TOKENS * 100, ignore_eos=True), ask(max_tokens=8, prompt="fast", ignore_eos=True)
    for lead_tokens in (LEAD_TOKENS, 10**6):
        gate = Gate()
        config = {"max_num_seqs": 1, "policy": Policy(min_ahead_seconds=3600.0), "classes": PATIENT}
        async with echo_with(gate, lead_tokens=lead_tokens, **config) as (_, streams):
            stream = await begin(streams, slow)
            async with aclosing(follow(streams, stream)) as reading:
                await anext(reading)
                await collect(streams, await begin(streams, fast))
                assert stream.terminal is None
                slow_id = gate.plans[0].chunks[0].seq_id
                is_other = [any(chunk.seq_id != slow_id for chunk in plan.chunks) for plan in gate.plans]
        num_steps = len(is_other) - is_other.index(True) - is_other[::-1].index(True)  # from its first to its last
        assert num_steps < 2 * (LEAD_TOKENS + 8)


@each_request
async def test_a_lead_of_four_tokens_changes_no_token(request_: GenerateRequest) -> None:
    """An engine that parks every few tokens at its reader's lead changes no token and shows no status."""
    async with echo_with(lead_tokens=10**6) as (_, streams):
        reference = answer(await collect(streams, await begin(streams, request_)), request_.n)
    async with echo_with(lead_tokens=4, policy=Policy(stalled_seconds=0.0)) as (_, streams):
        stream = await begin(streams, request_)
        events = await read_all(follow(streams, stream))
        assert answer(events, request_.n) == reference
        assert not any(isinstance(logged.event, Status) for logged in events)


async def test_a_whole_answer_is_never_parked() -> None:
    """A reader that collects the whole answer is not slow."""
    async with echo_with(lead_tokens=4) as (_, streams):
        stream = await streams.start(
            ask(max_tokens=NUM_TOKENS), Admission(owner="u1", tenant="t1", on_disconnect="finish")
        )
        await collect(streams, stream)
        assert stream.engine.parking.num_parks == 0


@each_request
@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.proof), 7])
async def test_parked_for_any_reason_equals_never_parked(
    echo: EngineClient, request_: GenerateRequest, num_tokens: int
) -> None:
    """An engine that parks every few tokens, for each reason in turn, gives the same tokens, text, end and usage."""
    parking = ParkingClient(echo, PARKS, num_tokens=num_tokens)
    streams = Streams({"echo": echo}, MemoryLog())
    reference = await collect(streams, await begin(streams, request_))
    streams.clients = {"echo": parking}
    events = await read_all(follow(streams, stream := await begin(streams, request_)))
    assert answer(events, request_.n) == answer(reference, request_.n)
    told = [logged.event.status for logged in events if isinstance(logged.event, Status)]
    assert told == ["waiting", "resumed"] * (len(told) // 2)
    assert stream.engine.parking.num_parks == parking.num_requests - 1 > 0
    await streams.aclose()


async def test_an_operators_pause_is_a_pause(gate: Gate) -> None:
    """An answer paused in the middle shows its reader a status, runs nothing, and resumes with the same text."""
    request = ask(max_tokens=NUM_TOKENS, ignore_eos=True)
    async with echo_with(gate) as (client, streams):
        reference = answer(await collect(streams, await begin(streams, request)))
        gate.allow(10)
        stream = await begin(streams, request)
        reading = follow(streams, stream)
        events = [await anext(reading)]
        await until(lambda: gate.is_holding, "it is in the middle")
        pausing = asyncio.create_task(client.control("pause"))
        await asyncio.sleep(0)
        gate.open()
        await pausing
        await until(lambda: stream.summary().park_reason == "paused", "it is parked")
        assert client.stats().blocks_used == 0
        await client.control("resume")
        events += await read_all(reading)
        assert answer(events) == reference
        told = [logged.event.status for logged in events if isinstance(logged.event, Status)]
        assert told == ["waiting", "resumed"]
