"""Laws of how a delivery begins and ends: which place is refused, what a leaving reader frees, and whole answers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.errors import BadRequest, Gone, QuotaExceeded
from streamserve.protocol.events import Done, Meta, Token
from streamserve.streams.reader.follow import collect, follow
from streamserve.streams.registry import Streams
from tests.support.checks.stream_checks import check_native_part, parse_sse
from tests.support.streams.deliveries import DONE, deliver, serving, start, written
from tests.support.streams.hand_made import ScriptedClient, tok, until
from tests.support.streams.wire import Wire


@pytest.mark.parametrize("after", [2, 10**12, -1])
async def test_a_place_outside_the_log_is_refused(streams: Streams, after: int) -> None:
    """A cursor before the first event is the client's mistake; one past the last may name what the log has lost."""
    stream = await start(streams)
    for make in (lambda: deliver(streams, stream, after=after), lambda: follow(streams, stream, after)):
        with pytest.raises(BadRequest if after < 0 else Gone) as caught:
            make()
        assert (caught.value.http_status, caught.value.code) == (
            (400, "unknown_event_id") if after < 0 else (410, "stream_expired")
        )


async def test_a_stream_has_so_many_readers_at_once(scripted: ScriptedClient) -> None:
    """A stream has a bounded number of readers; when one leaves there is room again."""
    streams = serving(scripted, max_readers=2)
    stream = await start(streams)
    readers = [asyncio.create_task(deliver(streams, stream).run(Wire().send)) for _ in range(2)]
    await until(lambda: stream.readers.num_attached == 2, "two readers read")
    for make in (lambda: deliver(streams, stream), lambda: follow(streams, stream)):
        with pytest.raises(QuotaExceeded, match="2 times"):
            make()
    deliver(streams, stream, watcher=True)  # counted apart
    readers[0].cancel()
    await asyncio.gather(readers[0], return_exceptions=True)
    deliver(streams, stream)
    await streams.aclose()
    await asyncio.gather(*readers, return_exceptions=True)


@pytest.mark.parametrize(("num_untaken", "is_seen"), [(0, True), (7, False), (None, False)])
async def test_an_end_is_seen_once_a_readers_system_has_it(
    streams: Streams, scripted: ScriptedClient, num_untaken: int | None, is_seen: bool
) -> None:
    """Where the server cannot tell what the system has taken, it is not: the reader may have lost its network."""
    stream = await start(streams)
    options = [] if num_untaken is None else [lambda: num_untaken]
    reading = asyncio.create_task(deliver(streams, stream).run(Wire().send, *options))
    scripted.last.push(DONE)
    await reading
    assert (stream.readers.seen_seq == stream.last_seq) == is_seen


async def test_a_reader_that_has_everything_gets_204(streams: Streams, scripted: ScriptedClient) -> None:
    """A reader that has everything gets 204 by `is_over`, and only the first bytes when it is run all the same."""
    stream = await start(streams)
    delivery = deliver(streams, stream, after=1)
    assert not delivery.is_over
    scripted.last.push(DONE)
    await stream.ended.wait()
    assert not delivery.is_over
    exhausted, wire = deliver(streams, stream, after=2), Wire()
    assert exhausted.is_over
    await exhausted.run(wire.send)
    assert wire.sent == [NativeEncoder.first_bytes]


async def test_a_dropped_stream_is_gone(scripted: ScriptedClient) -> None:
    """A delivery made before its log was dropped raises Gone and sends nothing made up."""
    streams = serving(scripted)
    stream = await written(streams, scripted, tok("a"), DONE)
    await collect(streams, stream)  # only the first reader has its events from memory
    delivery, wire = deliver(streams, stream), Wire()
    await streams.log.drop(stream.log_id)
    with pytest.raises(Gone):
        await delivery.run(wire.send)
    await streams.aclose()


@pytest.mark.parametrize("held", [True, False], ids=["inside send", "inside the wait"])
async def test_cancelling_a_delivery_parks_its_stream(streams: Streams, scripted: ScriptedClient, held: bool) -> None:
    """Wherever the cancel lands, the reader is no longer counted."""
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send))
    await until(lambda: len(wire.sent) == 2, "meta is sent")
    if held:
        wire.go.clear()
        scripted.last.push(tok("a"))
        await until(lambda: stream.last_seq == 2, "a token waits in send")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (stream.state, stream.readers.num_attached) == ("parked", 0)
    assert scripted.last.is_cancelled


