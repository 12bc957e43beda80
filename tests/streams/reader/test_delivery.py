"""Laws of a delivery: what leaves when, how tokens are joined, and that it keeps the pace of its transport."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from streamserve.dialects.native import NativeEncoder, TextEncoder
from streamserve.protocol.errors import BadRequest, Gone, QuotaExceeded
from streamserve.protocol.events import Done, LoggedEvent, Meta, PositionLogprobs, Status, Token, TokenLogprob
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect, follow
from streamserve.streams.registry import Streams
from streamserve.streams.store import Admission
from streamserve.streams.stream import Stream
from tests.support.checks.stream_checks import check_native, check_native_part, parse_sse
from tests.support.streams.hand_made import ScriptedClient, StallingLog, ask, tok, until
from tests.support.streams.wire import Wire

DONE = Done(finish_reason="stop")
LONG = 3600.0


@pytest.fixture(params=[False, True], ids=["pulled", "direct"], autouse=True)
def is_direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every law of delivery holds for a channel that is pulled from and for one that writes directly."""
    monkeypatch.setattr(Wire, "is_direct", request.param)
    return bool(request.param)


def serving(scripted: ScriptedClient, log: MemoryLog | None = None, **settings: float) -> Streams:
    return Streams({"scripted": scripted}, log or MemoryLog(), StreamConfig(**settings))


async def start(streams: Streams) -> Stream:
    return await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))


def deliver(streams: Streams, stream: Stream, after: int = 0, **rest: bool) -> Delivery:
    return Delivery(streams, stream, NativeEncoder(stream.log_id), after=after, **rest)


async def written(streams: Streams, scripted: ScriptedClient, *events: object) -> Stream:
    """Return a finished stream that holds `events`."""
    stream = await start(streams)
    scripted.last.push(*events)
    await stream.ended.wait()
    return stream


async def test_headers_hold_what_proxies_need(streams: Streams) -> None:
    """Headers name type, stream and start, forbid caching, buffering and compression, and give no length."""
    stream = await start(streams)
    delivery = deliver(streams, stream, after=1)
    assert dict(delivery.headers) == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache, no-transform",
        b"x-accel-buffering": b"no",
        b"content-encoding": b"identity",
        b"x-stream-id": stream.id.encode(),
        b"streamserve-from": b"2",
        b"streamserve-reader": delivery.reader.id.encode(),
    }


async def test_what_is_registered_for_the_close_is_called_once(streams: Streams) -> None:
    """However often the delivery closes; at once where it has closed before."""
    delivery = deliver(streams, await start(streams))
    calls: list[str] = []
    delivery.on_close(lambda: calls.append(f"open: {not delivery.is_closed}"))
    delivery.close()
    delivery.close()
    delivery.on_close(lambda: calls.append("late"))
    assert calls == ["open: False", "late"]


class CountingLog(MemoryLog):
    """Counts its reads."""

    num_reads = 0

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        self.num_reads += 1
        return await super().read(log_id, after, limit)


async def test_the_first_reader_of_a_short_answer_reads_no_log(scripted: ScriptedClient) -> None:
    """An answer may end before its response has begun. Its newest events wait for the first reader, and only for it."""
    log = CountingLog()
    streams = serving(scripted, log)
    stream = await written(streams, scripted, tok("Hi", 1), DONE)
    frames = [check_native(b"".join([data async for data in deliver(streams, stream)])) for _ in range(2)]
    assert [frame.event for frame in frames[0]] == ["meta", "token", "done"]
    assert frames[0] == frames[1]
    assert log.num_reads == 1
    assert stream.recent.num_bytes == 0


async def test_first_bytes_and_first_token_leave_at_once(scripted: ScriptedClient) -> None:
    """The first bytes and the first token wait neither for the engine nor for more tokens, also with a long hold."""
    streams = serving(scripted, coalesce_seconds=LONG)
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send, wire.flow))
    await until(lambda: len(wire.sent) == 2, "first bytes and meta are sent")
    assert wire.sent[0] == NativeEncoder.first_bytes
    scripted.last.push(tok("a"))
    await until(lambda: len(wire.sent) == 3, "the first token is sent")
    scripted.last.push(tok("b"))
    await until(lambda: stream.last_seq == 3, "the second token is committed")
    await asyncio.sleep(0)
    assert len(wire.sent) == 3
    scripted.last.push(DONE)
    await running
    assert [frame.event for frame in check_native(wire.data)] == ["meta", "token", "token", "done"]
    await streams.aclose()


