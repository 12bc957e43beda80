"""The kinds of work of a site: `kinds_of` makes them for a worker, `work_counts` counts their rows. asyncio."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from django.db import DatabaseError

from streamserve.api.answers import Answers
from streamserve.api.logs import get_logger
from streamserve.clients.pipeline.journal import Memo
from streamserve.conf import SiteConfig
from streamserve.models import Batch, Job, WebhookDelivery
from streamserve.protocol.errors import DatabaseUnavailable
from streamserve.rows import orm
from streamserve.rows.leases import Work
from streamserve.work.batch_runs import batch_kind
from streamserve.work.files import Files
from streamserve.work.job_runs import job_kind
from streamserve.work.queue import BATCHES, JOBS, WEBHOOKS, Kind
from streamserve.work.webhooks import webhook_kind

log = get_logger(__name__)

# By name, as `--kinds` takes them; the most urgent first.
MODELS: Mapping[str, type[Work]] = MappingProxyType({JOBS: Job, WEBHOOKS: WebhookDelivery, BATCHES: Batch})


def kinds_of(
    settings: SiteConfig,
    *,
    answers: Answers,
    memos: MutableMapping[str, Memo],
    watch: Callable[[], None],
    files: Files,
    rows: Answers,
    names: Collection[str] = (),
    concurrency: int | None = None,
) -> list[Kind[Any]]:
    """Return the kinds of these names, or all, in the order of `MODELS`. `concurrency`: of each, if not its own.

    `answers` and `memos` are what jobs run on, and `watch` begins to check the permissions of their owners; `files` and
    `rows`, which answers rows as requests, are what batches run on.
    """
    kinds: list[Kind[Any]] = [
        job_kind(answers, memos, watch, settings.jobs),
        webhook_kind(settings.webhooks),
        batch_kind(files, rows, at_once=settings.batches.concurrency),
    ]
    served = (kind for kind in kinds if not names or kind.name in names)
    return [replace(kind, concurrency=concurrency or kind.concurrency) for kind in served]


async def work_counts() -> dict[str, dict[str, int]]:
    """Return how many rows of each kind wait and run, in all processes; nothing while the database is away."""

    def count() -> dict[str, dict[str, int]]:
        return {
            name: {state: model._default_manager.filter(state=state).count() for state in ("queued", "running")}
            for name, model in MODELS.items()
        }

    try:
        return await orm.read(count)
    except (DatabaseError, DatabaseUnavailable):
        log.warning("work_not_counted", exc_info=True)
        return {}
