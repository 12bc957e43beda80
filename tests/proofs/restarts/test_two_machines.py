"""Two machines: a site process, an engine process and a state folder each, one database, one Redis with its AOF.

No reader loses or doubles a word when a machine's web process is killed or stands still, or Redis is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamserve.protocol.events import Done, Token
from streamserve.streams.log.redis_log import RedisLog
from tests.proofs.scale import scaled
from tests.proofs.support.workers import KEY, Reader, client
from tests.support.checks.stream_checks import check_native, text_of
from tests.support.docs.demo_site import environment, manage, processes_of
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

pytestmark = [pytest.mark.timeout(3600)]

NUM_STREAMS = 5
NUM_TOKENS = 200
SECONDS = 60.0
SETTINGS = "tests.support.sites.workers.two_machines_site"
PREPARE = f"""
from django.core.management import call_command
call_command("migrate", verbosity=0)
call_command("streamserve_key", "create", "--key", "{KEY}")
"""


class Machine:
    """A folder of its own; its web process can be killed and started again."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        folder.mkdir()
        self.folder, self.variables = folder, variables
        self._stack = contextlib.ExitStack()
        self._is_running = False
        self.server: Server

    def start(self) -> None:
        """Start it, unless it runs, and wait until it has its model."""
        if not self._is_running:
            env = environment(self.folder, **self.variables)
            self.server = self._stack.enter_context(daphne("project.asgi:application", env=env))
            self._is_running = True
            wait_until_ready(self.server.url)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.server.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.server.process.wait()
        self._stack.close()
        self._is_running = False

    def close(self) -> None:
        """End the web process and the engine that it has started."""
        self._stack.close()
        for pid in processes_of(self.folder):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + SECONDS
        while processes_of(self.folder):
            assert time.monotonic() < deadline
            time.sleep(0.05)


class Site:
    """Both machines, and what they share."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.redis = redis
        variables = {"DJANGO_SETTINGS_MODULE": SETTINGS, "SHARED_FOLDER": str(folder), "SHARED_REDIS": redis.url}
        self.texts: dict[int, str] = {}  # of uninterrupted runs
        self.one, self.two = (Machine(folder / name, variables) for name in ("one", "two"))

    def start(self) -> None:
        done = manage(self.one.folder, "shell", "-c", PREPARE, **self.one.variables)
        assert done.returncode == 0, done.stderr
        with ThreadPoolExecutor() as threads:
            list(threads.map(Machine.start, (self.one, self.two)))
        asyncio.run(self._run_quietly())

    async def _run_quietly(self) -> None:
        readers = [Reader(number, NUM_TOKENS) for number in range(NUM_STREAMS)]
        await asyncio.gather(*(reader.begin(self.two.server.url) for reader in readers))
        assert all(reader.is_over for reader in readers)
        self.texts = {reader.number: text_of(reader.frames) for reader in readers}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("machines")
    with RedisServer(folder) as redis:
        site = Site(folder, redis)
        try:
            site.start()
            yield site
        finally:
            with ThreadPoolExecutor() as threads:
                list(threads.map(Machine.close, (site.one, site.two)))


async def logged_text(site: Site, log_id: str) -> str:
    """Return the text that the log holds, and check that it is dense and ends once."""
    log = RedisLog(site.redis.url)
    events: list[Any] = []
    while page := await log.read(log_id, len(events)):
        events += page
    await log.aclose()
    assert [one.seq for one in events] == list(range(1, len(events) + 1))
    assert [isinstance(one.event, Done) for one in events].index(True) == len(events) - 1
    return "".join(one.event.text for one in events if isinstance(one.event, Token))


async def begun(machine: Machine) -> tuple[list[Reader], asyncio.Future[list[None]]]:
    """Return readers of answers that have begun, and the task that reads."""
    readers = [Reader(number, NUM_TOKENS) for number in range(NUM_STREAMS)]
    reading = asyncio.gather(*(reader.begin(machine.server.url) for reader in readers))
    async with asyncio.timeout(SECONDS):
        while min(reader.num_events for reader in readers) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return readers, reading


async def check(site: Site, readers: list[Reader]) -> None:
    """The text of each reader = the text of the log = an uninterrupted run at the second machine."""
    for reader in readers:
        assert reader.is_over
        logged = await logged_text(site, reader.frames[0].log_id)
        assert text_of(reader.frames) == logged == site.texts[reader.number]


async def come_back(machine: Machine, readers: list[Reader]) -> None:
    """Let readers whose connection was cut read the rest there."""
    async with asyncio.timeout(SECONDS):
        for reader in readers:
            while not reader.is_over:
                await reader.go_on(machine.server.url)


async def fence_of(site: Site, reader: Reader) -> int:
    """Return how often the stream has been claimed, the start included."""
    log_id = reader.frames[0].log_id
    log = RedisLog(site.redis.url)
    fence = await log._client.hget(f"streamserve:{{{log_id}}}:head", "fence")
    await log.aclose()
    return int(fence)


async def test_a_stream_of_one_machine_is_read_at_the_other(site: Site) -> None:
    """While it runs; both have the same text."""
    readers, reading = await begun(site.one)
    async with client(site.two.server.url) as http:
        for reader in readers:
            state = (await http.get(f"/streams/{reader.id}")).json()
            assert state["resumable"] is True
        answers = await asyncio.gather(*(http.get(f"/streams/{reader.id}/events") for reader in readers))
    await reading
    for reader, answer in zip(readers, answers, strict=True):
        assert text_of(check_native(answer.content)) == text_of(reader.frames)
    await check(site, readers)


async def test_a_machine_that_stands_still_is_fenced(site: Site) -> None:
    """When it runs again its own readers get the same text; its appends are refused, and nothing is doubled."""
    readers, reading = await begun(site.one)
    site.one.signal(signal.SIGSTOP)
    try:
        others = [Reader(reader.number, NUM_TOKENS) for reader in readers]
        pairs = list(zip(others, readers, strict=True))
        await asyncio.gather(*(other.follow(site.two.server.url, reader.id) for other, reader in pairs))
    finally:
        site.one.signal(signal.SIGCONT)
    await reading
    await come_back(site.one, readers)
    await check(site, readers)
    await check(site, others)
    assert max([await fence_of(site, reader) for reader in readers]) > 1


async def test_redis_restarted_under_streams(site: Site) -> None:
    """After kill -9 of Redis every acknowledged event is there; streams pause and continue."""
    readers, reading = await begun(site.one)
    site.redis.kill()
    await asyncio.to_thread(site.redis.start)
    await reading
    await come_back(site.one, readers)
    await check(site, readers)


@pytest.mark.cut_streams("a machine is killed")
@pytest.mark.parametrize("kill", range(scaled(10)))
async def test_readers_of_a_killed_machine_continue_at_the_other(site: Site, kill: int) -> None:
    """Once its keys have expired the other machine continues with its own engine, from the tokens in the log."""
    await asyncio.to_thread(site.one.start)
    readers, reading = await begun(site.one)
    site.one.kill()
    await reading
    cut = [reader for reader in readers if not reader.is_over]
    await asyncio.gather(*(reader.go_on(site.two.server.url) for reader in cut))
    await come_back(site.two, readers)
    await check(site, readers)
    assert cut
    assert max([await fence_of(site, reader) for reader in cut]) > 1
