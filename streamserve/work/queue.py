"""`Kind`: one sort of durable work, as the worker's loop knows it; `RowKind`: one with a `Work` table. asyncio.

    Worker ── claim ──► Kind ── a Claim ──► run ──► returns     the kind has written the row's end
                                                  ├─ Failed     retried with back-off, or buried: the dead letters
                                                  ├─ cancelled  given back; the attempt does not count
                                                  └─ LeaseLost  another worker has the row; nothing is written

Each call is one short transaction through the door to the ORM; none is open while `run` works.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, cast

from django.utils import timezone

from streamserve.rows import orm
from streamserve.rows.leases import Work, WorkQuerySet

RowT = TypeVar("RowT", bound=Work)

WORKER_LOST = "The process that ran it was lost {attempts} times, and it is not tried again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A row that this worker holds, with the fence by which every write about it is guarded. `attempt` is from 1."""

    kind: str
    id: Any
    fence: int
    worker_id: str
    attempt: int
    row: Any = None


class Failed(Exception):
    """An attempt failed. `message` is shown to the caller; one that is not `is_retryable` is not tried again."""

    def __init__(self, message: str, *, code: str = "internal_error", is_retryable: bool = True) -> None:
        super().__init__(message)
        self.message, self.code, self.is_retryable = message, code, is_retryable


class LeaseLost(Exception):
    """The row is not this worker's any more: it was cancelled, or another worker has claimed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often work is tried, and how long it waits in between: doubling, with jitter."""

    max_attempts: int = 5
    first_seconds: float = 2.0
    max_seconds: float = 600.0

    def seconds_after(self, attempt: int) -> float:
        """Return the wait after that attempt, which failed."""
        most: float = min(self.max_seconds, self.first_seconds * 2.0 ** min(attempt - 1, 30))
        return most * random.uniform(0.5, 1.0)


class Kind(Protocol):
    """One sort of work. Its calls may raise database errors; the worker tries again later."""

    name: str
    concurrency: int  # how many a worker runs at once
    retry: RetryPolicy

    async def claim(self, worker_id: str) -> Claim | None:
        """Claim the next row that is due; None if there is none."""

    async def run(self, claim: Claim) -> None:
        """Do the work and write its end (`finish`). Raises Failed, LeaseLost, or anything else, which is retried.

        When the worker stops it is cancelled, and may take a moment to leave what the next attempt needs.
        """

    async def fail(self, claim: Claim, failure: Failed) -> bool:
        """Queue it again after a failed attempt, or bury it; return whether it is tried again."""

    async def bury(self, claim: Claim, failure: Failed) -> None:
        """End it as failed."""

    async def release(self, claim: Claim) -> None:
        """Queue it again at once; the attempt does not count."""

    async def orphans(
        self, is_alive: Callable[[Collection[str]], Collection[str]], worker_id: str, running: Collection[Any]
    ) -> int:
        """Queue again what dead workers hold, and what `worker_id` holds but does not run; return how many.

        `is_alive` returns those of the given workers that live; it is called on the thread of writes. `running` are the
        ids of this worker's claims.
        """


class RowKind(Generic[RowT]):
    """A `Kind` over the rows of `model`; a kind of work adds `run`. Wake the worker after an insert: `Worker.wake`."""

    name = ""
    model: type[RowT]

    def __init__(self, *, concurrency: int = 1, retry: RetryPolicy | None = None) -> None:
        self.concurrency, self.retry = concurrency, retry or RetryPolicy()

    @property
    def rows(self) -> WorkQuerySet[RowT]:
        """The rows of this kind."""
        return cast("WorkQuerySet[RowT]", self.model._default_manager.all())

    async def claim(self, worker_id: str) -> Claim | None:
        rows = await orm.call(lambda: self.rows.take(worker_id))
        if not rows:
            return None
        (row,) = rows
        return Claim(kind=self.name, id=row.pk, fence=row.fence, worker_id=worker_id, attempt=row.attempts, row=row)

    async def run(self, claim: Claim) -> None:
        raise NotImplementedError

    async def finish(self, claim: Claim, state: str = "done", **columns: Any) -> None:
        """Write the end of the row. Raises LeaseLost if it is not this worker's."""
        await self.write(claim, lambda held: held.finish(state, **columns))

    async def fail(self, claim: Claim, failure: Failed) -> bool:
        if not failure.is_retryable or claim.attempt >= self.retry.max_attempts:
            await self.bury(claim, failure)
            return False
        due_at = timezone.now() + timedelta(seconds=self.retry.seconds_after(claim.attempt))
        await self.write(claim, lambda held: held.retry(due_at, **_columns(failure)))
        return True

    async def bury(self, claim: Claim, failure: Failed) -> None:
        await self.finish(claim, "failed", **_columns(failure))

    async def release(self, claim: Claim) -> None:
        await self.write(claim, lambda held: held.give_back(), insists=False)  # a worker that stops does not wait

    async def orphans(
        self, is_alive: Callable[[Collection[str]], Collection[str]], worker_id: str, running: Collection[Any]
    ) -> int:
        def requeue() -> int:
            producers = set(self.rows.producers())
            alive = set(is_alive(producers - {worker_id}))
            num = sum(self.rows.requeue_of(one) for one in producers - alive - {worker_id})
            return num + (self.rows.requeue_of(worker_id, but=running) if worker_id in producers else 0)

        return await orm.call(requeue)

    async def write(self, claim: Claim, change: Callable[[WorkQuerySet[RowT]], int], *, insists: bool = True) -> None:
        """Make one guarded change of the claimed row. Raises LeaseLost if it is not this worker's."""

        def write() -> int:
            return change(self.rows.held(claim.id, claim.fence, claim.worker_id))

        if not await (orm.insist(orm.write, write) if insists else orm.write(write)):
            raise LeaseLost(f"{claim.kind} {claim.id}")


def _columns(failure: Failed) -> dict[str, Any]:
    return {"error_code": failure.code[:64], "error_message": failure.message}
