"""Every kind of log behind one fixture: `make_log()` returns one more on the same storage, as another process has it.

Import `make_log` and `redis_server` into a test module to use them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from streamserve.protocol.events import Event, LoggedEvent
from streamserve.streams.log.base import EventLog, MemoryLog
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.log.redis_log import RedisLog
from tests.support.servers.redis_server import RedisServer

MakeLog = Callable[[], EventLog]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for all tests that leave it intact."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["memory", "file", "file, full sync", "redis"])
async def make_log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MakeLog]:
    """Each kind of log in turn. A log in memory is one per process, hence one per test."""
    made: list[EventLog] = []
    kind, path = request.param, tmp_path / "state" / "streams.db"
    server = request.getfixturevalue("redis_server") if kind == "redis" else None

    def make() -> EventLog:
        if kind == "memory":
            made[:] = made or [MemoryLog()]
            return made[0]
        log = FileLog(path, is_full_sync="sync" in kind) if server is None else RedisLog(server.url)
        made.append(log)
        return log

    yield make
    for log in made:
        await log.aclose()


async def everything(log: EventLog, log_id: str, page: int = 512) -> list[LoggedEvent]:
    """Read a whole log."""
    found: list[LoggedEvent] = []
    while more := await log.read(log_id, len(found), page):
        found += more
    return found


def numbered(events: Sequence[Event], first_seq: int = 1) -> list[LoggedEvent]:
    """Return the events as a log holds them."""
    return [LoggedEvent(seq=seq, event=event) for seq, event in enumerate(events, first_seq)]
