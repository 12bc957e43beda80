"""Batches whose file expires, whose owner is locked out, and whose rows cannot be stored; ids that no row can have."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections
from django.test.utils import override_settings
from django.utils import timezone

from streamserve.models import ApiKey, Batch, BatchRow, StoredFile
from streamserve.rows import orm
from streamserve.web import site
from tests.conftest import until, until_ready
from tests.support.servers.write_lock import on_sqlite, write_lock
from tests.support.sites.batch_runs import CHAT, Tenant, jsonl, line
from tests.support.streams.hand_made import Gate

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

HI = [{"role": "user", "content": "x"}]


@pytest.fixture
def tenant(alice_key: str) -> Tenant:
    return Tenant(alice_key)


@pytest.fixture
async def slow_engine(engine: None, site_gate: Gate) -> AsyncIterator[None]:
    """An echo engine of 100 tokens a second, so that a long row does not end in a test."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.01}):
        await until_ready()
        yield
        await site.reset()


def long(custom_id: str) -> dict[str, Any]:
    return line(custom_id, messages=HI, max_tokens=3000, ignore_eos=True)


def live_rows() -> list[str]:
    """Return the rows that are being answered."""
    return [stream.id for stream in site.get_site().work.rows.streams.all() if stream.is_live]


async def test_a_file_that_expires_is_read_to_the_batchs_end(tenant: Tenant) -> None:
    """The batch began with it. Its tenant does not see it any more, and the purge takes it when the batch has ended."""
    batch = (await tenant.create(jsonl([line("a"), line("b")]))).json()
    await StoredFile.objects.aupdate(expires_at=timezone.now() - timedelta(seconds=1))
    files = site.get_site().work.files
    assert (await tenant.get(f"/v1/files/{batch['input_file_id']}")).status_code == 404
    assert await files.purge() == (0, 0)
    ended = await tenant.until_ended(batch["id"])
    assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", 2)
    assert await files.purge() == (1, 0)


async def test_a_revoked_keys_batch_does_not_run(tenant: Tenant) -> None:
    """It is cancelled when its turn comes."""
    batch = (await tenant.create(jsonl([line("a")]))).json()
    await orm.call(ApiKey.objects.all().revoke)
    await run_until_ended()
    ended = await Batch.objects.aget(pk=batch["id"])
    assert (ended.status, ended.state, ended.num_completed, ended.num_failed) == ("cancelled", "cancelled", 0, 0)


@pytest.mark.usefixtures("slow_engine")
async def test_revoking_a_key_stops_its_batch(tenant: Tenant) -> None:
    """The rows that run are ended, and what has finished is kept."""
    batch = (await tenant.create(jsonl([line("short"), long("long")]))).json()
    worker = site.get_site().work.new_worker(["batch"])
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(60):
        while not await BatchRow.objects.acount():  # noqa: ASYNC110  (a row of another thread)
            await asyncio.sleep(0.01)
    await orm.call(ApiKey.objects.all().revoke)
    async with asyncio.timeout(60):
        while (ended := await Batch.objects.aget(pk=batch["id"])).state == "running":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    worker.stop()
    await running
    assert (ended.status, ended.num_completed) == ("cancelled", 1)
    assert ended.output_file_id
    assert ended.error_file_id


async def run_until_ended() -> None:
    """Have a worker run what is queued to its end."""
    worker = site.get_site().work.new_worker(["batch"])
    worker.ends_idle = True
    await worker.run()


@pytest.mark.skipif(connection.vendor != "sqlite", reason="the trigger is SQLite's")
@pytest.mark.usefixtures("slow_engine")
async def test_rows_end_with_an_attempt_that_fails(tenant: Tenant, site_gate: Gate) -> None:
    """A row that cannot be stored fails the attempt: no other row goes on in its name, beside the next attempt."""
    site_gate.allow(1)  # all rows have begun when the short one ends
    await orm.call(_refuse_rows, "CREATE TRIGGER refuse BEFORE INSERT ON streamserve_batchrow")
    batch = (await tenant.create(jsonl([long("one"), long("two"), line("short"), long("three")]))).json()
    worker = site.get_site().work.new_worker(["batch"])
    running = asyncio.create_task(worker.run())
    try:
        await until(lambda: len(live_rows()) == 4)
        site_gate.open()
        async with asyncio.timeout(60):
            while (await Batch.objects.aget(pk=batch["id"])).state != "queued":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await until(lambda: not live_rows())
    finally:
        worker.stop()
        await running
        await orm.call(_refuse_rows, "DROP TRIGGER refuse")


