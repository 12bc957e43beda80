"""`DjangoSite`: what Django's views and WebSockets serve with: engines, log and streams of this process, and services.

The site is this module's state, one for the process. It belongs to one event loop and is made on first use, because
daphne sends no lifespan events and `AppConfig.ready()` also runs for migrate. Tests run one loop after another; the
newest loop replaces the site.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured

from streamserve import __version__
from streamserve.api.answers import AnswerConfig, Answers, Defaults
from streamserve.api.embedders import Embedders
from streamserve.api.host_figures import HostFigures
from streamserve.api.logs import get_logger
from streamserve.api.mcp import McpEndpoint
from streamserve.api.openai.responses import LocalResponses
from streamserve.api.ops import Ops
from streamserve.clients.base import EngineClient
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.clients.pipeline.journal import Memo
from streamserve.conf import ECHO_PATH, LOG_SCHEMES, SiteConfig, get_settings
from streamserve.keys import salt_of
from streamserve.protocol.errors import Refused, SiteMisconfigured
from streamserve.rows import orm, rates
from streamserve.rows.answer_messages import AnswerMessages
from streamserve.rows.completions import CompletionRows
from streamserve.rows.conversation_store import ConversationRows
from streamserve.rows.health import DatabaseHealth
from streamserve.rows.reaper import Reaper, Sweeper, purge_before, row_ages
from streamserve.rows.responses import ResponseRows
from streamserve.rows.shares import ShareRows
from streamserve.rows.store import RowStore
from streamserve.rows.threads import ThreadRows
from streamserve.rows.titles import Titles
from streamserve.rows.usage import UsageRows, note_embedded
from streamserve.streams.interrupts import InterruptLog
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.registry import Streams
from streamserve.web import resources
from streamserve.web.audit import WatchAudit
from streamserve.web.auth import WrongKeys
from streamserve.web.caller_rules import SiteRules
from streamserve.web.live.metrics import LiveMetrics
from streamserve.web.moderation import SiteModerator
from streamserve.web.permissions import PermissionChecks
from streamserve.web.sealed import unseal
from streamserve.web.served_models import open_models
from streamserve.web.services import Services, served_by
from streamserve.work.attachments import Attachments
from streamserve.work.kinds import work_counts
from streamserve.work.site_work import SiteWork

log = get_logger(__name__)

FIGURES_FOLDER = "figures"  # in STATE_DIR


class DjangoSite:
    """Engine clients, log and streams of one event loop of this process, and the services that routes are given.

    What it opens it closes in `aclose`, the last first. Nothing but `reset` replaces it; it decides nothing about a
    request.
    """

    def __init__(self, settings: SiteConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.settings: SiteConfig = settings
        served = served_by(settings)
        self.loop, self.pid = loop, os.getpid()
        self.on_drain: set[Callable[[], None]] = set()  # open WebSockets
        self.wrong_keys = WrongKeys(settings.limits.max_wrong_keys)
        self._closing = AsyncExitStack()
        self._closing.push_async_callback(asyncio.to_thread, orm.close)

        if settings.log != "memory":
            resources.make_state_dir(settings)
        liveness = resources.liveness_for(settings)
        if liveness is not None:
            self._closing.push_async_callback(asyncio.to_thread, liveness.close)
        folder = Path(settings.state_dir) / FIGURES_FOLDER if liveness is not None else None
        host = HostFigures(lambda: self.services.ops.counted(), liveness, folder)
        self._closing.push_async_callback(host.aclose)
        self.log = resources.log_for(settings)
        self._closing.push_async_callback(self.log.aclose)
        if settings.log.startswith(LOG_SCHEMES):
            checking = loop.create_task(resources.check_log(self.log), name="check of the log", context=Context())
            self._closing.push_async_callback(_cancelled, checking)
        memos: dict[str, Memo] = {}

        def memo_of(stream_id: str) -> Memo | None:
            """Return what is kept of a run: of a job that runs here, or of a stream."""
            return memos.get(stream_id) or self.streams.memo_of(stream_id)

        interrupts = InterruptLog(self.log, settings.streams, forgets=liveness is None)
        models = open_models(settings, self._closing, memo_of, interrupts)
        self.clients = models.clients
        wait_seconds = settings.streams.engine_wait_seconds
        embedders = Embedders(
            models.embedding, settings.limits, wait_seconds=wait_seconds, on_begin=rates.enter, on_end=note_embedded
        )

        chats = CompletionRows(self.log, keeps=settings.store, reasoning_field=settings.reasoning_field)
        rows = None  # of responses: without them they go with the streams of this process
        if liveness is not None or settings.store:
            before = partial(purge_before, settings.streams)
            rows = ResponseRows(self.log, keeps=settings.store, purge_before=before)
        messages = AnswerMessages(self.log) if settings.conversations else None
        titles = titles_of(settings, self.clients)
        if titles is not None:
            self._closing.push_async_callback(titles.aclose)
        traces = settings.tracing is not False
        self.streams = Streams(
            self.clients,
            self.log,
            settings.streams,
            store=RowStore(
                liveness,
                keeps_text=settings.store,
                chats=chats,
                messages=messages,
                titles=titles,
                max_conversations=settings.limits.max_conversations,
                responses=rows,
            ),
            limits=settings.limits,
            patience={name: one.queue_seconds for name, one in settings.classes.items()},
            interrupts=interrupts,
            traces=traces,
        )
        self._closing.push_async_callback(self.streams.aclose)
        # Of answers within runs (web/calls/transport.py): in the run's place, without rows.
        self.inner_streams = Streams(self.clients, MemoryLog(), settings.streams, traces=traces)
        self._closing.push_async_callback(self.inner_streams.aclose)
        conversations = ConversationRows(settings.limits) if "conversations" in served else None
        watches = WatchAudit(self.streams)
        self.permissions = PermissionChecks(self.streams, watches)
        config = answer_config(settings, self.clients)
        answers = Answers(
            self.streams,
            config,
            salt_of=salt_of,
            rules=SiteRules(settings),
            on_start=self.permissions.note_start,
            embedders=embedders,
        )
        self.work = SiteWork(settings, answers, liveness, memos=memos, watch=self.permissions.ensure_running)
        attachments = Attachments(settings)
        if liveness is not None:
            purges = [self.work.files.purge, attachments.purge]
            if rows is not None:
                purges.append(rows.purge)
            reaper = Reaper(self.streams, liveness, row_ages(settings), purges)
            reaper.start()
            self._closing.push_async_callback(reaper.aclose)
        else:
            sweeper = Sweeper(self.streams, row_ages(settings))
            sweeper.start()
            self._closing.push_async_callback(sweeper.aclose)
        self._closing.push_async_callback(watches.aclose)
        database = DatabaseHealth()
        self._closing.push_async_callback(database.aclose)
        self._closing.push_async_callback(self.permissions.aclose)
        self.live = LiveMetrics(
            models.engines,
            self.streams,
            are_shared=settings.log != "memory",
            embedders=models.embedding,
            host=host,
            shared=models.shared,
            alerts=settings.alerts,
        )
        self.live.start()
        self._closing.push_async_callback(self.live.aclose)
        ops = Ops(
            self.clients,
            self.streams,
            embedders=models.embedding,
            host=host,
            shared=models.shared,
            is_debug=lambda: bool(django_settings.DEBUG),
            health=lambda: _health(self.streams, database),
            work=work_counts,
        )
        ops.is_draining = _is_draining
        self.services = Services(
            answers=answers,
            ops=ops,
            jobs=self.work.jobs,
            files=self.work.files,
            batches=self.work.batches,
            threads=ThreadRows(settings.limits, keeps_conversations=settings.conversations),
            responses=rows or LocalResponses(self.streams),
            watches=watches,
            chats=chats,
            conversations=conversations,
            shares=ShareRows() if "shares" in served else None,
            attachments=attachments if "attachments" in served else None,
            moderator=SiteModerator(settings.moderation) if "moderator" in served else None,
            mcp_endpoint=_mcp_endpoint(settings) if "mcp_endpoint" in served else None,
            usage=UsageRows() if "usage" in served else None,
        )
        host.start()
        self._closing.push_async_callback(self.work.aclose)

    async def aclose(self) -> None:
        """Close streams, engine clients and log. For tests, and for servers with a shutdown event."""
        await self._closing.aclose()


def titles_of(settings: SiteConfig, clients: Mapping[str, EngineClient]) -> Titles | None:
    """Return what makes titles; None where they are the first words. An echo engine makes none."""
    if not settings.conversations or settings.titles != "model":
        return None
    models = settings.models
    echoes = {alias for alias, entry in models.items() if models[entry.adapter_of or alias].model.path == ECHO_PATH}
    systems = {alias: entry.system for alias, entry in models.items() if entry.system}
    return Titles({alias: client for alias, client in clients.items() if alias not in echoes}, systems)


def answer_config(settings: SiteConfig, clients: Mapping[str, EngineClient]) -> AnswerConfig:
    """Return how the site's routes answer. A pipeline brings its latency class itself."""
    models = settings.models
    classes = {alias: model.default_class for alias, model in models.items()}
    classes |= {alias: client.default_class for alias, client in clients.items() if isinstance(client, PipelineClient)}
    return AnswerConfig(
        limits=settings.limits,
        default_model=settings.default_model,
        defaults=Defaults(
            systems={alias: model.system for alias, model in models.items() if model.system},
            latency_classes={alias: name for alias, name in classes.items() if name},
            route_classes=settings.route_classes,
        ),
        takes_prompt_in_url=settings.prompt_in_url,
        takes_timings=settings.reader_timings,
        gap_budgets={name: one.gap_p95_seconds for name, one in settings.classes.items() if one.gap_p95_seconds},
        reasoning_field=settings.reasoning_field,
        unseal=unseal,
    )


