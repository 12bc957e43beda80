"""Parked and resumed equals never parked: on the echo engine, whose every token depends on all tokens before it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.events import Done, Status, Token
from streamserve.protocol.requests import Admission, GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect, follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.checks.stream_checks import check_native, check_native_part, text_of
from tests.support.streams.hand_made import Gate, ask, until

NUM_TOKENS = 20
FINE = StreamConfig(coalesce_tokens=0)


@pytest.fixture
async def fine_streams(echo: ThreadClient):
    """A directory whose deliveries join nothing, so that a reader can leave at every seq."""
    streams = Streams({"echo": echo}, MemoryLog(), FINE)
    yield streams
    await streams.aclose()


async def begin(streams: Streams, request: GenerateRequest) -> Stream:
    return await streams.start(request, Admission(owner="u1", tenant="t1"))


async def whole(streams: Streams, request: GenerateRequest) -> tuple[list[Token], Done]:
    """Return tokens and end of an uninterrupted run."""
    events = [logged.event for logged in await collect(streams, await begin(streams, request))]
    assert isinstance(events[-1], Done)
    return [event for event in events if isinstance(event, Token)], events[-1]


def joined(tokens: list[Token], choice: int = 0) -> tuple[str, tuple[int, ...]]:
    """Return the text and the ids of one choice."""
    mine = [token for token in tokens if token.choice == choice]
    return "".join(token.text for token in mine), sum((token.token_ids for token in mine), ())


async def read_to(streams: Streams, stream: Stream, after: int, last: int | None) -> bytes:
    """Read native SSE after `after`, and leave after event `last` (None: stay to the end)."""
    out = bytearray()
    async with aclosing(aiter(Delivery(streams, stream, NativeEncoder(stream.log_id), after=after))) as frames:
        async for data in frames:
            out += data
            frames_so_far = check_native_part(bytes(out), after=after)
            if last is not None and frames_so_far and frames_so_far[-1].seq >= last:
                return bytes(out)
    return bytes(out)


@pytest.mark.parametrize("cut", range(1, NUM_TOKENS + 2))
async def test_leaving_at_any_event_loses_nothing(fine_streams: Streams, gate: Gate, cut: int) -> None:
    """A reader that leaves after event `cut` and comes back gets texts that join to the uninterrupted one."""
    request = ask(max_tokens=NUM_TOKENS, ignore_eos=True)
    reference, reference_end = await whole(fine_streams, request)
    gate.allow(cut)  # event 1 is meta, so the engine is held one token further
    stream = await begin(fine_streams, request)
    first = await read_to(fine_streams, stream, 0, cut)
    assert stream.state == ("parked" if stream.terminal is None else "finished")
    gate.open()
    second = await read_to(fine_streams, stream, cut, None)
    frames = check_native_part(first)[:cut] + check_native(second, after=cut)
    assert text_of(frames) == joined(reference)[0]
    assert isinstance(stream.terminal, Done)
    assert stream.terminal.usage.completion_tokens == reference_end.usage.completion_tokens
    assert stream.terminal.finish_reason == reference_end.finish_reason


@pytest.mark.parametrize(
    "request_",
    [
        ask(max_tokens=30, ignore_eos=True, temperature=0.0),
        ask(max_tokens=30, n=2),
        ask(max_tokens=30, n=3, stop=(" the", "w")),
        ask(max_tokens=200, stop=(". ", ",")),
        ask(max_tokens=30, logprobs=2),
        ask(max_tokens=30, presence_penalty=0.5, min_tokens=10),
    ],
    ids=["greedy", "two choices", "three choices, stop strings", "stop strings", "logprobs", "penalty"],
)
async def test_parked_at_every_token_equals_never_parked(
    echo_streams: Streams, gate: Gate, request_: GenerateRequest
) -> None:
    """A reader that leaves after every step gets the same tokens, text and end, choice by choice."""
    reference, reference_end = await whole(echo_streams, request_)
    gate.allow(0)
    stream = await begin(echo_streams, request_)
    seen: list = []
    while stream.terminal is None:
        async with aclosing(follow(echo_streams, stream, seen[-1].seq if seen else 0)) as events:
            reading = asyncio.create_task(_until_token(events, seen))
            while not reading.done():
                await until(lambda: gate.is_holding or reading.done(), "the engine is held")  # noqa: B023
                gate.allow(1)
                await until(lambda: gate.is_holding or reading.done(), "the step has run")  # noqa: B023
                await has_had_the_step()
            await reading
        gate.allow(0)
    gate.open()
    async with aclosing(follow(echo_streams, stream, seen[-1].seq)) as events:
        seen += [logged async for logged in events]
    tokens = [logged.event for logged in seen if isinstance(logged.event, Token)]
    for choice in range(request_.n):
        assert joined(tokens, choice) == joined(reference, choice)
    end = seen[-1].event
    assert isinstance(end, Done)
    assert (end.finish_reason, end.usage.completion_tokens) == (
        reference_end.finish_reason,
        reference_end.usage.completion_tokens,
    )
    assert end.usage.cached_tokens <= end.usage.prompt_tokens
    assert any(isinstance(logged.event, Status) for logged in seen)
    assert stream.engine.parking.num_parks > 0


async def has_had_the_step() -> None:
    """Let the loop take what the engine has handed over, and readers get it."""
    await asyncio.to_thread(int)  # wakes of the loop come in the order in which threads asked for them
    for _ in range(20):
        await asyncio.sleep(0)


async def _until_token(events, seen: list) -> None:
    async for logged in events:
        seen.append(logged)
        if isinstance(logged.event, Token):
            return


async def test_replay_from_every_seq_twice_from_two_readers(fine_streams: Streams) -> None:
    """Two readers that ask for what follows any seq, at the same time and again, get the same bytes."""
    stream = await begin(fine_streams, ask(max_tokens=NUM_TOKENS, ignore_eos=True))
    full = check_native(await read_to(fine_streams, stream, 0, None))
    for after in range(stream.last_seq):
        both = await asyncio.gather(*(read_to(fine_streams, stream, after, None) for _ in range(2)))
        for data in (*both, await read_to(fine_streams, stream, after, None)):
            assert check_native(data, after=after) == full[after:]


async def test_two_readers_of_a_running_stream_read_the_same(echo_streams: Streams, gate: Gate) -> None:
    """A second reader that comes in the middle changes nothing for the first, and both get the whole text."""
    gate.allow(5)
    stream = await begin(echo_streams, ask(max_tokens=NUM_TOKENS, ignore_eos=True))
    first = asyncio.create_task(read_to(echo_streams, stream, 0, None))
    await until(lambda: stream.last_seq > 3, "some tokens are out")
    second = asyncio.create_task(read_to(echo_streams, stream, 0, None))
    await asyncio.sleep(0)
    gate.open()
    one, two = [check_native(data) for data in await asyncio.gather(first, second)]
    assert text_of(one) == text_of(two) != ""
    assert stream.engine.parking.num_parks == 0


async def test_a_parked_stream_holds_no_block(echo_streams: Streams, echo: ThreadClient, gate: Gate) -> None:
    """A parked stream is in no plan made after its reader left, and its blocks are free."""
    gate.allow(3)
    stream = await begin(echo_streams, ask(max_tokens=500, ignore_eos=True))
    reading = asyncio.create_task(read_to(echo_streams, stream, 0, None))
    await until(lambda: gate.is_holding and stream.readers.num_holding == 1, "the reader waits, the engine is held")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    num_plans = len(gate.plans)
    gate.open()
    await until(lambda: echo.stats().blocks_used == 0, "its blocks are free")
    other = await whole(echo_streams, ask(max_tokens=4, prompt="other", ignore_eos=True))
    assert len(other[0]) == 4
    parked_id = gate.plans[0].chunks[0].seq_id
    assert all(chunk.seq_id != parked_id for plan in gate.plans[num_plans:] for chunk in plan.chunks)
    assert stream.state == "parked"
