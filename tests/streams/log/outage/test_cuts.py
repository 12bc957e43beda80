"""Laws of answers that are cut because their log is away: how connections end, and what is freed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.errors import QuotaExceeded
from streamserve.protocol.events import Done
from streamserve.protocol.limits import Limits
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import Fenced, LogFull, LogUnavailable, append, make_batch
from streamserve.streams.reader import feed as feed_module
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.reader.reader import BrokenStream
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from tests.streams.log.outage.conftest import DEADLINE_SECONDS, DONE, DOWN, Follower, start, words
from tests.support.checks.stream_checks import (
    check_native,
    check_native_part,
    going_away_of,
    notices_of,
    parse_sse,
    text_of,
)
from tests.support.streams.hand_made import ScriptedClient, StallingLog, tok, until, untimed
from tests.support.streams.stores import SharedRecords
from tests.support.streams.wire import Wire


async def test_a_cut_connection_ends_with_its_place(
    log: StallingLog, streams: Streams, scripted: ScriptedClient
) -> None:
    """A cut connection gets `waiting`, then a going-away event after the last shown seq, both without an id."""
    stream = await start(streams)
    sent = bytearray()
    delivery = Delivery(streams, stream, NativeEncoder(stream.log_id))
    reading = asyncio.create_task(_deliver(delivery, sent))
    scripted.last.push(tok("a"), tok("b"))
    await until(lambda: len(parse_sse(bytes(sent))) == 3, "two tokens are sent")
    log.outage = DOWN
    scripted.last.push(tok("c"))
    await until(lambda: len(notices_of(bytes(sent))) == 1, "it waits")
    streams.writer._outage_seconds = 0.0
    async with asyncio.timeout(DEADLINE_SECONDS):
        await reading
    frames, farewell = check_native_part(bytes(sent)), going_away_of(bytes(sent))
    assert text_of(frames) == "ab"
    assert [frame.json["status"] for frame in notices_of(bytes(sent))] == ["waiting"]
    assert farewell is not None
    assert (farewell.json["after"], farewell.json["event_id"]) == (3, f"{stream.log_id}-3")


async def test_a_notice_waits_for_room(log: StallingLog, streams: Streams, scripted: ScriptedClient) -> None:
    """A notice is shown when the frame before it has left; one of an outage that is over by then is dropped."""
    stream = await start(streams)
    delivery, sent = Delivery(streams, stream, NativeEncoder(stream.log_id)), bytearray()
    go, is_stuck = asyncio.Event(), asyncio.Event()

    async def send(data: bytes) -> None:
        if b"event: token" in data:
            is_stuck.set()
            await go.wait()
        sent.extend(data)

    reading = asyncio.create_task(delivery.run(send))
    for turn in range(2):
        go.clear()
        is_stuck.clear()
        scripted.last.push(tok("a"))
        await is_stuck.wait()
        log.outage = DOWN
        scripted.last.push(tok("b"))
        await until(lambda: streams.writer.outage is not None, "it is away")
        if turn:
            go.set()
            await until(lambda: len(notices_of(bytes(sent))) == 1, "it is shown")
        log.outage = None
        await until(lambda: streams.writer.outage is None, "it is back")
        go.set()
        await until(lambda turn=turn: len(parse_sse(bytes(sent))) >= 3 + 2 * turn, "the tokens are sent")
    scripted.last.push(DONE)
    await reading
    assert [frame.json["status"] for frame in notices_of(bytes(sent))] == ["waiting", "resumed"]


@pytest.mark.parametrize("stuck_at", [b"", b"event: token"], ids=["the first bytes", "a token"])
async def test_a_connection_without_room_for_its_place_breaks(
    log: StallingLog, hasty: Streams, scripted: ScriptedClient, stuck_at: bytes
) -> None:
    """A connection without room for the going-away event breaks: a clean end would make half an answer look whole.

    So it does while the first bytes are being sent: an empty answer must not look whole either.
    """
    stream = await start(hasty)
    delivery = Delivery(hasty, stream, NativeEncoder(stream.log_id))
    is_stuck, go = asyncio.Event(), asyncio.Event()

    async def send(data: bytes) -> None:
        if stuck_at in data:
            is_stuck.set()
            await go.wait()

    reading = asyncio.create_task(delivery.run(send))
    scripted.last.push(tok("a"))
    await is_stuck.wait()
    log.outage = DOWN
    scripted.last.push(tok("b"))
    await until(lambda: delivery.reader.is_over, "it is cut")
    go.set()
    with pytest.raises(BrokenStream):
        await reading


async def test_a_page_that_is_awaited_is_no_silence(
    log: StallingLog, scripted: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a finished answer cannot be read from its log, its reader gets keepalives, and then all of it."""
    monkeypatch.setattr(feed_module, "_RETRY_SECONDS", (0.005, 0.01))
    streams = Streams({"scripted": scripted}, log, StreamConfig(keepalive_seconds=0.01))
    stream = await start(streams)
    scripted.last.push(*words(0, 3), DONE)
    await stream.ended.wait()
    await collect(streams, stream)  # the next reader reads the log
    log.outage = DOWN
    wire = Wire()
    reading = asyncio.create_task(Delivery(streams, stream, NativeEncoder(stream.log_id)).run(wire.send))
    await until(lambda: wire.sent.count(NativeEncoder.keepalive) >= 3, "silence is filled")
    log.outage = None
    await reading
    assert text_of(check_native(wire.data)) == "".join(one.text for one in words(0, 3))
    await streams.aclose()


