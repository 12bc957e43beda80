"""Two daphne processes, one engine process, one log: workers are killed with -9; no reader loses or doubles a word."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamserve.protocol.events import Done, Token
from streamserve.streams.file_log import FileLog
from tests.demo_site import environment, manage, processes_of
from tests.proofs.scale import scaled
from tests.servers import Server, daphne, wait_until_ready
from tests.stream_checks import Frame, check_native, check_native_part, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KEY, OTHER_KEY = "a-key-for-these-tests", "another-key-for-these"
KEYS = (KEY, OTHER_KEY)
NUM_STREAMS = 20
NUM_KILLS = scaled(200)
NUM_TOKENS = 200
SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.proofs.two_workers_site"}
# Beside others on two cores a worker needs a while; readers must not give up before the test's own limit.
SECONDS = 60.0


class Site:
    """Two workers; either can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._env = environment(folder, **SETTINGS)
        self._stacks: list[contextlib.ExitStack] = [contextlib.ExitStack() for _ in range(2)]
        self.servers: list[Server] = []

    def start(self, index: int) -> Server:
        server = self._stacks[index].enter_context(daphne("project.asgi:application", env=self._env))
        wait_until_ready(server.url)
        self.servers[index : index + 1] = [server]
        return server

    def kill(self, index: int) -> None:
        os.kill(self.servers[index].process.pid, signal.SIGKILL)
        self.servers[index].process.wait()
        self._stacks[index].close()

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    for arguments in (["migrate", "--verbosity=0"], *(["streamserve_key", "create", "--key", key] for key in KEYS)):
        done = manage(folder, *arguments)
        assert done.returncode == 0, done.stderr
    site = Site(folder)
    try:
        for index in range(2):
            site.start(index)
        yield site
    finally:
        site.close()
        manage(folder, "streamserve_engine", "--stop", **SETTINGS)
        assert processes_of(folder) == set()


def client(server: Server, key: str = KEY) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=SECONDS)


