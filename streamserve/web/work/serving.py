"""`KINDS`, the kinds of durable work of a site, and `worker_for`, a worker that serves them.

A worker is a process of its own (`manage.py streamserve_worker`), or a task of the web process where JOBS is embedded.
To add a kind: a class as `RowKind`, and a line in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from django.db import DatabaseError

from streamserve.api.logs import get_logger
from streamserve.durable.leases import Work
from streamserve.streams.config import JobConfig
from streamserve.web.batches.work import BatchKind
from streamserve.web.rows import orm
from streamserve.web.work.jobs import Jobs
from streamserve.web.work.kinds import Kind, RetryPolicy
from streamserve.web.work.webhooks import Webhooks
from streamserve.web.work.worker import Presence, Worker

if TYPE_CHECKING:
    from streamserve.web.site import DjangoSite


log = get_logger(__name__)


def _jobs(site: DjangoSite) -> Kind:
    config = site.settings.jobs
    return Jobs(site.streams, site.memos, site.permissions, concurrency=config.concurrency, retry=retry_of(config))


def retry_of(config: JobConfig) -> RetryPolicy:
    """Return how often a job is tried."""
    return RetryPolicy(
        max_attempts=config.max_attempts, first_seconds=config.retry_seconds, max_seconds=config.max_retry_seconds
    )


# By name, as `--kinds` takes them, the most urgent first. Each is made once for a worker, with its site.
KINDS: Mapping[str, Callable[[DjangoSite], Kind]] = MappingProxyType(
    {"jobs": _jobs, "webhooks": lambda site: Webhooks(site.settings.webhooks), "batch": BatchKind}
)


_MODELS: Mapping[str, type[Work]] = {kind.name: kind.model for kind in (Jobs, Webhooks, BatchKind)}


async def work_counts() -> dict[str, dict[str, int]]:
    """Return how many rows of each kind wait and run, in all processes; nothing while the database is away."""

    def count() -> dict[str, dict[str, int]]:
        return {
            name: {state: model._default_manager.filter(state=state).count() for state in ("queued", "running")}
            for name, model in _MODELS.items()
        }

    try:
        return await orm.call(count)
    except DatabaseError:
        log.warning("work_not_counted", exc_info=True)
        return {}


def worker_for(
    site: DjangoSite, names: Sequence[str] = (), *, concurrency: int | None = None, grace_seconds: float = 30.0
) -> Worker:
    """Return a worker of the site that serves the kinds of these names, or all. `concurrency`: of each kind."""
    kinds = [make(site) for name, make in KINDS.items() if not names or name in names]
    for kind in kinds:
        kind.concurrency = concurrency or kind.concurrency
    presence = Presence(
        site.liveness,
        kinds=",".join(kind.name for kind in kinds),
        concurrency=sum(kind.concurrency for kind in kinds),
    )
    return Worker(kinds, presence, grace_seconds=grace_seconds)