async def test_a_cut_replica_claims_once(log: StallingLog, scripted: ScriptedClient) -> None:
    """A stream whose lease another worker took is cut as a replica: it has nothing to release when it claims again."""
    shared = SharedRecords()
    store = shared.worker("one")
    streams = Streams({"scripted": scripted}, log, StreamConfig(), store=store)
    stream = await start(streams)
    stream.attach(Attachment())
    theirs = shared.records[stream.id]
    shared.records[stream.id] = replace(theirs, fence=2, producer="two")
    await append(log, stream.log_id, 2, [])
    scripted.last.push(*words(0, 1))
    await until(lambda: not stream.lease.is_held, "it is a replica")
    stream.cut()
    shared.dead.add("two")
    await until(lambda: stream.lease.is_held and len(scripted.requests) == 2, "it continues here")
    assert (store.calls["claim"], store.calls["release"]) == (1, 0)
    await streams.aclose()


async def test_a_newcomer_that_meets_the_outage_frees_what_it_took(log: StallingLog, scripted: ScriptedClient) -> None:
    """Its log stalls, then is away: the newcomer is refused, holds no place, and the one that made room has an end."""
    streams = Streams({"scripted": scripted}, log, StreamConfig(), limits=Limits(max_streams_per_principal=1))
    parked = await start(streams)
    parked.release()
    log.go.clear()
    newcomer = asyncio.create_task(start(streams))
    await until(lambda: len(scripted.requests) == 2, "the engine has accepted it")
    with pytest.raises(QuotaExceeded):  # the evicted answer is not counted, the one that starts is
        await start(streams)
    log.outage = DOWN
    log.go.set()
    with pytest.raises(LogUnavailable):
        await newcomer
    assert scripted.sources[1].is_cancelled
    assert parked.terminal is None, "its end waits for the log"
    log.outage = None
    await parked.ended.wait()
    assert parked.terminal.finish_reason == "abandoned"
    assert (await start(streams)).state == "running"
    await streams.aclose()


async def test_a_cut_whole_answer_is_refused(log: StallingLog, hasty: Streams, scripted: ScriptedClient) -> None:
    """The caller of a whole answer that is cut gets the outage's error."""
    stream = await start(hasty)
    collecting = asyncio.create_task(collect(hasty, stream))
    scripted.last.push(tok("a"))
    await until(lambda: stream.last_seq == 2, "a token is committed")
    log.outage = LogFull("full", retry_after=30)
    scripted.last.push(tok("b"))
    with pytest.raises(LogFull):
        await collecting
    assert stream.readers.num_attached == 0


async def test_a_result_that_comes_after_the_cut_is_only_counted(streams: Streams, scripted: ScriptedClient) -> None:
    """A batch that was given up, and refused because of a later fence, ends nothing."""
    stream = await start(streams)
    old = make_batch(stream.log_id, stream.lease.fence, 1, [tok("old")])
    stream.on_result(old, Fenced(stream.log_id))
    scripted.last.push(tok("a"), DONE)
    await stream.ended.wait()
    assert untimed(stream.terminal) == DONE


async def test_a_stop_after_the_cut_takes_effect_later(
    log: StallingLog, hasty: Streams, scripted: ScriptedClient
) -> None:
    """The stream is parked, and ends as its user asked when the log is back."""
    stream = await start(hasty)
    reader = Follower(hasty, stream)
    await until(lambda: len(reader.seen) == 1, "it is read")
    log.outage = DOWN
    scripted.last.push(tok("a"))
    await reader.end()
    with pytest.raises(LogUnavailable):
        await stream.stop()
    log.outage = None
    await stream.ended.wait()
    assert isinstance(stream.terminal, Done)
    assert stream.terminal.finish_reason == "cancelled"


async def test_closing_during_an_outage_ends(log: StallingLog, streams: Streams, scripted: ScriptedClient) -> None:
    """No task waits for a log that does not come back."""
    stream = await start(streams)
    reader = Follower(streams, stream)
    await until(lambda: len(reader.seen) == 1, "it is read")
    log.outage = DOWN
    scripted.last.push(tok("a"))
    await until(lambda: reader.notices == ["waiting"], "it waits")
    for task in streams._tasks:  # `aclose` does that after some seconds
        task.cancel()
    await streams.aclose()
    with pytest.raises(BrokenStream):
        await reader.end()
    assert stream.terminal is None


async def _deliver(delivery: Delivery, sent: bytearray) -> None:
    async with aclosing(aiter(delivery)) as pieces:
        async for data in pieces:
            sent += data