async def test_tokens_are_joined_up_to_the_bound(scripted: ScriptedClient) -> None:
    """No frame holds more than `coalesce_tokens`, a full one leaves at once, and no text is lost."""
    streams = serving(scripted, coalesce_seconds=LONG, coalesce_tokens=5)
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send, wire.flow))
    scripted.last.push(tok("first"))
    await until(lambda: len(parse_sse(wire.data)) == 2, "the first token is sent")
    for number in range(12):
        scripted.last.push(tok(f" {number}"))
        await asyncio.sleep(0)
    await until(lambda: len(parse_sse(wire.data)) >= 4, "two full frames leave without a clock")
    scripted.last.push(DONE)
    await running
    payloads = [frame.json for frame in check_native(wire.data) if frame.event == "token"]
    assert max(len(payload["token_ids"]) for payload in payloads) == 5
    assert "".join(payload["text"] for payload in payloads) == "first" + "".join(f" {number}" for number in range(12))
    await streams.aclose()


async def test_a_held_token_leaves_after_its_time(scripted: ScriptedClient) -> None:
    """A token that follows another soon waits `coalesce_seconds` at most, then leaves alone."""
    streams = serving(scripted, coalesce_seconds=0.02)
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send, wire.flow))
    scripted.last.push(tok("a"))
    await until(lambda: len(parse_sse(wire.data)) == 2, "the first token is sent")
    scripted.last.push(tok("b"))
    await until(lambda: len(parse_sse(wire.data)) == 3, "the second token is sent")
    scripted.last.push(DONE)
    await running
    await streams.aclose()


async def test_joining_can_be_off(scripted: ScriptedClient) -> None:
    """With `coalesce_tokens` 0 each token has its own frame."""
    streams = serving(scripted, coalesce_tokens=0)
    stream = await written(streams, scripted, *(tok("x") for _ in range(9)), DONE)
    wire = Wire()
    await deliver(streams, stream).run(wire.send, wire.flow)
    assert [frame.seq for frame in check_native(wire.data)] == list(range(1, 12))
    await streams.aclose()


async def test_other_events_never_wait_and_keep_their_order(scripted: ScriptedClient) -> None:
    """A status leaves at once, and the held tokens leave before it."""
    streams = serving(scripted, coalesce_seconds=LONG)
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send, wire.flow))
    scripted.last.push(tok("a"))
    await until(lambda: len(parse_sse(wire.data)) == 2, "the first token is sent")
    scripted.last.push(tok("b"), Status(status="prefill"))
    await until(lambda: len(parse_sse(wire.data)) == 4, "both are sent")
    scripted.last.push(DONE)
    await running
    assert [frame.event for frame in check_native(wire.data)] == ["meta", "token", "token", "status", "done"]
    await streams.aclose()


async def test_keepalives_stand_between_events_in_silence_only(scripted: ScriptedClient) -> None:
    """Keepalives are whole comments between whole events, and no event is changed by them."""
    streams = serving(scripted, keepalive_seconds=0.01)
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send, wire.flow))
    await until(lambda: wire.sent.count(NativeEncoder.keepalive) >= 3, "silence is filled")
    scripted.last.push(tok("a"))
    await until(lambda: len(parse_sse(wire.data)) == 2, "the token is sent")
    await until(lambda: wire.sent[-1] == NativeEncoder.keepalive, "the next silence too")
    scripted.last.push(DONE)
    await running
    assert len(check_native(wire.data)) == 3
    assert all(data.endswith(b"\n") for data in wire.sent)
    await streams.aclose()


async def test_no_keepalive_while_events_come(scripted: ScriptedClient) -> None:
    """Silence is counted from the last bytes, not from a fixed beat."""
    streams = serving(scripted, keepalive_seconds=LONG, coalesce_tokens=0)
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send, wire.flow))
    for _ in range(20):
        scripted.last.push(tok("x"))
        await asyncio.sleep(0.001)
    scripted.last.push(DONE)
    await running
    assert b"keepalive" not in wire.data
    await streams.aclose()


async def test_plain_text_has_no_keepalive(scripted: ScriptedClient) -> None:
    """A dialect without comments gets nothing but its text; its head still leaves at once, as empty bytes."""
    streams = serving(scripted, keepalive_seconds=0.001)
    stream, wire = await start(streams), Wire()
    delivery = Delivery(streams, stream, TextEncoder())
    running = asyncio.create_task(delivery.run(wire.send, wire.flow))
    await until(lambda: wire.sent == [b""], "the head is flushed")
    scripted.last.push(tok("a"), tok("b"), DONE)
    await running
    assert wire.data == b"ab"
    assert stream.readers.last_transport == "text"
    await streams.aclose()


