"""`Worker`: the loop that runs durable work of several kinds, each a few at a time; `KINDS`, those of a site.

It is a process of its own (`manage.py streamserve_worker`), or a task of the web process where JOBS is embedded. To add
a kind: a class as `RowKind`, and a line in `KINDS`. asyncio, on one event loop.

    claim while there is room ──► a task for each claim ──► its end, a retry, a dead letter
           ▲                                       │
           └── a task ended, `wake`, a second over ┘        every 2 s: what dead workers held is queued again

`stop` ends it gracefully: nothing is claimed any more, what runs has `grace_seconds` to end, and is then given back.

`Presence`: this process among the workers, and which of the others live. A worker of this host holds a file lock, so
its death shows at once (streams/lease/liveness.py); with Redis that of one on another host shows after 3 s. Where there
is neither, a worker whose row has had no beat for `LEASE_SECONDS` counts as dead; if it was only slow, its writes are
refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextvars import Context
from types import MappingProxyType

from django.db import DatabaseError

from streamserve.api.answers import Answers
from streamserve.api.logs import get_logger
from streamserve.clients.pipeline.journal import Memo
from streamserve.conf import SiteConfig
from streamserve.models import Worker as WorkerRow
from streamserve.protocol.errors import DatabaseUnavailable
from streamserve.rows import orm
from streamserve.rows.leases import Work
from streamserve.streams.lease.liveness import Liveness
from streamserve.streams.registry import Streams
from streamserve.work.batch_runs import BatchKind
from streamserve.work.files import Files
from streamserve.work.job_runs import JobKind
from streamserve.work.queue import WORKER_LOST, Claim, Failed, Kind, LeaseLost, RetryPolicy
from streamserve.work.webhooks import Webhooks

log = get_logger(__name__)

BEAT_SECONDS = 5.0


class Presence:
    """Without a `liveness` (a log in memory) the worker has a new id, and only rows tell about others."""

    def __init__(self, liveness: Liveness | None, *, kinds: str, concurrency: int) -> None:
        self._liveness = liveness
        self.worker_id = f"memory-{secrets.token_hex(8)}" if liveness is None else liveness.own_id
        self._kinds, self._concurrency = kinds, concurrency

    async def beat(self) -> None:
        """Write this worker's beat; call it every `BEAT_SECONDS`."""
        await orm.call(WorkerRow.objects.beat, self.worker_id, self._kinds, self._concurrency)

    def alive(self, worker_ids: Collection[str]) -> Collection[str]:
        """Return the given workers that live, as far as is known."""
        judge = self._liveness
        seen = {one for one in worker_ids if judge is not None and judge.can_judge(one)}
        alive = {one for one in seen if judge is not None and judge.is_alive(one)}
        unseen = set(worker_ids) - seen
        if unseen:
            alive.update(WorkerRow.objects.alive().filter(pk__in=unseen).values_list("pk", flat=True))
        return alive

    async def leave(self) -> None:
        """Delete this worker's row."""
        await orm.call(WorkerRow.objects.filter(pk=self.worker_id).delete)


POLL_SECONDS = 1.0  # another process may have queued something
ORPHAN_SECONDS = 2.0
_OUTAGE_SECONDS = 2.0  # until a database that failed is asked again


