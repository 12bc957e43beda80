"""The one place with module state: engines, streams and quota of this process, bound to the loop that serves.

Everything is made on first use (daphne sends no lifespan events; `AppConfig.ready()` also runs for migrate). In a
process with several event loops one after the other (tests), the newest loop has it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from pathlib import Path
from typing import Any

import structlog

from streamserve.clients.base import EngineClient
from streamserve.clients.factory import make_client
from streamserve.clients.process.client import ProcessClient
from streamserve.conf import LOG_SCHEMES, SiteConfig, get_settings
from streamserve.protocol.errors import NotFound
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.lease.liveness import Workers
from streamserve.streams.log.base import EventLog, LogUnavailable, MemoryLog
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.quota import StreamQuota
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from streamserve.web import records as usage
from streamserve.web.audit import WatchAudit
from streamserve.web.auth import Principal, salt_of
from streamserve.web.lease_rows import RowClaims, running_of
from streamserve.web.permissions import PermissionChecks
from streamserve.web.reaper import Reaper

log = structlog.get_logger("streamserve")

LOG_FILE, WORKERS_FOLDER = "streams.sqlite3", "workers"  # in STATE_DIR
ACTIONS = ("pause", "resume", "drain")


def client_for(settings: SiteConfig, alias: str) -> EngineClient:
    """Return a new client of the model's engine, as CLIENT says: in a process of its own, or in this one."""
    if settings.client == "process":
        return ProcessClient(settings.engine_spec(alias))
    entry = settings.models[alias]
    return make_client(entry.model, entry.engine, step_delay_seconds=settings.echo_step_seconds)


def log_for(settings: SiteConfig) -> EventLog:
    """Return a new log of streams' events, as LOG says."""
    if settings.log == "memory":
        return MemoryLog()
    if settings.log.startswith(LOG_SCHEMES):
        from streamserve.streams.log.redis_log import RedisLog  # needs the package redis

        longest = max(settings.streams.retention_seconds, settings.streams.resume_window_seconds)
        return RedisLog(settings.log, retention_seconds=2 * longest)
    return FileLog(Path(settings.state_dir) / LOG_FILE)


def workers_for(settings: SiteConfig) -> Workers | None:
    """Return this process as a worker, under a new id. None where streams are in its memory: nobody shares them."""
    if settings.log == "memory":
        return None
    folder = Path(settings.state_dir) / WORKERS_FOLDER
    if settings.log.startswith(LOG_SCHEMES):
        from streamserve.streams.lease.redis_liveness import RedisWorkers  # needs the package redis

        return RedisWorkers(folder, settings.log)
    return Workers(folder)


async def check_log(event_log: EventLog) -> list[str]:
    """Return, and log, what would lose answers that the log in Redis has acknowledged, a sentence each.

    Answers are served all the same, if Redis can be reached.
    """
    complaints: list[str] = []
    try:
        complaints += await event_log.check()
    except LogUnavailable as error:
        complaints.append(f"{error.message} No answer can begin until it is back.")
    for complaint in complaints:
        log.warning("stream_log_unsafe", complaint=complaint)
    return complaints


