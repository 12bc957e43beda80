"""`/v1/batches`: from a file to the files of its results."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from django.test.utils import override_settings
from django.utils import timezone

from streamserve.models import Batch, BatchRow, Stream
from streamserve.web import site
from tests.conftest import until_ready
from tests.support.sites.batch_runs import CHAT, Tenant, jsonl, line, without_worker

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

HI = [{"role": "user", "content": "x"}]


@pytest.fixture
def tenant(alice_key: str) -> Tenant:
    return Tenant(alice_key)


async def test_rows_are_answered_as_requests_are(tenant: Tenant) -> None:
    """The output has each answer in the order of the input, as the route gives it; no row of a stream is kept."""
    requests = [line(f"row {index}") for index in range(20)]
    batch = await tenant.run(jsonl(requests), metadata={"night": "1"})
    assert (batch["status"], batch["error_file_id"], batch["metadata"]) == ("completed", None, {"night": "1"})
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    assert batch["expires_at"] == batch["created_at"] + 86_400
    results = await tenant.lines(batch["output_file_id"])
    assert [one["custom_id"] for one in results] == [one["custom_id"] for one in requests]
    assert await Stream.objects.acount() == 0
    assert await BatchRow.objects.acount() == 0
    alone = (await tenant.post(CHAT, requests[3]["body"])).json()
    body = results[3]["response"]["body"]
    assert (results[3]["response"]["status_code"], results[3]["error"]) == (200, None)
    assert body["choices"] == alone["choices"]
    assert body["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
    assert set(body) == set(alone)
    file = (await tenant.get(f"/v1/files/{batch['output_file_id']}")).json()
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")


async def test_a_web_process_that_has_a_worker_runs_it(tenant: Tenant) -> None:
    """As the demo's does, and every one with a log in memory: at once, and without a command."""
    file_id = await tenant.file(jsonl([line("a")]))
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch = (await tenant.post("/v1/batches", asked)).json()
    async with asyncio.timeout(60):
        while (batch := await tenant.batch(batch["id"]))["status"] != "completed":  # noqa: ASYNC110  (as a client polls)
            await asyncio.sleep(0.01)
    assert batch["request_counts"]["completed"] == 1


async def test_completions_are_rows_too(tenant: Tenant) -> None:
    """With several prompts in a row, as the route takes them."""
    rows = [
        line("one", "/v1/completions", prompt="ab", max_tokens=3),
        line("two", "/v1/completions", prompt=["a", "b"]),
    ]
    rows[1]["body"]["max_tokens"] = 2
    batch = await tenant.run(jsonl(rows), "/v1/completions")
    results = await tenant.lines(batch["output_file_id"])
    assert [len(one["response"]["body"]["choices"]) for one in results] == [1, 2]


async def test_responses_are_rows_too(tenant: Tenant) -> None:
    """Each is whole in the output file, and nowhere else."""
    rows = [line("one", "/v1/responses", input="ab"), line("two", "/v1/responses", input="ab", background=True)]
    batch = await tenant.run(jsonl(rows), "/v1/responses")
    (result,) = await tenant.lines(batch["output_file_id"])
    body = result["response"]["body"]
    assert (body["object"], body["store"], body["output"][0]["type"]) == ("response", False, "message")
    (refused,) = await tenant.lines(batch["error_file_id"])
    assert refused["response"]["body"]["error"]["param"] == "background"


async def test_wrong_rows_end_in_the_error_file(tenant: Tenant) -> None:
    """With the response that the route gives; the others are answered."""
    rows = [
        line("good"),
        line("bad", messages=HI, temperature=9),
        line("lost", model="no"),
    ]
    rows[2]["body"]["messages"] = rows[0]["body"]["messages"]
    batch = await tenant.run(jsonl(rows))
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 3, "completed": 1, "failed": 2})
    assert [one["custom_id"] for one in await tenant.lines(batch["output_file_id"])] == ["good"]
    bad, lost = await tenant.lines(batch["error_file_id"])
    assert (bad["custom_id"], bad["response"]["status_code"], bad["error"]) == ("bad", 400, None)
    alone = await tenant.post(CHAT, rows[1]["body"])
    assert bad["response"]["body"] == alone.json()
    assert (lost["response"]["status_code"], lost["response"]["body"]["error"]["code"]) == (404, "model_not_found")


