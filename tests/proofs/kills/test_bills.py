"""Bills, usage and limits over time under kill -9 of web processes and engines, on SQLite and PostgreSQL.

Two daphnes on one engine process and one log. Callers ask, read and are cut off, more of them than a limit has room
for; what they leave is continued, or ended, by the other web process. Judged are the database and the log: the rows of
streams against the bills of a receiver, the tokens in the log, the usage, and the windows of limits over time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psycopg
import pytest

from streamserve.protocol.events import Done, Token
from streamserve.streams.log.file_log import FileLog
from tests.proofs.scale import scaled
from tests.proofs.support.workers import SECONDS, Site, client, two_workers
from tests.support.docs.demo_site import processes_of
from tests.support.processes import command_of
from tests.support.servers.postgres_server import PostgresServer

pytestmark = [pytest.mark.timeout(7200), pytest.mark.cut_streams("web processes are killed with -9")]

NUM_ANSWERS = scaled(400)  # at least, on each database
NUM_KILLS = scaled(200)
NUM_CALLERS = 50
MOST_ENDS = 4  # answers that end between two kills of a process
MOST_TOKENS = 1_000  # of an answer, which holds them; it uses some hundred
TOKENS_PER_MINUTE = 30_000  # room for some twenty of them
WAYS = ("abort", "park")
TOKENS = "prompt_tokens, completion_tokens"
OF_ALL = "COALESCE(SUM(prompt_tokens + completion_tokens), 0)"


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    variables = {
        "DJANGO_SETTINGS_MODULE": "tests.support.sites.billing_site",
        "BILLS_TOKENS_PER_MINUTE": str(TOKENS_PER_MINUTE),
    }
    with ExitStack() as stack:
        if request.param == "postgres":
            variables["BILLS_POSTGRES"] = str(stack.enter_context(PostgresServer()).port)
        yield stack.enter_context(two_workers(tmp_path_factory.mktemp("site"), is_demo=False, variables=variables))


class Crowd:
    """Callers that ask one question after the other, and count the answers that have ended for them."""

    def __init__(self, site: Site, chance: random.Random) -> None:
        self.num_ended = self.num_refused = 0
        self.is_over = False
        self._site, self._chance = site, chance
        self._ends = asyncio.Condition()

    async def call(self) -> None:
        chance = self._chance
        async with contextlib.AsyncExitStack() as stack:
            doors = [await stack.enter_async_context(client(f"http://127.0.0.1:{port}")) for port in self._site.ports]
            while not self.is_over:
                body = {
                    "prompt": "a question " * chance.randrange(1, 4),
                    "max_tokens": MOST_TOKENS,
                    "on_disconnect": chance.choice(WAYS),
                }
                try:
                    is_answered = await self._ask(chance.choice(doors), body, most=chance.choice((2, 1 << 20)))
                except httpx.TransportError:
                    is_answered = False  # that web process has been killed: perhaps the other
                if is_answered:
                    self.num_ended += 1
                    async with self._ends:
                        self._ends.notify_all()
                else:
                    await asyncio.sleep(chance.random())

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, object], most: int) -> bool:
        """Read an answer, and leave after so many pieces; return whether there was one."""
        async with http.stream("POST", "/streams", json=body) as response:
            assert response.status_code in (200, 429, 503), await response.aread()
            self.num_refused += response.status_code == 429
            if response.status_code != 200:
                return False
            async for _ in response.aiter_raw():
                most -= 1
                if not most:
                    break
        return True

    async def until_ended(self, num: int) -> None:
        async with self._ends:
            await self._ends.wait_for(lambda: self.num_ended >= num)


class Books:
    """What the site's database has, read beside it."""

    def __init__(self, site: Site) -> None:
        self.fullest = self.num_looks = 0
        self.is_over = False
        port = site.variables.get("BILLS_POSTGRES")
        self._rows: Any
        if port is None:
            path = site.folder / "site.sqlite3"
            self._rows = sqlite3.connect(path, isolation_level=None, timeout=60, check_same_thread=False)
        else:
            self._rows = psycopg.connect(host="127.0.0.1", port=int(port), user="postgres", autocommit=True)
        self._begin = "BEGIN" if port is None else "BEGIN ISOLATION LEVEL REPEATABLE READ"

    def close(self) -> None:
        self._rows.close()

    def all(self, query: str) -> list[tuple[Any, ...]]:
        return list(self._rows.execute(query).fetchall())

    def look(self) -> None:
        """The key's window is not above its limit; the site's has what answers have used and hold, to the token."""
        self._rows.execute(self._begin)  # one moment for all queries
        windows = dict(self.all("SELECT subject, used FROM streamserve_ratewindow"))
        used = self.all(f"SELECT {OF_ALL} FROM streamserve_stream WHERE state = 'finished'")[0][0]
        running = self.all("SELECT held FROM streamserve_stream WHERE state = 'running'")
        self._rows.execute("COMMIT")
        held = [amount for (text,) in running for subject, *_, amount in json.loads(text) if subject == "site:"]
        of_key = max((count for subject, count in windows.items() if subject.startswith("key:")), default=0)
        assert windows.get("site:", 0) == used + sum(held)
        assert of_key <= TOKENS_PER_MINUTE
        self.fullest, self.num_looks = max(self.fullest, of_key), self.num_looks + 1

    async def keep_looking(self) -> None:
        while not self.is_over:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(0.1)

    async def until_idle(self) -> None:
        async with asyncio.timeout(SECONDS):
            while self.all("SELECT 1 FROM streamserve_stream WHERE state = 'running' LIMIT 1"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


class Killer:
    """Kills web processes and engines until there were enough kills."""

    def __init__(self, site: Site, crowd: Crowd, chance: random.Random) -> None:
        self.kills: Counter[str] = Counter()
        self._site, self._crowd, self._chance = site, crowd, chance

    async def kill_web(self, index: int) -> None:
        """Kill one of the web processes, and start it again."""
        while await self._is_next():
            self.kills[("first", "second")[index]] += 1
            self._site.kill(index)
            await asyncio.to_thread(self._site.start, index)

    async def kill_engines(self) -> None:
        """Kill the engine, which is started again by the web processes."""
        while await self._is_next():
            if pids := engines_of(self._site):
                self.kills["engine"] += 1
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    async def _is_next(self) -> bool:
        await self._crowd.until_ended(self._crowd.num_ended + self._chance.randrange(1, MOST_ENDS))
        return self.kills.total() < NUM_KILLS


def engines_of(site: Site) -> list[int]:
    """Return the engine processes, without a web process that starts."""
    program = "streamserve.clients.process.server"
    return [pid for pid in processes_of(site.folder) if program in command_of(pid)]


async def test_each_answer_is_billed_and_counted_once(site: Site) -> None:
    """Whoever is killed: each stream has one start and, once it has ended, one end with the tokens of its log.

    Usage and the site's window have the same tokens. At every moment no window is above its limit, and holds what its
    running answers hold: nothing stays reserved.
    """
    seed = random.randrange(10**6)
    print(f"\nseed {seed}")
    began, chance = time.monotonic(), random.Random(seed)
    crowd, books = Crowd(site, chance), Books(site)
    killer = Killer(site, crowd, chance)
    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(books.keep_looking())
        calling = [tasks.create_task(crowd.call()) for _ in range(NUM_CALLERS)]
        async with asyncio.TaskGroup() as killing:
            for kill in (killer.kill_web(0), killer.kill_web(1), killer.kill_engines()):
                killing.create_task(kill)
        await crowd.until_ended(NUM_ANSWERS)
        crowd.is_over = True
        await asyncio.gather(*calling)
        await books.until_idle()
        books.is_over = True
        await looking
    books.look()
    streams = books.all(f"SELECT id, log_id, {TOKENS} FROM streamserve_stream ORDER BY id")
    starts = books.all("SELECT stream_id FROM billing_bill WHERE kind = 'start' ORDER BY stream_id")
    ends = books.all(f"SELECT stream_id, {TOKENS} FROM billing_bill WHERE kind = 'end' ORDER BY stream_id")
    usage = books.all(f"SELECT SUM(requests), {OF_ALL} FROM streamserve_usageday")
    windows = dict(books.all("SELECT subject, used FROM streamserve_ratewindow"))
    books.close()
    assert starts == [(stream_id,) for stream_id, *_ in streams]
    assert ends == [(stream_id, *tokens) for stream_id, _, *tokens in streams]
    of_all = sum(prompt + completion for *_, prompt, completion in streams)
    assert usage == [(len(streams), of_all)]
    assert windows["site:"] == of_all
    num_failed = await check_log(site, streams)
    assert killer.kills.total() >= NUM_KILLS
    assert len(streams) >= NUM_ANSWERS
    assert crowd.num_refused
    print(
        f"{killer.kills.total()} kills -9 {dict(killer.kills)} in {time.monotonic() - began:.0f} s: {len(streams):,} "
        f"answers ({num_failed} failed) of {NUM_CALLERS} callers, one bill each, {of_all:,} tokens = log = usage; "
        f"{crowd.num_refused:,} requests refused, the fullest window had {books.fullest:,} of {TOKENS_PER_MINUTE:,} in "
        f"{books.num_looks:,} looks"
    )


async def check_log(site: Site, streams: list[tuple[Any, ...]]) -> int:
    """Each row has the tokens of its log, and so has its end; return how many answers failed."""
    num_failed = 0
    log = FileLog(site.folder / "streams.sqlite3")
    try:
        for _, log_id, *tokens in streams:
            events = []
            with contextlib.suppress(KeyError):  # its process was killed between the row and the log
                while page := await log.read(log_id, len(events)):
                    events += page
            pieces = [len(one.event.token_ids) for one in events if isinstance(one.event, Token)]
            assert sum(pieces) == tokens[1], log_id
            end = events[-1].event if events else None
            num_failed += not isinstance(end, Done)
            if isinstance(end, Done):
                assert [end.usage.prompt_tokens, end.usage.completion_tokens] == tokens
    finally:
        await log.aclose()
    return num_failed
