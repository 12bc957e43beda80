"""Rows of batches: stored by the worker that has the batch, and once; run by pipelines too; waiting for an engine."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError
from django.utils import timezone

from streamserve.api.batch.rows import TryLater, run_row
from streamserve.api.call import Caller
from streamserve.clients.pipeline.client import forget, pipeline
from streamserve.models import Batch, BatchRow
from streamserve.rows.work import BatchQuerySet
from streamserve.web import site
from tests.conftest import until_ready
from tests.support.sites.batch_runs import CHAT, Tenant, jsonl, line

HI = [{"role": "user", "content": "hi"}]


def row(number: int, status_code: int = 200) -> BatchRow:
    return BatchRow(
        batch_id="batch_1", line=number, custom_id=f"row {number}", request_id="r", status_code=status_code, body="{}"
    )


@pytest.fixture
def batch(transactional_db: Any) -> Batch:
    """A batch that `first` has claimed."""
    fields = {"owner": "user:1", "tenant": "user:1", "endpoint": CHAT, "input_file_id": "f"}
    Batch.objects.create(id="batch_1", status="in_progress", num_rows=3, expires_at=timezone.now(), **fields)
    (taken,) = Batch.objects.take("first")
    return taken


def held_by(worker_id: str, batch: Batch) -> BatchQuerySet:
    return Batch.objects.all().held(batch.pk, batch.fence, worker_id)


def test_rows_are_counted_as_they_are_stored(batch: Batch) -> None:
    """By their status; a worker that gets on has used no attempt."""
    Batch.objects.update(attempts=7)
    assert held_by("first", batch).store([row(1), row(2, 404)])
    found = Batch.objects.get()
    assert (found.num_completed, found.num_failed, found.attempts) == (1, 1, 1)
    assert BatchRow.objects.lines_of(batch.pk) == {1, 2}


def test_a_worker_that_lost_the_batch_stores_nothing(batch: Batch) -> None:
    """Nor does it count or change the status, when another worker has the batch, or none."""
    Batch.objects.requeue_of("first")
    assert not held_by("first", batch).store([row(1)])
    (again,) = Batch.objects.take("second")
    assert not held_by("first", batch).store([row(1)])
    assert not held_by("first", batch).move("finalizing")
    assert held_by("second", again).store([row(1)])
    assert Batch.objects.get().num_completed == BatchRow.objects.count() == 1


def test_no_line_ends_twice(batch: Batch) -> None:
    """The database refuses it, and then nothing of that write is counted."""
    held_by("first", batch).store([row(1)])
    with pytest.raises(IntegrityError):
        held_by("first", batch).store([row(2), row(1)])
    assert Batch.objects.get().num_completed == BatchRow.objects.count() == 1


async def test_a_pipeline_runs_each_row(alice_key: str, transactional_db: Any) -> None:
    """By its address; one that fails is in the error file, in the shape of its route."""
    await site.reset()

    @pipeline(model="echo")
    async def nightly(run: Any) -> None:
        await run.say(f"done {10 // run.input['number']}")

    try:
        await until_ready()
        tenant, url = Tenant(alice_key), "/pipelines/nightly"
        rows = [line(f"row {number}", url, input={"number": number}) for number in (5, 0, 2)]
        batch = await tenant.run(jsonl(rows), url)
        output = await tenant.lines(batch["output_file_id"])
        assert [one["response"]["body"]["text"] for one in output] == ["done 2", "done 5"]
        (failed,) = await tenant.lines(batch["error_file_id"])
        assert (failed["custom_id"], failed["response"]["body"]["error"]["code"]) == ("row 0", "pipeline_failed")
    finally:
        forget("nightly")
        await site.reset()


@pytest.mark.usefixtures("engine")
async def test_a_row_waits_for_an_engine_that_is_paused(alice_key: str) -> None:
    """It is refused for now, which is no end of a row."""
    await site.get_site().services.ops.control("echo", "pause")
    asked = {"messages": HI, "max_tokens": 4}
    refused = await Tenant(alice_key).post(CHAT, asked)
    assert refused.json()["error"]["code"] == "engine_paused"
    with pytest.raises(TryLater):
        await run_row(site.get_site().work.rows, Caller("user:1"), CHAT, asked, "req_1")
    await site.get_site().services.ops.control("echo", "resume")
    reply = await run_row(site.get_site().work.rows, Caller("user:1"), CHAT, asked, "req_1")
    assert reply.status_code == 200
