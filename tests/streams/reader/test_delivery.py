"""Laws of a delivery: what leaves when, how tokens are joined, and that it keeps the pace of its transport."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from streamserve.dialects.native import NativeEncoder
from streamserve.dialects.plain import TextEncoder
from streamserve.protocol.events import LoggedEvent, PositionLogprobs, Status, TokenLogprob
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.registry import Streams
from tests.support.checks.stream_checks import check_native, parse_sse
from tests.support.streams.deliveries import DONE, LONG, deliver, serving, start, written
from tests.support.streams.hand_made import ScriptedClient, StallingLog, tok, until
from tests.support.streams.wire import Wire


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
    running = asyncio.create_task(deliver(streams, stream).run(wire.send))
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
    running = asyncio.create_task(deliver(streams, stream).run(wire.send))
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
    running = asyncio.create_task(deliver(streams, stream).run(wire.send))
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
    await deliver(streams, stream).run(wire.send)
    assert [frame.seq for frame in check_native(wire.data)] == list(range(1, 12))
    await streams.aclose()


async def test_other_events_never_wait_and_keep_their_order(scripted: ScriptedClient) -> None:
    """A status leaves at once, and the held tokens leave before it."""
    streams = serving(scripted, coalesce_seconds=LONG)
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send))
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
    running = asyncio.create_task(deliver(streams, stream).run(wire.send))
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
    running = asyncio.create_task(deliver(streams, stream).run(wire.send))
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
    running = asyncio.create_task(delivery.run(wire.send))
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
        await deliver(streams, stream).run(wire.send)
        counts.append([len(parse_sse(data)) for data in wire.sent[2:]])  # the first page measures their size
        await streams.aclose()
    assert max(counts[0]) == 64
    assert max(counts[1]) <= 4


async def test_a_level_reader_does_not_read_the_log(scripted: ScriptedClient) -> None:
    """A reader that is level takes each event from the stream: the log is not read."""
    log = StallingLog()
    streams = serving(scripted, log, coalesce_tokens=1)
    stream, wire = await start(streams), Wire()
    running = asyncio.create_task(deliver(streams, stream).run(wire.send))
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
    running = asyncio.create_task(deliver(streams, stream).run(wire.send))
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
    await deliver(streams, stream, after=1500).run(wire.send)
    task.cancel()
    assert turns >= 3000 // 64 - 2
    check_native(wire.data, after=1500)
    await streams.aclose()
