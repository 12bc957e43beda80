"""Laws of credit: how many unacknowledged events a reader gets, and which position the engine counts for it."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from streamserve.engine.config import Policy
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import Done, LoggedEvent, Token
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import Follow, collect, follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.engines.runners import DEADLINE_SECONDS
from tests.support.streams.hand_made import Gate, ScriptedClient, ask, started_echo, tok, until

DONE = Done(finish_reason="stop")
NUM_TOKENS = 40
NUM_EVENTS = NUM_TOKENS + 2  # with meta and done
LEAD_TOKENS = 16


async def written(
    scripted: ScriptedClient, *, joins: bool = False, num_tokens: int = NUM_TOKENS
) -> tuple[Streams, Stream]:
    """Return a finished stream, all of it in the log: only credit can hold a reader back."""
    settings = StreamConfig() if joins else StreamConfig(coalesce_tokens=0)
    streams = Streams({"scripted": scripted}, MemoryLog(), settings)
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    scripted.last.push(*(tok("x") for _ in range(num_tokens)), DONE)
    await stream.ended.wait()
    return streams, stream


async def given_now(events: Follow) -> list[int]:
    """Take events until none comes after many turns of the loop; return their seqs."""
    seqs: list[int] = []
    while True:
        waiting = asyncio.ensure_future(anext(events, None))
        for _ in range(20):
            await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return seqs
        logged = waiting.result()
        if logged is None:
            return seqs
        seqs.append(logged.seq)


@pytest.mark.parametrize("credit", [1, 7, NUM_EVENTS - 1])
async def test_no_more_than_the_credit_is_given(scripted: ScriptedClient, credit: int) -> None:
    """A reader gets N events, then one for each acknowledged one; without credit it gets all."""
    streams, stream = await written(scripted)
    assert await given_now(follow(streams, stream)) == list(range(1, NUM_EVENTS + 1))
    events = follow(streams, stream, credit=credit)
    assert await given_now(events) == list(range(1, credit + 1))
    assert await given_now(events) == []
    events.ack(1)
    assert await given_now(events) == [credit + 1]
    events.ack(credit + 1)
    rest = range(credit + 2, min(NUM_EVENTS, 2 * credit + 1) + 1)
    assert await given_now(events) == list(rest)
    events.close()
    await streams.aclose()


async def test_the_end_needs_no_acknowledgement(scripted: ScriptedClient) -> None:
    """A reader that was given the terminal event is no longer counted when the iteration ends."""
    streams, stream = await written(scripted)
    events = follow(streams, stream, after=NUM_EVENTS - 1, credit=1)
    assert [logged.seq async for logged in events] == [NUM_EVENTS]
    assert stream.readers.num_attached == 0
    events.ack(NUM_EVENTS)
    await streams.aclose()


async def test_joined_tokens_are_one_event(scripted: ScriptedClient) -> None:
    """Five tokens in one message take one credit, and the last one's seq acknowledges them all."""
    streams, stream = await written(scripted, joins=True)
    events = follow(streams, stream, credit=3)
    assert await given_now(events) == [1, 6, 11]
    events.ack(5)
    assert await given_now(events) == [16]
    events.ack(11)
    assert await given_now(events) == [21, 26]
    events.close()
    await streams.aclose()


async def test_what_was_not_given_cannot_be_acknowledged(scripted: ScriptedClient) -> None:
    """An acknowledgement below the last one changes nothing; one above what was given is refused."""
    streams, stream = await written(scripted)
    events = follow(streams, stream, credit=4)
    with pytest.raises(BadRequest) as caught:
        events.ack(1)
    assert (caught.value.code, caught.value.param) == ("not_sent", "seq")
    assert await given_now(events) == [1, 2, 3, 4]
    events.ack(3)
    events.ack(2)
    events.ack(0)
    with pytest.raises(BadRequest):
        events.ack(5)
    assert await given_now(events) == [5, 6, 7]
    plain = follow(streams, stream)
    await anext(plain)
    plain.ack(1)
    with pytest.raises(BadRequest):
        plain.ack(2)
    plain.close()
    plain.ack(1)
    events.close()
    await streams.aclose()


async def test_a_reader_without_credit_reads_nothing(scripted: ScriptedClient) -> None:
    """While a part of a page waits for acknowledgements, no task looks for the next page."""
    streams, stream = await written(scripted, num_tokens=200)
    events = follow(streams, stream, credit=1)
    assert await given_now(events) == [1]
    for _ in range(20):
        await asyncio.sleep(0)
        assert "reader" not in {task.get_name() for task in asyncio.all_tasks()}
    events.close()
    await streams.aclose()


async def test_closing_ends_a_wait_for_credit(scripted: ScriptedClient) -> None:
    """Closing the reader ends its wait for credit."""
    streams, stream = await written(scripted)
    events = follow(streams, stream, credit=1)
    await anext(events)
    waiting = asyncio.create_task(anext(events, None))
    await asyncio.sleep(0)
    assert not waiting.done()
    events.close()
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await waiting is None
    await streams.aclose()


async def test_the_engine_decodes_no_further_than_what_is_acknowledged(gate: Gate) -> None:
    """With credit for everything and no ack the stream parks at the lead; acks alone resume it."""
    client = await started_echo(gate, lead_tokens=LEAD_TOKENS, policy=Policy(stalled_seconds=0.0))
    streams = Streams({"echo": client}, MemoryLog())
    request = ask(max_tokens=100, ignore_eos=True)
    reference = text_of(await collect(streams, await streams.start(request, Admission(owner="u1", tenant="t1"))))
    stream = await streams.start(request, Admission(owner="u1", tenant="t1"))
    read: list[LoggedEvent] = []

    async def read_all() -> None:
        async with aclosing(events):
            async for logged in events:
                read.append(logged)

    def is_over_or_waits() -> bool:
        has_more = events.seq == stream.last_seq > stream.readers.furthest_seq
        return stream.terminal is not None or (stream.state == "parked" and has_more)

    events = follow(streams, stream, credit=1000)
    reading = asyncio.create_task(read_all())
    dice, num_stops = random.Random(5), 0
    while stream.terminal is None:
        await until(is_over_or_waits, "it is parked, and all was sent")
        if stream.terminal is None:
            assert stream.engine.parking.reason == "lead"
            assert 0 < stream.lag.num_unread <= LEAD_TOKENS
            num_stops += 1
            events.ack(dice.randint(events.seq - 2, events.seq))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await reading
    assert text_of(read) == reference
    assert num_stops >= 100 // LEAD_TOKENS - 1
    await streams.aclose()
    await client.aclose()


def text_of(events: list[LoggedEvent]) -> str:
    return "".join(logged.event.text for logged in events if isinstance(logged.event, Token))