async def test_a_burst_is_committed_in_parts(scripted: ScriptedClient) -> None:
    """A long batch is committed a few events at a time, because an event in a commit is in memory several times."""
    log = StallingLog()
    streams = serving(scripted, log)
    stream = await written(streams, scripted, *(tok(str(number)) for number in range(100)), DONE)
    sizes = [len(batch) for batch in log.batches]
    assert sum(sizes) == stream.last_seq == 102
    assert 1 < max(sizes) <= 16
    await streams.aclose()


async def test_pages_are_as_large_as_their_events(scripted: ScriptedClient) -> None:
    """Events with many candidates are read a few at a time; plain ones by the page."""
    logprob = TokenLogprob(token_id=1, token="a", bytes_=b"a", logprob=-1.0)
    large = replace(tok("a"), logprobs=(PositionLogprobs(chosen=logprob, top=(logprob,) * 20),))
    counts = []
    for token in (tok("a"), large):
        streams = serving(scripted, coalesce_tokens=1, snapshot_events=0)
        stream = await written(streams, scripted, *[token] * 200, DONE)
        wire = Wire()
        await deliver(streams, stream).run(wire.send, wire.flow)
        counts.append([len(parse_sse(data)) for data in wire.sent[2:]])  # the first page measures their size
        await streams.aclose()
    assert max(counts[0]) == 64
    assert max(counts[1]) <= 4


async def test_a_level_reader_does_not_read_the_log(scripted: ScriptedClient) -> None:
    """A reader that is level takes each event from the stream: the log is not read."""
    log = StallingLog()
    streams = serving(scripted, log, coalesce_tokens=1)
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send, wire.flow))
    await until(lambda: len(wire.sent) == 2, "first bytes and meta are sent")
    for number in range(50):
        scripted.last.push(tok(f" {number}"))
        await until(lambda number=number: len(wire.sent) == 3 + number, "it is sent")
    scripted.last.push(DONE)
    await running
    assert len(check_native(wire.data)) == 52
    assert log.num_reads == 0
    await streams.aclose()


async def test_a_slow_transport_bounds_what_is_read(scripted: ScriptedClient) -> None:
    """A reader that takes nothing costs one page, not the answer; afterwards it gets everything."""
    log = StallingLog()
    streams = serving(scripted, log, snapshot_events=0)
    stream = await written(streams, scripted, *(tok(str(number)) for number in range(5000)), DONE)
    wire = Wire()
    wire.go.clear()
    before = log.num_reads
    running = asyncio.create_task(deliver(streams, stream).run(wire.send, wire.flow))
    for _ in range(200):
        await asyncio.sleep(0)
    assert log.num_reads == before
    wire.go.set()
    await running
    assert check_native(wire.data)[-1].seq == 5002
    assert max(map(len, wire.sent)) < 32_000
    await streams.aclose()


async def test_a_replay_lets_other_tasks_run(scripted: ScriptedClient) -> None:
    """A transport that never waits does not starve the loop while a long log is replayed."""
    streams = serving(scripted)
    stream = await written(streams, scripted, *(tok("x") for _ in range(3000)), DONE)
    turns, wire = 0, Wire()

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await deliver(streams, stream, after=1500).run(wire.send, wire.flow)
    task.cancel()
    assert turns >= 3000 // 64 - 2
    check_native(wire.data, after=1500)
    await streams.aclose()


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
    await exhausted.run(wire.send, wire.flow)
    assert wire.sent == [NativeEncoder.first_bytes]


async def test_a_dropped_stream_is_gone(scripted: ScriptedClient) -> None:
    """A delivery made before its log was dropped raises Gone and sends nothing made up."""
    streams = serving(scripted)
    stream = await written(streams, scripted, tok("a"), DONE)
    await collect(streams, stream)  # only the first reader has its events from memory
    delivery, wire = deliver(streams, stream), Wire()
    await streams.log.drop(stream.log_id)
    with pytest.raises(Gone):
        await delivery.run(wire.send, wire.flow)
    await streams.aclose()


@pytest.mark.parametrize("held", [True, False], ids=["inside send", "inside the wait"])
async def test_cancelling_a_delivery_parks_its_stream(streams: Streams, scripted: ScriptedClient, held: bool) -> None:
    """Wherever the cancel lands, the reader is no longer counted."""
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send, wire.flow))
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
    await delivery.run(wire.send, wire.flow)
    with pytest.raises(RuntimeError):
        await delivery.run(wire.send, wire.flow)


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
    running = asyncio.create_task(delivery.run(wire.send, wire.flow))
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
    running = asyncio.create_task(deliver(streams, stream).run(wire.send, wire.flow))
    scripted.last.push(*(tok("x") for _ in range(30)))
    await until(lambda: len(parse_sse(wire.data)) > 3, "some are sent")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert check_native_part(wire.data)
