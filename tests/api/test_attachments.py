"""`/attachments`: what comes back, whose it is, its limits, and when it goes."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test.utils import override_settings
from django.utils import timezone

from streamserve.models import Attachment, Conversation, Message
from streamserve.rows import orm
from streamserve.web import site
from streamserve.work.attachments import Attachments
from tests.conftest import Caller, body_of, until_ready
from tests.support.bodies.pdfs import pdf

pytestmark = pytest.mark.django_db(transaction=True)

TEXT = "Größe\n".encode()


class Attacher(Caller):
    """A caller that uploads."""

    async def attach(self, name: str = "a.txt", content: bytes = TEXT, **fields: Any) -> Any:
        form = {"file": SimpleUploadedFile(name, content), **fields}
        return await self.client.post("/attachments", form, headers=self.headers)

    async def attached(self, name: str = "a.txt", content: bytes = TEXT) -> str:
        response = await self.attach(name, content)
        assert response.status_code == 201, response.content
        return str(response.json()["id"])


@pytest.fixture(autouse=True)
async def kept(transactional_db: Any, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Path]:
    """A site with conversations, whose files are in a folder of the test; return the folder."""
    limits = getattr(request, "param", {})
    conf = {"TESTING": True, "CONVERSATIONS": True, "STATE_DIR": tmp_path, "LIMITS": limits}
    with override_settings(STREAMSERVE=conf):
        await until_ready()
        yield tmp_path / "attachments"
        await site.reset()


@pytest.fixture
def alices(alice_key: str) -> Attacher:
    return Attacher(key=alice_key)


@pytest.fixture
def login(alice: Any) -> Attacher:
    return Attacher(user=alice)


@pytest.fixture
def others(lonely_key: str, bob: Any) -> list[Attacher]:
    return [Attacher(key=lonely_key), Attacher(user=bob)]


def files_in(folder: Path) -> list[Path]:
    return [Path(at, name) for at, _, names in os.walk(folder) for name in names]


async def asked(alice: Any, attachment_id: str) -> Conversation:
    """Return a conversation of alice's with a question that has brought a file."""

    def insert() -> Conversation:
        conversation = Conversation.objects.create(owner="user", tenant=f"user:{alice.pk}", user=alice)
        question = Message.objects.create(conversation=conversation, role="user", text="What is in it?")
        Attachment.objects.attach(question.pk, [attachment_id], conversation.tenant)
        return conversation

    return await orm.call(insert)


async def purge() -> int:
    return await site.get_site().services.attachments.purge()


async def age(**by: float) -> None:
    await Attachment.objects.aupdate(created_at=timezone.now() - timedelta(**by))


async def test_a_file_comes_back_as_it_went_in(alices: Attacher, login: Attacher, kept: Path) -> None:
    """Upload with a key, look with the login of the same user, list, download, delete; then it is gone from disk."""
    response = await alices.attach("report.PDF", pdf("Nine euros"))
    file = response.json()
    assert response.status_code == 201
    expected = {"name": "report.PDF", "type": "application/pdf", "bytes": len(pdf("Nine euros")), "characters": 10}
    assert file == {**file, **expected}
    assert (await login.get(f"/attachments/{file['id']}")).json() == file
    assert (await alices.get("/attachments")).json() == {
        "attachments": [file], "has_more": False, "last_id": file["id"],
    }  # fmt: skip
    content = await alices.get(f"/attachments/{file['id']}/content")
    assert await body_of(content) == pdf("Nine euros")
    assert content["Content-Disposition"] == "attachment; filename*=UTF-8''report.PDF"
    assert (content["Content-Type"], content["X-Content-Type-Options"]) == ("application/octet-stream", "nosniff")
    assert len(files_in(kept)) == 1
    assert (await login.delete(f"/attachments/{file['id']}")).json() == {"id": file["id"], "deleted": True}
    assert files_in(kept) == []
    for path in (f"/attachments/{file['id']}", f"/attachments/{file['id']}/content"):
        missing = await alices.get(path)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "attachment_not_found")


