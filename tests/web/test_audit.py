"""Watching another owner's stream: which callers may, what is recorded, and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import override_settings

from streamserve import routing
from streamserve.models import ApiKey, Watch
from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.joined import with_joined_text
from tests.support.checks.stream_checks import check_native, check_native_part
from tests.support.engines.runners import DEADLINE_SECONDS
from tests.support.streams.hand_made import until
from tests.support.streams.log_lines import captured_events

pytestmark = pytest.mark.django_db(transaction=True)

LONG = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}
SHORT = {"prompt": "hello", "max_tokens": 6, "seed": 1}
UNKNOWN_ID = "0" * 32


@pytest.fixture
def may_watch(transactional_db: Any) -> Permission:
    return Permission.objects.get(codename="watch_stream")


@pytest.fixture
def bob(bob: Any, may_watch: Permission) -> Any:
    """A user that may watch, and has no other permission."""
    bob.user_permissions.add(may_watch)
    return bob


@pytest.fixture
async def slow(transactional_db: Any) -> AsyncIterator[None]:
    """A site whose answers take much longer than any test."""
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02, "STREAMS": {"MAX_READERS": 1}}):
        await until_ready()
        yield
        await site.reset()


def key(**fields: Any) -> str:
    return ApiKey.objects.make(**fields)[1]


async def caller_of(user: Any) -> Caller:
    caller = Caller()
    await caller.client.aforce_login(user)
    return caller


async def asked(caller: Caller, body: dict[str, Any]) -> tuple[str, AsyncIterator[bytes]]:
    """Start an answer; return its id and its owner's reader, after the first piece."""
    response = await caller.post("/streams", body)
    assert response.status_code == 200, response.content
    pieces = aiter(response)
    await anext(pieces)
    return response["X-Stream-Id"], pieces


async def until_ended() -> Watch:
    """Return the one watch, once it has ended."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await Watch.objects.filter(ended_at__isnull=False).aexists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return await Watch.objects.aget()


async def test_watching_needs_its_permission(
    engine: None, alice: Any, bob: Any, staff: Any, root: Any, lonely_key: str
) -> None:
    """The permission of the user or of the key's user decides, and the key needs the scope; else the id is unknown."""
    stream_id, pieces = await asked(await caller_of(alice), SHORT)
    assert [piece async for piece in pieces]

    def keys() -> list[str]:
        return [
            key(user=bob, scopes=["watch"]),
            key(user=bob),
            key(scopes=["watch"]),
            key(user=alice, scopes=["watch"]),
        ]

    watching, chatting, nobodys, alices = await sync_to_async(keys)()
    expected = [
        (await caller_of(bob), 200),
        (await caller_of(root), 200),
        (Caller(key=watching), 200),
        (Caller(key=chatting), 403),
        (Caller(key=lonely_key), 403),
        (Caller(key=nobodys), 404),
        (Caller(key=alices), 404),
        (await caller_of(staff), 404),
        (await caller_of(alice), 404),
        (Caller(), 401),
    ]
    for caller, status in expected:
        response = await caller.get(f"/streams/{stream_id}/watch")
        assert response.status_code == status
        if status == 200:
            assert check_native(await body_of(response))[-1].event == "done"
        else:
            unknown = await caller.get(f"/streams/{UNKNOWN_ID}/watch")
            assert (unknown.status_code, unknown.json()) == (status, response.json())
    assert (await expected[0][0].get(f"/streams/{UNKNOWN_ID}/watch")).status_code == 404
    assert await Watch.objects.acount() == 3


async def test_the_permission_opens_nothing_else(engine: None, alice: Any, bob: Any) -> None:
    """The permission opens `watch` alone: state, events and stop stay the owner's."""
    stream_id, pieces = await asked(await caller_of(alice), SHORT)
    assert [piece async for piece in pieces]
    watcher = await caller_of(bob)
    for path in ("", "/events"):
        assert (await watcher.get(f"/streams/{stream_id}{path}")).status_code == 404
    assert (await watcher.post(f"/streams/{stream_id}/stop")).status_code == 404


async def test_a_visitor_may_not_watch(anonymous_site: None, engine: None, alice: Any) -> None:
    """A visitor may not watch, also where visitors may chat."""
    assert (await Caller().get(f"/streams/{UNKNOWN_ID}/watch")).status_code == 401


