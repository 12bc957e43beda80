"""Web processes and the engine are killed with -9 under answers in conversations: each message is written once.

Its text is that of its log, whoever has written it; none is lost, none runs in the end. Two web processes of one site;
the engine is a process of its own. Answers of a model and runs of a pipeline; some readers do not come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.workers import SECONDS, Reader, Site, client, two_workers
from tests.support.checks.stream_checks import text_of
from tests.support.docs.demo_site import processes_of
from tests.support.servers.postgres_server import PostgresServer

pytestmark = [
    pytest.mark.timeout(7200 if IS_SOAK else 900),
    pytest.mark.cut_streams("a web process is killed with -9"),
]

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.conversations_site"}
NUM_KILLS, NUM_ANSWERS = scaled(200), scaled(400)
NUM_CONVERSATIONS, NUM_TOKENS = 8, 60
AT_ONCE = 4  # answers under way; a kill for every second answer


@pytest.fixture(params=["sqlite", "postgres"] if IS_SOAK else ["sqlite"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        variables = dict(SETTINGS)
        if request.param == "postgres":
            variables["JOBS_POSTGRES"] = str(stack.enter_context(PostgresServer()).port)
        folder, is_demo = tmp_path_factory.mktemp("site"), request.param == "sqlite"
        yield stack.enter_context(two_workers(folder, is_demo=is_demo, variables=variables))


class Asker(Reader):
    """Asks a question of a conversation; a request that was cut before its response is sent again with its key."""

    def __init__(self, number: int, conversation: str, model: str) -> None:
        super().__init__(number, NUM_TOKENS)
        self._body = {"conversation": conversation, "prompt": f"question {number}", "model": model, "parent": None}

    async def ask(self, url: str) -> None:
        """Ask, and read until the end, or until the connection breaks."""
        fields: dict[str, Any] = dict(self._body)
        if self._body["model"] != "audit":
            fields |= {"max_tokens": self.num_tokens, "ignore_eos": True, "seed": self.number}
        headers = {"Idempotency-Key": f"question-{self.number}"}
        async with client(url) as http:
            await self._take(http.stream("POST", "/streams", json=fields, headers=headers))

    async def ask_until_begun(self, urls: list[str]) -> None:
        """Ask, here or there, until the answer has begun."""
        async with asyncio.timeout(SECONDS):
            while not self.id:
                for url in urls:
                    await self.ask(url)
                    if self.id:
                        break
                    await asyncio.sleep(0.1)


async def test_each_message_is_written_once(site: Site) -> None:
    """200 kills of web processes and engines during 400 answers; each message equals its log, and none runs."""
    chance = random.Random(27)
    conversations = [await begun(site) for _ in range(NUM_CONVERSATIONS)]
    readers: list[Asker] = []
    kills: Counter[str] = Counter()
    logs: dict[str, str] = {}
    while len(readers) < NUM_ANSWERS:
        some = [
            Asker(len(readers) + index, chance.choice(conversations), chance.choice(("echo", "echo", "audit")))
            for index in range(min(AT_ONCE, NUM_ANSWERS - len(readers)))
        ]
        readers += some
        asking = [asyncio.create_task(one.ask(site.servers[index % 2].url)) for index, one in enumerate(some)]
        for _ in range(len(some) // 2):
            await seen(chance.choice(some), chance.randrange(0, NUM_TOKENS), asking)
            kills[await killed(site, chance.choice(("first", "second", "engine")))] += 1
        await asyncio.gather(*asking)
        urls = [server.url for server in site.servers]
        for index, one in enumerate(some):
            await one.ask_until_begun(urls)
            if index:  # the first does not come back: its answer goes on for the reader that looks at it afterwards
                await one.to_the_end(chance.choice(urls))
        for one in some:
            logs[one.id] = await log_of(site, one)
    rows = await settled(site, conversations)
    by_stream = {row["stream"]: row for row in rows if row["role"] == "assistant"}
    assert len(by_stream) == len(rows) / 2 == len(readers) == len({one.id for one in readers})
    assert by_stream.keys() == logs.keys()
    for stream_id, text in logs.items():
        row = by_stream[stream_id]
        shown = "".join(block["text"] for block in row["blocks"] if block["kind"] == "text")
        assert shown == text
        assert row["state"] == ("failed" if row["error"] else "done")
    assert kills.total() == NUM_KILLS
    states = Counter(row["error"] or row["finish_reason"] for row in by_stream.values())
    print(f"\nkill -9 under answers in conversations: {dict(kills)}; {len(readers)} answers, each once: {dict(states)}")


async def seen(reader: Asker, num_events: int, asking: list[asyncio.Task[None]]) -> None:
    """Wait until the reader has so many events, or no answer is read any more: its connection may be cut already."""
    async with asyncio.timeout(SECONDS):
        while reader.num_events < num_events and not all(one.done() for one in asking):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def begun(site: Site) -> str:
    async with client(site.servers[0].url) as http:
        return str((await http.post("/conversations", json={})).raise_for_status().json()["id"])


async def killed(site: Site, which: str) -> str:
    """Kill a web process and start it again, or the engine, which is started again by its clients."""
    if which == "engine":
        web = {server.process.pid for server in site.servers}
        for pid in processes_of(site.folder) - web:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        index = ("first", "second").index(which)
        site.kill(index)
        await asyncio.to_thread(site.start, index)
    return which


async def log_of(site: Site, reader: Asker) -> str:
    """Return the text that the log has, to its end, by a reader of its own; the first reader has no more of it."""
    whole = Reader(reader.number, NUM_TOKENS)
    async with asyncio.timeout(SECONDS):
        while not whole.is_over:
            if whole.id:
                await whole.go_on(site.servers[1].url)
            else:
                await whole.follow(site.servers[1].url, reader.id)
    assert text_of(whole.frames).startswith(text_of(reader.frames))
    return text_of(whole.frames)


async def settled(site: Site, conversations: list[str]) -> list[dict[str, Any]]:
    """Return all messages, once no answer runs."""
    async with asyncio.timeout(SECONDS), client(site.servers[0].url) as http:
        while True:
            rows = [row for one in conversations for row in await messages_of(http, one)]
            if all(row["state"] != "running" for row in rows):
                return rows
            await asyncio.sleep(0.2)


async def messages_of(http: httpx.AsyncClient, conversation: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while True:
        query = {"limit": "100", **({"after": rows[-1]["id"]} if rows else {})}
        page = (await http.get(f"/conversations/{conversation}/messages", params=query)).raise_for_status().json()
        rows += page["messages"]
        if not page["has_more"]:
            return rows
