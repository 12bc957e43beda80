"""Laws of uploads: their caller is known, and their place taken, before the first byte of the body is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.asgi import get_asgi_application
from django.middleware.csrf import CSRF_SECRET_LENGTH
from django.test import AsyncClient
from django.test.utils import override_settings

from streamserve import routing
from streamserve.asgi.types import Message, Receive, Scope, Send
from streamserve.models import ApiKey, StoredFile
from streamserve.web import site
from tests.support.streams.hand_made import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

MIB = 2**20
LIMITS = {"MAX_UPLOADS": 2, "MAX_UPLOADS_PER_PRINCIPAL": 1}
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
)
END = b"\r\n--x--\r\n"
WHOLE = FORM + b"0123456789abcde\n" * (2 * MIB // 16) + END


@pytest.fixture(autouse=True)
async def small() -> Any:
    """Limits that a test can reach."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ANONYMOUS": True, "LIMITS": LIMITS}):
        yield
        await site.reset()


class Upload:
    """A request whose body comes when the test sends it. `num_asked`: how often the app asked for some of it."""

    def __init__(
        self, app: Any, headers: dict[str, str], *, path: str = "/v1/files", length: int | str | None = len(WHOLE)
    ) -> None:
        self.sent: list[Message] = []
        self.num_asked = 0
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        given = {"host": "testserver", "content-type": "multipart/form-data; boundary=x", **headers}
        given |= {"transfer-encoding": "chunked"} if length is None else {"content-length": str(length)}
        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("203.0.113.7", 4711), "server": ("testserver", 80), "scheme": "http",
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        self.num_asked += 1
        return await self._incoming.get()

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def feed(self, data: bytes, *, is_last: bool = False) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": data, "more_body": not is_last})

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def until_asked(self) -> None:
        await until(lambda: self.num_asked > 0, "the body is asked for")

    async def answer(self) -> tuple[int, dict[str, Any]]:
        async with asyncio.timeout(60):
            await self.task
        return self.sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in self.sent[1:]))

    async def refused(self) -> tuple[int, str]:
        """Return the status and code of an answer that needed none of the body."""
        status, body = await self.answer()
        assert self.num_asked == 0
        return status, body["error"]["code"]


@pytest.fixture
def app() -> Any:
    return routing.wrap(get_asgi_application())


