"""Laws of `RedisLog` alone: Redis killed, stalled, emptied and full; retention; and what `check` reports missing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis

from streamserve.protocol.events import Done
from streamserve.streams.log.base import (
    EventLog,
    LogFull,
    LogLost,
    LogUnavailable,
    Rejected,
    append,
    commit_one,
    make_batch,
    new_log_id,
)
from streamserve.streams.log.redis_log import RedisLog
from tests.proofs.scale import scaled
from tests.support.servers.redis_server import RedisServer
from tests.support.streams.hand_made import tok
from tests.support.streams.log_killing import Writer, check, kill_in_turn
from tests.support.streams.logs import everything, numbered, redis_server

__all__ = ["redis_server"]

_DEADLINE_SECONDS = 60.0
MakeServer = Callable[..., RedisServer]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Start a Redis for one test; keywords are its configuration."""
    made: list[RedisServer] = []

    def make(**config: str) -> RedisServer:
        made.append(RedisServer(tmp_path, **config))
        made[-1].start()
        return made[-1]

    yield make
    for server in made:
        server.kill()


@contextlib.asynccontextmanager
async def log_at(server: RedisServer, **options: float) -> AsyncIterator[RedisLog]:
    """A log, closed at the end."""
    log = RedisLog(server.url, **options)
    try:
        yield log
    finally:
        await log.aclose()


@pytest.mark.proof
@pytest.mark.timeout(600)
async def test_kill_9_of_writers_takes_nothing_that_was_acknowledged(redis_server: RedisServer) -> None:
    """Each acknowledged batch is there whole, once and in order; two producers that race never lower the fence."""
    rng = random.Random(7)
    for _ in range(scaled(60, least=3)):
        raced = [new_log_id() for _ in range(3)]
        writers = [Writer(redis_server.url, f"w{number}", raced, f"{number + 1},2") for number in range(2)]
        writers.append(Writer(redis_server.url, "alone", [new_log_id() for _ in range(5)]))
        kill_in_turn(writers, rng)
        async with log_at(redis_server) as log:
            assert await check(log, writers)


@pytest.mark.proof
@pytest.mark.timeout(600)
async def test_kill_9_of_redis_loses_nothing_that_was_acknowledged(make_server: MakeServer) -> None:
    """Streams pause while Redis is away and then continue: no gap and no event twice, whatever was in flight."""
    server = make_server(appendfsync="always")
    log_ids = [new_log_id() for _ in range(20)]
    async with log_at(server, patience_seconds=20) as log, log_at(server, patience_seconds=20) as other:
        is_over = asyncio.Event()
        writers = [asyncio.create_task(_write_until(log, log_id, is_over)) for log_id in log_ids]
        readers = [asyncio.create_task(_follow(other, log_id)) for log_id in log_ids]
        await _kill_often(server, scaled(60, least=3))
        is_over.set()
        counts = await asyncio.gather(*writers)
        for log_id, count in zip(log_ids, counts, strict=True):
            assert await everything(other, log_id) == numbered([*(tok(f"{n}") for n in range(count)), tok("end")])
        async with asyncio.timeout(_DEADLINE_SECONDS):
            assert await asyncio.gather(*readers) == [[*(f"{n}" for n in range(count)), "end"] for count in counts]


@pytest.mark.proof
@pytest.mark.timeout(600)
async def test_what_everysec_loses_is_never_hidden(make_server: MakeServer) -> None:
    """Redis killed during a slow fsync may lose what it acknowledged: then the next commit raises LogLost."""
    server = make_server(appendfsync="everysec")
    num_lost = 0
    async with log_at(server, patience_seconds=20) as log, log_at(server, patience_seconds=20) as other:
        for _ in range(scaled(60, least=3)):
            is_over, log_ids = asyncio.Event(), [new_log_id() for _ in range(20)]
            writers = [asyncio.create_task(_write_until(log, log_id, is_over)) for log_id in log_ids]
            await _kill_often(server, 1)
            is_over.set()
            ends = await asyncio.gather(*writers, return_exceptions=True)
            for log_id, end in zip(log_ids, ends, strict=True):
                assert isinstance(end, int | LogLost), end
                found = await everything(other, log_id)
                texts = [tok(f"{n}") for n in range(len(found))]
                assert found == numbered(texts if isinstance(end, LogLost) else [*texts[:-1], tok("end")])
                assert isinstance(end, LogLost) or len(found) == end + 1
            num_lost += sum(isinstance(end, LogLost) for end in ends)
    print(f"{num_lost} streams lost something")