class Runtime:
    """What serves, on one event loop."""

    def __init__(self, settings: SiteConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.loop = loop
        self.on_drain: set[Callable[[], None]] = set()  # open WebSockets
        self.log = log_for(settings)
        self.checking: asyncio.Task[list[str]] | None = None
        if settings.log.startswith(LOG_SCHEMES):
            self.checking = loop.create_task(check_log(self.log), name="check of the log", context=Context())
        self.workers = workers_for(settings)
        claims = None if self.workers is None else RowClaims(self.workers)
        self.clients: dict[str, EngineClient] = {alias: client_for(settings, alias) for alias in settings.models}
        self.streams = Streams(self.clients, self.log, settings.streams, on_finished=self._finished, claims=claims)
        self.quota = StreamQuota(settings.limits, self.streams, running=None if self.workers is None else running_of)
        self.watches = WatchAudit(self.streams)
        self.rights = PermissionChecks(self.streams, self.watches)
        self.sweep = None if self.workers is None else Reaper(self.streams, self.workers)
        if self.sweep is not None:
            self.sweep.start()

    async def control_engine(self, alias: str, action: str) -> str:
        """Pause, resume or drain the engine of a model, for everybody; return the state it is in then."""
        if alias not in self.clients or action not in ACTIONS:
            raise NotFound(f"There is no model {alias!r} to {action} here.", code="model_not_found")
        client = self.clients[alias]
        await client.control(action)
        return client.describe().state

    async def start_stream(
        self, principal: Principal, request: GenerateRequest, *, on_disconnect: str = "park"
    ) -> Stream:
        """Start an answer for `principal`, within its quota, and write its row. Raises what the client is told."""
        self.streams.writer.refuse_if_down()
        request = dataclasses.replace(request, tenant=principal.tenant, salt=salt_of(principal.tenant))
        if request.model in self.clients:
            self.clients[request.model].start()
        async with self.quota.place_for(principal.owner):
            stream = await self.streams.start(
                request, owner=principal.owner, tenant=principal.tenant, on_disconnect=on_disconnect
            )
        await self._record_start(stream)
        self.rights.ensure_running()
        return stream

    async def _record_start(self, stream: Stream) -> None:
        """Write the row before the client learns the id. Without a row there is no owner: the stream is ended."""
        try:
            worker_id = "" if self.workers is None else self.workers.own_id
            await _outside_request(usage.record_start(stream, worker_id))
        except BaseException:
            await stream.stop(None)
            raise
        if stream.terminal is not None:  # it ended while its row was written, and found no row to finish
            await self._finished(stream)

    async def _finished(self, stream: Stream) -> None:
        await _outside_request(usage.record_finish(stream, self.log if self.settings.store else None))

    async def aclose(self) -> None:
        """End every stream and engine. For tests, and for servers that say when they stop."""
        if self.checking is not None:
            self.checking.cancel()
            await asyncio.gather(self.checking, return_exceptions=True)
        await self.rights.aclose()
        await self.watches.aclose()
        if self.sweep is not None:
            await self.sweep.aclose()
        await self.streams.aclose()
        for client in self.clients.values():
            await client.aclose()
        await self.log.aclose()
        if self.workers is not None:
            await asyncio.to_thread(self.workers.close)


async def _outside_request(work: Awaitable[Any]) -> Any:
    """Await `work` outside the request's context: asgiref would else keep a thread for a request that has ended."""

    async def run() -> Any:
        return await work

    # Shielded: a client who leaves while its row is written must not leave a row that nobody finishes.
    return await asyncio.shield(asyncio.get_running_loop().create_task(run(), context=Context()))


_runtime: Runtime | None = None  # touched on the event loop only


def get_runtime() -> Runtime:
    """Return the runtime of the running loop, making it when there is none yet."""
    global _runtime
    loop = asyncio.get_running_loop()
    if _runtime is None or _runtime.loop is not loop:
        _runtime = Runtime(get_settings(), loop)
    return _runtime


def get_streams() -> Streams:
    """Return the streams of this process."""
    return get_runtime().streams


def get_clients() -> Mapping[str, EngineClient]:
    """Return the engine clients of this process, by model alias."""
    return get_runtime().clients


def start_loading() -> None:
    """Begin loading every model that has not begun; returns at once."""
    for client in get_clients().values():
        client.start()


def begin_to_drain() -> None:
    """Have WebSockets end once nothing is shown on them. For servers that begin to go down; on the loop."""
    if _runtime is not None:
        for begin_to_leave in list(_runtime.on_drain):
            begin_to_leave()


def shut_down_streams() -> None:
    """End what streams here: what the log keeps goes on at another worker. For servers that go down; on the loop."""
    if _runtime is not None:
        _runtime.streams.shut_down()


async def reset() -> None:
    """Close what there is and forget it; the next use reads the settings again. For tests."""
    global _runtime
    runtime, _runtime = _runtime, None
    if runtime is not None and runtime.loop is asyncio.get_running_loop():
        await runtime.aclose()
