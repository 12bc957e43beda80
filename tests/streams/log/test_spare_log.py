"""What only `SpareLog` promises: streams go on while their log is full or away, and it has all of them afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from streamserve.protocol.events import Done, Event, LoggedEvent, Status
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import (
    Ended,
    EventLog,
    Fenced,
    Forked,
    LogLost,
    LogUnavailable,
    Place,
    new_log_id,
)
from streamserve.streams.log.spare_log import SpareLog
from streamserve.streams.reader.follow import follow
from streamserve.streams.reader.tail import BrokenStream
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.proofs.scale import scaled
from tests.support.logs import everything, numbered
from tests.support.outages import FullFile, Outage, RedisAway, outage
from tests.support.redis_server import RedisServer
from tests.support.streams import ScriptedClient, ask, tok, until

__all__ = ["outage"]

_DEADLINE_SECONDS = 30.0
_DONE = Done(finish_reason="stop")


def words(first: int, last: int) -> list[Event]:
    """Token events that need pages of their own."""
    return [tok(f"{number} " + "x" * 1100) for number in range(first, last)]


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[FullFile]:
    made = FullFile(tmp_path / "streams.db")
    yield made
    await made.aclose()


@pytest.fixture
async def streams(outage: Outage, scripted: ScriptedClient) -> AsyncIterator[Streams]:
    streams = Streams({"scripted": scripted}, outage.log, StreamConfig(coalesce_tokens=0))
    yield streams
    await streams.aclose()


async def read(streams: Streams, stream: Stream) -> list[LoggedEvent]:
    """Read to the end, as an owner's reader."""
    async with aclosing(follow(streams, stream)) as events:
        return [logged async for logged in events]


async def back(log: SpareLog, log_id: str) -> None:
    await until(lambda: log.is_durable(log_id), "it is written back")


# Streams


async def test_a_running_stream_goes_on_to_its_end(outage: Outage, streams: Streams, scripted: ScriptedClient) -> None:
    """Its readers have no gap and are told twice; new ones are refused; then the log holds just what was read."""
    stream = await streams.start(ask("scripted"), owner="o", tenant="t")
    reading = asyncio.create_task(read(streams, stream))
    scripted.last.push(*words(0, 3))
    await until(lambda: stream.last_seq == 4, "three words are in the log")
    await outage.begin()
    scripted.last.push(*words(3, 5))
    await until(lambda: stream.last_seq == 7, "two more and what became of the log")
    assert not stream.is_resumable
    assert not outage.log.is_durable(stream.log_id)
    late = asyncio.create_task(read(streams, stream))
    generation = scripted.last
    with pytest.raises(LogUnavailable) as refused:
        await streams.start(ask("scripted"), owner="o", tenant="t")
    assert (refused.value.code, refused.value.http_status) == outage.refusal
    assert scripted.last.is_cancelled
    generation.push(*words(5, 300))
    await until(lambda: stream.last_seq == 302, "all words")
    await outage.end()
    await back(outage.log, stream.log_id)
    assert stream.is_resumable
    generation.push(*words(300, 302), _DONE)
    async with asyncio.timeout(_DEADLINE_SECONDS):
        seen = await reading
        assert await late == seen
    assert [logged.seq for logged in seen] == list(range(1, 307))
    told = [logged.event for logged in seen if isinstance(logged.event, Status)]
    assert [(one.status, one.resumable) for one in told] == [(outage.refusal[0], False), ("log_back", True)]
    tokens = [one.event for one in seen if one.event.type == "token"]
    assert tokens == words(0, 302)
    assert await everything(outage.other(), stream.log_id) == seen
    assert (await streams.start(ask("scripted"), owner="o", tenant="t")).last_seq == 1


async def test_what_ends_meanwhile_is_written_back(outage: Outage, streams: Streams, scripted: ScriptedClient) -> None:
    """Ended and sealed, it is read here, again and again, and is in the log later."""
    stream = await streams.start(ask("scripted"), owner="o", tenant="t")
    await outage.begin()
    scripted.last.push(*words(0, 2), _DONE)
    async with asyncio.timeout(_DEADLINE_SECONDS):
        seen = await read(streams, stream)
        await stream.ended.wait()
    assert seen[-1].event.type == "done"
    assert (stream.state, stream.is_resumable) == ("finished", False)
    assert await read(streams, stream) == seen
    await outage.end()
    await back(outage.log, stream.log_id)
    assert await everything(outage.other(), stream.log_id) == await read(streams, stream) == seen


