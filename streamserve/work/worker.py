"""`Worker`: the loop that claims durable work, of several kinds, and runs a few of each at a time.

It is a process of its own (`manage.py streamserve_worker`), or a task of the web process where JOBS is embedded. It
knows no kind of work (kinds.py has them). asyncio, on one event loop.

    claim while there is room ──► a task for each claim ──► its end, a retry, a dead letter
           ▲                                       │
           └── a task ended, `wake`, a second over ┘        every 2 s: what dead workers held is queued again

`stop` ends it gracefully: nothing is claimed any more, what runs has `grace_seconds` to end, and is then given back.

`Presence`: this process among the workers, and which other workers live. A worker of this host holds a file lock, so
its death shows at once (streams/lease/liveness.py); with Redis a death on another host shows after 3 s. Where there
is neither, a worker whose row has had no beat for `LEASE_SECONDS` counts as dead; if it was only slow, its writes are
refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import Context
from typing import Any

from django.db.models import QuerySet

from streamserve.api.logs import get_logger
from streamserve.models import Worker as WorkerRow
from streamserve.rows import orm
from streamserve.rows.leases import WorkQuerySet
from streamserve.streams.lease.liveness import Liveness
from streamserve.work.queue import Claim, Failed, Kind, LeaseLost

log = get_logger(__name__)

BEAT_SECONDS = 5.0
ORPHAN_SECONDS = 2.0
POLL_SECONDS = 1.0  # another process may have queued something
_OUTAGE_SECONDS = 2.0  # until a database that failed is asked again
_WORKER_LOST = "The process that ran it was lost {attempts} times, and it is not tried again."


class Presence:
    """Without a `liveness` (a log in memory) the worker has a new id, and learns of other workers only from rows."""

    def __init__(self, liveness: Liveness | None, kinds: Sequence[Kind[Any]] = ()) -> None:
        self._liveness = liveness
        self.worker_id = f"memory-{secrets.token_hex(8)}" if liveness is None else liveness.own_id
        self._kinds = ",".join(kind.name for kind in kinds)
        self._concurrency = sum(kind.concurrency for kind in kinds)

    async def beat(self) -> None:
        """Write this worker's beat; call it every `BEAT_SECONDS`."""
        await orm.call(WorkerRow.objects.beat, self.worker_id, self._kinds, self._concurrency)

    def alive(self, worker_ids: Collection[str]) -> Collection[str]:
        """Return the given workers that live, as far as is known. Blocks."""
        judge = self._liveness
        seen = {worker for worker in worker_ids if judge is not None and judge.can_judge(worker)}
        alive = {worker for worker in seen if judge is not None and judge.is_alive(worker)}
        unseen = set(worker_ids) - seen
        if unseen:
            alive.update(WorkerRow.objects.alive().filter(pk__in=unseen).values_list("pk", flat=True))
        return alive

    async def leave(self) -> None:
        """Delete this worker's row."""
        await orm.call(WorkerRow.objects.filter(pk=self.worker_id).delete)


class Worker:
    """The worker of a process. `run` it; `stop` it. With `ends_idle` it stops when nothing is due and nothing runs."""

    def __init__(self, kinds: Sequence[Kind[Any]], liveness: Liveness | None, *, grace_seconds: float = 30.0) -> None:
        self.kinds, self.presence = kinds, Presence(liveness, kinds)
        self.num_done = 0
        self.ends_idle = self.is_stopping = False
        self._grace_seconds = grace_seconds
        self._running: dict[asyncio.Task[None], Claim[Any]] = {}
        self._news = asyncio.Event()
        self._beat_at = self._orphans_at = 0.0

    @property
    def claims(self) -> Collection[Claim[Any]]:
        """What runs now."""
        return self._running.values()

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
                await asyncio.wait(self._running, timeout=self._grace_seconds)
        finally:
            await self._leave()

    async def _look_after(self) -> None:
        """Give a beat, and queue again what dead workers held, if it is time."""
        now = time.monotonic()
        if now >= self._beat_at:
            await self.presence.beat()
            self._beat_at = now + BEAT_SECONDS
        if now >= self._orphans_at:
            self._orphans_at = now + ORPHAN_SECONDS
            for kind in await self._kinds_with(lambda rows: rows.producers()):
                running = [claim.id for claim in self.claims if claim.kind == kind.name]
                num = await kind.requeue_orphans(self.presence.alive, self.presence.worker_id, running)
                if num:
                    log.warning("work_requeued", kind=kind.name, num=num)

    async def _kinds_with(self, rows_of: Callable[[WorkQuerySet[Any]], QuerySet[Any, Any]]) -> list[Kind[Any]]:
        """Return the kinds that have such rows: one call of the database's thread for all, as mostly none has."""
        return await orm.call(lambda: [kind for kind in self.kinds if rows_of(kind.rows).exists()])

    async def _claim_all(self) -> None:
        """Claim one row of each kind that has one after the other, until nothing is due or there is no room."""
        waiting = await self._kinds_with(lambda rows: rows.due())
        while waiting and not self.is_stopping:
            for kind in list(waiting):
                has_room = sum(claim.kind == kind.name for claim in self.claims) < kind.concurrency
                claim = await kind.claim(self.presence.worker_id) if has_room else None
                if claim is None:
                    waiting.remove(kind)
                else:
                    self._begin(kind, claim)

    def _begin(self, kind: Kind[Any], claim: Claim[Any]) -> None:
        name = f"{claim.kind} {claim.id}"
        task = asyncio.get_running_loop().create_task(self._work(kind, claim), name=name, context=Context())
        self._running[task] = claim
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._news.set()

    async def _work(self, kind: Kind[Any], claim: Claim[Any]) -> None:
        """Run one claim and settle it. What cannot be settled now is queued again by a later `requeue_orphans`."""
        fields = {"kind": claim.kind, "id": claim.id, "attempt": claim.attempt}
        began = time.monotonic()
        log.info("work_started", **fields)
        try:
            if claim.attempt > kind.retry.max_attempts:
                message = _WORKER_LOST.format(attempts=kind.retry.max_attempts)
                raise Failed(message, code="worker_lost", is_retryable=False)
            await kind.run(claim)
            self.num_done += 1
            log.info("work_done", **fields, seconds=round(time.monotonic() - began, 3))
        except LeaseLost:
            log.warning("work_lost", **fields)
        except asyncio.CancelledError:
            await self._settle(claim.give_back(), "work_released", fields)
            raise
        except Exception as error:
            failure = error if isinstance(error, Failed) else Failed("It failed. The server's log has the cause.")
            log.warning("work_failed", **fields, code=failure.code, exc_info=failure is not error)
            await self._settle(kind.fail(claim, failure), "work_settled", fields)

    async def _settle(self, write: Awaitable[object], event: str, fields: dict[str, object]) -> None:
        try:
            again = await write
            log.info(event, **fields, again=again)
        except LeaseLost:
            log.warning("work_lost", **fields)
        except Exception:
            log.exception("work_not_settled", **fields)

    async def _leave(self) -> None:
        """Give back what runs, and delete this worker's row."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(Exception):  # the database is away: the row is too old soon
            await self.presence.leave()
        log.info("worker_stopped", worker=self.presence.worker_id, done=self.num_done, given_back=len(running))
