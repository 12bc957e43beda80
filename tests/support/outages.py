"""Places where a durable log is away for a while, for real: a full SQLite file, a full Redis, a Redis that is killed.

Import `outage` into a test module to have each in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from streamserve.streams.log.spare_log import SPARE_BYTES, SpareLog

from streamserve.streams.log.base import DurableLog, LogFull, LogUnavailable, append, new_log_id
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.log.file_store import FileStore, Refusal, Write
from streamserve.streams.log.redis_log import RedisLog
from tests.support.redis_server import RedisServer
from tests.support.streams import tok

_PATIENCE_SECONDS = 20.0


class FussyStore(FileStore):
    """Its file may not grow while `is_full`, and SQLite says so. `mute` commits, and then fails to say that."""

    is_full = is_mute = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.refused_alone: set[str] = set()  # logs that found no room in a transaction of their own

    def transact(self, writes: Sequence[Write]) -> list[int | Refusal]:
        self._db().execute(f"PRAGMA max_page_count = {1 if self.is_full else 2**30}")
        try:
            results = super().transact(writes)
        except LogFull:
            if len(writes) == 1:
                self.refused_alone.add(getattr(writes[0], "log_id", ""))
            raise
        if self.is_mute and any(getattr(write, "num_events", 0) for write in writes):
            raise LogUnavailable("Committed, but nobody was told.")
        return results


class Outage:
    """`log` is where streams write; `other()` is the same place as another process has it, which has no trouble."""

    refusal = ("", 0)  # code and HTTP status

    def __init__(self) -> None:
        self._made: list[DurableLog] = []
        self.log = self.spare_log()

    def spare_log(self, max_bytes: int = SPARE_BYTES) -> SpareLog:
        return SpareLog(self._inner(), max_bytes=max_bytes)

    def other(self) -> DurableLog:
        raise NotImplementedError

    async def begin(self) -> None:
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await self.log.aclose()
        for log in self._made:
            await log.aclose()

    def _inner(self) -> DurableLog:
        raise NotImplementedError


class FullFile(Outage):
    """SQLITE_FULL for everything but a claim."""

    refusal = ("log_full", 507)

    def __init__(self, path: Path) -> None:
        self._path, self.store = path, FussyStore(path)
        super().__init__()

    def other(self) -> FileLog:
        self._made.append(log := FileLog(self._path))
        return log

    async def begin(self) -> None:
        """Fill what room there is in pages that are there, so that the smallest event finds none."""
        log_id, log = new_log_id(), self.filler
        await append(log, log_id, 1, [tok("x")])
        self.store.is_full = True
        while log_id not in self.store.refused_alone:
            with contextlib.suppress(LogFull):
                await append(log, log_id, 1, [tok("x")])

    async def end(self) -> None:
        self.store.is_full = False

    def _inner(self) -> FileLog:
        self.filler = FileLog(self._path)
        self.filler._writer._store = self.store
        return self.filler


class RedisAway(Outage):
    """Killed, and started again. Only then are calls given up soon: a slow Redis is none that is away."""

    refusal = ("log_down", 503)

    def __init__(self, server: RedisServer, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self.server = server
        self._patience_seconds = patience_seconds
        self._inners: list[RedisLog] = []
        super().__init__()

    def other(self) -> RedisLog:
        self._made.append(log := RedisLog(self.server.url, patience_seconds=_PATIENCE_SECONDS))
        return log

    async def begin(self) -> None:
        self.server.kill()
        self._set_patience(0.0)

    async def end(self) -> None:
        await asyncio.to_thread(self.server.start)
        self._set_patience(self._patience_seconds)

    def _inner(self) -> RedisLog:
        self._inners.append(RedisLog(self.server.url, patience_seconds=self._patience_seconds))
        return self._inners[-1]

    def _set_patience(self, seconds: float) -> None:
        for log in self._inners:
            log._calls._patience_seconds = seconds


class FullRedis(RedisAway):
    """Over its memory limit."""

    refusal = ("log_full", 507)

    async def begin(self) -> None:
        self.server.say("CONFIG SET maxmemory 1")

    async def end(self) -> None:
        self.server.say("CONFIG SET maxmemory 0")


@pytest.fixture(params=["full file", "redis away", "full redis"])
async def outage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Outage]:
    """One that has not begun."""
    with contextlib.ExitStack() as stack:
        if request.param == "full file":
            made: Outage = FullFile(tmp_path / "state" / "streams.db")
        else:
            server = stack.enter_context(RedisServer(tmp_path))
            made = RedisAway(server) if request.param == "redis away" else FullRedis(server)
        yield made
        await made.aclose()
