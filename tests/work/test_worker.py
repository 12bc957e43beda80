"""Laws of durable work: each row is one worker's at a time, and comes to one end, whoever dies."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.db.models.functions import Now
from django.utils import timezone

from streamserve.models import Job, JobStep
from streamserve.models import Worker as WorkerRow
from streamserve.rows import orm
from streamserve.streams.lease.liveness import Liveness
from streamserve.work.queue import Claim, Failed, Kind, LeaseLost, RetryPolicy, bury_row
from streamserve.work.worker import Presence, Worker
from tests.conftest import until
from tests.support.servers.write_lock import on_sqlite, write_lock

pytestmark = pytest.mark.django_db(transaction=True)


def tasks(work: Callable[[Claim[Job]], Any], **options: Any) -> Kind[Job]:
    """Return jobs whose work is a function of the test."""

    async def run(claim: Claim[Job]) -> None:
        result = work(claim)
        if asyncio.iscoroutine(result):
            await result
        await claim.finish()

    return Kind(name="tasks", model=Job, run=run, **options)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    orm.close()


def queued(num: int = 1) -> list[str]:
    ids = [f"{index:032x}" for index in range(num)]
    for one in ids:
        Job.objects.create(id=one, stream_id=one, pipeline="p", owner="o", tenant="t")
    return ids


async def drained(worker: Worker, condition: Callable[[], bool]) -> None:
    """Run the worker until `condition` holds, then stop it."""
    running = asyncio.create_task(worker.run())
    await until(condition)
    worker.stop()
    await running


async def buried(worker: Worker) -> Job:
    """Run the worker until the one row is finished; return the row."""
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(60):
        while not (row := await orm.call(Job.objects.get)).is_finished:
            worker.wake()
            await asyncio.sleep(0.01)
    worker.stop()
    await running
    return row


async def states() -> list[tuple[str, int]]:
    return await orm.call(lambda: list(Job.objects.order_by("pk").values_list("state", "attempts")))


def test_no_row_is_taken_twice() -> None:
    """Four threads take sixty rows, each row once."""
    queued(60)
    taken: list[str] = []

    def take(name: str) -> None:
        try:
            misses = 0
            while misses < 3:
                rows = Job.objects.take(name, 3)
                misses = 0 if rows else misses + 1
                taken.extend(row.pk for row in rows)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=take, args=(f"worker-{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(taken) == Counter([f"{index:032x}" for index in range(60)])
    assert set(Job.objects.values_list("state", "fence", "attempts")) == {("running", 1, 1)}


@on_sqlite
async def test_an_end_waits_for_a_locked_database(tmp_path: Path) -> None:
    """Work that is done is not done again because its end is refused for some seconds."""
    await orm.call(queued)
    ran: list[Any] = []
    go = asyncio.Event()

    async def work(claim: Claim[Job]) -> None:
        ran.append(claim.id)
        await go.wait()

    worker = Worker([tasks(work)], Liveness(tmp_path))
    running = asyncio.create_task(worker.run())
    await until(lambda: ran)
    with write_lock():
        go.set()
        await until(lambda: orm.trouble() is not None)
    await until(lambda: worker.num_done == 1)
    worker.stop()
    await running
    assert await states() == [("done", 1)]
    assert len(ran) == 1


@on_sqlite
async def test_a_worker_that_stops_does_not_wait_for_a_locked_database(tmp_path: Path) -> None:
    """What it cannot give back is queued again by another worker, once its lock is free."""
    await orm.call(queued)
    begun = asyncio.Event()

    async def work(claim: Claim[Job]) -> None:
        begun.set()
        await asyncio.Event().wait()

    worker = Worker([tasks(work)], Liveness(tmp_path), grace_seconds=0.0)
    running = asyncio.create_task(worker.run())
    await begun.wait()
    with write_lock() as other:
        worker.stop()
        async with asyncio.timeout(60):
            await running
        assert other.in_transaction
    assert await states() == [("running", 1)]


async def test_work_is_done_once_and_its_end_is_written(tmp_path: Path) -> None:
    """Five rows, two at a time: each runs once, and no more than two run together."""
    await orm.call(queued, 5)
    ran: list[Any] = []
    most = 0

    async def work(claim: Claim[Job]) -> None:
        nonlocal most
        most = max(most, len(worker.claims))
        ran.append(claim.id)
        await asyncio.sleep(0)

    worker = Worker([tasks(work, concurrency=2)], Liveness(tmp_path))
    await drained(worker, lambda: worker.num_done == 5)
    assert sorted(ran) == [f"{index:032x}" for index in range(5)]
    assert await states() == [("done", 1)] * 5
    assert most <= 2
    assert await orm.call(WorkerRow.objects.count) == 0, "a worker that stops deletes its row"


async def test_a_failure_is_retried_until_it_is_a_dead_letter(tmp_path: Path) -> None:
    """Three attempts are allowed: then the row is failed, with the last error."""
    await orm.call(queued)

    def work(claim: Claim[Job]) -> None:
        raise Failed(f"no {claim.attempt}", code="too_bad")

    kind = tasks(work, retry=RetryPolicy(max_attempts=3, first_seconds=0.0))
    worker = Worker([kind], Liveness(tmp_path))
    row = await buried(worker)
    assert (row.attempts, row.error_code, row.error_message) == (3, "too_bad", "no 3")


async def test_a_retry_waits_and_what_is_final_does_not(tmp_path: Path) -> None:
    """A retryable failure is due later; one that is not is buried at its first attempt."""
    await orm.call(queued, 2)
    kind = tasks(lambda claim: None, retry=RetryPolicy(max_attempts=3, first_seconds=60.0))
    first, second = [await kind.claim("w") for _ in range(2)]
    assert first is not None
    assert second is not None
    assert await kind.fail(first, Failed("later"))
    assert not await kind.fail(second, Failed("never", is_retryable=False))
    assert await states() == [("queued", 1), ("failed", 1)]
    assert await kind.claim("w") is None
    due_at = (await orm.call(Job.objects.get, pk=first.id)).due_at
    assert due_at > timezone.now() + timedelta(seconds=15)


async def test_a_lost_lease_writes_nothing(tmp_path: Path) -> None:
    """Once another worker has claimed the row, no write of the first one has an effect."""
    await orm.call(queued)
    kind = tasks(lambda claim: None)
    old = await kind.claim("old")
    assert old is not None
    await orm.call(Job.objects.all().requeue_of, "old")
    new = await kind.claim("new")
    assert new is not None
    assert (new.row.fence, new.attempt) == (old.row.fence + 1, 2)
    for write in (old.finish(), old.give_back(), kind.fail(old, Failed("x")), bury_row(old, Failed("x"))):
        with pytest.raises(LeaseLost):
            await write
    assert await states() == [("running", 2)]
    await new.finish()
    assert await states() == [("done", 2)]


async def test_changes_of_a_claim_are_made_together_or_not_at_all(tmp_path: Path) -> None:
    """Under the row's lock, in one transaction: an error undoes them, and a claim that is lost makes none."""
    await orm.call(queued)
    claim = await tasks(lambda claim: None).claim("w")
    assert claim is not None

    def keep(held: Any) -> None:
        JobStep.objects.create(job_id=claim.id, name="s", ordinal=0, result="1", seconds=0.1)

    def keep_and_fail(held: Any) -> None:
        keep(held)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await claim.transact(keep_and_fail)
    assert await orm.call(JobStep.objects.count) == 0
    await claim.transact(keep)
    assert await orm.call(JobStep.objects.count) == 1
    await orm.call(Job.objects.all().requeue_of, "w")
    with pytest.raises(LeaseLost):
        await claim.transact(keep_and_fail)