async def test_a_file_is_its_tenants(alices: Attacher, others: list[Attacher]) -> None:
    """For another user, and for a key without a user, it does not exist; a visitor may not ask."""
    file_id = await alices.attached()
    for other in others:
        assert (await other.get("/attachments")).json()["attachments"] == []
        for path in (f"/attachments/{file_id}", f"/attachments/{file_id}/content"):
            assert (await other.get(path)).status_code == 404
        assert (await other.delete(f"/attachments/{file_id}")).status_code == 404
    assert (await Attacher().get(f"/attachments/{file_id}")).status_code == 401
    assert (await alices.get(f"/attachments/{file_id}")).status_code == 200


async def test_a_list_comes_in_pages(alices: Attacher) -> None:
    """The newest first; `after` is the last id of the page before."""
    ids = [await alices.attached(f"{number}.txt") for number in range(4)]
    first = (await alices.get("/attachments?limit=3")).json()
    assert ([one["id"] for one in first["attachments"]], first["has_more"]) == (ids[:0:-1], True)
    rest = (await alices.get(f"/attachments?after={first['last_id']}")).json()
    assert ([one["id"] for one in rest["attachments"]], rest["has_more"]) == (ids[:1], False)
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("after=x%00", "after"), ("page=2", "page")):
        wrong = await alices.get(f"/attachments?{query}")
        assert 400 <= wrong.status_code < 500
        assert wrong.json()["error"]["param"] == param


async def test_forms_that_are_wrong(alices: Attacher, kept: Path) -> None:
    """Each has a status, a code and a param; nothing is kept."""
    post = alices.client.post
    for response, expected in (
        (await alices.attach("a.exe"), (415, "unsupported_file", "file")),
        (await alices.attach("a.txt", b""), (400, "empty_file", "file")),
        (await alices.attach("a.txt", b"\xff"), (400, "wrong_encoding", "file")),
        (await alices.attach("a.pdf", b"\xff"), (400, "broken_file", "file")),
        (await alices.attach(purpose="batch"), (400, "unknown_field", "purpose")),
        (await alices.attach(more=SimpleUploadedFile("b.txt", TEXT)), (400, "invalid_form", "more")),
        (await alices.post("/attachments", {"file": "x"}), (415, "unsupported_media_type", "Content-Type")),
        (await post("/attachments", {"a": "b"}, headers=alices.headers), (400, "missing_field", "file")),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == expected
    assert await Attachment.objects.acount() == 0
    assert files_in(kept) == []


async def test_names_are_only_names(alices: Attacher, kept: Path) -> None:
    """No name is a place on the disk, or a header."""
    for name in ("../../etc/passwd.txt", "a%0d%0aX-Evil: 1.txt", "ä" * 250 + ".txt", ".txt.txt"):
        response = await alices.attach(name)
        file = response.json()
        assert response.status_code == 201, file
        assert "/" not in file["name"]
        content = await alices.get(f"/attachments/{file['id']}/content")
        assert await body_of(content) == TEXT
        assert "X-Evil" not in content.headers
    assert all(len(path.name) == 32 for path in files_in(kept))


async def test_no_body_is_an_error_of_the_server(alices: Attacher) -> None:
    """Forms that are cut, mixed or made of noise."""
    chance = random.Random(7)
    whole = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n'
        b"Content-Type: text/plain\r\n\r\nHello\r\n--b--\r\n"
    )
    for _ in range(60):
        body = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(body))
            body[at : at + chance.randint(0, 9)] = chance.randbytes(chance.randint(0, 5))
        kind = chance.choice(
            ["multipart/form-data; boundary=b", "multipart/form-data", 'multipart/form-data; boundary="']
        )
        response = await alices.client.post("/attachments", bytes(body), content_type=kind, headers=alices.headers)
        assert response.status_code < 500, bytes(body)


