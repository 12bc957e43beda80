"""`SiteWork`: the durable work of a site as its web processes see it: the services of routes, and an embedded worker.

Of one event loop. A worker of its own (`manage.py streamserve_worker`) is made of the same parts, by `new_worker`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, MutableMapping
from contextvars import Context
from dataclasses import replace

from streamserve.api.answers import Answers, rows_config
from streamserve.clients.pipeline.journal import Memo
from streamserve.conf import SiteConfig
from streamserve.keys import salt_of
from streamserve.streams.lease.liveness import Liveness
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.registry import Streams
from streamserve.work.batches import Batches
from streamserve.work.files import Files
from streamserve.work.jobs import Jobs
from streamserve.work.kinds import kinds_of
from streamserve.work.worker import Worker

_KEEP_ROW_SECONDS, _MAX_FINISHED_ROWS = 1.0, 32  # a finished row of a batch is read at once


class SiteWork:
    """Jobs, batches and files as routes see them, and the workers that run them here.

    Holds these services, what the rows of batches are answered by (`rows`), and the embedded worker once it exists.
    `ensure_worker` makes it, and `wake` where the log is in memory, which no other process reads; nothing else does.
    `memos` are of the jobs that run here, by their streams' ids; `watch` begins to check the permissions of owners.
    """

    def __init__(
        self,
        settings: SiteConfig,
        answers: Answers,
        liveness: Liveness | None,
        *,
        memos: MutableMapping[str, Memo],
        watch: Callable[[], None],
    ) -> None:
        self.liveness = liveness
        self.jobs = Jobs(answers, settings, self.wake)
        self.batches = Batches(settings, self.wake)
        self.files = Files(settings)
        self.rows = Answers(
            _streams_of_rows(settings, answers),
            rows_config(answers.config),
            salt_of=salt_of,
            rules=answers.rules,
            embedders=answers.embedders,
        )
        self.embedded: Worker | None = None
        self._running: asyncio.Task[None] | None = None
        self._settings, self._answers, self._memos, self._watch = settings, answers, memos, watch

    def new_worker(
        self, names: Collection[str] = (), *, concurrency: int | None = None, grace_seconds: float = 30.0
    ) -> Worker:
        """Return a worker that serves the kinds of work of these names, or all. `concurrency`: of each kind."""
        kinds = kinds_of(
            self._settings,
            answers=self._answers,
            memos=self._memos,
            watch=self._watch,
            files=self.files,
            rows=self.rows,
            names=names,
            concurrency=concurrency,
        )
        return Worker(kinds, self.liveness, grace_seconds=grace_seconds)

    def ensure_worker(self) -> Worker:
        """Run jobs and batches in this process too. Call it on the loop."""
        if self.embedded is None:
            self.embedded = self.new_worker(grace_seconds=0.0)
            running = self.embedded.run()
            self._running = asyncio.get_running_loop().create_task(running, name="worker", context=Context())
        return self.embedded

    def wake(self) -> None:
        """Have what was just queued run at once, where a worker runs here."""
        if self._settings.log == "memory":
            self.ensure_worker()
        if self.embedded is not None:
            self.embedded.wake()

    def stop(self) -> None:
        """Have the embedded worker claim nothing more. What it runs is given back, and costs no attempt."""
        if self.embedded is not None:
            self.embedded.stop()

    async def aclose(self) -> None:
        """End the embedded worker, which gives back what it runs, and the rows of batches."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.rows.streams.aclose()
        await self.rows.streams.log.aclose()


def _streams_of_rows(settings: SiteConfig, answers: Answers) -> Streams:
    """Return the streams of the rows of batches: they have no row of their own, no quota, and a log in memory.

    A row that a kill has cut short is run again from its beginning, so no part of it is kept.
    """
    config = replace(settings.streams, retention_seconds=_KEEP_ROW_SECONDS, max_finished=_MAX_FINISHED_ROWS)
    return Streams(answers.clients, MemoryLog(), config, traces=settings.tracing is not False)
