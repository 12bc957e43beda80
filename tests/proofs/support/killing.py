"""Readers that request one answer after the other while the engine is killed again and again.

Times are reported and never asserted. Every expected event is waited for with a deadline: a hang fails.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from signal import SIGKILL, SIGSTOP, Signals
from statistics import median

from streamserve.clients.adapter import AdapterClient
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.requests import Admission, GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.proofs.support.pairs import Answer
from tests.proofs.support.transcripts import Transcript, over_follow, over_sse
from tests.support.engines.engine_processes import DEADLINE_SECONDS, connected, until

NUM_SEATS = 16
# Seats whose readers pause now and then until the engine parks them, and whose readers leave and come back.
SLOW, LEAVING = {3, 12}, {6, 9}
STEADY = frozenset(range(NUM_SEATS)) - SLOW - LEAVING
STAND_STILL, LEAVE = 0.04, 0.03  # the probability, at each event
# Every event has a number of its own: none of them is joined to another.
# Every event by itself, so that transcripts can be checked event by event.
SETTINGS = StreamConfig(coalesce_seconds=0.0, max_finished=4 * NUM_SEATS, snapshot_events=0)


class Readers:
    """`NUM_SEATS` streams at a time; each is read to its end and compared with the uninterrupted answer."""

    def __init__(self, client: ProcessClient, rng: random.Random, adapters: Iterable[str] = ()) -> None:
        clients = {client.alias: client, **{name: AdapterClient(name, client) for name in adapters}}
        self.streams = Streams(clients, MemoryLog(), SETTINGS)
        self.num_answers = self.num_tokens = self.num_waits = self.num_returns = self.num_refused = 0
        self.next_token: list[float] = []  # seconds from each kill on
        self._client = client
        self._rng = rng
        self._killed: tuple[int, float] | None = None
        self._kill = asyncio.Event()
        self._gone_on: set[int] = set()  # seats that have tokens of the current engine
        self._num_since = 0
        self._is_over = False

    async def sit(self, seat: int, cases: list[tuple[GenerateRequest, Answer]]) -> None:
        """Request one answer after the other until the end of the test."""
        while not self._is_over:
            request, answer = self._rng.choice(cases)
            transcript = await self.read(seat, request)
            assert transcript.end is not None
            assert transcript.end[0] == "done", transcript.end
            assert transcript.answer == answer, f"seat {seat}: not the uninterrupted answer to {request}"
            self.num_answers += 1
            self.num_tokens += sum(len(choice.token_ids) for choice in answer)
            self.num_waits += transcript.statuses.count("waiting")

    async def read(self, seat: int, request: GenerateRequest) -> Transcript:
        """Return the transcript of an answer in that seat."""
        stream, transcript = await self._start(request), Transcript(request.n)
        while transcript.end is None:
            kill = self._kill
            await self._read_on(seat, stream, transcript)
            if transcript.end is None:
                await kill.wait()
                self.num_returns += 1
        return transcript

    async def _read_on(self, seat: int, stream: Stream, transcript: Transcript) -> None:
        """Read until the end, or until the reader leaves."""
        read = over_follow if seat % 2 else over_sse
        async with aclosing(read(self.streams, stream, transcript.seq)) as events:
            async for shown in events:
                transcript.take(shown)
                if shown[1] == "token":
                    self._note_token(seat)
                if seat in LEAVING and self._rng.random() < LEAVE:
                    return
                if seat in SLOW and self._rng.random() < STAND_STILL:
                    await until(lambda: stream.state != "running")

    async def _start(self, request: GenerateRequest) -> Stream:
        """Submit a request, and again after `Retry-After`, as a client does."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                try:
                    return await self.streams.start(request, Admission(owner="reader", tenant="site"))
                except EngineUnavailable as refused:
                    if refused.code == "engine_died":
                        raise
                    self.num_refused += 1
                    await until(self._has_answer)

    def _has_answer(self) -> bool:
        """Whether the next request is not told to wait: there is an engine, or the model is given up."""
        state = self._client.describe().state
        return state == "failed" or (state == "ready" and self._client.is_connected)

    def _note_token(self, seat: int) -> None:
        """Count the tokens of the current engine; a slow reader may still receive older ones."""
        pid = self._client.engine_pid
        if seat not in STEADY or pid is None or (self._killed is not None and pid == self._killed[0]):
            return
        if self._killed is not None:
            self.next_token.append(time.monotonic() - self._killed[1])
            self._killed = None
        self._gone_on.add(seat)
        self._num_since += 1

    def kill(self, pid: int, how: Signals) -> None:
        """Kill the engine; readers that are away come back."""
        os.kill(pid, how)
        self._killed = pid, time.monotonic()
        self._gone_on.clear()
        self._num_since = 0
        self._wake()

    def finish(self) -> None:
        """Let all readers finish the answers that have begun."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        self._kill.set()
        self._kill = asyncio.Event()
        if self._is_over:
            self._kill.set()

    async def progress(self, num_tokens: int) -> None:
        """Wait until each steady reader has tokens of the current engine, and all together so many."""
        await until(lambda: self._gone_on >= STEADY and self._num_since >= num_tokens)


@dataclass
class Killer:
    """Kills the client's engine, and notes how long it takes to be noticed.

    `num_drafted`: tokens of a draft model that the engines had accepted, as far as they have reported.
    """

    client: ProcessClient
    readers: Readers
    rng: random.Random
    most_tokens: int
    noticed: dict[Signals, list[float]] = field(default_factory=lambda: {SIGKILL: [], SIGSTOP: []})
    num_early: int = 0
    num_lost: int = 0  # engines, by the client's count
    num_drafted: int = 0

    async def kill_all(self, signals: Iterable[Signals]) -> None:
        """Kill in turn. One in six dies as soon as it has started; then the next one may live for a while."""
        was_early = True  # the first engine has to serve something
        for how in signals:
            await until(lambda: self.client.engine_pid is not None)
            was_early = not was_early and self.rng.random() < 1 / 6
            self.num_early += was_early
            if not was_early:
                await self.readers.progress(self.rng.randrange(self.most_tokens))
            await self._kill(how)
        await self.readers.progress(0)

    async def _kill(self, how: Signals) -> None:
        pid = self.client.engine_pid
        assert pid is not None, "it ended by itself"
        self.num_drafted += sum(self.client.stats().accepted_drafts.values())
        self.readers.kill(pid, how)
        now = time.monotonic()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while self.client.engine_pid == pid:  # noqa: ASYNC110  (as a caller sees it, without an event)
                await asyncio.sleep(0.0005)
        self.noticed[how].append(time.monotonic() - now)

    def report(self, patience: float) -> str:
        """Report the counts and measurements, in one line; `patience` is the client's `hang_seconds`."""
        readers, (kills, stops) = self.readers, (self.noticed[SIGKILL], self.noticed[SIGSTOP])
        return (
            f"{len(kills)} SIGKILL and {len(stops)} SIGSTOP ({self.num_early} as soon as it was there) under"
            f" {NUM_SEATS} streams: {readers.num_answers:,} answers ({readers.num_tokens:,} tokens) equal the"
            f" uninterrupted ones; {readers.num_waits:,} waits ended, {readers.num_returns:,} readers went and"
            f" came back, {readers.num_refused:,} refused and asked again; 0 errors, 0 hangs, 0 repeats. SIGKILL"
            f" noticed: {_spread(kills)} (promised 0.5 s); SIGSTOP with {patience:g} s of patience: {_spread(stops)}"
            f" (promised 15 s with 10); next token: {_spread(readers.next_token)}"
        )