@on_sqlite
@pytest.mark.usefixtures("slow_engine")
async def test_a_row_that_has_ended_is_stored_by_a_worker_that_stops(tenant: Tenant, site_gate: Gate) -> None:
    """Its write waits for a locked database. The batch is given back with the row, which is not run again."""
    ending = line("ending", messages=HI, max_tokens=30, ignore_eos=True)
    site_gate.allow(10)
    batch = (await tenant.create(jsonl([ending, long("long")]))).json()
    worker = site.get_site().work.new_worker(["batch"])
    running = asyncio.create_task(worker.run())
    await until(lambda: len(live_rows()) == 2)
    with write_lock():
        site_gate.open()
        await until(lambda: len(live_rows()) == 1)
        running.cancel()
        await until(lambda: not live_rows())
    await asyncio.gather(running, return_exceptions=True)
    assert [row.custom_id async for row in BatchRow.objects.all()] == ["ending"]
    found = await Batch.objects.aget(pk=batch["id"])
    assert (found.state, found.num_completed) == ("queued", 1)


def _refuse_rows(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement + (" BEGIN SELECT RAISE(FAIL, 'no room'); END" if "CREATE" in statement else ""))


async def test_a_file_that_cannot_be_dropped_keeps_no_other(tenant: Tenant) -> None:
    """The purge goes on with the next one, and tries that one again another time."""
    stuck, loose = await tenant.file(b"stuck"), await tenant.file(b"loose")
    files = site.get_site().work.files
    row = await StoredFile.objects.aget(pk=stuck)
    path = Path(files.storage.path(row.name))
    path.unlink()  # noqa: ASYNC240  (a test)
    (path / "in the way").mkdir(parents=True)
    await StoredFile.objects.aupdate(expires_at=timezone.now() - timedelta(seconds=1))
    await StoredFile.objects.filter(pk=loose).aupdate(expires_at=timezone.now())
    assert await files.purge() == (1, 0)
    assert [one.pk async for one in StoredFile.objects.all()] == [stuck]
    (path / "in the way").rmdir()
    assert await files.purge() == (1, 0)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
async def test_a_page_after_an_id_with_nul(tenant: Tenant, path: str) -> None:
    """PostgreSQL takes no NUL in a query: it never gets one."""
    answer = await tenant.get(f"{path}?after=file-%00")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


async def test_a_batch_with_nul_in_its_fields(tenant: Tenant) -> None:
    """It is refused by name."""
    file_id = await tenant.file(jsonl([line("a")]))
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for wrong, param in (
        ({"metadata": {"night": "1\0"}}, "metadata"),
        ({"metadata": {"ni\0ght": "1"}}, "metadata"),
        ({"input_file_id": "file-\0"}, "input_file_id"),
    ):
        refused = await tenant.post("/v1/batches", {**asked, **wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_locked_database_is_a_503(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds SQLite's write lock for longer than a request waits: clients try again by themselves."""
    file_id = await tenant.file(jsonl([line("a")]))
    monkeypatch.setitem(connections.settings["default"]["OPTIONS"], "timeout", 0.05)
    orm.close()  # the next connection has the timeout
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    with closing(sqlite3.connect(connections.settings["default"]["NAME"], isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refused = await tenant.post("/v1/batches", body)
        other.execute("ROLLBACK")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "database_unavailable")
    assert refused["Retry-After"] == "2"
    assert (await tenant.post("/v1/batches", body)).status_code == 200
    orm.close()