def _mcp_endpoint(settings: SiteConfig) -> McpEndpoint:
    return McpEndpoint(version=__version__, secret_of=salt_of, origins=settings.cors_origins)


async def _health(streams: Streams, database: DatabaseHealth) -> dict[str, str]:
    """Return the states of log and database, for `/readyz`."""
    outage = streams.writer.outage
    return {"log": "ok" if outage is None else outage.code, "database": await database.state()}


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


_site: DjangoSite | None = None  # changed on the event loop only
_is_draining = False


def get_site() -> DjangoSite:
    """Return the site of the running loop; make it on the first call.

    Raises ImproperlyConfigured, also for a folder that cannot be used; the next call tries again.
    """
    global _site
    loop = asyncio.get_running_loop()
    if _site is None or _site.loop is not loop:
        settings = get_settings()
        try:
            _site = DjangoSite(settings, loop)
        except OSError as error:
            raise ImproperlyConfigured(
                f"The site's folder cannot be used: {error}. Let this user write to {settings.state_dir}, or name "
                'another folder in STREAMSERVE["STATE_DIR"].'
            ) from error
    return _site


def misconfigured(problem: ImproperlyConfigured, request_id: str, path: str) -> Refused:
    """Log the problem, and return the error for the caller, who is not told what is wrong."""
    log.error("site_misconfigured", request_id=request_id, path=path, problem=str(problem))
    return SiteMisconfigured(
        "This site's settings are wrong. On the server `manage.py check` names them, and so does the log, under "
        f"{request_id}."
    )