def broken(number: int) -> bytes:
    """Return 1,300 good lines, of which one is cut."""
    lines = jsonl(line(f"r{index}") for index in range(1300)).splitlines(keepends=True)
    lines[number - 1] = lines[number - 1][:30] + b"\n"
    return b"".join(lines)


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (jsonl([line("a"), line("b"), line("a")]), "duplicate_custom_id", 3),
        (broken(1234), "invalid_json_line", 1234),
        (b"\n \n", "empty_file", None),
        (jsonl([line("a"), line("b", "/v1/completions", prompt="x")]), "invalid_url", 2),
        (jsonl([{**line("a"), "method": "GET"}]), "invalid_method", 1),
        (jsonl([line("a", messages=[], stream=True)]), "stream_not_supported", 1),
        (jsonl([{"method": "POST", "url": CHAT, "body": {}}]), "missing_required_parameter", 1),
        (jsonl([line("a"), [1]]), "invalid_json_line", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_wrong_file_fails_before_any_row(tenant: Tenant, content: bytes, code: str, number: int | None) -> None:
    """The batch says what is wrong, and where."""
    batch = await tenant.run(content)
    assert (batch["status"], batch["output_file_id"], batch["in_progress_at"]) == ("failed", None, None)
    assert [(one["code"], one["line"]) for one in batch["errors"]["data"]] == [(code, number)]
    assert batch["errors"]["object"] == "list"
    assert isinstance(batch["failed_at"], int)


async def test_batches_that_cannot_be(tenant: Tenant, lonely_key: str) -> None:
    """Each refusal has a code and a param, and no batch is made."""
    content = jsonl([line("a")])
    file_id = await tenant.file(content)
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for change, status, param in (
        ({"endpoint": "/v1/images/generations"}, 400, "endpoint"),
        ({"endpoint": "/pipelines/none"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"priority": "high"}, 400, "priority"),
    ):
        refused = await tenant.post("/v1/batches", {**asked, **change})
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert (await Tenant(lonely_key).post("/v1/batches", asked)).json()["error"]["code"] == "file_not_found"
    assert await Batch.objects.acount() == 0


async def test_a_key_queues_one_batch(tenant: Tenant, lonely_key: str) -> None:
    """However often it is sent, and at once. With another body it is refused; another caller has keys of its own."""
    await without_worker()
    asked = {"input_file_id": await tenant.file(jsonl([line("a")])), "endpoint": CHAT, "completion_window": "24h"}
    tenant.headers["idempotency-key"] = "night-1"
    answers = await asyncio.gather(*(tenant.post("/v1/batches", asked) for _ in range(4)))
    assert [one.status_code for one in answers] == [200] * 4
    assert len({one.json()["id"] for one in answers}) == await Batch.objects.acount() == 1
    refused = await tenant.post("/v1/batches", {**asked, "metadata": {"night": "2"}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    other = Tenant(lonely_key)
    other.headers["idempotency-key"] = "night-1"
    theirs = {**asked, "input_file_id": await other.file(jsonl([line("a")]))}
    assert (await other.post("/v1/batches", theirs)).status_code == 200
    assert await Batch.objects.acount() == 2


async def test_a_batch_is_its_tenants(tenant: Tenant, lonely_key: str) -> None:
    """For another tenant it does not exist."""
    batch = (await tenant.create(jsonl([line("a")]))).json()
    other = Tenant(lonely_key)
    for response in (
        await other.get(f"/v1/batches/{batch['id']}"),
        await other.post(f"/v1/batches/{batch['id']}/cancel", {}),
        await other.get("/v1/batches/batch_none"),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "batch_not_found")
    assert (await other.get("/v1/batches")).json()["data"] == []
    assert (await tenant.get("/v1/batches")).json()["data"] == [batch]


async def test_a_tenant_has_so_many_batches(tenant: Tenant) -> None:
    """Those that have not ended count."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "LIMITS": {"MAX_BATCHES": 1}}):
        await tenant.create(jsonl([line("a")]))
        refused = await tenant.create(jsonl([line("a")]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_batches")


async def test_a_key_has_the_last_place_once(tenant: Tenant) -> None:
    """Two requests with one key, at once: the second does not find the place taken that the first has."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "LIMITS": {"MAX_BATCHES": 1}}):
        await without_worker()
        body = {"input_file_id": await tenant.file(jsonl([line("a")])), "endpoint": CHAT, "completion_window": "24h"}
        tenant.headers["idempotency-key"] = "k"
        both = await asyncio.gather(*(tenant.post("/v1/batches", body) for _ in range(2)))
        assert [one.status_code for one in both] == [200, 200], both[1].content
        assert both[0].json()["id"] == both[1].json()["id"]
        await site.reset()


async def test_an_input_in_use_is_not_deleted(tenant: Tenant) -> None:
    """Before its batch has ended."""
    batch = (await tenant.create(jsonl([line("a")]))).json()
    path = f"/v1/files/{batch['input_file_id']}"
    refused = await tenant.delete(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "file_in_use")
    await tenant.until_ended(batch["id"])
    assert (await tenant.delete(path)).status_code == 200


async def test_a_batch_that_waits_is_cancelled(tenant: Tenant) -> None:
    """No row has run; each is in the error file. It cannot be cancelled when it has ended."""
    batch = (await tenant.create(jsonl([line("a"), line("b")]))).json()
    cancelled = (await tenant.post(f"/v1/batches/{batch['id']}/cancel", {})).json()
    assert cancelled["status"] == "cancelling"
    ended = await tenant.until_ended(batch["id"])
    assert (ended["status"], ended["output_file_id"]) == ("cancelled", None)
    errors = await tenant.lines(ended["error_file_id"])
    assert [(one["custom_id"], one["response"], one["error"]["code"]) for one in errors] == [
        ("a", None, "batch_cancelled"), ("b", None, "batch_cancelled"),
    ]  # fmt: skip
    assert (await tenant.post(f"/v1/batches/{batch['id']}/cancel", {})).json()["status"] == "cancelled"
    done = await tenant.run(jsonl([line("a")]))
    refused = await tenant.post(f"/v1/batches/{done['id']}/cancel", {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "batch_not_cancellable")


async def _half_run(tenant: Tenant, rows: list[dict[str, Any]]) -> tuple[str, asyncio.Task[None], Any]:
    """Start a batch whose last rows take very long; return when the short ones have ended."""
    batch_id = (await tenant.create(jsonl(rows))).json()["id"]
    worker = site.get_site().work.new_worker(["batch"])
    running = asyncio.create_task(worker.run())
    num_short = sum("ignore_eos" not in row["body"] for row in rows)
    async with asyncio.timeout(60):
        while (await tenant.batch(batch_id))["request_counts"]["completed"] < num_short:
            worker.wake()
            await asyncio.sleep(0.01)
    return batch_id, running, worker


def long(custom_id: str) -> dict[str, Any]:
    return line(custom_id, messages=HI, max_tokens=3000, ignore_eos=True)


@pytest.fixture
async def slow_engine(engine: None) -> Any:
    """An echo engine of 100 tokens a second, so that a long row does not end in a test."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.01}):
        await until_ready()
        yield
        await site.reset()


@pytest.mark.usefixtures("slow_engine")
async def test_cancelling_keeps_what_has_finished(tenant: Tenant) -> None:
    """Rows that run are stopped, and with those that wait end in the error file."""
    batch_id, running, worker = await _half_run(tenant, [line("short"), *(long(f"long {n}") for n in range(12))])
    await tenant.post(f"/v1/batches/{batch_id}/cancel", {})
    ended = await tenant.until_ended(batch_id)
    worker.stop()
    await running
    assert (ended["status"], ended["request_counts"]) == ("cancelled", {"total": 13, "completed": 1, "failed": 0})
    assert [one["custom_id"] for one in await tenant.lines(ended["output_file_id"])] == ["short"]
    assert len(await tenant.lines(ended["error_file_id"])) == 12
    assert ended["cancelling_at"] <= ended["cancelled_at"]


@pytest.mark.usefixtures("slow_engine")
async def test_a_batch_expires(tenant: Tenant) -> None:
    """What has not run when its window ends is in the error file; what has is kept."""
    batch_id, running, worker = await _half_run(tenant, [line("short"), long("long")])
    worker.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await Batch.objects.filter(pk=batch_id).aupdate(expires_at=timezone.now() - timedelta(seconds=1))
    ended = await tenant.until_ended(batch_id)
    assert (ended["status"], ended["expired_at"] is None) == ("expired", False)
    assert [one["custom_id"] for one in await tenant.lines(ended["output_file_id"])] == ["short"]
    (unrun,) = await tenant.lines(ended["error_file_id"])
    assert (unrun["custom_id"], unrun["error"]["code"]) == ("long", "batch_expired")


@pytest.mark.usefixtures("slow_engine")
async def test_a_worker_that_stops_gives_its_batch_back(tenant: Tenant) -> None:
    """The next one runs what has no end; no finished row is run again, and no custom_id is there twice."""
    rows = [
        line("short"),
        *(line(f"row {n}", messages=HI, max_tokens=40) for n in range(9)),
    ]
    rows[1]["body"].update(max_tokens=3000, ignore_eos=True, timeout_seconds=2)
    batch_id = (await tenant.create(jsonl(rows))).json()["id"]
    worker = site.get_site().work.new_worker(["batch"])
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(60):
        while not (await tenant.batch(batch_id))["request_counts"]["completed"]:
            worker.wake()
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    kept = {row.line: row.request_id async for row in BatchRow.objects.all()}
    assert 1 in kept
    assert len(kept) < 10
    assert (await Batch.objects.aget()).state == "queued"
    ended = await tenant.until_ended(batch_id)
    results = await tenant.lines(ended["output_file_id"])
    errors = await tenant.lines(ended["error_file_id"])
    assert sorted(one["custom_id"] for one in results + errors) == sorted(row["custom_id"] for row in rows)
    assert [one["response"]["body"]["error"]["code"] for one in errors] == ["timeout"]
    again = {one["custom_id"]: one["id"] for one in results}
    assert all(again[rows[number - 1]["custom_id"]] == f"batch_{kept[number]}" for number in kept)


async def test_rows_are_of_the_class_batch(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever class a row or its caller names."""
    seen: set[str] = set()
    client = site.get_site().clients["echo"]
    generate = client.generate

    async def watched(request: Any, *decided: Any) -> Any:
        seen.add(request.latency_class)
        return await generate(request, *decided)

    monkeypatch.setattr(client, "generate", watched)
    await tenant.run(jsonl([line("a", messages=HI, max_tokens=4, latency_class="chat")]))
    assert seen == {"batch"}
