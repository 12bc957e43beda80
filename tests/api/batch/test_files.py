"""`/v1/files`: shapes, owners, limits."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.files.storage import FileSystemStorage
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import AsyncClient
from django.test.utils import override_settings
from django.utils import timezone

from streamserve.models import StoredFile
from streamserve.rows import orm
from streamserve.web import site
from tests.conftest import until
from tests.support.sites.batch_runs import CHAT, Tenant, jsonl, line

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]


@pytest.fixture
def tenant(alice_key: str) -> Tenant:
    return Tenant(alice_key)


async def test_a_file_comes_back_as_it_went_in(tenant: Tenant) -> None:
    """Upload, look, list, download, delete; then it is gone, from the storage too."""
    content = b'{"a": 1}\n' * 30_000
    file = (await tenant.upload(content)).json()
    assert (file["object"], file["bytes"], file["filename"], file["purpose"], file["status"]) == (
        "file", len(content), "in.jsonl", "batch", "processed",
    )  # fmt: skip
    assert (await tenant.get(f"/v1/files/{file['id']}")).json() == file
    assert (await tenant.get("/v1/files")).json()["data"] == [file]
    response = await tenant.get(f"/v1/files/{file['id']}/content")
    assert response.headers["Content-Length"] == str(len(content))
    assert b"".join([piece async for piece in response.streaming_content]) == content
    row = await StoredFile.objects.aget()
    assert site.get_site().work.files.storage.exists(row.name)
    deleted = await tenant.delete(f"/v1/files/{file['id']}")
    assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert not site.get_site().work.files.storage.exists(row.name)
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", "/v1/files/nonsense"):
        missing = await tenant.get(path)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "file_not_found")


async def test_a_file_is_its_tenants(tenant: Tenant, lonely_key: str) -> None:
    """For another tenant it does not exist."""
    file_id = await tenant.file(b"{}\n")
    other = Tenant(lonely_key)
    assert (await other.get("/v1/files")).json()["data"] == []
    assert (await other.get(f"/v1/files/{file_id}")).status_code == 404
    assert (await other.get(f"/v1/files/{file_id}/content")).status_code == 404
    assert (await other.delete(f"/v1/files/{file_id}")).status_code == 404
    assert (await tenant.get(f"/v1/files/{file_id}")).status_code == 200


async def test_a_list_comes_in_pages(tenant: Tenant) -> None:
    """Newest first, or oldest first; `after` is the last id of the page before."""
    ids = [await tenant.file(b"%d\n" % index) for index in range(5)]
    first = (await tenant.get("/v1/files?limit=2")).json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (ids[:2:-1], True)
    rest = (await tenant.get(f"/v1/files?limit=3&after={first['last_id']}")).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
    oldest = (await tenant.get("/v1/files?order=asc&limit=2&purpose=batch")).json()
    assert [one["id"] for one in oldest["data"]] == ids[:2]
    assert (await tenant.get("/v1/files?purpose=batch_output")).json()["data"] == []
    assert (await tenant.get("/v1/files?limit=0")).json()["error"]["param"] == "limit"
    assert (await tenant.get("/v1/files?after=file-none")).json()["error"]["param"] == "after"


async def test_forms_that_are_wrong(tenant: Tenant) -> None:
    """Each has a code and a param."""
    response = await tenant.upload(b"x", purpose="fine-tune")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "purpose")
    response = await tenant.upload(b"")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "empty_file")
    response = await tenant.client.post("/v1/files", {"purpose": "batch"}, headers=tenant.headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")
    response = await tenant.post("/v1/files", {"purpose": "batch"})
    assert (response.status_code, response.json()["error"]["param"]) == (415, "Content-Type")
    broken = await tenant.client.post(
        "/v1/files", b"no form", content_type="multipart/form-data", headers=tenant.headers
    )
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_form")
    expires = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}
    response = await tenant.upload(b"x", **expires)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "expires_after[seconds]")
    assert await StoredFile.objects.acount() == 0


@pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 413)])
async def test_the_largest_file(tenant: Tenant, size: int, status: int) -> None:
    """One byte more is refused, by name; nothing of it is kept."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "LIMITS": {"MAX_FILE_BYTES": 1000}}):
        response = await tenant.upload(b"x" * size)
        assert response.status_code == status
        if status == 413:
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("file_too_large", "file")
            assert "1,000" in error["message"]
            assert await StoredFile.objects.acount() == 0
        await site.reset()


async def test_a_tenant_has_so_much_room(tenant: Tenant) -> None:
    """What it keeps counts; deleting makes room."""
    await site.reset()
    room = 80 * 1024
    with override_settings(STREAMSERVE={"TESTING": True, "LIMITS": {"MAX_TENANT_FILE_BYTES": room}}):
        file_id = await tenant.file(b"x" * room)
        full = await tenant.upload(b"y" * room)
        assert (full.status_code, full.json()["error"]["code"]) == (507, "storage_full")
        await tenant.delete(f"/v1/files/{file_id}")
        await tenant.file(b"y" * room)
        await site.reset()


async def test_what_has_expired_is_gone(tenant: Tenant) -> None:
    """At once for its tenant; from the storage by the purge, which also drops what was never whole."""
    expires = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = (await tenant.upload(b"x", **expires)).json()
    assert file["expires_at"] == file["created_at"] + 3600
    kept, torn = await tenant.file(b"kept"), await tenant.file(b"torn")
    past = timezone.now() - timedelta(days=2)
    await StoredFile.objects.filter(pk=file["id"]).aupdate(expires_at=past)
    await StoredFile.objects.filter(pk=torn).aupdate(is_ready=False, created_at=past)
    assert (await tenant.get(f"/v1/files/{file['id']}")).status_code == 404
    assert await site.get_site().work.files.purge() == (2, 0)
    assert [row.pk async for row in StoredFile.objects.all()] == [kept]