async def test_an_outage_is_named_after_the_timeout(make_server: MakeServer) -> None:
    """Commits and reads raise 503 `log_down`; the refused batch is committed once when Redis is back."""
    server = make_server()
    async with log_at(server, patience_seconds=0.5) as log:
        await append(log, "a", 1, [tok("x")])
        batch = make_batch("a", 1, 1, [tok("y")])
        server.kill()
        for _ in range(3):
            with pytest.raises(LogUnavailable) as raised:
                await log.commit([batch])
            assert (raised.value.code, raised.value.http_status) == ("log_down", 503)
        for call in (log.last_seq("a"), log.read("a", 0), log.drop("a"), log.purge(0.0)):
            with pytest.raises(LogUnavailable):
                await call
        server.start()
        assert await log.commit([batch]) == [2]
        assert await everything(log, "a") == numbered([tok("x"), tok("y")])


async def test_a_commit_that_was_given_up_is_found_by_its_retry(make_server: MakeServer) -> None:
    """A stalled Redis may run the given-up commit before the retry, after it, or never: the batch is in once."""
    server = make_server()
    for number in range(scaled(60, least=3)):
        log_id = f"log{number}"
        async with log_at(server, patience_seconds=0.2) as log:
            await append(log, log_id, 1, [tok("x")])
            batch = make_batch(log_id, 1, 1, [tok("y"), tok("y")])
            server.pause()
            with pytest.raises(LogUnavailable):
                await log.commit([batch])
            server.go_on()
            assert await log.commit([batch]) == [3]
            assert await commit_one(log, make_batch(log_id, 1, 3, [tok("z")])) == 4
            assert await everything(log, log_id) == numbered([tok("x"), tok("y"), tok("y"), tok("z")])


async def test_a_redis_without_its_data_is_not_written_to(make_server: MakeServer) -> None:
    """A Redis restarted without persistence raises LogLost: seqs do not start again."""
    server = make_server(appendonly="no")
    async with log_at(server) as log:
        await append(log, "a", 1, [tok("x")])
        server.kill()
        server.start()
        for _ in range(2):
            with pytest.raises(LogLost):
                await commit_one(log, make_batch("a", 1, 1, [tok("y")]))
        with pytest.raises(KeyError):
            await log.read("a", 0)
        assert await append(log, "b", 1, [tok("x")]) == 1


async def test_a_redis_with_half_of_a_log_is_not_written_to(make_server: MakeServer) -> None:
    """After a fail-over to a shorter replica the batch does not follow the log's end, and nothing is written."""
    server = make_server()
    async with log_at(server) as log:
        for text in "abc":
            await append(log, "a", 1, [tok(text)])
        server.forget_events("streamserve:{a}", keep=1)
        assert [type(one) for one in await log.commit([make_batch("a", 1, 3, [tok("d")])])] == [LogLost]
        assert await everything(log, "a") == numbered([tok("a")])


async def test_a_full_redis_is_named_and_recovered_from(make_server: MakeServer) -> None:
    """A full Redis raises 507 `log_full` and tears nothing; with memory again, commits succeed."""
    server = make_server(maxmemory="3mb", **{"maxmemory-policy": "noeviction"})
    async with log_at(server) as log, log_at(server) as other:
        with pytest.raises(LogFull) as raised:
            await _append_for_ever(log)
        assert (raised.value.code, raised.value.http_status) == ("log_full", 507)
        last_seq = await other.last_seq("a")
        assert [one.seq for one in await everything(other, "a")] == list(range(1, last_seq + 1))
        server.command("CONFIG SET maxmemory 0")
        assert await append(log, "a", 1, [tok("y")]) == last_seq + 1