async def test_closing_an_iterator_parks_its_stream(streams: Streams, scripted: ScriptedClient) -> None:
    """A framework that pulls closes the iterator; the stream is parked before `aclose` returns."""
    stream = await start(streams)
    async with aclosing(aiter(deliver(streams, stream))) as frames:
        assert await anext(frames) == NativeEncoder.first_bytes
        assert b"event: meta" in await anext(frames)
        assert stream.state == "running"
    assert stream.state == "parked"


async def test_a_delivery_that_never_ran_gives_its_stream_up(streams: Streams, scripted: ScriptedClient) -> None:
    """`close` before `run` parks the stream at once, not after `first_reader_seconds`."""
    stream = await start(streams)
    deliver(streams, stream, watcher=True).close()
    assert stream.state == "running"
    delivery = deliver(streams, stream)
    delivery.close()
    delivery.close()
    assert stream.state == "parked"
    assert scripted.last.is_cancelled


async def test_a_delivery_runs_once(streams: Streams, scripted: ScriptedClient) -> None:
    """A second `run` is refused, because the encoder already holds the first one's state."""
    stream = await written(streams, scripted, DONE)
    delivery, wire = deliver(streams, stream), Wire()
    await delivery.run(wire.send)
    with pytest.raises(RuntimeError):
        await delivery.run(wire.send)


async def test_a_transport_that_fails_counts_its_reader_out(streams: Streams) -> None:
    """An error of `send` passes through to the server, and the reader is no longer counted."""
    stream = await start(streams)

    async def send(data: bytes) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await deliver(streams, stream).run(send)
    assert stream.state == "parked"


async def test_the_reader_position_is_what_the_transport_took(streams: Streams, scripted: ScriptedClient) -> None:
    """`Reader.seq` lags behind the log by what is still in `send`."""
    stream, wire = await start(streams), Wire()
    delivery = deliver(streams, stream)
    running = asyncio.create_task(delivery.run(wire.send))
    await until(lambda: delivery.reader.received_seq == 1, "meta was taken")
    wire.go.clear()
    scripted.last.push(tok("a"))
    await until(lambda: stream.last_seq == 2, "a token waits in send")
    assert delivery.reader.received_seq == 1
    wire.go.set()
    await until(lambda: delivery.reader.received_seq == 2, "the token was taken")
    scripted.last.push(DONE)
    await running


async def test_follow_gives_joined_events_to_the_end(streams: Streams, scripted: ScriptedClient) -> None:
    """The WebSocket's iterator ends after the terminal event, and its reader is no longer counted by then."""
    stream = await written(streams, scripted, *(tok("x") for _ in range(7)), DONE)
    events = [logged async for logged in follow(streams, stream)]
    assert [type(logged.event) for logged in events] == [Meta, Token, Token, Done]
    assert [logged.seq for logged in events] == [1, 6, 8, 9]
    assert stream.readers.num_attached == 0


async def test_closing_follow_is_synchronous(streams: Streams, scripted: ScriptedClient) -> None:
    """A disconnect closes the iterator while another task waits in it; that task ends when it is cancelled."""
    stream = await start(streams)
    events = follow(streams, stream)
    assert (await anext(events)).seq == 1
    waiting = asyncio.create_task(anext(events))
    await asyncio.sleep(0)
    events.close()
    assert scripted.last.is_cancelled
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_nothing_is_given_after_close(streams: Streams, scripted: ScriptedClient) -> None:
    """An iterator closed in the middle of a replay ends its wait and yields no further event."""
    stream = await written(streams, scripted, *(tok("x") for _ in range(200)), DONE)
    await collect(streams, stream)  # the next reader reads the log
    events = follow(streams, stream)
    waiting = asyncio.create_task(anext(events, None))
    await asyncio.sleep(0)
    assert not waiting.done()
    events.close()
    assert await waiting is None
    assert await anext(events, None) is None


async def test_collect_waits_for_the_end(streams: Streams, scripted: ScriptedClient) -> None:
    """It returns every event as it is in the log; cancelled, its reader has left."""
    stream = await start(streams)
    collecting = asyncio.create_task(collect(streams, stream))
    scripted.last.push(*(tok("x") for _ in range(150)), DONE)
    assert [logged.seq for logged in await collecting] == list(range(1, 153))
    other = await start(streams)
    collecting = asyncio.create_task(collect(streams, other))
    await asyncio.sleep(0)
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    assert other.state == "parked"


async def test_a_cut_stream_is_in_order_as_far_as_it_came(streams: Streams, scripted: ScriptedClient) -> None:
    """Whenever the reader leaves, what it has is a prefix without a gap."""
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send))
    scripted.last.push(*(tok("x") for _ in range(30)))
    await until(lambda: len(parse_sse(wire.data)) > 3, "some are sent")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert check_native_part(wire.data)