def question(number: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"question {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number, **fields}


class Reader:
    """Reads one answer, from whichever worker, and never asks for what it has."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.id = ""
        self.frames: list[Frame] = []  # as of the last connection's end
        self.num_events = 0  # so far
        self.waits: list[float] = []  # from asking again to the first event
        self._asked_at = 0.0

    @property
    def last_seq(self) -> int:
        return self.frames[-1].seq if self.frames else 0

    @property
    def is_over(self) -> bool:
        return bool(self.frames) and self.frames[-1].event in {"done", "error"}

    async def begin(self, server: Server) -> None:
        """Ask the question and read until the end, or until the connection breaks."""
        async with client(server) as http:
            await self._take(http.stream("POST", "/streams", json=question(self.number)))

    async def go_on(self, server: Server) -> None:
        """Come back with the id of the last event."""
        self._asked_at = time.monotonic()
        headers = {"Last-Event-ID": self.frames[-1].id}
        async with client(server) as http:
            await self._take(http.stream("GET", f"/streams/{self.id}/events", headers=headers))

    async def _take(self, answer: Any) -> None:
        data, after = bytearray(), self.last_seq
        with contextlib.suppress(httpx.TransportError):
            async with answer as response:
                assert response.status_code == 200, await response.aread()
                self.id = response.headers["x-stream-id"]
                assert response.headers["streamserve-from"] == str(after + 1)
                async for piece in response.aiter_bytes():
                    data += piece
                    self.num_events += piece.count(b"\nid: ")
                    if self._asked_at and b"\nid: " in piece:
                        self.waits.append(time.monotonic() - self._asked_at)
                        self._asked_at = 0.0
        self.frames += check_native_part(bytes(data), after=after)


async def quiet(server: Server, number: int) -> str:
    """Return the text of an uninterrupted run."""
    reader = Reader(number)
    await reader.begin(server)
    assert reader.is_over
    return text_of(reader.frames)


async def logged_text(log: FileLog, log_id: str) -> str:
    """Return the text that the log holds, and see that it is dense and ends once."""
    events = []
    while page := await log.read(log_id, len(events)):
        events += page
    assert [one.seq for one in events] == list(range(1, len(events) + 1))
    assert [isinstance(one.event, Done) for one in events].index(True) == len(events) - 1
    return "".join(one.event.text for one in events if isinstance(one.event, Token))


async def test_readers_of_killed_workers_lose_nothing(site: Site) -> None:
    """Each time: 20 streams with readers, kill -9, back to the other worker: text = log = uninterrupted run."""
    texts = await asyncio.gather(*(quiet(site.servers[1], number) for number in range(NUM_STREAMS)))
    log = FileLog(site.folder / "streams.sqlite3")
    chance = random.Random(1)
    waits: list[float] = []
    num_cut = 0
    for kill in range(NUM_KILLS):
        dying, living = kill % 2, 1 - kill % 2
        readers = [Reader(number) for number in range(NUM_STREAMS)]
        reading = asyncio.gather(*(reader.begin(site.servers[dying]) for reader in readers))
        async with asyncio.timeout(SECONDS):
            while min(reader.num_events for reader in readers) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(chance.uniform(0, 1))
        site.kill(dying)
        await reading
        cut = [reader for reader in readers if not reader.is_over]
        num_cut += len(cut)
        await asyncio.gather(*(reader.go_on(site.servers[living]) for reader in cut))
        for reader, text in zip(readers, texts, strict=True):
            assert reader.is_over, f"kill {kill}, stream {reader.id}: no end"
            assert text_of(reader.frames) == text == await logged_text(log, reader.frames[0].log_id)
        waits += [wait for reader in cut for wait in reader.waits]
        await asyncio.to_thread(site.start, dying)
    await log.aclose()
    assert num_cut > NUM_KILLS * NUM_STREAMS / 2
    waits.sort()
    middle, late = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
    print(f"\n{NUM_KILLS} kills, {num_cut} readers cut off; back to the first event:", end=" ")
    print(f"median {middle:.3f} s, p99 {late:.3f} s, max {waits[-1]:.3f} s")


async def test_a_worker_that_comes_back_serves_its_own_readers(site: Site) -> None:
    """Killed and started again, with nobody else: the same holds. The engine was not told anything."""
    text = await quiet(site.servers[0], 7)
    reader = Reader(7)
    reading = asyncio.create_task(reader.begin(site.servers[0]))
    async with asyncio.timeout(SECONDS):
        while reader.num_events < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    site.kill(0)
    await reading
    assert not reader.is_over
    await asyncio.to_thread(site.start, 0)
    await reader.go_on(site.servers[0])
    assert reader.is_over
    assert text_of(reader.frames) == text


async def begun(server: Server, number: int) -> tuple[Reader, asyncio.Task[None]]:
    """Return the reader of a long answer that has begun."""
    reader = Reader(number)
    reading = asyncio.create_task(reader.begin(server))
    async with asyncio.timeout(SECONDS):
        while reader.num_events < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return reader, reading


async def test_a_second_tab_at_the_other_worker(site: Site) -> None:
    """Follows live, and both have the same to the last byte of the text."""
    reader, reading = await begun(site.servers[0], 3)
    async with client(site.servers[1]) as http:
        state = (await http.get(f"/streams/{reader.id}")).json()
        assert (state["state"], state["resumable"]) == ("running", True)
        other = check_native((await http.get(f"/streams/{reader.id}/events")).content)
    await reading
    assert text_of(other) == text_of(reader.frames)
    assert not [frame for frame in other if frame.event == "status"]


async def test_stop_at_the_other_worker(site: Site) -> None:
    """Ends it for its reader at the first one, within a moment."""
    reader, reading = await begun(site.servers[0], 4)
    async with client(site.servers[1]) as http:
        stopped = (await http.post(f"/streams/{reader.id}/stop", json={"seen_seq": 4})).json()
        assert (stopped["state"], stopped["finish_reason"]) == ("finished", "cancelled")
        await asyncio.wait_for(reading, 10)
        assert reader.frames[-1].json["finish_reason"] == "cancelled"
        assert reader.frames[-1].json["kept_seq"] == 4
        again = (await http.post(f"/streams/{reader.id}/stop")).json()
        assert again["last_seq"] == stopped["last_seq"] == reader.last_seq


async def test_another_tenant_finds_nothing_at_either_worker(site: Site) -> None:
    """Whatever it asks, and by whichever id."""
    reader, reading = await begun(site.servers[0], 5)
    async with client(site.servers[0]) as http:
        log_id = (await http.get(f"/streams/{reader.id}")).json()["log_id"]
    for server in site.servers:
        async with client(server, OTHER_KEY) as http:
            assert (await http.get(f"/streams/{reader.id}")).status_code == 404
            assert (await http.get(f"/streams/{reader.id}/events")).status_code == 404
            assert (await http.post(f"/streams/{reader.id}/stop")).status_code == 404
            event_id = f"{log_id}-1"
            by_event = await http.get("/streams/new?prompt=x", headers={"Last-Event-ID": event_id})
            assert by_event.status_code == 410
    await reading
    assert reader.is_over


async def test_what_nobody_comes_back_to_is_ended(site: Site) -> None:
    """Its worker was killed: another ends it when the resume window is over."""
    reader, reading = await begun(site.servers[0], 6)
    site.kill(0)
    await reading
    async with asyncio.timeout(120), client(site.servers[1]) as http:
        while (state := (await http.get(f"/streams/{reader.id}")).json())["state"] != "finished":  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    assert state["finish_reason"] == "abandoned"
    await asyncio.to_thread(site.start, 0)
