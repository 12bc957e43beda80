"""`Idempotency-Key` on files and message batches: an upload that is sent again makes no second one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.utils import timezone

from streamserve.models import Batch, StoredFile
from tests.support.sites.batch_runs import Tenant, without_worker

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

PATH = "/v1/messages/batches"
FILE = b'{"custom_id": "a"}\n'


def body(text: str = "hi") -> dict[str, Any]:
    return {
        "requests": [{"custom_id": "a", "params": {"messages": [{"role": "user", "content": text}], "max_tokens": 4}}]
    }


@pytest.fixture
async def tenant(alice_key: str) -> Tenant:
    await without_worker()
    tenant = Tenant(alice_key)
    tenant.headers["idempotency-key"] = "night-1"
    return tenant


async def test_a_message_batch_is_queued_once(tenant: Tenant) -> None:
    """The same requests have the same batch, and leave no second file; others are refused."""
    ids = {(await tenant.post(PATH, body())).json()["id"] for _ in range(3)}
    assert (len(ids), await Batch.objects.acount(), await StoredFile.objects.acount()) == (1, 1, 1)
    refused = await tenant.post(PATH, body("other"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert refused.json()["type"] == "error"
    tenant.headers["idempotency-key"] = "night-2"
    assert (await tenant.post(PATH, body())).json()["id"] not in ids


async def test_of_two_at_once_one_is_queued(tenant: Tenant) -> None:
    """Both get the same batch, and one file is left."""
    found = await asyncio.gather(*(tenant.post(PATH, body()) for _ in range(3)))
    assert len({one.json()["id"] for one in found}) == 1
    assert (await Batch.objects.acount(), await StoredFile.objects.acount()) == (1, 1)


async def test_a_file_is_stored_once(tenant: Tenant) -> None:
    """The same upload has the same file, at once and later; another file, or other fields, are refused."""
    found = await asyncio.gather(*(tenant.upload(FILE) for _ in range(3)))
    (file_id,) = {one.json()["id"] for one in [*found, await tenant.upload(FILE)]}
    assert await StoredFile.objects.acount() == 1
    for refused in (
        await tenant.upload(b"other\n"),
        await tenant.upload(FILE, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    del tenant.headers["idempotency-key"]
    assert (await tenant.upload(FILE)).json()["id"] != file_id


async def test_a_file_that_is_gone_gives_its_key_back(tenant: Tenant) -> None:
    """Deleted or expired, the next upload makes another one; and a key is no text."""
    first = (await tenant.upload(FILE)).json()["id"]
    await tenant.delete(f"/v1/files/{first}")
    second = (await tenant.upload(FILE)).json()["id"]
    await StoredFile.objects.aupdate(expires_at=timezone.now())
    third = (await tenant.upload(FILE)).json()["id"]
    assert len({first, second, third}) == 3
    tenant.headers["idempotency-key"] = "a key"
    assert (await tenant.upload(FILE)).json()["error"]["param"] == "Idempotency-Key"