def _spread(seconds: list[float]) -> str:
    return f"median {median(seconds):.3f} s, worst {max(seconds):.3f} s" if seconds else "none"


def signals_of(num_kills: int, rng: random.Random) -> list[Signals]:
    """About one in ten hangs instead of dying."""
    num_stops = max(1, num_kills // 10) if num_kills > 1 else 0
    signals = [SIGSTOP] * num_stops + [SIGKILL] * (num_kills - num_stops)
    rng.shuffle(signals)
    return signals


@asynccontextmanager
async def reading(
    spec: LaunchConfig, requests: list[GenerateRequest], rng: random.Random, right: list[Answer] | None
) -> AsyncIterator[Readers]:
    """Readers at work, as soon as each request has been answered once without a kill, as in `right`. All end well."""
    async with connected(spec) as client:
        readers = Readers(client, rng, spec.model.adapters)
        try:
            seat = min(STEADY)
            whole = await asyncio.gather(*(readers.read(seat, request) for request in requests))
            assert all(one.end is not None and one.end[0] == "done" and not one.statuses for one in whole)
            assert right is None or [one.answer for one in whole] == right
            cases = [(request, one.answer) for request, one in zip(requests, whole, strict=True)]
            async with asyncio.TaskGroup() as seats:
                tasks = [seats.create_task(readers.sit(seat, cases)) for seat in range(NUM_SEATS)]
                yield readers
                readers.finish()
                await until(lambda: all(task.done() for task in tasks))
            await until(lambda: client.stats().steps > 0 and client.stats().running == client.stats().blocks_used == 0)
        finally:
            await readers.streams.aclose()


async def kill_under_readers(
    spec: LaunchConfig,
    requests: list[GenerateRequest],
    signals: list[Signals],
    rng: random.Random,
    most_tokens: int,
    right: list[Answer] | None = None,
) -> Killer:
    """Kill the engine of `spec` with those signals, at random moments, and return the counts.

    `right`: the answers, where another engine has given them; otherwise they are the engine's own without a kill.
    """
    async with reading(spec, requests, rng, right) as readers:
        client = readers.streams.clients[spec.model.alias]
        assert isinstance(client, ProcessClient)
        killer = Killer(client, readers, rng, most_tokens)
        await killer.kill_all(signals)
        killer.num_lost = client.stats().lost_engines
    killer.num_drafted += sum(client.stats().accepted_drafts.values())
    return killer