async def test_scripts_are_loaded_again(redis_server: RedisServer) -> None:
    """A Redis that lost its scripts is sent them again, and the commit succeeds."""
    async with log_at(redis_server) as log:
        log_id = new_log_id()
        await append(log, log_id, 1, [tok("x")])
        redis_server.command("SCRIPT FLUSH")
        assert await append(log, log_id, 1, [tok("y")]) == 2


async def test_retention_counts_from_the_last_append(redis_server: RedisServer) -> None:
    """Redis keeps an unfinished log, however long its site is down; a finished one it deletes after the retention."""
    async with log_at(redis_server, retention_seconds=0.4) as log, log_at(redis_server) as other:
        log_id = new_log_id()
        for last_seq in range(1, 4):
            assert await append(log, log_id, 1, [tok("x")]) == last_seq
            await asyncio.sleep(0.5)
        assert await other.last_seq(log_id) == 3
        assert set(_lives(redis_server, log_id)) == {-1}
        await append(log, log_id, 1, [Done(finish_reason="stop")])
        assert -1 not in _lives(redis_server, log_id)
        async with asyncio.timeout(_DEADLINE_SECONDS):
            await _forgotten(other, log_id)


def _lives(server: RedisServer, log_id: str) -> list[int]:
    """Return the milliseconds that Redis still keeps the log's keys; -1: for ever."""
    with redis.Redis.from_url(server.url) as client:
        return [int(client.pttl(f"streamserve:{{{log_id}}}:{what}")) for what in ("head", "events")]


async def test_an_event_between_a_read_and_a_wait_is_not_missed(redis_server: RedisServer) -> None:
    """`wait` returns for a message that came before it and for an event before the subscription."""
    async with log_at(redis_server) as ours, log_at(redis_server) as theirs:
        log_id, beacon_id = new_log_id(), new_log_id()
        for one in (log_id, beacon_id):
            await append(theirs, one, 1, [tok("x")])
            async with asyncio.timeout(_DEADLINE_SECONDS):
                await ours.wait(one, 1)  # ends when it is subscribed to
        async with asyncio.timeout(_DEADLINE_SECONDS):
            await ours.wait(log_id, 0)
        await append(theirs, log_id, 1, [tok("y")])
        beacon = asyncio.create_task(ours.wait(beacon_id, 1))
        await append(theirs, beacon_id, 1, [tok("y")])
        async with asyncio.timeout(_DEADLINE_SECONDS):
            await beacon  # the message of `log_id` has come, too
            await ours.wait(log_id, 1)


async def test_one_connection_listens_for_all(make_server: MakeServer) -> None:
    """All waiting readers share one subscribed connection."""
    server = make_server()
    async with log_at(server) as log:
        log_ids = [new_log_id() for _ in range(50)]
        await asyncio.gather(*[append(log, log_id, 1, [tok("x")]) for log_id in log_ids])
        await asyncio.gather(*[log.wait(log_id, 1) for log_id in log_ids])
        assert _num_listeners(server) == 1


@pytest.mark.proof
async def test_a_process_that_stood_still_retries(make_server: MakeServer) -> None:
    """A process that stood still past its timeout finds Redis up, and commits its batch once."""
    server = make_server()
    log_id = new_log_id()
    async with log_at(server, patience_seconds=1) as log:
        await append(log, log_id, 1, [tok("a")])
        server.pause()
        appending = asyncio.create_task(commit_one(log, make_batch(log_id, 1, 1, [tok("b")])))
        await asyncio.sleep(0.05)
        server.go_on()
        time.sleep(1.2)  # noqa: ASYNC251 - the loop itself has to stand still
        assert await appending == 2
        assert await everything(log, log_id) == numbered([tok("a"), tok("b")])


