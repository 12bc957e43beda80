"""Laws of a log that has lost events: each reader gets one error, and nothing begins anew under the old name."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from streamserve.protocol.events import Error
from streamserve.streams.log.base import EventLog
from streamserve.streams.reader.follow import collect, follow
from streamserve.streams.reader.reader import BrokenStream
from streamserve.streams.registry import Streams
from streamserve.streams.store import NullStore
from streamserve.streams.stream import Stream
from streamserve.streams.transcript import StreamSummary
from tests.streams.log.outage.conftest import DEADLINE_SECONDS, DONE, Follower, start, streams_on, words
from tests.support.streams.hand_made import ScriptedClient, StallingLog, until
from tests.support.streams.outages import RedisKilled


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
    async with asyncio.timeout(DEADLINE_SECONDS):
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
    async with asyncio.timeout(DEADLINE_SECONDS):
        with pytest.raises(BrokenStream):
            await collecting


def forget(log: StallingLog, stream: Stream, num_kept: int) -> None:
    """Drop the stream's events after the first `num_kept` from the log and from memory, as a fail-over does."""
    stream.recent.clear()
    if num_kept:
        del log._logs[stream.log_id].events[num_kept:]
    else:
        del log._logs[stream.log_id]