async def test_a_parked_stream_tells_too(full: FullFile, scripted: ScriptedClient) -> None:
    """That the log is back is told although the engine has nothing to say."""
    streams = Streams({"scripted": scripted}, full.log, StreamConfig(coalesce_tokens=0))
    stream = await streams.start(ask("scripted"), owner="o", tenant="t")
    stream_reader = asyncio.create_task(read(streams, stream))
    await until(lambda: stream.readers.num_holding == 1, "it is read")
    await full.begin()
    scripted.last.push(*words(0, 2))
    await until(lambda: stream.last_seq == 4, "it is told that the log is away")
    stream_reader.cancel()
    await until(lambda: stream.state == "parked", "it is parked")
    await full.end()
    await until(lambda: stream.last_seq == 5, "it is told that the log is back")
    assert (await full.log.read(stream.log_id, 4))[0].event == Status(status="log_back", resumable=True)
    await streams.aclose()


async def test_another_producer_meanwhile(full: FullFile, scripted: ScriptedClient) -> None:
    """What was shown here is not what the log says: readers are cut off, and nothing of it is mixed into the log."""
    streams = Streams({"scripted": scripted}, full.log, StreamConfig(coalesce_tokens=0))
    stream = await streams.start(ask("scripted"), owner="o", tenant="t")
    seen: list[LoggedEvent] = []
    reading = asyncio.create_task(_read_into(seen, streams, stream))
    await full.begin()
    scripted.last.push(*words(0, 2))
    await until(lambda: len(seen) == 4, "two words, and that the log is away")
    other = full.other()
    assert await other.append(stream.log_id, 2, [tok("theirs")] * 9) == 10
    full.store.is_full = False
    async with asyncio.timeout(_DEADLINE_SECONDS):
        with pytest.raises(BrokenStream):
            await reading
        scripted.last.push(*words(2, 3))
        await stream.ended.wait()
    assert stream.is_forked
    mixed: list[LoggedEvent] = []
    with pytest.raises(BrokenStream):
        await _read_into(mixed, streams, stream)
    assert mixed == []
    assert [logged.event.type for logged in seen] == ["meta", "token", "token", "status"]
    assert await everything(other, stream.log_id) == numbered([seen[0].event, *[tok("theirs")] * 9])
    assert full.log.is_durable(stream.log_id)
    await streams.aclose()


# The log itself


async def test_a_spare_is_a_log(outage: Outage) -> None:
    """Numbers go on, any part can be read, who waits is woken, fences and ends hold."""
    log, log_id = outage.log, new_log_id()
    events: list[Event] = [tok(f"{number}") for number in range(9)]
    assert await log.append(log_id, 2, events[:4]) == 4
    await outage.begin()
    waiting = asyncio.create_task(log.wait(log_id, Place(4)))
    await asyncio.sleep(0)
    assert await log.append(log_id, 2, events[4:6]) == 6
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await waiting
    late = asyncio.create_task(log.wait(log_id, Place(6)))
    await asyncio.sleep(0)
    assert await log.append(log_id, 2, events[6:]) == await log.append(log_id, 2, []) == await log.last_seq(log_id) == 9
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await late
    assert await everything(log, log_id, 2) == numbered(events)
    for after in range(10):
        page = await log.read(log_id, after)
        assert page == numbered(events)[after : after + len(page)]
        assert page or after == 9
    with pytest.raises(Fenced):
        await log.append(log_id, 1, [tok("z")])
    with pytest.raises(LogUnavailable):
        await log.append(log_id, 3, [])
    with pytest.raises(LogUnavailable):
        await log.append(new_log_id(), 1, [tok("z")])
    assert await log.append(log_id, 2, [_DONE]) == 10
    with pytest.raises(Ended):
        await log.append(log_id, 2, [tok("z")])
    assert await log.purge(time.time() + 3600) == 0  # it would take what is to be gone on with
    await outage.end()
    await back(log, log_id)
    assert await everything(outage.other(), log_id) == await everything(log, log_id) == numbered([*events, _DONE])
    with pytest.raises(Ended):
        await log.append(log_id, 2, [tok("z")])


async def test_it_can_be_away_again(outage: Outage) -> None:
    """Three times, the last time for good."""
    log, log_id = outage.log, new_log_id()
    await log.append(log_id, 1, words(0, 1))
    for number in range(1, 7, 2):
        await outage.begin()
        assert await log.append(log_id, 1, words(number, number + 1)) == number + 1
        assert not log.is_durable(log_id)
        await outage.end()
        await back(log, log_id)
        assert await log.append(log_id, 1, words(number + 1, number + 2)) == number + 2
        assert log.is_durable(log_id)
    assert await everything(outage.other(), log_id) == numbered(words(0, 7))


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_commit_nobody_was_told_of_is_in_once(full: FullFile, goes_on: bool) -> None:
    """The refused append had been committed: it is not written twice, with or without something after it."""
    log, log_id = full.log, new_log_id()
    await log.append(log_id, 1, words(0, 2))
    full.store.is_mute = True
    assert await log.append(log_id, 1, words(2, 5)) == 5
    events = words(0, 5)
    if goes_on:
        assert await log.append(log_id, 1, [*words(5, 7), _DONE]) == 8
        events += [*words(5, 7), _DONE]
    full.store.is_mute = False
    await back(log, log_id)
    assert await everything(full.other(), log_id) == await everything(log, log_id) == numbered(events)


