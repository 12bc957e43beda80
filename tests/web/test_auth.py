"""Laws of authentication: which tenant a request has, and what a tenant's salt is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from django.db.backends.utils import CursorWrapper
from django.utils import timezone

from streamserve.keys import salt_of
from streamserve.models import ApiKey
from streamserve.protocol.errors import QuotaExceeded, Unauthorized
from streamserve.rows import orm
from streamserve.web.auth import KnownKeys, WrongKeys, authenticate, key_in

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer abc"}, "abc"),
        ({"authorization": "bearer   abc"}, "abc"),
        ({"authorization": "Bearer"}, ""),
        ({"authorization": "Bearer", "x-api-key": "def"}, ""),
        ({"x-api-key": "abc"}, "abc"),
        ({"authorization": "Bearer abc", "x-api-key": "def"}, "abc"),
        ({"authorization": "Basic abc", "x-api-key": "def"}, "def"),
        ({"authorization": "Basic abc"}, None),
        ({}, None),
    ],
)
def test_where_a_key_is_read(headers: dict[str, str], key: str | None) -> None:
    """A Bearer key comes before x-api-key; other schemes belong to a proxy."""
    assert key_in(headers) == key


async def test_a_key_decides_alone(alice: Any, bob: Any, alice_key: str) -> None:
    """A wrong key with a right session is still wrong; a right one is its own user."""
    caller = await authenticate({"x-api-key": alice_key}, bob, None)
    assert caller is not None
    assert (caller.kind, caller.user_id) == ("key", alice.pk)
    assert caller.tenant == f"user:{alice.pk}"
    with pytest.raises(Unauthorized):
        await authenticate({"authorization": "Bearer " + "wrong" * 5}, bob, None)


@pytest.fixture
async def verbs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of SQL statements that were made, in order; none is left from the test before."""
    await orm_is_done()
    out: list[str] = []
    execute = CursorWrapper.execute

    def noted(cursor: Any, sql: str, params: Any = None) -> Any:
        if not sql.startswith("SET LOCAL"):  # how long PostgreSQL waits for a lock
            out.append(sql.partition(" ")[0])
        return execute(cursor, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", noted)
    return out


async def orm_is_done() -> None:
    """Wait for everything that was posted to the ORM."""
    await orm.call(int)


async def test_a_key_in_use_is_noted_once_a_minute(alice_key: str, verbs: list[str]) -> None:
    """A second look-up within the minute writes nothing: an UPDATE without a row would still lock SQLite."""
    for _ in range(2):
        await KnownKeys().caller_of(alice_key)
        await orm_is_done()
    assert verbs == ["SELECT", "UPDATE", "SELECT"]


async def test_a_key_is_looked_up_every_30_seconds(alice_key: str, verbs: list[str]) -> None:
    """Until then it costs no query; afterwards a key that was revoked elsewhere is refused."""
    now = 0.0
    keys = KnownKeys(lambda: now)
    for _ in range(3):
        await keys.caller_of(alice_key)
        await orm_is_done()
    assert verbs == ["SELECT", "UPDATE"]
    # As another process revokes it: no signal is sent here.
    await ApiKey.objects.all().aupdate(revoked_at=timezone.now())
    now = 29.9
    await keys.caller_of(alice_key)
    now = 30.0
    with pytest.raises(Unauthorized):
        await keys.caller_of(alice_key)


async def test_a_key_expires_at_its_time(alice_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expiry is not overslept, although the key is known."""
    keys = KnownKeys()
    expires_at = timezone.now() + timedelta(hours=1)
    await ApiKey.objects.all().aupdate(expires_at=expires_at)
    await keys.caller_of(alice_key)
    monkeypatch.setattr(timezone, "now", lambda: expires_at)
    with pytest.raises(Unauthorized):
        await keys.caller_of(alice_key)


async def test_a_change_here_is_seen_at_once(alice: Any, alice_key: str) -> None:
    """A key that this process revokes, or whose user it deactivates, is refused at the next request."""
    keys = KnownKeys()
    await keys.caller_of(alice_key)
    alice.is_active = False
    await alice.asave()
    with pytest.raises(Unauthorized):
        await keys.caller_of(alice_key)
    alice.is_active = True
    await alice.asave()
    await keys.caller_of(alice_key)
    await sync_to_async(ApiKey.objects.all().revoke)()
    with pytest.raises(Unauthorized):
        await keys.caller_of(alice_key)


async def test_no_caller_is_none_unless_anonymous_is_on(alice: Any) -> None:
    """ANONYMOUS is off by default; a deactivated user is no caller."""
    alice.is_active = False
    assert await authenticate({}, alice, None) is None


def test_a_salt_is_the_tenants_own() -> None:
    """A salt is stable, different for another tenant, and does not hold the tenant's name."""
    assert salt_of("user:1") == salt_of("user:1") != salt_of("user:2")
    assert "user" not in salt_of("user:1")


def test_permissions_are_two_queries_whatever_the_number(
    alice: Any, bob: Any, alice_key: str, django_assert_num_queries: Any
) -> None:
    """Deleted, deactivated and revoked owners lose their permission in two queries; visitors have none to lose."""
    bob.is_active = False
    bob.save()
    owners = {f"user:{alice.pk}", f"user:{bob.pk}", "user:99999", "key:99999", "anon:abc"}
    with django_assert_num_queries(2):
        assert ApiKey.objects.owners_without_permission(owners) == {f"user:{bob.pk}", "user:99999", "key:99999"}


RIGHT, WRONG = "right" * 4, "wrong" * 4


def test_wrong_keys_count_by_address_and_minute() -> None:
    """Another address, and the next minute, are not limited; a right key that turns wrong is no longer known."""
    now = 0.0
    keys = WrongKeys(2, clock=lambda: now)
    keys.note_right(RIGHT)
    for address in ("203.0.113.7", "203.0.113.7", ""):
        keys.note_wrong(address, WRONG)
    keys.check("203.0.113.7", RIGHT)
    keys.check("203.0.113.8", WRONG)
    keys.check("", WRONG)
    now = 20.0
    with pytest.raises(QuotaExceeded, match="2 wrong API keys") as raised:
        keys.check("203.0.113.7", WRONG)
    assert (raised.value.code, raised.value.retry_after) == ("too_many_wrong_keys", 40)
    keys.note_wrong("203.0.113.7", RIGHT)
    with pytest.raises(QuotaExceeded):
        keys.check("203.0.113.7", RIGHT)
    now = 60.0
    keys.check("203.0.113.7", WRONG)
    for address in ("2001:db8::1", "2001:db8::2"):  # of one client
        keys.note_wrong(address, WRONG)
    with pytest.raises(QuotaExceeded):
        keys.check("2001:db8::3", WRONG)


async def test_only_the_session_that_has_signed_a_user_in_is_its_login(alice: Any, bob: Any) -> None:
    """A user whom a middleware of the site names has no login in the session beside it, which could seem ended."""
    session = SessionStore()
    await session.aset(SESSION_KEY, str(alice.pk))
    await session.asave()
    keys = [getattr(await authenticate({}, user, session), "session_key", None) for user in (alice, bob)]
    assert keys == [session.session_key, ""]
