"""Proof: three upstreams of one model are killed and stopped at random while sixty readers read.

Every answer that ends `done` is complete, none shows a token twice, and every other ends in an error that is honest: it
may be asked for again, and what was shown is the beginning of the answer. That is a thought, which no server takes up;
an answer of text ends so when five upstreams in a row were lost to it, which a machine that is too busy adds to.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from pathlib import Path

import pytest

from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig, Upstream
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.events import BlockStart, Done, Error, Event, Token
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from tests.proofs.scale import scaled
from tests.proofs.support import upstream_program
from tests.proofs.support.upstream_program import words_of
from tests.support.servers.upstreams import chat, client_of, counts, until

NUM_READERS, NUM_KILLS = 60, scaled(200, least=20)
PROGRAM = str(Path(upstream_program.__file__))
THINKS = 5  # one answer in so many begins with a thought
SETTINGS = StreamConfig(max_finished=2 * NUM_READERS)
DEADLINE_SECONDS = 120
# How an answer ends that is text so far.
LATER = {"engine_died", "engine_unavailable", "upstream_timeout"}


class Upstreams:
    """Three processes that answer on ports of their own, and whose end is always by a signal."""

    def __init__(self) -> None:
        self.ports = [0, 0, 0]
        self._processes: list[Process | None] = [None, None, None]

    async def start(self, number: int) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, PROGRAM, str(self.ports[number]), stdout=PIPE, stderr=DEVNULL
        )
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_SECONDS):
            self.ports[number] = int(await process.stdout.readline())
        self._processes[number] = process

    def signal(self, number: int, what: signal.Signals) -> None:
        process = self._processes[number]
        assert process is not None
        os.kill(process.pid, what)

    async def kill(self, number: int) -> None:
        process = self._processes[number]
        if process is not None:
            self.signal(number, signal.SIGKILL)
            await process.wait()
            self._processes[number] = None


class Readers:
    """Each reads one answer after the other, and compares it with the whole."""

    def __init__(self, client: RemoteClient, streams: Streams, rng: random.Random) -> None:
        self.ends: Counter[str] = Counter()
        self.num_ended = 0
        self.is_over = False
        self._client, self._streams, self._rng = client, streams, rng
        self._has_ended = asyncio.Condition()

    async def sit(self, name: str) -> None:
        while not self.is_over:
            num_thoughts = 8 if self._rng.random() < 1 / THINKS else 0
            question = f"{self._rng.randint(5, 60)} {num_thoughts} {self._rng.random()}"
            await self._read(name, question)
            async with self._has_ended:
                self.num_ended += 1
                self._has_ended.notify_all()

    async def ended(self, num_more: int) -> None:
        """Wait until so many more answers have ended."""
        least = self.num_ended + num_more
        async with asyncio.timeout(DEADLINE_SECONDS), self._has_ended:
            await self._has_ended.wait_for(lambda: self.num_ended >= least)

    async def _read(self, name: str, question: str) -> None:
        request = chat(question, max_tokens=500)
        try:
            stream = await self._streams.start(request, Admission(owner=name, tenant=name))
        except EngineUnavailable as refused:
            self.ends[f"refused: {refused.code}"] += 1
            await until(lambda: self._client.describe().state == "ready")
            return
        stream.attach(reader := Attachment(is_paced=False))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await stream.ended.wait()
        self._judge(question, [logged.event for logged in await self._streams.log.read(stream.log_id, 0)])
        stream.detach(reader)  # it may be dropped now

    def _judge(self, question: str, events: list[Event]) -> None:
        check_events(events)
        thoughts, words = ("".join(parts) for parts in words_of(question))
        kinds = {event.index: event.kind for event in events if isinstance(event, BlockStart)}
        shown = {"thinking": "", "text": ""}
        for event in events:
            if isinstance(event, Token):
                shown[kinds.get(event.index, "text")] += event.text
        end = events[-1]
        if isinstance(end, Done):
            assert (shown["thinking"], shown["text"]) == (thoughts, words)
            self.ends["done"] += 1
            return
        assert isinstance(end, Error)
        assert end.retryable, end
        assert thoughts.startswith(shown["thinking"])
        assert words.startswith(shown["text"])
        assert end.code == "cannot_continue" if shown["thinking"] else end.code in LATER, end
        self.ends["thought" if thoughts else end.code] += 1


# httpcore 1.0 takes dead connections out of its pool and closes them for a request; where that request is cancelled
# meanwhile, those that are left wait for the garbage collector.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <(socket|function _SelectorTransport):pytest.PytestUnraisableExceptionWarning"
)
async def test_kills_of_upstreams_cost_no_answer_that_can_be_continued() -> None:
    """See above; the seed is printed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}, {NUM_KILLS} kills")
    rng = random.Random(seed)
    processes = Upstreams()
    for number in range(3):
        await processes.start(number)
    urls = [f"http://127.0.0.1:{port}/v1" for port in processes.ports]
    config = RemoteConfig(
        alias="m",
        upstreams=tuple(
            Upstream(url=url, name=name, weight=weight)
            for url, name, weight in zip(urls, "abc", (1, 2, 1), strict=True)
        ),
        connect_seconds=2.0,
        silence_seconds=3.0,
        first_token_seconds=30.0,
        poll_seconds=0.5,
    )
    try:
        async with client_of(config) as client:
            streams = Streams({"m": client}, MemoryLog(), SETTINGS)
            readers = Readers(client, streams, rng)
            async with asyncio.TaskGroup() as tasks:
                for number in range(NUM_READERS):
                    tasks.create_task(readers.sit(f"reader {number}"))
                for _ in range(NUM_KILLS):
                    await readers.ended(rng.randint(1, 30))
                    number = rng.randrange(3)
                    if rng.random() < 0.15:  # a slow death: it accepts, and says nothing
                        processes.signal(number, signal.SIGSTOP)
                        await readers.ended(rng.randint(1, 60))
                    await processes.kill(number)
                    await readers.ended(rng.randint(0, 20))
                    await processes.start(number)
                await readers.ended(NUM_READERS)
                readers.is_over = True
            found = counts(client)
            print(readers.ends, dict(found))
            await streams.aclose()
    finally:
        for number in range(3):
            await processes.kill(number)
    gc.collect()
    assert sum(readers.ends[code] for code in LATER) <= readers.ends["done"] / 50
    assert found["moved"] > 0
    assert found["continued"] > 0
    assert found["away"] > 0
