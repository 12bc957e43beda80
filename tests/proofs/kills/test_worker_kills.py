"""Two daphnes behind nginx, one engine process, one log, 20 readers: kill -9 of a worker, with events in flight.

Readers know nginx only. Before each kill the dying worker's log stops (stalling_app.py), so that each of its streams
has events that the engine has made and no reader has. For half of the streams they are in the log, without an
acknowledgement to their worker.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamserve.streams.log.base import EventLog
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.log.redis_log import RedisLog
from tests.proofs.scale import scaled
from tests.proofs.support.workers import STALLING, Reader, Site, logged_text, quiet, two_workers
from tests.support.checks.stream_checks import text_of
from tests.support.servers.nginx_server import nginx
from tests.support.servers.redis_server import RedisServer

pytestmark = [pytest.mark.timeout(7200), pytest.mark.cut_streams("workers are killed with -9")]

NUM_STREAMS = 20
NUM_KILLS = scaled(100)  # on each of the two logs
NUM_RESTARTS = scaled(40)
MOST_TRIES = 20
NUM_TOKENS = 144  # none of the answers ends within a code point then


@dataclass(frozen=True)
class Front:
    """A site behind nginx. `redis` is None where the log is a file."""

    url: str
    site: Site
    redis: RedisServer | None

    def new_log(self) -> EventLog:
        """Return the site's log, for the test to read."""
        return FileLog(self.site.folder / "streams.sqlite3") if self.redis is None else RedisLog(self.redis.url)


@pytest.fixture(scope="module", params=["file", "redis"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(_made(folder / "redis"))) if request.param == "redis" else None
        log = "file" if redis is None else redis.url
        site = stack.enter_context(two_workers(folder, log=log, app=STALLING))
        yield Front(stack.enter_context(nginx(site.ports)), site, redis)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture
async def log(front: Front) -> AsyncIterator[EventLog]:
    log = front.new_log()
    yield log
    await log.aclose()


async def references(front: Front) -> list[str]:
    """Return the texts of uninterrupted runs."""
    return await asyncio.gather(*(quiet(front.url, number, NUM_TOKENS) for number in range(NUM_STREAMS)))


async def all_the_same(readers: list[Reader], texts: list[str], log: EventLog) -> None:
    """Each reader's text is that of the log, and that of an uninterrupted run."""
    for reader, text in zip(readers, texts, strict=True):
        assert reader.is_over, f"stream {reader.id}: no end"
        assert text_of(reader.frames) == text == await logged_text(log, reader.log_id)


async def hung(
    front: Front, index: int, chance: random.Random, on_the_way: Counter[str]
) -> tuple[list[Reader], list[asyncio.Task[None]]]:
    """Begin to read all answers, and stop that worker's log amid its part of them; again if they end before that."""
    for _ in range(MOST_TRIES):
        readers = [Reader(number, NUM_TOKENS) for number in range(NUM_STREAMS)]
        reading = [asyncio.create_task(reader.begin(front.url)) for reader in readers]
        await asyncio.gather(*(reader.seen(1) for reader in readers))
        front.site.stall(index, chance.randrange(2, NUM_TOKENS))
        if counts := await front.site.stalled(index, reading):
            on_the_way += counts
            return readers, reading
        await asyncio.gather(*reading)
    raise AssertionError(f"the answers ended {MOST_TRIES} times before a log was stopped")


async def test_kills(front: Front, log: EventLog) -> None:
    """Each time: 20 readers, a log that stops, kill -9, back to nginx: text = log = uninterrupted run."""
    texts = await references(front)
    chance, on_the_way, num_cut = random.Random(1), Counter[str](), 0
    waits: list[float] = []
    for kill in range(NUM_KILLS):
        readers, reading = await hung(front, kill % 2, chance, on_the_way)
        front.site.kill(kill % 2)
        coming_back = asyncio.create_task(asyncio.to_thread(front.site.start, kill % 2))
        await asyncio.gather(*reading)
        cut = [reader for reader in readers if not reader.is_over]
        assert cut, "no reader was cut off"
        num_cut += len(cut)
        await asyncio.gather(*(reader.to_the_end(front.url) for reader in cut))
        await all_the_same(readers, texts, log)
        waits += [wait for reader in cut for wait in reader.waits]
        await coming_back
    assert on_the_way["streams"] >= NUM_KILLS
    assert on_the_way["unwritten"]
    assert on_the_way["unacknowledged"]
    waits.sort()
    print(
        f"\nkill -9 of a worker, {'file' if front.redis is None else 'Redis'}: {NUM_KILLS} behind nginx under"
        f" {NUM_STREAMS} readers; {on_the_way['streams']:,} streams hung on their log with {on_the_way['unwritten']:,}"
        f" events not written and {on_the_way['unacknowledged']:,} written and not acknowledged; {num_cut:,} readers"
        f" cut off; text = log = uninterrupted run for all {NUM_KILLS * NUM_STREAMS:,}; asked again to the first event:"
        f" median {waits[len(waits) // 2]:.3f} s, p99 {waits[int(len(waits) * 0.99)]:.3f} s, most {waits[-1]:.3f} s"
    )


async def test_restarts_of_redis(front: Front, log: EventLog) -> None:
    """Redis, which writes each append to its disk, is killed with -9 under 20 readers: no acknowledged event is lost.

    One worker's streams hang: Redis has events without an acknowledgement to their worker, and gets others when it is
    back.
    """
    if front.redis is None:
        pytest.skip("the log is a file")
    texts = await references(front)
    chance, on_the_way, num_cut, num_refused = random.Random(2), Counter[str](), 0, 0
    for _ in range(NUM_RESTARTS):
        readers, reading = await hung(front, 0, chance, on_the_way)
        front.redis.kill()
        await asyncio.to_thread(front.redis.start)
        front.site.go_on(0)
        await asyncio.gather(*reading)
        cut = [reader for reader in readers if not reader.is_over]
        await asyncio.gather(*(reader.to_the_end(front.url) for reader in cut))
        await all_the_same(readers, texts, log)
        num_cut, num_refused = num_cut + len(cut), num_refused + sum(reader.num_refused for reader in readers)
    print(
        f"\nkill -9 of Redis: {NUM_RESTARTS} under {NUM_STREAMS} readers; {on_the_way['unwritten']:,} events were on"
        f" their way to it, and {on_the_way['unacknowledged']:,} in it and not acknowledged; {num_cut} readers cut off,"
        f" {num_refused} times refused for a while; text = log = uninterrupted run for all"
        f" {NUM_RESTARTS * NUM_STREAMS:,}"
    )
