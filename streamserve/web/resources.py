"""What a site is made of, by its settings: engine clients, log, liveness, folder. Commands make them without a site.

Functions only: what they return belongs to the caller, who closes it.
"""

from __future__ import annotations

from pathlib import Path

from streamserve.api.logs import get_logger
from streamserve.clients.base import EmbeddingClient, EngineClient
from streamserve.clients.factory import make_client, make_embedder, remote_client
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.embedder import ProcessEmbedder
from streamserve.conf import LOG_SCHEMES, SiteConfig
from streamserve.streams.lease.liveness import Liveness
from streamserve.streams.log.base import UNFINISHED_SECONDS, EventLog, LogUnavailable, MemoryLog
from streamserve.streams.log.file_log import FileLog

log = get_logger(__name__)

LOG_FILE, WORKERS_FOLDER = "streams.sqlite3", "workers"  # in STATE_DIR


def client_for(settings: SiteConfig, alias: str) -> EngineClient:
    """Return a new client of the model's engine, which CLIENT puts into its own process or into this process.

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


def embedder_for(settings: SiteConfig, alias: str) -> EmbeddingClient:
    """Return a new client of the embedding model, where CLIENT puts it."""
    if settings.client == "process":
        make_state_dir(settings)
        return ProcessEmbedder(settings.engine_spec(alias))
    return make_embedder(settings.embedding_models[alias].model, step_delay_seconds=settings.echo_step_seconds)


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

        kept_seconds = 2 * max(settings.streams.retention_seconds, settings.streams.resume_window_seconds)
        if settings.conversations:  # a purge drops a log earlier, but never before its answer's message is written
            kept_seconds += UNFINISHED_SECONDS
        return RedisLog(settings.log, retention_seconds=kept_seconds)
    return FileLog(Path(settings.state_dir) / LOG_FILE)


def workers_folder(settings: SiteConfig) -> Path:
    """Return the folder of the locks of this host's processes."""
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