async def test_missing_persistence_is_named(make_server: MakeServer, redis_server: RedisServer) -> None:
    """`check` reports each setting that would lose answers, and nothing for a safe one."""
    async with log_at(redis_server) as log:
        assert await log.check() == []
    careless = make_server(appendonly="no", **{"maxmemory-policy": "allkeys-lru"})
    async with log_at(careless) as log:
        complaints = await log.check()
        assert [word in text for word, text in zip(("appendonly no", "allkeys-lru"), complaints, strict=True)]
    careless.command("CONFIG SET appendonly yes")
    careless.command("CONFIG SET appendfsync everysec")
    async with log_at(careless) as log:
        assert "appendfsync everysec" in (await log.check())[0]


async def test_a_redis_that_forbids_config_is_reported(make_server: MakeServer) -> None:
    """A Redis that forbids CONFIG, as managed ones do, is reported as unknown."""
    server = make_server()
    server.command("ACL SETUSER default -config")
    async with log_at(server) as log:
        (complaint,) = await log.check()
        assert "forbidden" in complaint


async def test_checking_an_absent_redis_raises(make_server: MakeServer) -> None:
    """`check` raises when there is no Redis."""
    server = make_server()
    server.kill()
    async with log_at(server, patience_seconds=0.1) as log:
        with pytest.raises(LogUnavailable):
            await log.check()


def test_the_place_for_operators_has_no_password() -> None:
    """Host, port and database are named; what an address has to itself is not."""
    assert RedisLog("rediss://me:secret@cache:6380/2").place == "rediss://cache:6380/2"
    assert RedisLog("unix:///run/redis.sock?password=secret").place == "unix:///run/redis.sock"


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library the error names `pip install "streamserve[redis]"`."""
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(ImportError, match=r"streamserve\[redis\]"):
        RedisLog("redis://127.0.0.1:1/0")


async def _kill_often(server: RedisServer, num_kills: int) -> None:
    for _ in range(num_kills):
        await asyncio.sleep(random.uniform(0.05, 0.3))
        server.kill()
        await asyncio.sleep(random.uniform(0.0, 0.2))
        await asyncio.to_thread(server.start)


async def _write_until(log: EventLog, log_id: str, is_over: asyncio.Event) -> int:
    """Commit one by one and return the count; each batch is acknowledged under its own seq."""
    for number in itertools.count():
        text = "end" if is_over.is_set() else f"{number}"
        assert await commit_one(log, make_batch(log_id, 1, number, [tok(text)])) == number + 1
        if text == "end":
            return number
    raise AssertionError


async def _follow(log: EventLog, log_id: str) -> list[str]:
    """Read as a reader does, across outages, to "end"."""
    texts: list[str] = []
    while texts[-1:] != ["end"]:
        try:
            page = await log.read(log_id, len(texts), 64)
        except KeyError:
            await asyncio.sleep(0.01)
            continue
        assert [one.seq for one in page] == list(range(len(texts) + 1, len(texts) + 1 + len(page)))
        texts += [one.event.text for one in page]
        if not page:
            await log.wait(log_id, len(texts))
    return texts


async def _append_for_ever(log: EventLog) -> None:
    while True:
        await append(log, "a", 1, [tok("word " * 1000)])


async def _forgotten(log: EventLog, log_id: str) -> None:
    """Wait until there is no such log."""
    with contextlib.suppress(KeyError):
        while await log.last_seq(log_id):  # noqa: ASYNC110 - Redis sends no notice
            await asyncio.sleep(0.05)


def _num_listeners(server: RedisServer) -> int:
    with redis.Redis.from_url(server.url) as client:
        return sum(int(one["sub"]) > 0 for one in client.client_list())


async def test_what_redis_refuses_for_one_log_is_no_outage(redis_server: RedisServer) -> None:
    """A key of another kind under a log's name refuses that log's batch; the others of the commit are written."""
    async with log_at(redis_server) as log:
        broken, fine = new_log_id(), new_log_id()
        with redis.Redis.from_url(redis_server.url) as client:
            client.set(f"streamserve:{{{broken}}}:events", "not a stream")
        results = await log.commit([make_batch(one, 1, 0, [tok("a")]) for one in (broken, fine)])
        assert isinstance(results[0], Rejected)
        assert results[1] == 1
        with pytest.raises(Rejected):
            await commit_one(log, make_batch(broken, 1, 0, [tok("a")]))
