"""Two web processes of one site, which are killed and restarted, and readers that never request an event twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from streamserve.protocol.events import Done, Token
from streamserve.streams.log.base import EventLog
from tests.support.checks.stream_checks import Frame, check_native_part, text_of
from tests.support.docs.demo_site import environment, manage, processes_of
from tests.support.plugins.migrated import KEY, MIGRATE, prepare
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

OTHER_KEY = "another-key-for-these"
KEYS = (KEY, OTHER_KEY)
# A worker on two busy cores needs a while; readers must not give up before the test's own limit.
SECONDS = 120.0
STALLING = "tests.support.sites.workers.stalling_app:application"
SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.workers.two_workers_site"}


class Site:
    """Two workers; either can be killed and started again, at the same address. `log` is LOG."""

    def __init__(
        self,
        folder: Path,
        *,
        log: str = "file",
        app: str = "project.asgi:application",
        variables: Mapping[str, str] = SETTINGS,
    ) -> None:
        self.folder = folder
        self.variables = {**variables, "LOG": log}
        self._app = app
        self._env = environment(folder, **self.variables)
        self._stacks: list[contextlib.ExitStack] = [contextlib.ExitStack() for _ in range(2)]
        self.ports = [free_port() for _ in range(2)]
        self.servers: list[Server] = []

    def start(self, index: int) -> Server:
        server = self._stacks[index].enter_context(daphne(self._app, port=self.ports[index], env=self._env))
        wait_until_ready(server.url)
        self.servers[index : index + 1] = [server]
        return server

    def kill(self, index: int) -> None:
        os.kill(self.servers[index].process.pid, signal.SIGKILL)
        self.servers[index].process.wait()
        self._note(index, "stall").unlink(missing_ok=True)  # another worker may get its pid
        self._stacks[index].close()

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()

    def stall(self, index: int, num_events: int) -> None:
        """Stop the log of that worker (a STALLING one) after so many more events of each stream."""
        self._note(index, "stalled").unlink(missing_ok=True)
        written = self._note(index, "written")
        written.write_text(str(num_events))
        written.replace(self._note(index, "stall"))  # at once: the worker may read it at any moment

    def go_on(self, index: int) -> None:
        """Release the held appends."""
        self._note(index, "stall").unlink()

    async def stalled(self, index: int, reading: Collection[asyncio.Task[None]] = ()) -> Counter[str]:
        """Wait until a commit of that worker hangs, and so all its streams; count its streams and events by kind.

        No streams if all of `reading` end before one is stopped: on a busy machine answers have few events.
        """
        note = self._note(index, "stalled")
        async with asyncio.timeout(SECONDS):
            while not (text := note.read_text() if note.exists() else "").endswith("\n"):
                if reading and all(one.done() for one in reading):
                    self.go_on(index)
                    return Counter()
                await asyncio.sleep(0.01)
        lines = [line.split() for line in text.splitlines()]
        counts = Counter(streams=len(lines))
        for _, num_events, kind in lines:
            counts[kind] += int(num_events)
        return counts

    def _note(self, index: int, name: str) -> Path:
        return self.folder / f"{name}-{self.servers[index].process.pid}"


@contextlib.contextmanager
def two_workers(folder: Path, *, is_demo: bool = True, **options: Any) -> Iterator[Site]:
    """Run a site with its keys while the block runs; its engine has ended afterwards. `options`: those of `Site`.

    `is_demo`: its database is SQLite, and has the demo's tables.
    """
    site = Site(folder, **options)
    commands = [("streamserve_key", "create", "--key", key) for key in KEYS]
    if is_demo:
        prepare(folder, *commands)
    else:
        for command in (MIGRATE, *commands):
            done = manage(folder, *command, **site.variables)
            assert done.returncode == 0, done.stderr
    try:
        for index in range(2):
            site.start(index)
        yield site
    finally:
        site.close()
        manage(folder, "streamserve_engine", "--stop", **site.variables)
        assert processes_of(folder) == set()


def client(url: str, key: str = KEY) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=SECONDS)


class Reader:
    """Reads one answer, at any address, and never requests an event that it has."""

    def __init__(self, number: int, num_tokens: int) -> None:
        self.number, self.num_tokens = number, num_tokens
        self.id = ""
        self.frames: list[Frame] = []  # as of the last connection's end
        self.num_events = 0  # so far
        self.waits: list[float] = []  # from the request to the first event
        self.num_refused = 0
        self._asked_at = 0.0

    @property
    def last_seq(self) -> int:
        return self.frames[-1].seq if self.frames else 0

    @property
    def log_id(self) -> str:
        return self.frames[0].log_id

    @property
    def is_over(self) -> bool:
        return bool(self.frames) and self.frames[-1].event in {"done", "error"}

    async def begin(self, url: str, path: str = "/streams", **more: Any) -> None:
        """Send the question and read until the end, or until the connection breaks."""
        fields = {"max_tokens": self.num_tokens, "ignore_eos": True, "seed": self.number, **more}
        async with client(url) as http:
            await self._take(http.stream("POST", path, json={"prompt": f"question {self.number}", **fields}))

    async def follow(self, url: str, stream_id: str) -> None:
        """Read another reader's answer from its first event on."""
        async with client(url) as http:
            await self._take(http.stream("GET", f"/streams/{stream_id}/events"))

    async def go_on(self, url: str) -> None:
        """Resume with the id of the last event, and read until the end, a cut or a refusal."""
        self._asked_at = time.monotonic()
        headers = {"Last-Event-ID": self.frames[-1].id}
        async with client(url) as http:
            await self._take(http.stream("GET", f"/streams/{self.id}/events", headers=headers))

    async def to_the_end(self, url: str) -> None:
        """Resume as often as needed."""
        async with asyncio.timeout(SECONDS):
            while not self.is_over:
                await self.go_on(url)

    async def seen(self, num_events: int) -> None:
        """Wait until so many events have come on this connection, or the answer is over."""
        async with asyncio.timeout(SECONDS):
            while self.num_events < num_events and not self.is_over:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def _take(self, answer: Any) -> None:
        data, after = bytearray(), self.last_seq
        with contextlib.suppress(httpx.TransportError):
            async with answer as response:
                if response.status_code == 503:  # the log is down: the status has a Retry-After
                    self.num_refused += 1
                    await asyncio.sleep(min(0.5, float(response.headers["retry-after"])))
                    return
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


async def quiet(url: str, number: int, num_tokens: int) -> str:
    """Return the text of an uninterrupted run."""
    reader = Reader(number, num_tokens)
    await reader.begin(url)
    assert reader.is_over
    return text_of(reader.frames)


async def logged_text(log: EventLog, log_id: str) -> str:
    """Return the text that the log holds, and check that it is dense and ends once."""
    events = []
    while page := await log.read(log_id, len(events)):
        events += page
    assert [one.seq for one in events] == list(range(1, len(events) + 1))
    assert isinstance(events[-1].event, Done), f"the last event is {events[-1].event}"
    assert sum(isinstance(one.event, Done) for one in events) == 1
    return "".join(one.event.text for one in events if isinstance(one.event, Token))
