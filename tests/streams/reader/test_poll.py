"""`Poll`: a reader without a connection between its requests holds its stream while it is expected back."""

from __future__ import annotations

import asyncio

import pytest

from streamserve.engine.config import Policy
from streamserve.protocol.errors import QuotaExceeded
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.poll import Poll
from streamserve.streams.registry import Streams
from tests.streams.conftest import DONE, start
from tests.support.streams.hand_made import Gate, ScriptedClient, ask, started_echo, tok, until

LEAD_TOKENS = 8


async def test_a_reader_between_two_requests_holds_its_stream(streams: Streams, scripted: ScriptedClient) -> None:
    """The stream runs on while the reader is expected back, and its next request is the same reader."""
    stream = await start(streams)
    poll = Poll.begin(streams, stream, 0)
    await poll.wait(60)
    poll.pause(1)
    assert (stream.state, stream.readers.num_holding) == ("running", 1)
    assert Poll.begin(streams, stream, 1) is poll
    assert stream.readers.furthest_seq == 1
    scripted.last.push(tok("a"))
    await poll.wait(60)
    assert stream.last_seq == 2
    poll.close()


async def test_a_request_that_is_sent_again_is_the_same_reader(streams: Streams, scripted: ScriptedClient) -> None:
    """A response that was lost is asked for at the old place."""
    stream = await start(streams)
    poll = Poll.begin(streams, stream, 0)
    poll.pause(1)
    assert Poll.begin(streams, stream, 0) is poll
    poll.close()


async def test_a_request_that_ends_early_parks_its_stream(streams: Streams, scripted: ScriptedClient) -> None:
    """A client that closes its connection while it waits has left at once."""
    stream = await start(streams)
    poll = Poll.begin(streams, stream, 1)
    waiting = asyncio.create_task(poll.wait(60))
    await asyncio.sleep(0)
    waiting.cancel()
    poll.close()
    assert (stream.state, stream.readers.num_holding) == ("parked", 0)
    assert scripted.last.is_cancelled


async def test_a_reader_that_stays_away_has_left(scripted: ScriptedClient) -> None:
    """After as long as a first reader may take, the stream is parked."""
    streams = Streams({"scripted": scripted}, MemoryLog(), StreamConfig(first_reader_seconds=0.01))
    stream = await start(streams)
    poll = Poll.begin(streams, stream, 0)
    poll.pause(1)
    await until(lambda: stream.state == "parked", "the reader is counted out")
    assert Poll.begin(streams, stream, 1) is not poll
    await streams.aclose()


async def test_the_end_lets_go_of_a_reader_that_is_away(streams: Streams, scripted: ScriptedClient) -> None:
    """An answer that ends between two requests keeps no reader, and the next request needs none."""
    stream = await start(streams)
    poll = Poll.begin(streams, stream, 0)
    poll.pause(1)
    scripted.last.push(tok("a"), DONE)
    await until(lambda: stream.ended.is_set(), "the end is committed")
    assert stream.readers.num_attached == 0


async def test_one_reader_too_many_is_refused(scripted: ScriptedClient) -> None:
    """A reader between two requests has a place."""
    streams = Streams({"scripted": scripted}, MemoryLog(), StreamConfig(max_readers=1))
    stream = await start(streams)
    Poll.begin(streams, stream, 0).pause(1)
    Poll.begin(streams, stream, 0)
    with pytest.raises(QuotaExceeded):
        Poll.begin(streams, stream, 0)
    await streams.aclose()


async def test_the_engine_keeps_to_a_polling_reader(gate: Gate) -> None:
    """No more is computed than the lead beyond the offset that the reader has sent, and its polls get the rest."""
    client = await started_echo(gate, lead_tokens=LEAD_TOKENS, policy=Policy(stalled_seconds=0.0))
    streams = Streams({"echo": client}, MemoryLog())
    stream = await streams.start(ask(max_tokens=60, ignore_eos=True), Admission(owner="u1", tenant="t1"))
    seq, num_stops = 0, 0
    while stream.terminal is None:
        poll = Poll.begin(streams, stream, seq)
        await poll.wait(60)
        seq = stream.last_seq
        poll.pause(seq)
        await until(lambda: stream.terminal is not None or stream.state == "parked", "it is parked at the lead")
        if stream.terminal is None:
            assert 0 < stream.lag.num_unread <= LEAD_TOKENS
            num_stops += 1
            seq = stream.last_seq
    assert num_stops >= 60 // LEAD_TOKENS - 1
    await streams.aclose()
    await client.aclose()
