"""Batches that fail after rows have ended: nothing that has an answer is lost, and every other row has a reason."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.models import Batch, BatchRow, StoredFile
from streamserve.web import site
from streamserve.work.queue import BATCHES
from tests.conftest import until_ready
from tests.support.sites.batch_runs import Tenant, jsonl, line, without_worker

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

HI = [{"role": "user", "content": "x"}]
LONG = {"messages": HI, "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture
async def tenant(engine: None, alice_key: str) -> Any:
    """Of a site whose echo engine gives 100 tokens a second, so that a long row does not end in a test."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.01}):
        await until_ready()
        yield Tenant(alice_key)
        await site.reset()


async def lose(batch_id: str, attempts: int) -> None:
    """Run the batch until its first row has ended; then its worker is gone, for the last of so many times."""
    worker = site.get_site().work.new_worker([BATCHES])
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(60):
        while not await BatchRow.objects.acount():  # noqa: ASYNC110  (a row of another thread)
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await Batch.objects.filter(pk=batch_id).aupdate(attempts=attempts)


async def lost(tenant: Tenant, attempts: int = 20, *, without_file: bool = False) -> dict[str, Any]:
    """Return a batch of a short and a long row that was lost so often, as it has ended."""
    batch = (await tenant.create(jsonl([line("short"), line("long", **LONG)]))).json()
    await lose(batch["id"], attempts)
    if without_file:
        await StoredFile.objects.filter(pk=batch["input_file_id"]).adelete()
    return await tenant.until_ended(batch["id"])


async def test_a_batch_that_lost_its_worker_too_often_has_its_files(tenant: Tenant) -> None:
    """What has ended is in the output; every other row is in the error file, with the reason of the batch."""
    ended = await lost(tenant)
    assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "worker_lost")
    assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
    assert [one["custom_id"] for one in await tenant.lines(ended["output_file_id"])] == ["short"]
    (unrun,) = await tenant.lines(ended["error_file_id"])
    assert (unrun["custom_id"], unrun["response"], unrun["error"]["code"]) == ("long", None, "worker_lost")
    assert ended["failed_at"] is not None
    row = await Batch.objects.aget()
    assert (row.state, await BatchRow.objects.acount()) == ("failed", 0)


async def test_a_batch_whose_input_is_gone_keeps_its_answers(tenant: Tenant) -> None:
    """The rows without an answer have no name any more."""
    ended = await lost(tenant, attempts=1, without_file=True)
    assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "input_file_not_found")
    assert [one["custom_id"] for one in await tenant.lines(ended["output_file_id"])] == ["short"]
    assert ended["error_file_id"] is None


async def test_files_that_kill_the_worker_are_given_up(tenant: Tenant) -> None:
    """A batch whose worker is lost while its files are made ends all the same."""
    ended = await lost(tenant, attempts=40)
    assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "worker_lost")
    assert (ended["output_file_id"], ended["error_file_id"]) == (None, None)


async def test_a_message_batch_has_a_result_for_each_request(tenant: Tenant) -> None:
    """Those without an answer are errored, in Anthropic's shape."""
    await without_worker()
    requests = [
        {"custom_id": "short", "params": {"messages": HI, "max_tokens": 4}},
        {"custom_id": "long", "params": {"messages": [{"role": "user", "content": "x " * 2000}], "max_tokens": 3000}},
    ]
    batch = (await tenant.post("/v1/messages/batches", {"requests": requests})).json()
    await lose(batch["id"], 20)
    worker = site.get_site().work.new_worker([BATCHES])
    worker.ends_idle = True
    await worker.run()
    ended = (await tenant.get(f"/v1/messages/batches/{batch['id']}")).json()
    assert ended["processing_status"] == "ended"
    assert ended["request_counts"] == {"processing": 0, "succeeded": 1, "errored": 1, "canceled": 0, "expired": 0}
    response = await tenant.get(ended["results_url"])
    lines = [json.loads(one) for one in b"".join([piece async for piece in response.streaming_content]).splitlines()]
    assert [(one["custom_id"], one["result"]["type"]) for one in lines] == [("short", "succeeded"), ("long", "errored")]
    error = lines[1]["result"]["error"]
    assert (error["type"], error["error"]["type"], error["error"]["code"]) == ("error", "api_error", "worker_lost")