async def test_a_watch_resumes(engine: None, alice: Any, bob: Any) -> None:
    """Last-Event-ID or `after` resumes a watch: 204 at the end, 410 for another log's id; every watch is recorded."""
    owner, watcher = await caller_of(alice), await caller_of(bob)
    stream_id, pieces = await asked(owner, SHORT)
    assert [piece async for piece in pieces]
    path = f"/streams/{stream_id}/watch"
    full = await body_of(await owner.get(f"/streams/{stream_id}/events"))
    frames = check_native(full)
    assert with_joined_text(await body_of(await watcher.get(path))) == with_joined_text(full)
    rest = await watcher.get(path, **{"Last-Event-ID": frames[0].id})
    assert rest["Streamserve-From"] == "2"
    assert with_joined_text(check_native(await body_of(rest), after=1)) == with_joined_text(frames[1:])
    assert (await watcher.get(path, **{"Last-Event-ID": frames[-1].id})).status_code == 204
    assert (await watcher.get(path, **{"Last-Event-ID": "a" * 12 + "-1"})).status_code == 410
    assert (await watcher.get(f"{path}?after=99")).status_code == 410
    assert (await watcher.get(f"{path}?after=-1")).status_code == 400
    await site.reset()
    noted = [(row.after_seq, row.last_seq) async for row in Watch.objects.order_by("pk")]
    assert noted == [(0, frames[-1].seq), (1, frames[-1].seq)]


async def test_a_watch_is_written_down_before_its_first_byte(slow: None, alice: Any, bob: Any) -> None:
    """A row with watcher, stream and address comes first; its end and last event follow, with one log line."""
    stream_id, owner = await asked(await caller_of(alice), LONG)
    response = await (await caller_of(bob)).get(f"/streams/{stream_id}/watch")
    row = await Watch.objects.aget()
    assert (row.watcher, row.username, row.stream_id) == (f"user:{bob.pk}", "bob", stream_id)
    assert (row.stream_owner, row.address, row.ended_at, row.last_seq) == (f"user:{alice.pk}", "127.0.0.1", None, 0)
    with captured_events() as lines:
        pieces, seen = aiter(response), b""
        while seen.count(b"\nid: ") < 3:
            seen += await anext(pieces)
        await pieces.aclose()
        row = await until_ended()
    assert row.last_seq >= check_native_part(seen)[-1].seq
    assert row.ended_at >= row.began_at
    [line] = [line for line in lines if line["event"] == "stream_watched"]
    assert (line["username"], line["stream_id"], line["last_seq"]) == ("bob", stream_id, row.last_seq)
    await owner.aclose()


async def test_no_audit_no_watch(slow: None, alice: Any, bob: Any) -> None:
    """When the table takes no row, no byte is sent and no reader is attached."""
    stream_id, owner = await asked(await caller_of(alice), LONG)
    watcher = await caller_of(bob)
    await execute(REFUSE)
    try:
        with captured_events() as lines:
            response = await watcher.get(f"/streams/{stream_id}/watch")
    finally:
        await execute("DROP TRIGGER no_watch")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert [line["event"] for line in lines] == ["request_failed"]
    assert site.get_site().streams.find(stream_id).readers.num_watchers == 0
    assert site.get_site().services.watches.watchers == set()
    assert await Watch.objects.acount() == 0
    await owner.aclose()


REFUSE = "CREATE TRIGGER no_watch BEFORE INSERT ON streamserve_watch BEGIN SELECT RAISE(ABORT, 'full'); END"


@sync_to_async
def execute(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


class Browser:
    """A client of the whole ASGI application, which leaves on request."""

    def __init__(self, path: str, api_key: str) -> None:
        headers = [(b"host", b"testserver"), (b"authorization", f"Bearer {api_key}".encode())]
        self._scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "query_string": b"",
            "headers": headers,
            "client": ["10.1.2.3", 5],
        }
        self._messages = asyncio.Queue[dict[str, Any]]()
        self._messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        self.sent: list[dict[str, Any]] = []

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def run(self) -> None:
        await routing.application(self._scope, self._messages.get, self._send)

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


async def test_a_cut_connection_ends_the_watch(slow: None, alice: Any, bob: Any) -> None:
    """A cut connection under StreamMiddleware ends the watch; the owner's reader notices nothing."""
    stream_id, owner = await asked(await caller_of(alice), LONG)
    api_key = await sync_to_async(key)(user=bob, scopes=["watch"])
    browser = Browser(f"/streams/{stream_id}/watch", api_key)
    running = asyncio.create_task(browser.run())
    await until(lambda: browser.body.count(b"\nid: ") >= 3, "it is shown")
    readers = site.get_site().streams.find(stream_id).readers
    assert (readers.num_watchers, readers.num_holding) == (1, 1)
    browser.leave()
    await running
    row = await until_ended()
    assert (row.address, row.last_seq) == ("10.1.2.3", check_native_part(browser.body)[-1].seq)
    assert (readers.num_watchers, readers.num_holding) == (0, 1)
    assert await anext(owner)
    await owner.aclose()


