"""`DjangoSite`: what Django's views and WebSockets serve with: engines, log and streams of this process, and services.

The only module with state. The site belongs to one event loop and is made on first use, because daphne sends no
lifespan events and `AppConfig.ready()` also runs for migrate. Tests run one loop after another; the newest loop
replaces the site.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.conf import settings as django_settings

from streamserve.api.answers import AnswerConfig, Answers, Defaults, rows_config
from streamserve.api.logs import get_logger
from streamserve.api.ops import Ops
from streamserve.api.routes import SERVICES
from streamserve.clients.base import EngineClient
from streamserve.clients.factory import make_client, remote_client
from streamserve.clients.pipeline.journal import Memo
from streamserve.clients.process.client import ProcessClient
from streamserve.conf import LOG_SCHEMES, SiteConfig, get_settings
from streamserve.keys import salt_of
from streamserve.rows import orm
from streamserve.rows.completions import CompletionRows
from streamserve.rows.health import DatabaseHealth
from streamserve.rows.reaper import Reaper, RowAges
from streamserve.rows.store import RowStore
from streamserve.streams.lease.liveness import Liveness
from streamserve.streams.log.base import EventLog, LogUnavailable, MemoryLog
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.registry import Streams
from streamserve.web.audit import WatchAudit
from streamserve.web.auth import WrongKeys
from streamserve.web.live import LiveMetrics
from streamserve.web.permissions import PermissionChecks
from streamserve.web.pipelines import filtered, pipeline_clients
from streamserve.web.sealed import unseal
from streamserve.work.batches import Batches
from streamserve.work.files import Files
from streamserve.work.jobs import Jobs
from streamserve.work.kinds import kinds_of, work_counts
from streamserve.work.worker import Worker

log = get_logger(__name__)

LOG_FILE, WORKERS_FOLDER = "streams.sqlite3", "workers"  # in STATE_DIR
_KEEP_ROW_SECONDS, _MAX_FINISHED_ROWS = 1.0, 32  # a finished row of a batch is read at once


def client_for(settings: SiteConfig, alias: str) -> EngineClient:
    """Return a new client of the model's engine, which CLIENT puts into its own process or into this one.

    The engine of a model with a URL is a server elsewhere.
    """
    remote = settings.models[alias].remote
    if remote is not None:
        return remote_client(remote)
    if settings.client == "process":
        make_state_dir(settings)
        return ProcessClient(settings.engine_spec(alias))
    entry = settings.models[alias]
    return make_client(entry.model, entry.engine, step_delay_seconds=settings.echo_step_seconds)


def make_state_dir(settings: SiteConfig) -> None:
    """Make STATE_DIR with a .gitignore for everything in it. It holds answers, and lies in the project by default."""
    folder = Path(settings.state_dir)
    if settings.state_dir and not folder.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")


def log_for(settings: SiteConfig) -> EventLog:
    """Return a new event log of the kind that LOG names."""
    if settings.log == "memory":
        return MemoryLog()
    if settings.log.startswith(LOG_SCHEMES):
        from streamserve.streams.log.redis_log import RedisLog  # needs the package redis

        longest = max(settings.streams.retention_seconds, settings.streams.resume_window_seconds)
        return RedisLog(settings.log, retention_seconds=2 * longest)
    return FileLog(Path(settings.state_dir) / LOG_FILE)


def row_ages(settings: SiteConfig) -> RowAges:
    """Return how long rows are kept."""
    return RowAges(
        streams_days=settings.keep_streams_days,
        watches_days=settings.keep_watches_days,
        jobs_days=settings.keep_jobs_days,
    )


def workers_folder(settings: SiteConfig) -> Path:
    """Return the folder of the locks of this host's workers."""
    return Path(settings.state_dir) / WORKERS_FOLDER


def liveness_for(settings: SiteConfig) -> Liveness | None:
    """Return this process's liveness lock, under a new id; None where the log is in memory and not shared."""
    if settings.log == "memory":
        return None
    folder = workers_folder(settings)
    if settings.log.startswith(LOG_SCHEMES):
        from streamserve.streams.lease.liveness import RedisLiveness  # needs the package redis

        return RedisLiveness(folder, settings.log)
    return Liveness(folder)


async def check_log(event_log: EventLog) -> list[str]:
    """Return the faults by which the log can lose acknowledged events, one sentence each, and log them.

    They are warnings: answers are served as long as the log can be reached.
    """
    complaints: list[str] = []
    try:
        complaints += await event_log.check()
    except LogUnavailable as error:
        complaints.append(f"{error.message} No answer can begin until it can be reached.")
    for complaint in complaints:
        log.warning("stream_log_unsafe", complaint=complaint)
    return complaints