def with_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def signed_in(user: Any) -> dict[str, str]:
    browser = AsyncClient()
    await browser.aforce_login(user)
    cookies = {"csrftoken": "t" * CSRF_SECRET_LENGTH, **{one.key: one.value for one in browser.cookies.values()}}
    return {"cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}


@pytest.mark.parametrize("length", [len(WHOLE), f"{len(WHOLE):040}", None], ids=["announced", "zeros", "unknown"])
async def test_callers_that_may_not_upload(app: Any, alice: Any, lonely_key: str, length: int | str | None) -> None:
    """No key, a wrong one, one without the scope, a visitor, a login without the CSRF token: nothing is asked for."""
    await ApiKey.objects.filter(name="lonely").aupdate(scopes=["ops"])
    cases: list[tuple[dict[str, str], tuple[int, str]]] = [
        ({}, (401, "unauthorized")),
        (with_key("wrong" * 8), (401, "invalid_api_key")),
        (with_key(lonely_key), (403, "insufficient_scope")),
        (await signed_in(alice), (403, "csrf_failed")),
    ]
    for headers, expected in cases:
        assert await Upload(app, headers, length=length).refused() == expected


async def test_a_login_uploads_with_its_token(app: Any, alice: Any) -> None:
    """As with a small file: the session, and the token in its header."""
    upload = Upload(app, {**await signed_in(alice), "x-csrftoken": "t" * CSRF_SECRET_LENGTH})
    await upload.until_asked()
    upload.feed(WHOLE[:MIB])
    upload.feed(WHOLE[MIB:], is_last=True)
    status, body = await upload.answer()
    assert (status, body["bytes"]) == (200, 2 * MIB)


async def test_a_full_tenant_is_refused_before_the_body(app: Any, alice_key: str) -> None:
    """Its files leave no room for what is announced."""
    room = {"TESTING": True, "LIMITS": {"MAX_TENANT_FILE_BYTES": MIB}}
    await site.reset()
    with override_settings(STREAMSERVE=room):
        assert await Upload(app, with_key(alice_key)).refused() == (507, "storage_full")
        await site.reset()


async def test_places_are_taken_and_given_back(app: Any, alice_key: str, lonely_key: str, alice: Any) -> None:
    """By callers, and by all of them together; a place is free when its upload has ended, or its client has left."""
    first, second = Upload(app, with_key(alice_key)), Upload(app, with_key(lonely_key))
    await first.until_asked()
    await second.until_asked()
    assert await Upload(app, with_key(alice_key)).refused() == (429, "too_many_uploads")
    user = {**await signed_in(alice), "x-csrftoken": "t" * CSRF_SECRET_LENGTH}
    assert await Upload(app, user).refused() == (503, "uploads_busy")
    first.feed(WHOLE[:MIB])
    first.leave()
    await first.task
    assert first.sent == []
    second.feed(WHOLE, is_last=True)
    assert (await second.answer())[0] == 200
    third = Upload(app, with_key(alice_key), length=None)
    await third.until_asked()
    third.feed(WHOLE, is_last=True)
    assert (await third.answer())[1]["bytes"] == 2 * MIB
    assert await StoredFile.objects.acount() == 2


@pytest.mark.parametrize("length", [len(WHOLE), None])
async def test_a_body_that_is_larger_than_it_may_be(app: Any, alice_key: str, length: int | None) -> None:
    """Its pieces are counted, whatever was announced."""
    most = {"TESTING": True, "LIMITS": {"MAX_FILE_BYTES": 3 * MIB}}
    await site.reset()
    with override_settings(STREAMSERVE=most):
        upload = Upload(app, with_key(alice_key), length=length)
        await upload.until_asked()
        for _ in range(4):
            upload.feed(b"x" * MIB)
        status, body = await upload.answer()
        assert (status, body["error"]["code"]) == (413, "file_too_large")
        await site.reset()


@pytest.mark.parametrize("length", ["announced", None])
async def test_a_message_batch_is_bounded_where_no_guard_stands(alice_key: str, length: str | None) -> None:
    """In an application that is not wrapped, no body over the largest file is made a batch."""
    await site.reset()
    message = {"model": "chat", "max_tokens": 1, "messages": [{"role": "user", "content": "x" * 100 * 1024}]}
    body = json.dumps({"requests": [{"custom_id": "a", "params": message}]}).encode()
    with override_settings(STREAMSERVE={"TESTING": True, "LIMITS": {"MAX_FILE_BYTES": 1000}}):
        headers = {**with_key(alice_key), "content-type": "application/json"}
        upload = Upload(
            get_asgi_application(), headers, path="/v1/messages/batches", length=None if length is None else len(body)
        )
        upload.feed(body, is_last=True)
        status, answer = await upload.answer()
        assert (status, answer["error"]["type"]) == (413, "request_too_large")
        assert await StoredFile.objects.acount() == 0
        await site.reset()


async def test_an_app_that_stores_bodies_first_has_so_many(alice_key: str) -> None:
    """Behind another ASGI layer Django receives the body before our view runs: the guard counts."""
    django = get_asgi_application()

    async def other(scope: Scope, receive: Receive, send: Send) -> None:
        await django(scope, receive, send)

    app = routing.wrap(other)
    uploads = [Upload(app, with_key("wrong" * 8)) for _ in range(2)]
    for upload in uploads:
        await upload.until_asked()
    assert await Upload(app, with_key(alice_key)).refused() == (503, "uploads_busy")
    for upload in uploads:
        upload.leave()
        await upload.task
    last = Upload(app, with_key(alice_key))
    await last.until_asked()
    last.feed(WHOLE, is_last=True)
    assert (await last.answer())[0] == 200


def reads_body(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A middleware of the site that looks at every body that it can read."""

    def middleware(request: Any) -> Any:
        try:
            request.seen = len(request.body)
        except OSError:
            request.seen = None
        response = get_response(request)
        response["X-Seen"] = str(request.seen)
        return response

    return middleware


@pytest.fixture
def watching() -> Iterator[None]:
    from django.conf import settings

    with override_settings(MIDDLEWARE=[*settings.MIDDLEWARE, f"{__name__}.reads_body"]):
        yield


async def test_a_middleware_that_reads_bodies(watching: None, app: Any, alice_key: str) -> None:
    """It sees a small upload, as on any route, and not a large one; both are stored."""
    small = FORM + b"{}\n" + END
    for body, seen in ((small, str(len(small))), (WHOLE, "None")):
        upload = Upload(app, with_key(alice_key), length=len(body))
        upload.feed(body, is_last=True)
        assert (await upload.answer())[0] == 200, upload.sent
        assert dict(upload.sent[0]["headers"])[b"X-Seen"].decode() == seen