@pytest.mark.parametrize("loss", ["permission", "account", "key", "scope"])
async def test_a_watcher_without_permission_is_cut_off(
    slow: None, alice: Any, bob: Any, may_watch: Permission, loss: str
) -> None:
    """At the next check the connection ends without a further event or an end of the stream; its owner reads on."""
    stream_id, owner = await asked(await caller_of(alice), LONG)
    api_key = await sync_to_async(key)(user=bob, scopes=["watch"])
    browser = Browser(f"/streams/{stream_id}/watch", api_key)
    running = asyncio.create_task(browser.run())
    await until(lambda: browser.body.count(b"\nid: ") >= 3, "it is shown")
    rights = site.get_site().permissions
    await rights.check()
    row = await Watch.objects.aget()
    assert row.last_seq > 0
    assert row.ended_at is None

    def lose() -> None:
        match loss:
            case "permission":
                bob.user_permissions.remove(may_watch)
            case "account":
                type(bob).objects.filter(pk=bob.pk).update(is_active=False)
            case "key":
                ApiKey.objects.all().revoke()
            case "scope":
                ApiKey.objects.update(scopes=["chat"])

    await sync_to_async(lose)()
    await rights.check()
    await asyncio.wait_for(running, DEADLINE_SECONDS)
    row = await until_ended()
    # A frame that was being sent when the connection was cut counts as shown.
    assert check_native_part(browser.body)[-1].seq <= row.last_seq <= site.get_site().streams.find(stream_id).last_seq
    assert browser.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert site.get_site().streams.find(stream_id).terminal is None
    assert await anext(owner)
    await owner.aclose()


async def test_watchers_keep_no_reader_out(slow: None, alice: Any, bob: Any) -> None:
    """Each kind of reader has MAX_READERS slots of its own, which is one here."""
    reader, watcher = await caller_of(alice), await caller_of(bob)
    stream_id, owner = await asked(reader, LONG)
    first = aiter(await watcher.get(f"/streams/{stream_id}/watch"))
    await anext(first)
    second = await watcher.get(f"/streams/{stream_id}/watch")
    assert (second.status_code, second.json()["error"]["code"]) == (429, "too_many_readers")
    await owner.aclose()
    again = await reader.get(f"/streams/{stream_id}/events")
    assert again.status_code == 200
    pieces = aiter(again)
    await anext(pieces)
    assert (await reader.get(f"/streams/{stream_id}/events")).status_code == 429
    await pieces.aclose()
    await first.aclose()
    assert await Watch.objects.acount() == 1


# -- the admin ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def row() -> StreamRow:
    return StreamRow.objects.create(id=UNKNOWN_ID, log_id="a" * 12, owner="user:1", tenant="user:1", model="m")


@pytest.fixture
def looker(staff: Any) -> Client:
    """A staff user that may see the rows."""
    for name in ("view_stream", "view_watch"):
        staff.user_permissions.add(Permission.objects.get(codename=name))
    client = Client()
    client.force_login(staff)
    return client


def test_the_admin_links_to_the_watch_page(looker: Client, staff: Any, may_watch: Permission, row: StreamRow) -> None:
    """A user with the permission gets the link and the page; other staff get neither."""
    page, watch = (f"/admin/streamserve/stream/{row.pk}/{name}/" for name in ("change", "watch"))
    assert watch not in looker.get(page).content.decode()
    assert looker.get(watch).status_code == 403
    staff.user_permissions.add(may_watch)
    assert watch in looker.get(page).content.decode()
    opened = looker.get(watch)
    assert f'data-events-url="/streams/{row.pk}/watch"' in opened.content.decode()
    assert "script-src 'self'" in opened["Content-Security-Policy"]
    assert looker.get("/admin/streamserve/stream/nonsense/watch/").status_code == 404


def test_watches_are_read_only_and_outlive_their_stream(looker: Client, root: Any, row: StreamRow) -> None:
    """Watches cannot be edited, and stay when the stream's row is deleted."""
    Watch.objects.create(stream_id=row.pk, stream_owner=row.owner, watcher="user:2", username="bob")
    row.delete()
    assert "bob" in looker.get(f"/admin/streamserve/watch/?q={UNKNOWN_ID}").content.decode()
    looker.force_login(root)
    pk = Watch.objects.get().pk
    assert looker.get("/admin/streamserve/watch/add/").status_code == 403
    assert looker.post(f"/admin/streamserve/watch/{pk}/change/", {"username": "x"}).status_code == 403
    assert looker.post(f"/admin/streamserve/watch/{pk}/delete/", {"post": "yes"}).status_code == 403