async def test_a_write_back_nobody_was_told_of_is_in_once(full: FullFile) -> None:
    """Every page of the write-back is committed, and every time we are not told: each try gets further."""
    log, log_id = full.log, new_log_id()
    await log.append(log_id, 1, words(0, 1))
    full.store.is_full = True
    await log.append(log_id, 1, words(1, 400))
    full.store.is_full, full.store.is_mute = False, True
    await back(log, log_id)
    assert await everything(full.other(), log_id) == numbered(words(0, 400))


async def test_a_stalled_redis_that_has_it_in_its_socket(tmp_path: Path) -> None:
    """Whether it finds what we gave up, or not: all is there once."""
    with RedisServer(tmp_path) as server:
        place = RedisAway(server, patience_seconds=1.0)
        for number in range(scaled(60, least=3)):
            log_id = f"log{number}"
            assert await place.log.append(log_id, 1, words(0, 1)) == 1
            server.pause()
            assert await place.log.append(log_id, 1, words(1, 3)) == 3
            assert await place.log.append(log_id, 1, words(3, 4)) == 4
            server.go_on()
            await back(place.log, log_id)
            assert await place.log.append(log_id, 1, words(4, 5)) == 5
            assert await everything(place.other(), log_id) == numbered(words(0, 5))
        await place.aclose()


async def test_memory_is_bounded(outage: Outage) -> None:
    """Beyond it the log refuses as without a spare; what was written back makes room."""
    log, log_ids = outage.spare_log(max_bytes=100_000), [new_log_id() for _ in range(2)]
    for log_id in log_ids:
        await log.append(log_id, 1, words(0, 1))
    for _ in range(2):
        await outage.begin()
        num_kept = 0
        with contextlib.suppress(LogUnavailable):
            while True:
                await log.append(log_ids[num_kept % 2], 1, words(0, 1))
                num_kept += 1
        with pytest.raises(LogUnavailable) as refused:
            await log.append(log_ids[0], 1, words(0, 1))
        assert refused.value.code == outage.refusal[0]
        assert 80 < num_kept < 90
        await outage.end()
        for log_id in log_ids:
            await back(log, log_id)
    await log.aclose()


async def test_a_redis_that_forgot(tmp_path: Path) -> None:
    """Restarted without persistence it has lost what it acknowledged: there is nothing to go on from."""
    with RedisServer(tmp_path, appendonly="no") as server:
        place = RedisAway(server)
        log, log_id = place.log, new_log_id()
        await log.append(log_id, 1, words(0, 1))
        await place.begin()
        assert await log.append(log_id, 1, words(1, 2)) == 2
        await place.end()
        await until(lambda: isinstance(log.outage(log_id), LogLost), "the loss is noticed")
        for _ in range(2):
            with pytest.raises(LogLost):
                await log.append(log_id, 1, words(2, 3))
        await log.seal(log_id)
        assert log.is_durable(log_id)
        with pytest.raises(KeyError):
            await log.last_seq(log_id)
        await place.aclose()


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_log_that_is_gone(full: FullFile, is_new: bool) -> None:
    """Dropped by another process, also if something of its name is there again: nothing is written back."""
    log, log_id, other = full.log, new_log_id(), full.other()
    await log.append(log_id, 1, words(0, 3))
    await full.begin()
    assert await log.append(log_id, 1, words(3, 4)) == 4
    await other.drop(log_id)
    if is_new:
        await other.append(log_id, 1, words(7, 8))
    await full.end()
    await until(lambda: isinstance(log.outage(log_id), LogLost), "the loss is noticed")
    with pytest.raises(LogLost):
        await log.append(log_id, 1, words(4, 5))
    await log.seal(log_id)
    if is_new:
        assert await everything(other, log_id) == numbered(words(7, 8))


