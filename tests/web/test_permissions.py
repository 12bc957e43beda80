"""Answers of owners that lost their permission end, also while the log is away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.contrib.sessions.models import Session
from django.test import AsyncClient, Client
from django.test.utils import override_settings
from django.utils import timezone

from streamserve import routing
from streamserve.models import ApiKey
from streamserve.protocol.errors import Unauthorized
from streamserve.protocol.requests import Admission
from streamserve.streams.registry import Streams
from streamserve.web import permissions, site
from streamserve.web.permissions import Login, PermissionChecks, ended_logins
from tests.conftest import Caller, until_ready
from tests.support.streams.hand_made import ScriptedClient, StallingLog, ask, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]


async def test_answers_of_a_revoked_key_end(alice: Any) -> None:
    """Keys are checked every 30 s, with one query a kind."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        row, key = await sync_to_async(lambda: ApiKey.objects.make(user=alice))()
        response = await Caller(key=key).post("/streams", LONG)
        chunks = aiter(response)
        await anext(chunks)
        checks = PermissionChecks(site.get_site().streams)
        await checks.check()
        [stream] = site.get_site().streams.all()
        assert stream.terminal is None
        await sync_to_async(ApiKey.objects.filter(pk=row.pk).revoke)()
        await checks.check()
        assert stream.terminal is not None
        rest = b"".join([chunk async for chunk in chunks])
        assert b'"finish_reason":"cancelled"' in rest
        await site.reset()


async def test_a_reader_that_has_ended_is_checked_no_more(alice_key: str) -> None:
    """When its body closes, not when the garbage collector finds it."""
    checks = site.get_site().permissions
    response = await Caller(key=alice_key).post("/streams", {"prompt": "hi", "max_tokens": 4, "ignore_eos": True})
    held = list(checks._readers)
    assert len(held) == 1
    async for _ in response:
        pass
    assert held[0].is_closed
    assert not checks._readers


async def test_a_stop_that_the_log_does_not_take_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check returns, the next one stops what is new, and the first stop is committed when the log is back."""
    monkeypatch.setattr(permissions, "_STOP_SECONDS", 0.0)
    scripted, log = ScriptedClient(), StallingLog()
    streams = Streams({"scripted": scripted}, log)
    checks = PermissionChecks(streams)
    stuck, other = [await streams.start(ask("scripted"), Admission(owner="key:99999", tenant="t")) for _ in range(2)]
    log.go.clear()
    await checks.check()
    await checks.check()
    await until(lambda: all(one.is_cancelled for one in scripted.sources), "the engine is free")
    assert (stuck.terminal, other.terminal) == (None, None)
    log.go.set()
    await asyncio.gather(stuck.ended.wait(), other.ended.wait())
    assert {stuck.terminal.finish_reason, other.terminal.finish_reason} == {"cancelled"}
    await checks.aclose()
    await streams.aclose()


LONG = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True}  # 80 s: longer than a test takes on a busy machine


async def log_out(user: Any, client: AsyncClient) -> None:
    await client.alogout()


async def change_password(user: Any, client: AsyncClient) -> None:
    await sync_to_async(user.set_password)("another")
    await user.asave()


async def expire(user: Any, client: AsyncClient) -> None:
    await Session.objects.aupdate(expire_date=timezone.now())


async def deactivate(user: Any, client: AsyncClient) -> None:
    user.is_active = False
    await user.asave()


async def until_error(chunks: AsyncIterator[bytes], kind: type[Exception]) -> AsyncIterator[bytes]:
    """Yield the chunks up to their end or an error of that kind."""
    with suppress(kind):
        async for chunk in chunks:
            yield chunk


@pytest.mark.cut_streams("a login that ends cuts its readers off")
@pytest.mark.parametrize("end_login", [log_out, change_password, expire, deactivate])
async def test_a_login_that_ends_takes_its_streams_along(alice: Any, end_login: Any) -> None:
    """Its answers are stopped; its reader of another answer is cut off, and so is its socket.

    Another login of the same user goes on, unless the password or the account has changed.
    """
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        mine, other = AsyncClient(), AsyncClient()
        for client in (mine, other):
            await client.aforce_login(alice)
        started = [await client.post("/streams", LONG, content_type="application/json") for client in (mine, other)]
        chunks = [aiter(response) for response in started]
        for one in chunks:
            await anext(one)
        [hers, others] = site.get_site().streams.all()
        resumed = aiter(await mine.get(f"/streams/{others.id}/events"))
        await anext(resumed)
        cookie = f"sessionid={mine.cookies['sessionid'].value}".encode()
        headers = [(b"host", b"testserver"), (b"origin", b"http://testserver"), (b"cookie", cookie)]
        socket = WebsocketCommunicator(routing.application, "/ws/streams", headers=headers)
        assert (await socket.connect(timeout=30))[0]
        checks = site.get_site().permissions
        await checks.check()
        assert (hers.terminal, others.terminal) == (None, None)
        await end_login(alice, mine)
        await checks.check()
        assert hers.terminal is not None
        assert b'"finish_reason":"cancelled"' in b"".join([chunk async for chunk in chunks[0]])
        others_ends = end_login is not log_out
        read = [chunk async for chunk in until_error(resumed, Unauthorized)]
        assert (b'"finish_reason":"cancelled"' in b"".join(read)) is others_ends
        assert json.loads(await socket.receive_from(timeout=30))["error"]["code"] == "rights_lost"
        assert (await socket.receive_output(timeout=30))["code"] == 4401
        assert (others.terminal is not None) is others_ends
        await chunks[1].aclose()
        await site.reset()


async def test_the_socket_of_a_revoked_key_is_closed_without_a_message(alice_key: str) -> None:
    """A check closes an idle socket; and a socket that has closed is held no longer."""
    headers = [(b"host", b"testserver"), (b"x-api-key", alice_key.encode())]
    idle, left = [WebsocketCommunicator(routing.application, "/ws/streams", headers=headers) for _ in range(2)]
    for socket in (idle, left):
        assert (await socket.connect(timeout=30))[0]
    await left.disconnect()
    checks = site.get_site().permissions
    assert len(checks._readers) == 1
    await sync_to_async(ApiKey.objects.all().revoke)()
    await checks.check()
    assert json.loads(await idle.receive_from(timeout=30))["error"]["code"] == "rights_lost"
    assert (await idle.receive_output(timeout=30))["code"] == 4401
    assert not checks._readers


def test_ended_logins_are_two_queries(alice: Any, bob: Any, django_assert_num_queries: Any) -> None:
    """One for the sessions and one for the users, whatever the number of logins."""
    logins = []
    for user in (alice, bob):
        client = Client()
        client.force_login(user)
        logins.append(Login(client.session.session_key, str(user.pk)))
    swapped = Login(logins[0].session_key, str(bob.pk))
    unknown = Login("x" * 32, str(bob.pk))
    with django_assert_num_queries(2):
        assert ended_logins([*logins, swapped, unknown]) == {swapped, unknown}


@pytest.mark.parametrize("engine_name", ["signed_cookies", "cache", "cached_db"])
def test_other_session_engines(alice: Any, engine_name: str) -> None:
    """A live login of any session engine is no ended one; a new password ends it."""
    with override_settings(SESSION_ENGINE=f"django.contrib.sessions.backends.{engine_name}"):
        client = Client()
        client.force_login(alice)
        login = Login(client.session.session_key, str(alice.pk))
        assert ended_logins([login]) == set()
        alice.set_password("another")
        alice.save()
        assert ended_logins([login]) == {login}