async def test_rows_of_a_dead_worker_run_again(tmp_path: Path) -> None:
    """A worker whose process is gone, by its lock, loses its rows; a live one keeps them."""
    await orm.call(queued, 3)
    dead, live = Liveness(tmp_path), Liveness(tmp_path)
    kind = tasks(lambda claim: None)
    assert await kind.claim(dead.own_id)
    kept = await kind.claim(live.own_id)
    assert kept is not None
    dead.close()
    worker = Worker([kind], Liveness(tmp_path))
    await drained(worker, lambda: worker.num_done == 2)
    assert await states() == [("done", 2), ("running", 1), ("done", 1)]
    live.close()


async def test_a_worker_of_another_host_is_dead_without_a_beat(tmp_path: Path) -> None:
    """Its row tells: one that has given a beat lives, one whose beat is old does not."""
    own = Presence(Liveness(tmp_path))
    await orm.call(lambda: [WorkerRow.objects.beat(one, "tasks", 1) for one in ("far-1", "far-2")])
    await orm.call(WorkerRow.objects.filter(pk="far-2").update, beat_at=Now() - timedelta(minutes=2))
    assert set(await orm.call(own.alive, {"far-1", "far-2", "far-3", own.worker_id})) == {"far-1", own.worker_id}


async def test_what_is_used_up_is_not_run_again(tmp_path: Path) -> None:
    """A row that has lost its worker in every attempt is buried without a run: it may be what kills workers."""
    await orm.call(queued)
    ran: list[int] = []
    kind = tasks(lambda claim: ran.append(claim.attempt), retry=RetryPolicy(max_attempts=2))
    for _ in range(2):
        assert await kind.claim("gone-1")
        await orm.call(Job.objects.all().requeue_of, "gone-1")
    worker = Worker([kind], Liveness(tmp_path))
    row = await buried(worker)
    assert (row.state, row.error_code, ran) == ("failed", "worker_lost", [])