async def test_a_fence_found_at_the_write_back(full: FullFile) -> None:
    """Who wrote here hears of it with its next append, until it seals the log; readers keep to what was shown."""
    log, log_id = full.log, new_log_id()
    await log.append(log_id, 1, words(0, 30))  # more than is kept in memory anyway
    await full.begin()
    await log.append(log_id, 1, words(30, 32))
    await full.other().append(log_id, 2, words(77, 79))
    await full.end()
    await until(lambda: isinstance(log.outage(log_id), Forked), "the claim is noticed")
    for _ in range(2):
        with pytest.raises(Forked):
            await log.append(log_id, 1, words(32, 33))
    assert await log.read(log_id, 0) == numbered(words(0, 30))  # what follows in the file is another's
    assert await log.read(log_id, 30) == numbered(words(30, 32), 31)
    with pytest.raises(Forked):
        await log.read(log_id, 32)
    await log.seal(log_id)
    assert await everything(log, log_id) == numbered([*words(0, 30), *words(77, 79)])


async def test_a_fence_after_the_end(full: FullFile, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is left to be told: it is logged, and read here as it was shown, until it is old."""
    log, log_id = full.log, new_log_id()
    await log.append(log_id, 1, words(0, 1))
    await full.begin()
    await log.append(log_id, 1, [*words(1, 3), _DONE])
    await log.seal(log_id)
    await full.other().append(log_id, 2, words(7, 9))
    await full.end()
    await until(lambda: "3 events of log" in caplog.text, "the loss is logged")
    assert await everything(log, log_id) == numbered([*words(0, 3), _DONE])
    await log.purge(2e9 * 2)
    assert log.is_durable(log_id)


async def test_closing_writes_back_what_it_can(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    """A log that is back gets the rest; of one that is not, it is said how much is lost."""
    for is_back in (True, False):
        caplog.clear()
        log, log_id = outage.spare_log(), new_log_id()
        await log.append(log_id, 1, words(0, 1))
        await outage.begin()
        await log.append(log_id, 1, words(1, 4))
        if is_back:
            await outage.end()
        await log.aclose()
        await outage.end() if not is_back else None
        assert await everything(outage.other(), log_id) == numbered(words(0, 4 if is_back else 1))
        assert (f"3 events of log {log_id}" in caplog.text) is not is_back


async def test_a_dropped_spare_is_gone(outage: Outage) -> None:
    """It is not written back, and its memory is free."""
    log, log_id = outage.spare_log(max_bytes=5000), new_log_id()
    await log.append(log_id, 1, words(0, 1))
    for _ in range(3):
        await outage.begin()
        await log.append(log_id, 1, words(1, 4))
        await outage.end()
        await log.drop(log_id)
        with pytest.raises(KeyError):
            await log.read(log_id, 0)
        await log.append(log_id, 1, words(0, 1))
        assert await everything(outage.other(), log_id) == numbered(words(0, 1))
    await log.aclose()


async def test_any_outages_at_any_time(full: FullFile) -> None:
    """Many streams, a file that is full, mute or well by turns: all is there, once, in order, for all."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    log_ids = [new_log_id() for _ in range(8)]
    for log_id in log_ids:
        await full.log.append(log_id, 1, words(0, 1))
    writers = [asyncio.create_task(_write(full.log, log_id, scaled(2000, least=100))) for log_id in log_ids]
    readers = [asyncio.create_task(_read_to_end(full.log, log_id)) for log_id in log_ids]
    while not all(writer.done() for writer in writers):
        full.store.is_full, full.store.is_mute = rng.random() < 0.3, rng.random() < 0.3
        await asyncio.sleep(rng.random() / 50)
    full.store.is_full = full.store.is_mute = False
    other = full.other()
    async with asyncio.timeout(_DEADLINE_SECONDS):
        for log_id, writer, reader in zip(log_ids, writers, readers, strict=True):
            expected = numbered([*words(0, await writer), _DONE])
            assert await reader == expected
            await back(full.log, log_id)
            assert await everything(other, log_id) == expected


async def _write(log: SpareLog, log_id: str, num_appends: int) -> int:
    number = 1
    for turn in range(num_appends):
        more = 1 + turn % 3
        assert await log.append(log_id, 1, words(number, number + more)) == number + more
        number += more
        await asyncio.sleep(0)
    assert await log.append(log_id, 1, [_DONE]) == number + 1
    return number


async def _read_to_end(log: EventLog, log_id: str) -> list[LoggedEvent]:
    seen: list[LoggedEvent] = []
    while not seen or seen[-1].event != _DONE:
        page = await log.read(log_id, len(seen), 64)
        seen += page
        if not page:
            await log.wait(log_id, Place(len(seen)))
    return seen


async def _read_into(seen: list[LoggedEvent], streams: Streams, stream: Stream) -> None:
    async with aclosing(follow(streams, stream)) as events:
        async for logged in events:
            seen.append(logged)
