"""The queue of durable work of every kind: `Kind` defines what runs a row, `Claim` is the lease of one row. asyncio.

    Kind.claim ──► a Claim ──► run ──► returns      the run has written the row's end
                                ├─ Failed           retried with back-off, or buried: the dead letters
                                ├─ cancelled        given back; the attempt does not count
                                └─ LeaseLost        another worker has the row; nothing is written

Every write about a row goes through its claim, which names the fence: a worker that lost its row changes nothing. Each
is one short transaction through the door to the ORM; none is open while `run` works. To add a kind: rows that derive
from `Work` (rows/leases.py), and a line in kinds.py.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from streamserve.rows import orm
from streamserve.rows.leases import Work, WorkQuerySet

RowT = TypeVar("RowT", bound=Work)

JOBS, WEBHOOKS, BATCHES = "jobs", "webhooks", "batch"


class Failed(Exception):
    """An attempt failed. `message` is shown to the caller; without `is_retryable` the row is not tried again."""

    def __init__(self, message: str, *, code: str = "internal_error", is_retryable: bool = True) -> None:
        super().__init__(message)
        self.message, self.code, self.is_retryable = message, code, is_retryable

    @property
    def columns(self) -> dict[str, str]:
        """What the row keeps of it."""
        return {"error_code": self.code[:64], "error_message": self.message}


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


@dataclass(frozen=True, slots=True)
class Claim(Generic[RowT]):
    """A row that this worker holds, as it was when the worker took it. Each write raises LeaseLost if it is not held.

    Writes wait for a database that is away, and may then be asked for twice: the fence makes that harmless.
    """

    kind: str
    row: RowT
    worker_id: str

    @property
    def id(self) -> Any:
        """The row's."""
        return self.row.pk

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self.row.attempts

    def held(self) -> WorkQuerySet[RowT]:
        """Return the row, if this worker still holds it. For reads; `write` and `transact` are for changes."""
        rows: Any = self.row._meta.default_manager
        held: WorkQuerySet[RowT] = rows.held(self.id, self.row.fence, self.worker_id)
        return held

    async def write(
        self,
        change: Callable[[Any], int],
        *,
        insists: bool = True,
        ask: Callable[[Callable[[], int]], Awaitable[int]] = orm.write,
    ) -> None:
        """Make one guarded change: `change` takes the held row's queryset, and returns whether it found it."""

        def write() -> int:
            return change(self.held())

        if not await (orm.insist(ask, write) if insists else ask(write)):
            raise LeaseLost(f"{self.kind} {self.id}")

    async def transact(self, change: Callable[[Any], object]) -> None:
        """Make several changes in one transaction, under the held row's lock."""

        def write() -> bool:
            with transaction.atomic(using=self.held().db):
                is_held = self.held().update(fence=F("fence")) > 0
                if is_held:
                    change(self.held())
                return is_held

        if not await orm.insist(orm.call, write):
            raise LeaseLost(f"{self.kind} {self.id}")

    async def finish(self, state: str = "done", **columns: Any) -> None:
        """Write the end of the row."""
        await self.write(lambda held: held.finish(state, **columns))

    async def give_back(self) -> None:
        """Queue the row again at once; the attempt does not count. A worker that stops does not wait for a database."""
        await self.write(lambda held: held.give_back(), insists=False)


async def bury_row(claim: Claim[Any], failure: Failed) -> None:
    """End a row as failed."""
    await claim.finish("failed", **failure.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[RowT]):
    """One sort of work. Wake the worker after an insert (`Worker.wake`).

    `run` does the work of a claim and writes its end. It raises Failed, LeaseLost, or anything else, which is retried.
    When the worker stops it is cancelled, and may take a moment to leave what the next attempt needs. `bury` ends a row
    that is not tried again. `concurrency` is how many a worker runs at once.
    """

    name: str
    model: type[RowT]
    run: Callable[[Claim[RowT]], Awaitable[None]]
    bury: Callable[[Claim[RowT], Failed], Awaitable[None]] = bury_row
    concurrency: int = 1
    retry: RetryPolicy = RetryPolicy()

    @property
    def rows(self) -> WorkQuerySet[RowT]:
        """The rows of this kind."""
        rows: WorkQuerySet[RowT] = self.model._default_manager.all()  # type: ignore[assignment]
        return rows

    async def claim(self, worker_id: str) -> Claim[RowT] | None:
        """Claim the next row that is due; None if there is none."""
        taken = await orm.call(lambda: self.rows.take(worker_id))
        return Claim(self.name, taken[0], worker_id) if taken else None

    async def fail(self, claim: Claim[RowT], failure: Failed) -> bool:
        """Queue the row again after a failed attempt, or bury it; return whether it is tried again."""
        if not failure.is_retryable or claim.attempt >= self.retry.max_attempts:
            await self.bury(claim, failure)
            return False
        due_at = timezone.now() + timedelta(seconds=self.retry.seconds_after(claim.attempt))
        await claim.write(lambda held: held.retry(due_at, **failure.columns))
        return True

    async def requeue_orphans(
        self, alive_of: Callable[[Collection[str]], Collection[str]], worker_id: str, running: Collection[Any]
    ) -> int:
        """Queue again what dead workers hold, and what `worker_id` holds but does not run; return how many.

        `alive_of` returns the living among the given workers; it is called on the thread of writes. `running` are the
        ids of this worker's claims.
        """

        def requeue() -> int:
            producers = set(self.rows.producers())
            dead = producers - {worker_id} - set(alive_of(producers - {worker_id}))
            num = sum(self.rows.requeue_of(producer) for producer in dead)
            return num + (self.rows.requeue_of(worker_id, but=running) if worker_id in producers else 0)

        return await orm.call(requeue)
