"""Real outages of a durable log: SQLite without room; Redis killed, stalled, out of memory.

Import `outage` into a test module to run it with each in turn, and `quick` to wait less.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from streamserve.streams import stream as stream_module
from streamserve.streams import writer as writer_module
from streamserve.streams.log.base import EventLog, LogFull, Result, append, new_log_id
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.log.file_store import FileStore, Write
from streamserve.streams.log.redis_log import RedisLog
from tests.support.servers.redis_server import RedisServer
from tests.support.streams.hand_made import tok

_PATIENCE_SECONDS = 20.0


class FussyStore(FileStore):
    """A store whose file cannot grow while `is_full` (SQLITE_FULL); with `refuses_claims` claims fail then too."""

    is_full = refuses_claims = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.refused_alone: set[str] = set()  # logs that had no room in their own transaction

    def transact(self, writes: Sequence[Write]) -> list[Result]:
        with self._errors():
            self._db().execute(f"PRAGMA max_page_count = {1 if self.is_full else 2**30}")
        if self.is_full and self.refuses_claims:
            raise LogFull("No room.", retry_after=30)
        try:
            return super().transact(writes)
        except LogFull:
            if len(writes) == 1:
                self.refused_alone.add(getattr(writes[0], "log_id", ""))
            raise


class Outage:
    """`log` is the log of the streams; `other()` is the same log as another process has it."""

    refusal = ("", 0)  # code and HTTP status
    notice_seconds = 0.0  # the longest time until a commit fails
    log: EventLog

    def __init__(self) -> None:
        self._made: list[EventLog] = []

    def other(self) -> EventLog:
        raise NotImplementedError

    async def begin(self) -> None:
        """Make all commits fail from now on."""
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        for log in [self.log, *self._made]:
            await log.aclose()


class FullFile(Outage):
    """SQLITE_FULL for everything but a claim."""

    refusal = ("log_full", 507)

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self.store = path, FussyStore(path)
        self.log = FileLog(path)
        self.log._writer._store = self.store

    def other(self) -> FileLog:
        self._made.append(log := FileLog(self._path))
        return log

    async def begin(self) -> None:
        """Fill the free room of existing pages, so that not even the smallest event fits."""
        log_id = new_log_id()
        await append(self.log, log_id, 1, [tok("x")])
        self.store.is_full = True
        while log_id not in self.store.refused_alone:
            with contextlib.suppress(LogFull):
                await append(self.log, log_id, 1, [tok("x")])

    async def end(self) -> None:
        self.store.is_full = False


class RedisKilled(Outage):
    """Redis is killed with kill -9, and started again. Calls fail at once meanwhile."""

    refusal = ("log_down", 503)

    def __init__(self, server: RedisServer, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        super().__init__()
        self.server = server
        self._patience_seconds = patience_seconds
        self.log = RedisLog(server.url, patience_seconds=patience_seconds)

    def other(self) -> RedisLog:
        self._made.append(log := RedisLog(self.server.url, patience_seconds=_PATIENCE_SECONDS))
        return log

    async def begin(self) -> None:
        self.log._calls._patience_seconds = 0.0
        self.server.kill()

    async def end(self) -> None:
        await asyncio.to_thread(self.server.start)
        self.log._calls._patience_seconds = self._patience_seconds


class RedisStalled(RedisKilled):
    """Redis is stopped with its connections open: it later reads what was sent meanwhile."""

    notice_seconds = 2.5

    def __init__(self, server: RedisServer) -> None:
        super().__init__(server, patience_seconds=1.0)

    async def begin(self) -> None:
        self.server.pause()

    async def end(self) -> None:
        self.server.go_on()


class FullRedis(RedisKilled):
    """Redis is over its memory limit."""

    refusal = ("log_full", 507)

    async def begin(self) -> None:
        self.server.command("CONFIG SET maxmemory 1")

    async def end(self) -> None:
        self.server.command("CONFIG SET maxmemory 0")


_REDIS = {"redis killed": RedisKilled, "redis stalled": RedisStalled, "full redis": FullRedis}


@pytest.fixture(params=["full file", *_REDIS])
async def outage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Outage]:
    """Each kind of outage in turn, before it begins."""
    with contextlib.ExitStack() as stack:
        if request.param == "full file":
            made: Outage = FullFile(tmp_path / "state" / "streams.db")
        else:
            made = _REDIS[request.param](stack.enter_context(RedisServer(tmp_path)))
        yield made
        await made.aclose()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are retried soon, and a stop is refused soon."""
    monkeypatch.setattr(writer_module, "_FIRST_RETRY_SECONDS", 0.005)
    monkeypatch.setattr(writer_module, "_MAX_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(stream_module, "STOP_SECONDS", 0.05)