class HeldStorage(FileSystemStorage):
    """Deletes when `go` is set."""

    is_asked, go = threading.Event(), threading.Event()

    def delete(self, name: str) -> None:
        self.is_asked.set()
        assert self.go.wait(30)
        super().delete(name)


@pytest.mark.parametrize("does_expire", [False, True])
async def test_no_batch_begins_with_a_file_that_is_being_deleted(
    tenant: Tenant, tmp_path: Path, does_expire: bool
) -> None:
    """By its tenant, or by the purge. It is gone at once, however long its storage takes."""
    HeldStorage.is_asked.clear()
    HeldStorage.go.clear()
    await site.reset()
    held = {"BACKEND": f"{__name__}.HeldStorage", "OPTIONS": {"location": str(tmp_path)}}
    batches = {"TESTING": True, "BATCHES": {"STORAGE": "held"}}
    with override_settings(STORAGES={**settings.STORAGES, "held": held}, STREAMSERVE=batches):
        file_id = await tenant.file(jsonl([line("a")]))
        now = timezone.now()
        if does_expire:
            await StoredFile.objects.filter(pk=file_id).aupdate(expires_at=now)
            deleting: asyncio.Future[Any] = asyncio.ensure_future(site.get_site().work.files.purge())
        else:
            deleting = asyncio.ensure_future(tenant.delete(f"/v1/files/{file_id}"))
        await asyncio.to_thread(HeldStorage.is_asked.wait, 30)
        await StoredFile.objects.filter(pk=file_id).aupdate(expires_at=None)  # as the batch saw it a moment before
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        refused = await tenant.post("/v1/batches", body)
        HeldStorage.go.set()
        await deleting
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "file_not_found")
        assert await StoredFile.objects.acount() == 0
        await site.reset()


class SlowStorage(FileSystemStorage):
    """Opens a file when `go` is set."""

    is_asked, go = threading.Event(), threading.Event()
    opened: list[Any] = []  # noqa: RUF012  (the test empties it)

    def open(self, name: str, mode: str = "rb") -> Any:
        self.is_asked.set()
        assert self.go.wait(30)
        self.opened.append(super().open(name, mode))
        return self.opened[-1]


async def test_a_file_that_is_opened_too_late_is_closed(tenant: Tenant, tmp_path: Path) -> None:
    """A worker that stops may give up a batch while its file is being opened: no descriptor waits to be collected."""
    await site.reset()
    SlowStorage.opened.clear()
    slow = {"BACKEND": f"{__name__}.SlowStorage", "OPTIONS": {"location": str(tmp_path)}}
    batches = {"TESTING": True, "BATCHES": {"STORAGE": "slow"}}
    with override_settings(STORAGES={**settings.STORAGES, "slow": slow}, STREAMSERVE=batches):
        file_id = await tenant.file(b"{}\n")
        row = await StoredFile.objects.aget()
        opening = asyncio.create_task(site.get_site().work.files.open(row.tenant, file_id))
        await asyncio.to_thread(SlowStorage.is_asked.wait, 30)
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        SlowStorage.go.set()
        await until(lambda: SlowStorage.opened and SlowStorage.opened[0].closed)
        await site.reset()


async def test_a_download_outlives_its_file(tenant: Tenant) -> None:
    """What was answered with 200 comes whole, though the file is deleted before its first byte is read."""
    content = b'{"a": 1}\n' * 30_000
    file_id = await tenant.file(content)
    response = await tenant.get(f"/v1/files/{file_id}/content")
    assert (await tenant.delete(f"/v1/files/{file_id}")).status_code == 200
    assert b"".join([piece async for piece in response.streaming_content]) == content


async def test_a_file_that_its_storage_has_lost(tenant: Tenant) -> None:
    """It is a 404, and not half an answer."""
    file_id = await tenant.file(b"{}")
    row = await orm.call(StoredFile.objects.get)
    await asyncio.to_thread(site.get_site().work.files.storage.delete, row.name)
    missing = await tenant.get(f"/v1/files/{file_id}/content")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "file_not_found")


async def test_contents_are_in_a_private_folder(tenant: Tenant) -> None:
    """Under a name that no client is shown, in STATE_DIR, which no web server serves."""
    file = (await tenant.upload(b"secret")).json()
    row = await orm.call(StoredFile.objects.get)
    path = Path(site.get_site().work.files.storage.path(row.name))
    assert path.is_relative_to(Path(settings.BASE_DIR) / "state" / "files")
    assert path.stat().st_mode & 0o077 == 0  # noqa: ASYNC240  (a test)
    assert path.name not in json.dumps(file)


async def test_a_signed_in_user_uploads_with_the_csrf_token(alice: Any) -> None:
    """In its header: the check reads nothing of the body, which may be large."""
    client = AsyncClient(enforce_csrf_checks=True)
    await client.aforce_login(alice)
    client.cookies["csrftoken"] = token = "a" * 32

    def form() -> dict[str, Any]:
        return {"purpose": "batch", "file": SimpleUploadedFile("in.jsonl", b"{}\n")}

    refused = await client.post("/v1/files", form())
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "csrf_failed")
    taken = await client.post("/v1/files", form(), headers={"X-CSRFToken": token})
    assert (taken.status_code, taken.json()["bytes"]) == (200, 3), taken.content
