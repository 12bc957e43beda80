"""What is committed is written in the same turn where a server offers a pen; nothing is lost where it cannot be."""

from __future__ import annotations

import asyncio

import pytest

from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.events import LoggedEvent, Status
from streamserve.streams.config import StreamConfig
from streamserve.streams.reader.delivery import Delivery, Flow
from streamserve.streams.reader.tail import BrokenStream
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.streams.reader.test_delivery import DONE, Wire
from tests.support.stream_checks import check_native, text_of
from tests.support.streams import ScriptedClient, StallingLog, ask, tok, until

NUM_TOKENS = 100
WORDS = [tok(f" {number}") for number in range(NUM_TOKENS)]
TEXT = "".join(word.text for word in WORDS)


class FailingEncoder(NativeEncoder):
    """Fails at the word " 5"."""

    def encode(self, logged: LoggedEvent) -> bytes:
        frame = super().encode(logged)
        if b'" 5"' in frame:
            raise RuntimeError("cannot say that")
        return frame


@pytest.fixture
def log() -> StallingLog:
    return StallingLog()


@pytest.fixture
def streams(scripted: ScriptedClient, log: StallingLog) -> Streams:
    return Streams({"scripted": scripted}, log, StreamConfig(coalesce_seconds=0))


async def reading(streams: Streams, wire: Wire) -> tuple[Stream, asyncio.Task[None]]:
    """Return a stream, and a reader with a pen that has its first event."""
    stream = await streams.start(ask("scripted"), owner="u1", tenant="t1")
    delivery = Delivery(streams, stream, NativeEncoder(stream.log_id))
    running = asyncio.create_task(delivery.run(wire.send, Flow(pen=wire)))
    await until(lambda: b"meta" in wire.data, "it has the first event")
    await asyncio.sleep(0)
    return stream, running


async def test_a_token_is_written_before_its_engine_goes_on(
    streams: Streams, scripted: ScriptedClient, log: StallingLog
) -> None:
    """No turn of the loop, no reading of the log and no `send` lies between a token and its reader."""
    wire = Wire()
    _, running = await reading(streams, wire)
    num_reads = log.num_reads
    for number, word in enumerate(WORDS, 1):
        scripted.last.push(word)
        assert wire.data.count(b"event: token") == number
    assert log.num_reads == num_reads
    scripted.last.push(DONE)
    await running
    assert text_of(check_native(wire.data)) == TEXT


async def test_what_is_not_committed_is_not_written(
    streams: Streams, scripted: ScriptedClient, log: StallingLog
) -> None:
    """Not before, and not if it never is."""
    wire = Wire()
    stream, running = await reading(streams, wire)
    scripted.last.push(WORDS[0])
    log.go.clear()
    scripted.last.push(WORDS[1])
    await asyncio.sleep(0)
    assert wire.data.count(b"event: token") == 1
    log.is_broken = True
    log.go.set()
    with pytest.raises(BrokenStream):
        await running
    assert wire.data.count(b"event: token") == 1
    assert stream.last_seq == 2


@pytest.mark.parametrize("num_stuck", [1, 7, NUM_TOKENS])
async def test_a_pen_that_is_not_ready_loses_nothing(
    num_stuck: int, streams: Streams, scripted: ScriptedClient
) -> None:
    """While it is not, the reader waits in `send`; then it has all in order, and the pen is used again."""
    wire = Wire()
    _, running = await reading(streams, wire)
    for start in range(0, NUM_TOKENS, 2 * num_stuck):
        stuck = WORDS[start + num_stuck : start + 2 * num_stuck]
        scripted.last.push(*WORDS[start : start + num_stuck])
        await until(lambda: wire.num_waiting == 0, "nothing is in send")
        wire.go.clear()
        scripted.last.push(*stuck)
        if stuck:
            await until(lambda: wire.num_waiting == 1, "it is stuck in send")
        wire.go.set()
        num_pushed = min(NUM_TOKENS, start + 2 * num_stuck)
        await until(lambda: wire.data.count(b"event: token") == num_pushed, "it has all")  # noqa: B023
    scripted.last.push(DONE)
    await running
    assert text_of(check_native(wire.data)) == TEXT


async def test_a_reader_that_fails_costs_no_other(streams: Streams, scripted: ScriptedClient) -> None:
    """What one reader's frames raise ends its delivery; the stream and its other readers go on."""
    wire, other = Wire(), Wire()
    stream, running = await reading(streams, other)
    failing = asyncio.create_task(
        Delivery(streams, stream, FailingEncoder(stream.log_id)).run(wire.send, Flow(pen=wire))
    )
    await until(lambda: b"meta" in wire.data, "it reads too")
    await asyncio.sleep(0)
    for word in WORDS:
        scripted.last.push(word)
    with pytest.raises(RuntimeError, match="cannot say that"):
        await failing
    scripted.last.push(DONE)
    await running
    assert wire.data.count(b"event: token") == 5
    assert text_of(check_native(other.data)) == TEXT
    assert stream.readers.num_attached == 0


async def test_a_reader_who_leaves_is_written_to_no_more(streams: Streams, scripted: ScriptedClient) -> None:
    """From the moment of `close`, before its task has heard of it."""
    wire, other = Wire(), Wire()
    stream, staying = await reading(streams, other)
    delivery = Delivery(streams, stream, NativeEncoder(stream.log_id))
    leaving = asyncio.create_task(delivery.run(wire.send, Flow(pen=wire)))
    await until(lambda: b"meta" in wire.data, "it has the first event")
    await asyncio.sleep(0)
    scripted.last.push(WORDS[0])
    delivery.close()
    scripted.last.push(WORDS[1], DONE)
    await asyncio.gather(leaving, staying)
    assert [one.data.count(b"event: token") for one in (wire, other)] == [1, 2]


async def test_a_status_makes_no_token_wait(scripted: ScriptedClient) -> None:
    """The first token never waits for company, whatever was said before it."""
    streams, wire = Streams({"scripted": scripted}, StallingLog(), StreamConfig(coalesce_seconds=3600.0)), Wire()
    _, running = await reading(streams, wire)
    scripted.last.push(Status(status="prefill"))
    scripted.last.push(WORDS[0])
    assert wire.data.count(b"event: token") == 1
    scripted.last.push(DONE)
    await running


async def test_held_tokens_are_written_when_their_time_is_over(scripted: ScriptedClient) -> None:
    """Without waking the reader: the frame comes although its task never runs."""
    streams, wire = Streams({"scripted": scripted}, StallingLog(), StreamConfig(coalesce_seconds=0.3)), Wire()
    _, running = await reading(streams, wire)
    scripted.last.push(WORDS[0])
    scripted.last.push(WORDS[1])
    scripted.last.push(WORDS[2])
    assert wire.data.count(b"event: token") == 1
    await until(lambda: wire.data.count(b"event: token") == 2, "two are written as one")
    assert b'" 1 2"' in wire.data
    scripted.last.push(DONE)
    await running
    check_native(wire.data)