@pytest.mark.parametrize("kept", [{"MAX_ATTACHMENT_BYTES": 1000, "MAX_ATTACHMENT_CHARS": 500}], indirect=True)
async def test_the_largest_file(alices: Attacher) -> None:
    """One byte or character more is refused, by name."""
    assert (await alices.attach(content=b"x" * 500)).status_code == 201
    assert (await alices.attach(content="ä".encode() * 500)).status_code == 201
    for content, code in (
        (b"x" * 501, "text_too_long"),
        (b"x" * 1001, "file_too_large"),
        (b"x" * 99_000, "file_too_large"),
    ):
        response = await alices.attach(content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (413, code)
    assert await Attachment.objects.acount() == 2


@pytest.mark.parametrize("kept", [{"MAX_TENANT_ATTACHMENTS": 3, "MAX_TENANT_ATTACHMENT_BYTES": 100}], indirect=True)
async def test_a_tenant_has_so_much_room(alices: Attacher, lonely_key: str) -> None:
    """Of files and bytes; deleting makes room, and another tenant has its own."""
    file_id = await alices.attached(content=b"x" * 80)
    full = await alices.attach(content=b"x" * 30)
    assert (full.status_code, full.json()["error"]["code"]) == (507, "storage_full")
    assert (await Attacher(key=lonely_key).attach(content=b"x" * 30)).status_code == 201
    await alices.delete(f"/attachments/{file_id}")
    for _ in range(3):
        await alices.attached(content=b"x")
    full = await alices.attach(content=b"x")
    assert (full.status_code, full.json()["error"]["code"]) == (507, "storage_full")


async def test_while_conversations_are_off_there_is_nothing(alices: Attacher) -> None:
    """A 404 that names the setting."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True}):
        for response in (
            await alices.attach(),
            await alices.get("/attachments"),
            await alices.get(f"/attachments/{'0' * 32}"),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (404, "conversations_off")
        await site.reset()


async def test_a_file_of_a_question_stays_with_it(alices: Attacher, alice: Any, kept: Path) -> None:
    """It cannot be deleted alone, and goes with the last conversation that has it."""
    file_id = await alices.attached()
    first, second = await asked(alice, file_id), await asked(alice, file_id)
    refused = await alices.delete(f"/attachments/{file_id}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "attachment_in_use")
    await age(days=9)
    await first.adelete()
    assert (await purge(), len(files_in(kept))) == (0, 1)
    await second.adelete()
    assert (await purge(), files_in(kept)) == (1, [])
    assert not await Attachment.objects.aexists()


async def test_what_was_never_sent_goes_after_a_day(alices: Attacher, kept: Path) -> None:
    """Not before."""
    await alices.attached()
    await age(hours=23)
    assert await purge() == 0
    await age(hours=25)
    assert (await purge(), files_in(kept)) == (1, [])


async def test_a_deleted_users_files_go(alices: Attacher, alice: Any, lonely_key: str, kept: Path) -> None:
    """Of sent and unsent files nothing is left; a key without a user keeps its own."""
    await asked(alice, await alices.attached())
    await alices.attached()
    other = await Attacher(key=lonely_key).attached()
    await alice.adelete()
    left = [(row.name, row.text) async for row in Attachment.objects.exclude(pk=other)]
    assert left == [("", "")] * 2  # at once; the files with the next purge
    assert (await purge(), len(files_in(kept))) == (2, 1)
    assert [row.pk async for row in Attachment.objects.all()] == [other]


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("when", ["before its content", "after its content", "between content and row"])
async def test_a_killed_process_leaves_no_file(
    alices: Attacher, kept: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Wherever it is killed, a row is left that the purge finds; the file is never seen half."""
    storage = site.get_site().services.attachments.storage

    def killed(*args: Any) -> None:
        if when != "before its content":
            save(*args) if args[1:] else delete(*args)
        raise Killed

    async def nothing(*args: Any) -> None:
        """Clean nothing up: the process is gone."""

    save, delete = storage.save, storage.delete
    with monkeypatch.context() as patch:
        if when == "between content and row":
            file_id = await alices.attached()
            patch.setattr(storage, "delete", killed)
            with pytest.raises(Killed):
                await alices.delete(f"/attachments/{file_id}")
        else:
            patch.setattr(storage, "save", killed)
            patch.setattr(Attachments, "_drop", nothing)
            with pytest.raises(Killed):
                await alices.attach()
    assert (await alices.get("/attachments")).json()["attachments"] == []
    await age(hours=25)
    assert (await purge(), files_in(kept)) == (1, [])
    assert not await Attachment.objects.aexists()