class DjangoSite:
    """Engine clients, log and streams of one event loop of this process, and the services that routes are given.

    `services` has them by name (see SERVICES in api/routes.py). What it opens it closes in `aclose`, the last first.
    Nothing but `reset` replaces it; it decides nothing about a request.
    """

    def __init__(self, settings: SiteConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.settings: SiteConfig = settings
        self.loop, self.pid = loop, os.getpid()
        self.on_drain: set[Callable[[], None]] = set()  # open WebSockets
        self.wrong_keys = WrongKeys(settings.limits.max_wrong_keys)
        self._closing = AsyncExitStack()
        self._closing.push_async_callback(asyncio.to_thread, orm.close)

        if settings.log != "memory":
            make_state_dir(settings)
        self.liveness = liveness_for(settings)
        if self.liveness is not None:
            self._closing.push_async_callback(asyncio.to_thread, self.liveness.close)
        self.log = log_for(settings)
        self._closing.push_async_callback(self.log.aclose)
        self.checking: asyncio.Task[list[str]] | None = None
        if settings.log.startswith(LOG_SCHEMES):
            self.checking = loop.create_task(check_log(self.log), name="check of the log", context=Context())
            self._closing.push_async_callback(_cancelled, self.checking)
        models = {alias: filtered(settings.models[alias], client_for(settings, alias)) for alias in settings.models}
        self.memos: dict[str, Memo] = {}  # of the jobs that run here, by their streams' ids
        self.clients = {**models, **pipeline_clients(settings, models, self._memo_of)}
        for client in self.clients.values():
            self._closing.push_async_callback(client.aclose)

        self.chats = CompletionRows(self.log, keeps=settings.store, reasoning_field=settings.reasoning_field)
        self.streams = Streams(
            self.clients,
            self.log,
            settings.streams,
            store=RowStore(self.liveness, keeps_text=settings.store, chats=self.chats),
            limits=settings.limits,
            patience={name: one.queue_seconds for name, one in settings.classes.items()},
        )
        self._closing.push_async_callback(self.streams.aclose)
        self.watches = WatchAudit(self.streams)
        self.permissions = PermissionChecks(self.streams, self.watches)
        config = answer_config(settings, self.clients)
        self.answers = Answers(self.streams, config, salt_of=salt_of, on_start=self.permissions.note_start)
        self.rows = Answers(_streams_of_rows(settings, self.clients), rows_config(config), salt_of=salt_of)
        self._closing.push_async_callback(self.rows.streams.log.aclose)
        self._closing.push_async_callback(self.rows.streams.aclose)
        self.files = Files(settings)
        if self.liveness is not None:
            reaper = Reaper(self.streams, self.liveness, row_ages(settings), self.files.purge)
            reaper.start()
            self._closing.push_async_callback(reaper.aclose)
        self._closing.push_async_callback(self.watches.aclose)
        self._database = DatabaseHealth()
        self._closing.push_async_callback(self._database.aclose)
        self._closing.push_async_callback(self.permissions.aclose)
        self.live = LiveMetrics(models, self.streams, are_shared=settings.log != "memory")
        self.live.start()
        self._closing.push_async_callback(self.live.aclose)
        self.ops = Ops(
            self.clients,
            self.streams,
            is_debug=lambda: bool(django_settings.DEBUG),
            health=self._health,
            work=work_counts,
        )
        self.ops.is_draining = _is_draining
        self.jobs = Jobs(self.streams, settings, self.wake_worker)
        self.batches = Batches(settings, self.wake_worker)
        self.worker: Worker | None = None  # embedded

    def _memo_of(self, stream_id: str) -> Memo | None:
        """Return what is kept of a run: of a job that runs here, or of a stream."""
        return self.memos.get(stream_id) or self.streams.memo_of(stream_id)

    @property
    def services(self) -> Mapping[str, object]:
        """What routes are given, by the names of their endpoints' parameters."""
        return {name: getattr(self, name) for name in SERVICES}

    async def _health(self) -> dict[str, str]:
        """Return the states of log and database, for `/readyz`."""
        outage = self.streams.writer.outage
        return {"log": "ok" if outage is None else outage.code, "database": await self._database.state()}

    def ensure_worker(self) -> None:
        """Run jobs and batches in this process too."""
        if self.worker is None:
            self.worker = self.new_worker(grace_seconds=0.0)
            working = self.loop.create_task(self.worker.run(), name="worker", context=Context())
            self._closing.push_async_callback(_cancelled, working)  # it gives back what it runs

    def new_worker(
        self, names: Collection[str] = (), *, concurrency: int | None = None, grace_seconds: float = 30.0
    ) -> Worker:
        """Return a worker that serves the kinds of work of these names, or all. `concurrency`: of each kind."""
        kinds = kinds_of(
            self.settings,
            streams=self.streams,
            memos=self.memos,
            watch=self.permissions.ensure_running,
            files=self.files,
            rows=self.rows,
            names=names,
            concurrency=concurrency,
        )
        return Worker(kinds, self.liveness, grace_seconds=grace_seconds)

    def wake_worker(self) -> None:
        """Have what was just queued run at once, where a worker runs here; a log in memory no other process reads."""
        if self.settings.log == "memory":
            self.ensure_worker()
        if self.worker is not None:
            self.worker.wake()

    async def aclose(self) -> None:
        """Close streams, engine clients and log. For tests, and for servers with a shutdown event."""
        await self._closing.aclose()


def answer_config(settings: SiteConfig, clients: Mapping[str, EngineClient]) -> AnswerConfig:
    """Return how the site's routes answer. A pipeline brings its latency class itself."""
    models = settings.models
    classes = {alias: getattr(models.get(alias, client), "latency_class", "") for alias, client in clients.items()}
    return AnswerConfig(
        limits=settings.limits,
        default_model=settings.default_model,
        defaults=Defaults(
            systems={alias: model.system for alias, model in models.items() if model.system},
            latency_classes={alias: name for alias, name in classes.items() if name},
            route_classes=settings.route_classes,
        ),
        takes_prompt_in_url=settings.prompt_in_url,
        reasoning_field=settings.reasoning_field,
        unseal=unseal,
    )


def _streams_of_rows(settings: SiteConfig, clients: Mapping[str, EngineClient]) -> Streams:
    """Return the streams of the rows of batches: they have no row, no quota, and a log in memory.

    A row that a kill has cut short is run again from its beginning, so nothing of it is kept.
    """
    config = replace(settings.streams, retention_seconds=_KEEP_ROW_SECONDS, max_finished=_MAX_FINISHED_ROWS)
    return Streams(clients, MemoryLog(), config)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


_site: DjangoSite | None = None  # changed on the event loop only
_is_draining = False


def get_site() -> DjangoSite:
    """Return the site of the running loop; make it on the first call."""
    global _site
    loop = asyncio.get_running_loop()
    if _site is None or _site.loop is not loop:
        _site = DjangoSite(get_settings(), loop)
    return _site


def ensure_embedded() -> None:
    """Run jobs here, where they are embedded and no lifespan event came before the first request that is about them."""
    here = get_site()
    if here.settings.jobs.embedded and not _is_draining:
        here.ensure_worker()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop of this process's site while it runs, for calls from other threads; None after a fork."""
    if _site is None or _site.pid != os.getpid() or not _site.loop.is_running():
        return None
    return _site.loop


def get_streams() -> Streams:
    """Return the streams of this process, for a site's own code."""
    return get_site().streams


def start_loading() -> None:
    """Start to load every model; return at once."""
    for client in get_site().clients.values():
        client.start()


async def begin_to_serve() -> None:
    """Run jobs where they are embedded, and start loading; with DEBUG the first page that needs a model does."""
    if not django_settings.DEBUG:
        start_loading()
    if get_settings().jobs.embedded:
        get_site().ensure_worker()


def begin_to_drain() -> None:
    """Fail the probes, refuse what waits for a place, and close each WebSocket once it shows no stream.

    For servers that begin to shut down.
    """
    global _is_draining
    _is_draining = True
    if _site is not None:
        _site.ops.is_draining = True
        _site.streams.begin_to_drain()
        for begin_to_leave in list(_site.on_drain):
            begin_to_leave()
        if _site.worker is not None:
            _site.worker.stop()  # what it runs is given back, and costs no attempt


def shut_down_streams() -> None:
    """End this process's deliveries; readers resume at another worker. For servers that shut down; on the loop."""
    if _site is not None:
        _site.streams.shut_down()


async def reset() -> None:
    """Close the site; the next use reads the settings again. For tests.

    A site whose loop is over cannot be closed; of that, too, no connection to the database is left.
    """
    global _site, _is_draining
    site, _site, _is_draining = _site, None, False
    if site is not None and site.loop is asyncio.get_running_loop():
        await site.aclose()
    else:
        await asyncio.to_thread(orm.close)
