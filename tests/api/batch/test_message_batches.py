"""`/v1/messages/batches`: from the requests in a body to a file of their results."""

from __future__ import annotations

import asyncio
import http.client
import json
from contextlib import closing
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from django.utils import timezone

from streamserve.models import ApiKey, Batch, BatchRow, StoredFile
from streamserve.testing import DaphneServer
from streamserve.web import site
from tests.support.sites.batch_runs import Tenant, jsonl, line, without_worker

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

PATH = "/v1/messages/batches"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tenant(alice_key: str) -> Tenant:
    return Tenant(alice_key)


def request(custom_id: str, **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": {"messages": HI, "max_tokens": 4, "seed": 7, **changes}}


async def created(tenant: Tenant, *requests: Any) -> dict[str, Any]:
    """Create a batch, which waits for a worker of the test; return it."""
    await without_worker()
    response = await tenant.post(PATH, {"requests": list(requests)})
    assert response.status_code == 200, response.content
    assert response["Request-Id"]
    return dict(response.json())


async def until_ended(tenant: Tenant, batch_id: str) -> dict[str, Any]:
    """Have a worker run what is queued until the batch has ended; return it."""
    worker = site.get_site().work.new_worker(["batch"])
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(60):
            while (batch := (await tenant.get(f"{PATH}/{batch_id}")).json())["processing_status"] != "ended":
                worker.wake()
                await asyncio.sleep(0.01)
    finally:
        worker.stop()
        await running
    return dict(batch)


async def results_of(tenant: Tenant, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines at a batch's results_url."""
    response = await tenant.get(batch["results_url"])
    assert response.status_code == 200, response.content
    whole = b"".join([piece async for piece in response.streaming_content])
    return [json.loads(one) for one in whole.splitlines()]


async def test_requests_are_answered_as_messages_are(tenant: Tenant) -> None:
    """In the order of the requests: a message each, or the error that the route gives."""
    requests = [request(f"r{index}") for index in range(12)]
    requests[5] = request("bad", temperature=9)
    batch = await created(tenant, *requests)
    assert (batch["type"], batch["processing_status"], batch["results_url"]) == ("message_batch", "in_progress", None)
    assert batch["id"].startswith("msgbatch_")
    assert batch["request_counts"]["processing"] == 12
    ended = await until_ended(tenant, batch["id"])
    assert ended["request_counts"] == {"processing": 0, "succeeded": 11, "errored": 1, "canceled": 0, "expired": 0}
    assert ended["created_at"] <= ended["ended_at"] < ended["expires_at"]
    lines = await results_of(tenant, ended)
    assert [one["custom_id"] for one in lines] == [one["custom_id"] for one in requests]
    alone = (await tenant.post("/v1/messages", requests[0]["params"])).json()
    message = lines[0]["result"]["message"]
    assert (lines[0]["result"]["type"], message["content"], set(message)) == ("succeeded", alone["content"], set(alone))
    wrong = (await tenant.post("/v1/messages", requests[5]["params"])).json()
    assert lines[5]["result"] == {"type": "errored", "error": {**wrong, "request_id": None}}
    assert await BatchRow.objects.acount() == 0


async def test_jsonl_is_taken_too(tenant: Tenant) -> None:
    """One request a line."""
    body = jsonl([request("a"), request("b")])
    response = await tenant.client.post(PATH, body, content_type="application/x-ndjson", headers=tenant.headers)
    ended = await until_ended(tenant, response.json()["id"])
    assert [one["custom_id"] for one in await results_of(tenant, ended)] == ["a", "b"]


async def test_a_cancelled_batch_has_a_result_for_each_request(tenant: Tenant) -> None:
    """Those that were not run are canceled; cancelled again it stays as it is."""
    batch = await created(tenant, *(request(f"r{index}") for index in range(5)))
    first = (await tenant.post(f"{PATH}/{batch['id']}/cancel", {})).json()
    assert (first["processing_status"], first["cancel_initiated_at"] is not None) == ("canceling", True)
    assert (await tenant.post(f"{PATH}/{batch['id']}/cancel", {})).json()["processing_status"] == "canceling"
    ended = await until_ended(tenant, batch["id"])
    assert ended["request_counts"] == {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 5, "expired": 0}
    lines = await results_of(tenant, ended)
    assert [(one["custom_id"], one["result"]["type"]) for one in lines] == [(f"r{i}", "canceled") for i in range(5)]


async def test_a_batch_expires(tenant: Tenant) -> None:
    """What has not run by then is expired."""
    batch = await created(tenant, request("a"))
    await Batch.objects.filter(pk=batch["id"]).aupdate(expires_at=timezone.now() - timedelta(seconds=1))
    ended = await until_ended(tenant, batch["id"])
    assert ended["request_counts"]["expired"] == 1
    assert [one["result"] for one in await results_of(tenant, ended)] == [{"type": "expired"}]


async def test_a_failed_batch_has_no_results(tenant: Tenant) -> None:
    """The answer says so, and names no file."""
    batch = await created(tenant, request("a"))
    await Batch.objects.aupdate(status="failed", state="failed")
    missing = await tenant.get(f"/v1/messages/batches/{batch['id']}/results")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert f"{batch['id']} failed" in missing.json()["error"]["message"]


async def test_a_batch_is_deleted_with_its_results(tenant: Tenant) -> None:
    """When it has ended, and not before; nothing of it is left."""
    batch = await created(tenant, request("a"))
    for response in (await tenant.delete(f"{PATH}/{batch['id']}"), await tenant.get(f"{PATH}/{batch['id']}/results")):
        assert (response.status_code, response.json()["error"]["code"]) == (400, "batch_not_ended")
    await until_ended(tenant, batch["id"])
    deleted = await tenant.delete(f"{PATH}/{batch['id']}")
    assert deleted.json() == {"id": batch["id"], "type": "message_batch_deleted"}
    assert (await tenant.get(f"{PATH}/{batch['id']}")).status_code == 404
    assert (await Batch.objects.acount(), await StoredFile.objects.acount()) == (0, 0)


async def test_batches_are_listed_in_pages(tenant: Tenant) -> None:
    """Newest first; after one, or before one; those of the other API are not among them, nor the other way round."""
    ids = [(await created(tenant, request("a")))["id"] for _ in range(4)][::-1]
    other = (await tenant.create(jsonl([line("a")]))).json()["id"]

    async def page(query: str) -> tuple[list[str], bool]:
        found = (await tenant.get(f"{PATH}?{query}")).json()
        shown = [one["id"] for one in found["data"]]
        assert (found["first_id"], found["last_id"]) == ((shown[0], shown[-1]) if shown else (None, None))
        return shown, found["has_more"]

    assert await page("") == (ids, False)
    assert await page("limit=3") == (ids[:3], True)
    assert await page(f"limit=3&after_id={ids[2]}") == (ids[3:], False)
    assert await page(f"limit=2&before_id={ids[3]}") == (ids[1:3], True)
    assert [one["id"] for one in (await tenant.get("/v1/batches")).json()["data"]] == [other]
    assert (await tenant.get(f"{PATH}/{other}")).status_code == 404
    assert (await tenant.get(f"/v1/batches/{ids[0]}")).status_code == 404
    assert (await tenant.get(f"{PATH}?limit=0")).json()["error"]["param"] == "limit"
    assert (await tenant.get(f"{PATH}?after_id=nope")).status_code == 404


async def test_a_wrong_body_makes_no_batch(tenant: Tenant) -> None:
    """The error is in Anthropic's shape and names the request; no file is left."""
    for requests, param in (
        ([request("a"), request("a")], "requests[1].custom_id"),
        ([request("a", stream=True)], "requests[0].params.stream"),
        ([], "requests"),
    ):
        refused = await tenant.post(PATH, {"requests": requests})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert refused.json()["type"] == "error"
    text = await tenant.client.post(PATH, b"x", content_type="text/plain", headers=tenant.headers)
    assert text.status_code == 415
    assert (await Batch.objects.acount(), await StoredFile.objects.acount()) == (0, 0)


async def test_too_many_batches_leave_no_file(tenant: Tenant) -> None:
    """The refusal of one more drops what was stored for it."""
    for _ in range(site.get_site().services.answers.limits.max_batches):
        await created(tenant, request("a"))
    num_files = await StoredFile.objects.acount()
    refused = await tenant.post(PATH, {"requests": [request("a")]})
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert await StoredFile.objects.acount() == num_files


async def test_a_batch_is_its_tenants(tenant: Tenant, lonely_key: str) -> None:
    """For another tenant it does not exist."""
    batch = await created(tenant, request("a"))
    other = Tenant(lonely_key)
    for response in (
        await other.get(f"{PATH}/{batch['id']}"),
        await other.get(f"{PATH}/{batch['id']}/results"),
        await other.delete(f"{PATH}/{batch['id']}"),
        await other.post(f"{PATH}/{batch['id']}/cancel", {}),
    ):
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert (await other.get(PATH)).json()["data"] == []


def test_a_large_body_over_the_wire(hard_server: DaphneServer) -> None:
    """Far above the limit of other routes, read to its last request; above its own limit it is a 413 at once."""
    _row, key = ApiKey.objects.make()
    requests = [request(f"r{index}", note="x" * 1000) for index in range(3000)]
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=hard_server.url, headers=headers, timeout=30, trust_env=False) as client:
        refused = client.post(PATH, json={"requests": [*requests, request("r0")]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "requests[3000].custom_id")
    address = urlsplit(hard_server.url)
    head = {**headers, "Content-Type": "application/json", "Content-Length": str(300 * 1024 * 1024)}
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    with closing(connection):
        connection.request("POST", PATH, headers=head)  # without the body
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["type"]) == (413, "request_too_large")


async def test_a_batch_is_deleted_while_another_reads_its_requests(tenant: Tenant) -> None:
    """With its results; the requests stay for the other."""
    batch = await created(tenant, request("a"))
    await until_ended(tenant, batch["id"])
    row = await Batch.objects.aget()
    body = {"input_file_id": row.input_file_id, "endpoint": "/v1/messages", "completion_window": "24h"}
    other = await tenant.post("/v1/batches", body)
    assert other.status_code == 200, other.content
    deleted = await tenant.delete(f"{PATH}/{batch['id']}")
    assert deleted.status_code == 200, deleted.content
    assert (await tenant.get(f"{PATH}/{batch['id']}")).status_code == 404
    assert [one.pk async for one in StoredFile.objects.all()] == [row.input_file_id]
    assert (await tenant.until_ended(other.json()["id"]))["request_counts"]["completed"] == 1
