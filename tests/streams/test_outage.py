"""Laws of streams while their log is away: nothing shown is lost or changed, and it looks like a slow reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.clients.base import EngineClient
from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.errors import QuotaExceeded, Refused
from streamserve.protocol.events import Done, Error, LoggedEvent, Status, Token
from streamserve.protocol.requests import Limits
from streamserve.streams import stream as stream_module
from streamserve.streams import writer as writer_module
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog, Fenced, LogFull, LogUnavailable, append, make_batch
from streamserve.streams.reader import pages as pages_module
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect, follow
from streamserve.streams.reader.reader import BrokenStream
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.store import Admission, NullStore
from streamserve.streams.stream import Stream
from streamserve.streams.transcript import StreamSummary
from tests.support.checks.stream_checks import (
    check_native,
    check_native_part,
    going_away_of,
    notices_of,
    parse_sse,
    text_of,
)
from tests.support.servers.redis_server import RedisServer
from tests.support.streams.hand_made import Gate, ScriptedClient, StallingLog, ask, started_echo, tok, until, untimed
from tests.support.streams.logs import everything
from tests.support.streams.outages import Outage, RedisKilled, outage
from tests.support.streams.stores import SharedRecords
from tests.support.streams.wire import Wire

__all__ = ["outage"]

DONE = Done(finish_reason="stop")
DOWN = LogUnavailable("The log is away.")
_DEADLINE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are retried soon, and a stop is refused soon."""
    monkeypatch.setattr(writer_module, "_FIRST_RETRY_SECONDS", 0.005)
    monkeypatch.setattr(writer_module, "_MAX_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(stream_module, "STOP_SECONDS", 0.05)


@pytest.fixture
async def waiting(outage: Outage, scripted: ScriptedClient) -> AsyncIterator[Streams]:
    """Streams in a log that will be away, for which they wait for ever."""
    async with streams_on(outage.log, scripted) as streams:
        yield streams


@pytest.fixture
def log() -> StallingLog:
    return StallingLog()


@asynccontextmanager
async def streams_on(log: EventLog, client: EngineClient, *, outage_seconds: float = 3600.0) -> AsyncIterator[Streams]:
    """A directory of streams in that log, closed at the end."""
    config = StreamConfig(coalesce_tokens=0, log_outage_seconds=outage_seconds)
    streams = Streams({client.alias: client}, log, config)
    try:
        yield streams
    finally:
        if isinstance(log, StallingLog):
            log.outage = None
            log.go.set()
        await streams.aclose()


@pytest.fixture
async def streams(log: StallingLog, scripted: ScriptedClient) -> AsyncIterator[Streams]:
    """Streams that wait for their log for ever."""
    async with streams_on(log, scripted) as streams:
        yield streams


@pytest.fixture
async def hasty(log: StallingLog, scripted: ScriptedClient) -> AsyncIterator[Streams]:
    """Streams that are cut as soon as their log is away."""
    async with streams_on(log, scripted, outage_seconds=0.0) as streams:
        yield streams


@pytest.fixture
async def redis(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RedisKilled]:
    """A Redis for one test; the parameter is whether it keeps what it has."""
    with RedisServer(tmp_path, appendonly=getattr(request, "param", "yes")) as server:
        place = RedisKilled(server)
        yield place
        await place.aclose()


class Follower:
    """A reader of a stream to its end, or to where its connection ends."""

    def __init__(self, streams: Streams, stream: Stream, after: int = 0, **options: object) -> None:
        self.seen: list[LoggedEvent] = []
        self._follow = follow(streams, stream, after, **options)
        self.task = asyncio.create_task(self._read())

    @property
    def logged(self) -> list[LoggedEvent]:
        return [one for one in self.seen if one.seq]

    @property
    def notices(self) -> list[str]:
        """Return the frames without an id: statuses and error codes."""
        events = [one.event for one in self.seen if not one.seq]
        return [event.status if isinstance(event, Status) else event.code for event in events]

    @property
    def was_let_go(self) -> bool:
        return self._follow.reader.is_let_go

    async def end(self) -> list[LoggedEvent]:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            await self.task
        return self.logged

    async def _read(self) -> None:
        async with aclosing(self._follow) as events:
            async for logged in events:
                self.seen.append(logged)


async def start(streams: Streams, **rest: str) -> Stream:
    return await streams.start(ask("scripted"), Admission(owner="o", tenant="t", **rest))


def words(first: int, last: int) -> list[Token]:
    """Tokens that need pages of their own."""
    return [tok(f"{number} " + "x" * 1100, number) for number in range(first, last)]


# Every kind of outage


async def test_readers_wait_and_lose_nothing(outage: Outage, waiting: Streams, scripted: ScriptedClient) -> None:
    """An early and a late reader each see the log, which is the uninterrupted answer, and each gets the notices."""
    streams = waiting
    stream = await start(streams)
    early, generation = Follower(streams, stream), scripted.last
    generation.push(*words(0, 3))
    await until(lambda: len(early.logged) == 4, "three words are read")
    await outage.begin()
    generation.push(*words(3, 9))
    await until(lambda: early.notices == ["waiting"], "it is shown that the answer waits")
    late = Follower(streams, stream, after=2)
    await until(lambda: len(late.logged) == 2, "what is committed can be read")
    with pytest.raises(LogUnavailable) as refused:
        await start(streams)
    assert (refused.value.code, refused.value.http_status) == outage.refusal
    assert len(scripted.requests) == 1, "the engine got no request"
    generation.push(*words(9, 40))
    assert not generation.is_cancelled
    await outage.end()
    await until(lambda: "resumed" in early.notices, "it is shown that it continues")
    generation.push(*words(40, 42), DONE)
    seen, rest = await early.end(), await late.end()
    assert [one.seq for one in seen] == list(range(1, 45))
    assert [untimed(one.event) for one in seen[1:]] == [*words(0, 42), DONE]
    assert rest == seen[2:]
    assert await everything(outage.other(), stream.log_id) == seen
    assert early.notices == late.notices == ["waiting", "resumed"]
    assert (await start(streams)).last_seq == 1, "new answers are accepted again"


async def test_it_can_be_away_again_and_again(outage: Outage, waiting: Streams, scripted: ScriptedClient) -> None:
    """Each outage shows one notice, and the answer is whole."""
    stream = await start(waiting)
    reader = Follower(waiting, stream)
    for turn in range(1, 4):
        await outage.begin()
        scripted.last.push(*words(5 * turn, 5 * turn + 5))
        await until(lambda turn=turn: len(reader.notices) == 2 * turn - 1, "it waits")
        await outage.end()
        await until(lambda turn=turn: stream.last_seq == 5 * turn + 1, "it continues")
    scripted.last.push(DONE)
    seen = await reader.end()
    assert [untimed(one.event) for one in seen[1:]] == [*words(5, 20), DONE]
    assert reader.notices == ["waiting", "resumed"] * 3
    assert await everything(outage.other(), stream.log_id) == seen


async def test_a_cut_answer_resumes_without_a_gap(outage: Outage, scripted: ScriptedClient) -> None:
    """The engine drops the answer, the connection ends, and a returning reader gets the rest of the same words."""
    async with streams_on(outage.log, scripted, outage_seconds=0.0) as streams:
        stream = await start(streams)
        reader = Follower(streams, stream)
        scripted.last.push(*words(0, 3))
        await until(lambda: len(reader.logged) == 4, "three words are read")
        await outage.begin()
        scripted.last.push(*words(3, 5))
        seen = await reader.end()
        assert reader.was_let_go
        assert scripted.generations[0].is_cancelled
        assert len(seen) == 4
        await outage.end()
        await until(lambda: stream.last_seq == 6, "the commit in doubt is settled")
        again = Follower(streams, stream, after=4)
        await until(lambda: len(scripted.generations) == 2, "the engine is asked to continue")
        assert scripted.requests[1].output_token_ids == ((0, 1, 2, 3, 4),)
        scripted.last.push(*words(5, 9), DONE)
        seen += await again.end()
        assert [one.seq for one in seen] == list(range(1, len(seen) + 1))
        assert [one.event for one in seen if isinstance(one.event, Token)] == words(0, 9)
        assert await everything(outage.other(), stream.log_id) == seen


# Refusals


async def test_the_answer_that_finds_the_outage_is_refused(
    log: StallingLog, streams: Streams, scripted: ScriptedClient
) -> None:
    """The refused answer's generation is cancelled, and nothing of it is in the log later."""
    log.outage = LogFull("full", retry_after=30)
    with pytest.raises(LogFull):
        await start(streams)
    assert scripted.last.is_cancelled
    scripted.last.push(tok("late"))
    with pytest.raises(LogFull):
        await start(streams)
    assert len(scripted.requests) == 1
    log.outage = None
    await until(lambda: streams.writer.outage is None, "it is over")
    await until(lambda: not log._logs, "its log is dropped")
    assert (await start(streams)).last_seq == 1
    assert len(log._logs) == 1


async def test_an_answer_that_waited_behind_the_outage_is_refused_too(
    log: StallingLog, streams: Streams, scripted: ScriptedClient
) -> None:
    """A first event that was pending and not tried is never committed."""
    running = await start(streams)
    log.go.clear()
    scripted.last.push(tok("a"))
    await until(lambda: log.num_commits == 2, "a commit is under way")
    starting = asyncio.create_task(start(streams))
    await until(lambda: len(scripted.requests) == 2, "the engine has accepted")
    await asyncio.sleep(0)
    log.outage = DOWN
    log.go.set()
    with pytest.raises(LogUnavailable):
        await starting
    log.outage = None
    await until(lambda: running.last_seq == 2, "it is over")
    scripted.generations[0].push(tok("b"))
    await until(lambda: running.last_seq == 3, "it continues")
    assert list(log._logs) == [running.log_id]


# Stops


async def test_a_stop_is_recorded_and_takes_effect_later(
    log: StallingLog, streams: Streams, scripted: ScriptedClient
) -> None:
    """The engine drops the stream, the caller gets the outage's error, and the end is in the log when that is back."""
    stream = await start(streams)
    reader = Follower(streams, stream)
    scripted.last.push(tok("a"), tok("b"))
    await until(lambda: len(reader.logged) == 3, "two tokens are read")
    log.outage = LogFull("full", retry_after=30)
    scripted.last.push(tok("c"))
    await until(lambda: streams.writer.outage is not None, "the outage is noticed")
    with pytest.raises(LogFull):
        await stream.stop(2)
    assert scripted.last.is_cancelled
    assert not stream.ended.is_set()
    log.outage = None
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await stream.stop()
    *_, last = await reader.end()
    assert isinstance(last.event, Done)
    assert (last.event.finish_reason, last.event.kept_seq) == ("cancelled", 2)
    assert await everything(log, stream.log_id) == reader.logged


async def test_a_stop_while_the_log_is_slow_waits(log: StallingLog, streams: Streams, scripted: ScriptedClient) -> None:
    """A slow commit is no outage."""
    stream = await start(streams)
    log.go.clear()
    stopping = asyncio.create_task(stream.stop())
    await until(lambda: log.num_commits == 2, "the end is being committed")
    await asyncio.sleep(3 * stream_module.STOP_SECONDS)
    assert not stopping.done()
    log.go.set()
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await stopping
    assert isinstance(stream.terminal, Done)


# Reading positions


@pytest.mark.parametrize("kind", ["finish", "whole"])
async def test_the_engine_keeps_to_the_log_meanwhile(
    log: StallingLog, streams: Streams, scripted: ScriptedClient, kind: str
) -> None:
    """A stream that waits for no reader passes the committed tokens as read, and none of them again afterwards."""
    stream = await start(streams, on_disconnect="finish" if kind == "finish" else "park")
    collecting = asyncio.create_task(collect(streams, stream)) if kind == "whole" else None
    await until(lambda: stream.readers.num_attached == (collecting is not None), "it is read")
    scripted.last.push(tok("a", 1), tok("b", 2, 3))
    await until(lambda: stream.last_seq == 3, "three tokens are committed")
    before = len(scripted.last.positions)
    log.outage = DOWN
    scripted.last.push(tok("c", 4))
    await until(lambda: len(scripted.last.positions) > before, "the engine is informed")
    assert scripted.last.positions[before:] == [(3,)]
    log.outage = None
    await until(lambda: stream.last_seq == 4, "it continues")
    assert scripted.last.positions[before:] == [(3,), None]
    scripted.last.push(DONE)
    if collecting is not None:
        assert [untimed(one.event) for one in await collecting][1:] == [tok("a", 1), tok("b", 2, 3), tok("c", 4), DONE]
    else:
        await stream.ended.wait()


async def test_an_unread_answer_does_not_run_away(log: StallingLog) -> None:
    """The engine parks it at its lead, and the whole answer is that of an uninterrupted run."""
    gate, request = Gate(keeps_plans=False), ask(max_tokens=400, ignore_eos=True)
    client = await started_echo(gate, lead_tokens=32, stalled_seconds=0.0)
    async with aclosing(client), streams_on(log, client) as streams:
        plain = await streams.start(request, Admission(owner="o", tenant="t", on_disconnect="finish"))
        await plain.ended.wait()
        gate.allow(8)
        stream = await streams.start(request, Admission(owner="o", tenant="t", on_disconnect="finish"))
        await until(lambda: stream.last_seq > 4, "it runs")
        log.outage = DOWN
        gate.allow(1)
        await until(lambda: stream.lag.is_log_down, "the outage is noticed")
        generation = stream._generation
        assert generation is not None
        gate.open()
        await until(lambda: not generation.is_open, "the engine parks it")
        assert generation.parked is not None
        assert generation.parked.reason == "lead"
        assert client.stats().running == 0
        log.outage = None
        await stream.ended.wait()
        assert [await shown(log, one) for one in (plain, stream)] == [await shown(log, plain)] * 2
        assert stream.usage.completion_tokens == 400


async def shown(log: StallingLog, stream: Stream) -> str:
    """Return the text of the answer."""
    return "".join(one.event.text for one in await everything(log, stream.log_id) if isinstance(one.event, Token))


# Cuts


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
    async with asyncio.timeout(_DEADLINE_SECONDS):
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


async def test_a_connection_without_room_for_its_place_breaks(
    log: StallingLog, hasty: Streams, scripted: ScriptedClient
) -> None:
    """A connection without room for the going-away event breaks: a clean end would make half an answer look whole."""
    stream = await start(hasty)
    delivery = Delivery(hasty, stream, NativeEncoder(stream.log_id))
    is_stuck, go = asyncio.Event(), asyncio.Event()

    async def send(data: bytes) -> None:
        if b"event: token" in data:
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


async def test_a_connection_cut_before_its_first_event_breaks(
    log: StallingLog, hasty: Streams, scripted: ScriptedClient
) -> None:
    """Also while the first bytes are being sent: an empty answer must not look whole either."""
    stream = await start(hasty)
    delivery = Delivery(hasty, stream, NativeEncoder(stream.log_id))
    is_stuck, go = asyncio.Event(), asyncio.Event()

    async def send(data: bytes) -> None:
        is_stuck.set()
        await go.wait()

    reading = asyncio.create_task(delivery.run(send))
    await is_stuck.wait()
    log.outage = DOWN
    scripted.last.push(tok("a"))
    await until(lambda: delivery.reader.is_over, "it is cut")
    go.set()
    with pytest.raises(BrokenStream):
        await reading


async def test_a_page_that_is_awaited_is_no_silence(
    log: StallingLog, scripted: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a finished answer cannot be read from its log, its reader gets keepalives, and then all of it."""
    monkeypatch.setattr(pages_module, "_RETRY_SECONDS", (0.005, 0.01))
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
    assert scripted.generations[1].is_cancelled
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


# A log that has lost events


@pytest.mark.parametrize("num_kept", [0, 2])
async def test_a_lost_answer_ends_in_one_error_without_an_id(
    log: StallingLog, streams: Streams, scripted: ScriptedClient, num_kept: int
) -> None:
    """When all or a part of the log is lost each reader gets `log_lost` once, and the stream is finished."""
    finished: list[str | None] = []

    class Store(NullStore):
        async def finish(self, summary: StreamSummary, *, last_seq: int, text: str) -> None:
            finished.append(summary.error_code)

    streams.store = Store()
    stream = await start(streams)
    readers = [Follower(streams, stream) for _ in range(2)]
    scripted.last.push(*words(0, 3))
    await until(lambda: all(len(reader.logged) == 4 for reader in readers), "three words are read")
    forget(log, stream, num_kept)
    scripted.last.push(*words(3, 5))
    for reader in readers:
        assert len(await reader.end()) == 4
        assert reader.notices == ["log_lost"]
    await until(lambda: finished == ["log_lost"], "it is reported")
    assert scripted.last.is_cancelled
    assert stream.state == "finished"
    await until(lambda: streams.find(stream.id) is None, "it is dropped")
    assert streams.is_expired(stream.id), "later ids are answered with 410"


@pytest.mark.parametrize("num_kept", [0, 2])
@pytest.mark.parametrize("dialect_after", [None, 0, 4])
async def test_a_loss_is_found_by_a_reader_too(
    log: StallingLog, streams: Streams, scripted: ScriptedClient, num_kept: int, dialect_after: int | None
) -> None:
    """A stream that writes nothing ends the same for a reader that returns to it, behind or for a snapshot."""
    stream = await start(streams)
    async with aclosing(follow(streams, stream)) as events:
        scripted.last.push(*words(0, 40))
        async for logged in events:
            if logged.seq == 41:
                break
    await until(lambda: stream.state == "parked", "its reader has left")
    forget(log, stream, num_kept)
    reader = Follower(streams, stream, after=dialect_after or 0)
    await reader.end()
    assert reader.notices == ["log_lost"]
    assert stream.is_lost


@pytest.mark.parametrize("num_kept", [0, 2])
async def test_a_redis_that_failed_over_to_less_is_a_loss(
    redis: RedisKilled, scripted: ScriptedClient, num_kept: int
) -> None:
    """A Redis that is empty or short of events causes one error, and no log begins anew under the old name."""
    async with streams_on(redis.log, scripted) as streams:
        stream = await start(streams)
        reader = Follower(streams, stream)
        scripted.last.push(*words(0, 3))
        await until(lambda: len(reader.logged) == 4, "three words are read")
        if num_kept:
            redis.server.forget_events(f"streamserve:{{{stream.log_id}}}", keep=num_kept)
        else:
            redis.server.forget()
        scripted.last.push(*words(3, 5))
        assert len(await reader.end()) == 4
        assert reader.notices == ["log_lost"]
        with pytest.raises(KeyError):  # what was left of it is dropped with the stream
            await until_gone(redis.other(), stream)


async def until_gone(log: EventLog, stream: Stream) -> None:
    """Wait until `last_seq` raises KeyError: there is no such log."""
    async with asyncio.timeout(_DEADLINE_SECONDS):
        while True:
            await log.last_seq(stream.log_id)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("redis", ["no"], indirect=True)
async def test_a_redis_that_comes_back_empty_is_a_loss(redis: RedisKilled, scripted: ScriptedClient) -> None:
    """Redis killed and replaced by an empty one causes `waiting`, then `log_lost`; new answers are accepted."""
    async with streams_on(redis.log, scripted) as streams:
        stream = await start(streams)
        reader = Follower(streams, stream)
        scripted.last.push(*words(0, 3))
        await until(lambda: len(reader.logged) == 4, "three words are read")
        await redis.begin()
        scripted.last.push(*words(3, 5))
        await until(lambda: reader.notices == ["waiting"], "it waits")
        await redis.end()
        assert len(await reader.end()) == 4
        assert reader.notices == ["waiting", "resumed", "log_lost"]
        assert isinstance(stream.terminal, Error)
        assert (await start(streams)).last_seq == 1


async def test_a_lost_whole_answer_breaks(log: StallingLog, streams: Streams, scripted: ScriptedClient) -> None:
    """A lost whole answer ends in an error, not with half of its text."""
    stream = await start(streams)
    collecting = asyncio.create_task(collect(streams, stream))
    scripted.last.push(*words(0, 3))
    await until(lambda: stream.last_seq == 4, "three words are committed")
    forget(log, stream, 2)
    scripted.last.push(DONE)
    async with asyncio.timeout(_DEADLINE_SECONDS):
        with pytest.raises(BrokenStream):
            await collecting


def forget(log: StallingLog, stream: Stream, num_kept: int) -> None:
    """Drop the stream's events after the first `num_kept` from the log and from memory, as a fail-over does."""
    stream.recent.clear()
    if num_kept:
        del log._logs[stream.log_id].events[num_kept:]
    else:
        del log._logs[stream.log_id]


async def _deliver(delivery: Delivery, sent: bytearray) -> None:
    async with aclosing(aiter(delivery)) as pieces:
        async for data in pieces:
            sent += data


async def test_a_stop_has_a_deadline(
    log: StallingLog, streams: Streams, scripted: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop whose end hangs in a commit is answered after a while; it is recorded, and takes effect later."""
    monkeypatch.setattr(stream_module, "STOP_DEADLINE_SECONDS", 0.05)
    stream = await start(streams)
    log.go.clear()
    with pytest.raises(Refused) as caught:
        await stream.stop()
    assert (caught.value.code, stream.terminal) == ("stop_pending", None)
    log.go.set()
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await stream.ended.wait()
    assert isinstance(stream.terminal, Done)
    assert stream.terminal.finish_reason == "cancelled"
