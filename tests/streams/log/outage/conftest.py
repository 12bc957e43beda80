"""Streams whose log is away for a while, and readers of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from streamserve.clients.base import EngineClient
from streamserve.protocol.events import Done, LoggedEvent, Status, Token
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog, LogUnavailable
from streamserve.streams.reader.follow import follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.servers.redis_server import RedisServer
from tests.support.streams.hand_made import ScriptedClient, StallingLog, ask, tok
from tests.support.streams.outages import Outage, RedisKilled, outage, quick

__all__ = ["outage", "quick"]

DONE = Done(finish_reason="stop")
DOWN = LogUnavailable("The log is away.")
DEADLINE_SECONDS = 60.0


@pytest.fixture
async def waiting(outage: Outage, scripted: ScriptedClient) -> AsyncIterator[Streams]:
    """Streams in a log that will be away, for which they wait for ever."""
    async with streams_on(outage.log, scripted) as streams:
        yield streams


@pytest.fixture
def log() -> StallingLog:
    return StallingLog()


@asynccontextmanager
async def streams_on(log: EventLog, client: EngineClient, *, outage_seconds: float = 3600.0) -> AsyncIterator[Streams]:
    """A directory of streams in that log, closed at the end."""
    config = StreamConfig(coalesce_tokens=0, log_outage_seconds=outage_seconds)
    streams = Streams({client.alias: client}, log, config)
    try:
        yield streams
    finally:
        if isinstance(log, StallingLog):
            log.outage = None
            log.go.set()
        await streams.aclose()


@pytest.fixture
async def streams(log: StallingLog, scripted: ScriptedClient) -> AsyncIterator[Streams]:
    """Streams that wait for their log for ever."""
    async with streams_on(log, scripted) as streams:
        yield streams


@pytest.fixture
async def hasty(log: StallingLog, scripted: ScriptedClient) -> AsyncIterator[Streams]:
    """Streams that are cut as soon as their log is away."""
    async with streams_on(log, scripted, outage_seconds=0.0) as streams:
        yield streams


@pytest.fixture
async def redis(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RedisKilled]:
    """A Redis for one test; the parameter is whether it keeps what it has."""
    with RedisServer(tmp_path, appendonly=getattr(request, "param", "yes")) as server:
        place = RedisKilled(server)
        yield place
        await place.aclose()


class Follower:
    """A reader of a stream to its end, or to where its connection ends."""

    def __init__(self, streams: Streams, stream: Stream, after: int = 0, **options: object) -> None:
        self.seen: list[LoggedEvent] = []
        self._follow = follow(streams, stream, after, **options)
        self.task = asyncio.create_task(self._read())

    @property
    def logged(self) -> list[LoggedEvent]:
        return [one for one in self.seen if one.seq]

    @property
    def notices(self) -> list[str]:
        """Return the frames without an id: statuses and error codes."""
        events = [one.event for one in self.seen if not one.seq]
        return [event.status if isinstance(event, Status) else event.code for event in events]

    @property
    def was_let_go(self) -> bool:
        return self._follow.reader.is_let_go

    async def end(self) -> list[LoggedEvent]:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.task
        return self.logged

    async def _read(self) -> None:
        async with aclosing(self._follow) as events:
            async for logged in events:
                self.seen.append(logged)


async def start(streams: Streams, **rest: str) -> Stream:
    return await streams.start(ask("scripted"), Admission(owner="o", tenant="t", **rest))


def words(first: int, last: int) -> list[Token]:
    """Tokens that need pages of their own."""
    return [tok(f"{number} " + "x" * 1100, number) for number in range(first, last)]
