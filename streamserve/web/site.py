"""`DjangoSite`: the `Site` of Django's views and WebSockets: engines, log, streams and quota of this process.

The only module with state. The site belongs to one event loop and is made on first use, because daphne sends no
lifespan events and `AppConfig.ready()` also runs for migrate. Tests run one loop after another; the newest loop
replaces the site.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from contextvars import Context
from pathlib import Path
from typing import Any

from django.conf import settings as django_settings

from streamserve.api.call import Body, Call, Caller, Found
from streamserve.api.idempotency import StartOnce
from streamserve.api.logs import get_logger
from streamserve.clients.base import EngineClient
from streamserve.clients.factory import make_client, remote_client
from streamserve.clients.pipeline.journal import Memo
from streamserve.clients.process.client import ProcessClient
from streamserve.conf import LOG_SCHEMES, SiteConfig, get_settings
from streamserve.dialects.native import query_values
from streamserve.dialects.pace import pace_of_query
from streamserve.keys import salt_of
from streamserve.protocol.errors import NotFound, no_stream
from streamserve.protocol.requests import LATENCY_CLASSES, GenerateRequest, with_system
from streamserve.rows import orm
from streamserve.rows.completions import CompletionRows
from streamserve.rows.health import DatabaseHealth
from streamserve.rows.reaper import Reaper, RowAges
from streamserve.rows.store import RowStore
from streamserve.streams.lease.liveness import Liveness
from streamserve.streams.log.base import EventLog, LogUnavailable, MemoryLog
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.quota import Places
from streamserve.streams.registry import Streams
from streamserve.streams.store import Admission, Once
from streamserve.streams.stream import Stream
from streamserve.web.audit import WatchAudit
from streamserve.web.auth import WrongKeys
from streamserve.web.live import LiveMetrics
from streamserve.web.permissions import PermissionChecks, watching_user
from streamserve.web.pipelines import filtered, pipeline_clients
from streamserve.web.row_site import RowSite
from streamserve.web.sealed import unseal
from streamserve.work.batches import Batches
from streamserve.work.files import Files
from streamserve.work.jobs import Jobs
from streamserve.work.worker import Worker, kinds_of, work_counts, worker_for

log = get_logger(__name__)

LOG_FILE, WORKERS_FOLDER = "streams.sqlite3", "workers"  # in STATE_DIR
ACTIONS = ("pause", "resume", "drain")


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
    """See `Site` and `AuditedSite` in api/call.py. Of one event loop."""

    def __init__(self, settings: SiteConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.settings: SiteConfig = settings
        self.loop, self.pid = loop, os.getpid()
        self.limits, self.default_model = settings.limits, settings.default_model
        self.wrong_keys = WrongKeys(settings.limits.max_wrong_keys)
        self.on_drain: set[Callable[[], None]] = set()  # open WebSockets
        if settings.log != "memory":
            make_state_dir(settings)
        self.log = log_for(settings)
        self.checking: asyncio.Task[list[str]] | None = None
        if settings.log.startswith(LOG_SCHEMES):
            self.checking = loop.create_task(check_log(self.log), name="check of the log", context=Context())
        self.liveness = liveness_for(settings)
        models = {alias: filtered(settings.models[alias], client_for(settings, alias)) for alias in settings.models}
        self.memos: dict[str, Memo] = {}  # of the jobs that run here, by their streams' ids
        self.clients = {**models, **pipeline_clients(settings, models, self.memos)}
        self.stored_chats = CompletionRows(self.log, keeps=settings.store, reasoning_field=settings.reasoning_field)
        store = RowStore(self.liveness, keeps_text=settings.store, chats=self.stored_chats)
        self.streams = Streams(
            self.clients,
            self.log,
            settings.streams,
            store=store,
            limits=settings.limits,
            patience={name: one.queue_seconds for name, one in settings.classes.items()},
        )
        self._start_once = StartOnce(self.streams)
        self.files = Files(settings)
        self.batches = Batches(settings, self.wake_worker)
        self._row_site: RowSite | None = None
        self.audit = WatchAudit(self.streams)
        self.live = LiveMetrics(models, self.streams, are_shared=settings.log != "memory")
        self.live.start()
        self.permissions = PermissionChecks(self.streams, self.audit)
        self.database = DatabaseHealth()
        self.jobs = Jobs(self.streams, settings, self.wake_worker)
        self.worker: Worker | None = None  # embedded
        self._working: asyncio.Task[None] | None = None
        self.reaper = (
            None if self.liveness is None else Reaper(self.streams, self.liveness, row_ages(settings), self.files.purge)
        )
        if self.reaper is not None:
            self.reaper.start()

    def ensure_worker(self) -> None:
        """Run jobs and batches in this process too."""
        if self.worker is None:
            self.worker = self.new_worker(grace_seconds=0.0)
            self._working = self.loop.create_task(self.worker.run(), name="worker", context=Context())

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
            rows=self.row_site,
        )
        served = [kind for kind in kinds if not names or kind.name in names]
        return worker_for(served, self.liveness, concurrency=concurrency, grace_seconds=grace_seconds)

    def wake_worker(self) -> None:
        """Have what was just queued run at once, where a worker runs here; a log in memory no other process reads."""
        if self.settings.log == "memory":
            self.ensure_worker()
        if self.worker is not None:
            self.worker.wake()

    async def control_engine(self, alias: str, action: str) -> str:
        """Pause, resume or drain the engine of a model for all workers; return its state afterwards."""
        if alias not in self.clients or action not in ACTIONS:
            raise NotFound(f"There is no model {alias!r} to {action} here.", code="model_not_found")
        client = self.clients[alias]
        await client.control(action)
        return client.describe().state

    async def start(
        self,
        principal: Caller,
        request: GenerateRequest,
        on_disconnect: str = "park",
        *,
        received_at: float | None = None,
        once: Once | None = None,
        begins_unloaded: bool = False,
        places: Places | None = None,
    ) -> Stream:
        """Start an answer for `principal`, within its quota. Raises StreamserveError."""
        admission = Admission(
            owner=principal.owner,
            tenant=principal.tenant,
            counted_as=principal.counted_as,
            salt=salt_of(principal.tenant),
            on_disconnect=on_disconnect,
            received_at=received_at,
            once=once,
            begins_unloaded=begins_unloaded,
        )
        start = self.streams.start if once is None else self._start_once
        stream = await start(self.prepared(request), admission, places)
        self.permissions.note_start(stream, principal)
        return stream

    def with_own_system(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the system prompt that the settings give its model, unless it brings one."""
        served = self.settings.models.get(request.model)
        return request if served is None or not served.system else with_system(request, served.system)

    def prepared(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the system prompt of its model, which begins to load if it has not."""
        if request.model in self.clients:
            self.clients[request.model].start()
        return self.with_own_system(request)

    @property
    def row_site(self) -> RowSite:
        """What answers the rows of batches; made on its first use."""
        if self._row_site is None:
            self._row_site = RowSite(self)
        return self._row_site

    def default_class(self, route: str, model: str) -> str:
        """Return the latency class of requests that name none: the route's, the model's, or that of chats."""
        served = self.settings.models.get(model)
        own = served.latency_class if served is not None else getattr(self.clients.get(model), "latency_class", "")
        return self.settings.route_classes.get(route) or own or LATENCY_CLASSES[0]

    async def find(self, caller: Caller, *, stream_id: str = "", log_id: str = "") -> Found:
        """Return the stream with its row, by one query. Raises NotFound for an unknown id and for another tenant's."""
        record = await self.streams.store.find(stream_id=stream_id, log_id=log_id)
        if record is None or record.tenant != caller.tenant:
            raise no_stream()
        return Found(stream=await self.streams.reach(record.id, record), record=record)

    async def find_for_watcher(self, caller: Caller, stream_id: str) -> tuple[str, Found]:
        """Return the caller's user name and the stream, of any tenant. Raises NotFound unless the user may watch."""
        user = await orm.of_site(watching_user, caller.owner)
        record = None if user is None else await self.streams.store.find(stream_id=stream_id)
        if record is None:
            raise no_stream()
        return user.get_username(), Found(stream=await self.streams.reach(record.id, record), record=record)

    async def watch(self, call: Call, username: str, stream: Stream, after: int) -> Body:
        """Record the watch and return its delivery."""
        pace, address = pace_of_query(query_values(call.query())), call.address[:45]
        delivery = await self.audit.begin(call.caller, username, stream, after=after, address=address, pace=pace)
        self.permissions.ensure_running()
        return delivery

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down and refuses new answers."""
        return _is_draining

    @property
    def is_debug(self) -> bool:
        """Whether responses may name folders and libraries."""
        return bool(django_settings.DEBUG)

    @property
    def takes_prompt_in_url(self) -> bool:
        """Whether `GET /streams/new?prompt=` starts answers."""
        return self.settings.prompt_in_url

    @property
    def reasoning_field(self) -> str:
        """Where chat completions show thinking."""
        return self.settings.reasoning_field

    @staticmethod
    def unseal(sealed: str) -> str:
        """Open the system prompt of a chat element's page. Raises BadRequest."""
        return unseal(sealed)

    async def health(self) -> dict[str, Any]:
        """Return the states of log and database, for `/readyz`."""
        outage = self.streams.writer.outage
        return {"log": "ok" if outage is None else outage.code, "database": await self.database.state()}

    async def work(self) -> Mapping[str, Mapping[str, int]]:
        """Return how much durable work waits and runs, in all processes; nothing while the database is away."""
        return await work_counts()

    async def aclose(self) -> None:
        """Close streams, engine clients and log. For tests, and for servers with a shutdown event."""
        if self.checking is not None:
            self.checking.cancel()
            await asyncio.gather(self.checking, return_exceptions=True)
        if self._working is not None:  # it gives back what it runs
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        await self.live.aclose()
        await self.permissions.aclose()
        await self.database.aclose()
        await self.audit.aclose()
        if self.reaper is not None:
            await self.reaper.aclose()
        if self._row_site is not None:
            await self._row_site.aclose()
        await self.streams.aclose()
        for client in self.clients.values():
            await client.aclose()
        await self.log.aclose()
        if self.liveness is not None:
            await asyncio.to_thread(self.liveness.close)
        await asyncio.to_thread(orm.close)


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