def ensure_embedded() -> None:
    """Run jobs here, where they are embedded and no lifespan event came before the first request that is about them."""
    here = get_site()
    if here.settings.jobs.embedded and not _is_draining:
        here.work.ensure_worker()


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
    for client in get_site().services.ops.all.values():
        client.start()


async def begin_to_serve() -> None:
    """Run jobs where they are embedded, and start loading; with DEBUG the first page that needs a model does.

    A site whose settings are wrong serves its own pages all the same, and each answer of ours says so.
    """
    try:
        if not django_settings.DEBUG:
            start_loading()
        if get_settings().jobs.embedded:
            get_site().work.ensure_worker()
    except ImproperlyConfigured as error:
        log.error("site_misconfigured", problem=str(error))


def begin_to_drain() -> None:
    """Fail the probes, refuse what waits for a place, and close each WebSocket once it shows no stream.

    For servers that begin to shut down.
    """
    global _is_draining
    _is_draining = True
    if _site is not None:
        _site.services.ops.is_draining = True
        _site.streams.begin_to_drain()
        for begin_to_leave in list(_site.on_drain):
            begin_to_leave()
        _site.work.stop()


def shut_down_streams() -> None:
    """End this process's deliveries; readers resume at another process. For servers that shut down; on the loop."""
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