async def test_a_graceful_stop_lets_work_end(tmp_path: Path) -> None:
    """What runs at the stop ends by itself; nothing more is claimed."""
    await orm.call(queued, 2)
    began, may_end = asyncio.Event(), asyncio.Event()

    async def work(claim: Claim[Job]) -> None:
        began.set()
        await may_end.wait()

    worker = Worker([tasks(work)], Liveness(tmp_path))
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(began.wait(), 60)
    worker.stop()
    may_end.set()
    await running
    assert await states() == [("done", 1), ("queued", 0)]


async def test_what_does_not_end_in_time_is_given_back(tmp_path: Path) -> None:
    """After the grace it is cancelled and queued again, and the attempt does not count."""
    await orm.call(queued)
    began = asyncio.Event()

    async def work(claim: Claim[Job]) -> None:
        began.set()
        await asyncio.Event().wait()

    worker = Worker([tasks(work)], Liveness(tmp_path), grace_seconds=0.0)
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(began.wait(), 60)
    worker.stop()
    await running
    assert await states() == [("queued", 0)]


async def test_what_it_holds_and_does_not_run_is_queued_again(tmp_path: Path) -> None:
    """An end that could not be written, because the database was away, leaves no row with this worker."""
    await orm.call(queued)
    kind, own = tasks(lambda claim: None), Presence(Liveness(tmp_path))
    claim = await kind.claim(own.worker_id)
    assert claim is not None
    assert await kind.requeue_orphans(own.alive, own.worker_id, [claim.id]) == 0
    assert await kind.requeue_orphans(own.alive, own.worker_id, []) == 1
    assert await states() == [("queued", 1)]


def test_a_clock_that_is_set_back_delays_nothing_new() -> None:
    """What was queued, or given back, by a clock that was an hour ahead is taken at once; a retry has its wait."""
    fresh, given_back, retried = queued(3)
    ahead = timezone.now() + timedelta(hours=1)
    Job.objects.filter(pk=fresh).update(due_at=ahead, created_at=ahead)
    held = Job.objects.filter(pk=given_back)
    held.update(created_at=ahead, due_at=ahead + timedelta(minutes=1), state="running", producer="w", attempts=1)
    held.give_back()
    Job.objects.filter(pk=retried).update(due_at=ahead)
    assert {row.pk for row in Job.objects.take("here", 3)} == {fresh, given_back}


def test_a_beat_from_the_future_is_no_life() -> None:
    """It was given before the database's clock was set back: a worker that lives gives another within seconds."""
    for name, seconds in (("now", 0), ("behind", -60), ("ahead", 3600)):
        beat_at = timezone.now() + timedelta(seconds=seconds)
        WorkerRow.objects.create(id=name, kinds="jobs", concurrency=1, beat_at=beat_at)
    assert [one.pk for one in WorkerRow.objects.alive()] == ["now"]