class Worker:
    """One a process. `run` it; `stop` it."""

    def __init__(self, kinds: Sequence[Kind], presence: Presence, *, grace_seconds: float = 30.0) -> None:
        self.kinds, self.presence = kinds, presence
        self.num_done = 0
        self.ends_idle = False  # it stops when nothing is due and nothing runs
        self._grace_seconds = grace_seconds
        self._running: dict[asyncio.Task[None], tuple[Kind, Claim]] = {}
        self._news = asyncio.Event()
        self.is_stopping = False
        self._beat_at = self._orphans_at = 0.0

    @property
    def claims(self) -> list[Claim]:
        """What runs now."""
        return [claim for _, claim in self._running.values()]

    def wake(self) -> None:
        """Look for work at once: something was queued in this process."""
        self._news.set()

    def stop(self) -> None:
        """Claim nothing more; `run` returns when what runs has ended, or was given back. Call it on the loop."""
        self.is_stopping = True
        self._news.set()

    async def run(self) -> None:
        """Work until `stop`. Cancelled, it gives back what runs at once."""
        log.info("worker_started", worker=self.presence.worker_id, kinds=",".join(kind.name for kind in self.kinds))
        try:
            while not self.is_stopping:
                self._news.clear()
                try:
                    await self._look_after()
                    await self._claim_all()
                    if self.ends_idle and not self._running:
                        break
                except Exception:
                    log.exception("worker_database_failed")
                    await asyncio.sleep(_OUTAGE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._news.wait()
            if self._running:
                log.info("worker_stopping", running=len(self._running), grace_seconds=self._grace_seconds)
                await self._wait_for_the_rest()
        finally:
            await self._leave()

    async def _look_after(self) -> None:
        """Give a beat, and queue again what dead workers held, if it is time."""
        now = time.monotonic()
        if now >= self._beat_at:
            await self.presence.beat()
            self._beat_at = now + BEAT_SECONDS
        if now < self._orphans_at:
            return
        self._orphans_at = now + ORPHAN_SECONDS
        for kind in self.kinds:
            running = [claim.id for of, claim in self._running.values() if of is kind]
            num = await kind.orphans(self.presence.alive, self.presence.worker_id, running)
            if num:
                log.warning("work_requeued", kind=kind.name, num=num)

    async def _claim_all(self) -> None:
        """Claim one of each kind after the other, until nothing is due or there is no room."""
        waiting = list(self.kinds)
        while waiting and not self.is_stopping:
            for kind in list(waiting):
                num_running = sum(of is kind for of, _ in self._running.values())
                claim = await kind.claim(self.presence.worker_id) if num_running < kind.concurrency else None
                if claim is None:
                    waiting.remove(kind)
                else:
                    self._begin(kind, claim)

    def _begin(self, kind: Kind, claim: Claim) -> None:
        name = f"{claim.kind} {claim.id}"
        task = asyncio.get_running_loop().create_task(self._work(kind, claim), name=name, context=Context())
        self._running[task] = (kind, claim)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._news.set()

    async def _work(self, kind: Kind, claim: Claim) -> None:
        """Run one claim and settle it. What cannot be settled now is queued again by a later `orphans`."""
        fields = {"kind": claim.kind, "id": claim.id, "attempt": claim.attempt}
        began = time.monotonic()
        log.info("work_started", **fields)
        try:
            if claim.attempt > kind.retry.max_attempts:
                message = WORKER_LOST.format(attempts=kind.retry.max_attempts)
                raise Failed(message, code="worker_lost", is_retryable=False)
            await kind.run(claim)
            self.num_done += 1
            log.info("work_done", **fields, seconds=round(time.monotonic() - began, 3))
        except LeaseLost:
            log.warning("work_lost", **fields)
        except asyncio.CancelledError:
            await self._settle(kind.release(claim), "work_released", fields)
            raise
        except Exception as error:
            failure = error if isinstance(error, Failed) else Failed("It failed. The server's log has the cause.")
            log.warning("work_failed", **fields, code=failure.code, exc_info=failure is not error)
            await self._settle(kind.fail(claim, failure), "work_settled", fields)

    async def _settle(self, write: object, event: str, fields: dict[str, object]) -> None:
        try:
            again = await write  # type: ignore[misc]
            log.info(event, **fields, again=again)
        except LeaseLost:
            log.warning("work_lost", **fields)
        except Exception:
            log.exception("work_not_settled", **fields)

    async def _wait_for_the_rest(self) -> None:
        """Wait for what runs; when `grace_seconds` are over, cancel it, which gives it back."""
        await asyncio.wait(self._running, timeout=self._grace_seconds)

    async def _leave(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(Exception):  # the database is away: the row is too old soon
            await self.presence.leave()
        log.info("worker_stopped", worker=self.presence.worker_id, done=self.num_done, given_back=len(running))


KINDS: Mapping[str, type[Work]] = MappingProxyType(
    {kind.name: kind.model for kind in (JobKind, Webhooks, BatchKind)}  # the most urgent first
)


def kinds_of(
    settings: SiteConfig,
    *,
    streams: Streams,
    memos: MutableMapping[str, Memo],
    watch: Callable[[], None],
    files: Files,
    rows: Answers,
) -> list[Kind]:
    """Return the kinds of work of a site, in the order of `KINDS`, each made once for a worker."""
    config = settings.jobs
    retry = RetryPolicy(
        max_attempts=config.max_attempts, first_seconds=config.retry_seconds, max_seconds=config.max_retry_seconds
    )
    return [
        JobKind(streams, memos, watch, concurrency=config.concurrency, retry=retry),
        Webhooks(settings.webhooks),
        BatchKind(files, rows, at_once=settings.batches.concurrency),
    ]


async def work_counts() -> dict[str, dict[str, int]]:
    """Return how many rows of each kind wait and run, in all processes; nothing while the database is away."""

    def count() -> dict[str, dict[str, int]]:
        return {
            name: {state: model._default_manager.filter(state=state).count() for state in ("queued", "running")}
            for name, model in KINDS.items()
        }

    try:
        return await orm.read(count)
    except (DatabaseError, DatabaseUnavailable):
        log.warning("work_not_counted", exc_info=True)
        return {}


def worker_for(
    kinds: Sequence[Kind], liveness: Liveness | None, *, concurrency: int | None = None, grace_seconds: float = 30.0
) -> Worker:
    """Return a worker that serves `kinds`. `concurrency`: of each kind, if not its own."""
    for kind in kinds:
        kind.concurrency = concurrency or kind.concurrency
    presence = Presence(
        liveness,
        kinds=",".join(kind.name for kind in kinds),
        concurrency=sum(kind.concurrency for kind in kinds),
    )
    return Worker(kinds, presence, grace_seconds=grace_seconds)
