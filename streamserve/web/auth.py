"""`Principal`: a caller known by an API key, a session, or (only where ANONYMOUS is on) a browser without a login.

Made once per request or handshake; the code below trusts it. Knows nothing of routes (see access.py). Runs on the event
loop; the look-ups are Django's ORM.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.utils import timezone

from streamserve.api.call import Caller
from streamserve.conf import get_settings
from streamserve.managers import LAST_USED_EVERY
from streamserve.models import SCOPES, ApiKey
from streamserve.protocol.errors import Unauthorized

SESSION_TENANT = "streamserve_tenant"
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal(Caller):
    """A caller that the site knows. `tenant` decides which objects it reaches; quotas count per `owner`.

    The owner is this user, key or browser.
    """

    kind: str  # "session", "key" or "anonymous"
    user_id: Any = None
    key_id: int | None = None
    is_staff: bool = False
    scopes: frozenset[str] = field(default_factory=frozenset)


class AsyncSession(Protocol):
    """The part of Django's session that we use."""

    async def aget(self, key: str, default: Any = None) -> Any: ...

    async def aset(self, key: str, value: Any) -> None: ...


async def authenticate(headers: Mapping[str, str], user: Any, session: AsyncSession | None) -> Principal | None:
    """Return the caller, or None for an unknown one. Raises Unauthorized for a key that is not active.

    If a key is sent, it alone decides. `headers` has lower-case names; `user` is the session's user or None.
    """
    key = key_in(headers)
    if key is not None:
        return await sync_to_async(_use_key)(key)
    if user is not None and user.is_authenticated and user.is_active:
        tenant = f"user:{user.pk}"
        scopes = frozenset({"chat", "watch", "ops"} if user.is_staff else {"chat", "watch"})
        return Principal(
            kind="session", tenant=tenant, owner=tenant, user_id=user.pk, is_staff=bool(user.is_staff), scopes=scopes
        )
    if get_settings().anonymous:
        return await _anonymous_principal(session)
    return None


def key_in(headers: Mapping[str, str]) -> str | None:
    """Return the API key sent, if any: `Authorization: Bearer` or `x-api-key`. Other schemes are ignored."""
    bearer = _BEARER.fullmatch(headers.get("authorization", "").strip())
    return bearer.group(1) if bearer else headers.get("x-api-key")


def _use_key(key: str) -> Principal:
    row = ApiKey.objects.find_active(key)
    if row is None:
        raise Unauthorized("This API key is unknown, expired or revoked.", code="invalid_api_key")
    if row.last_used_at is None or row.last_used_at < timezone.now() - LAST_USED_EVERY:
        ApiKey.objects.filter(pk=row.pk).touch()
    scopes = frozenset(row.scopes) & frozenset(SCOPES)
    owner = f"key:{row.pk}"
    return Principal(
        kind="key",
        tenant=row.tenant,
        owner=owner,
        latency_class=row.latency_class or "",
        user_id=row.user_id,
        key_id=row.pk,
        scopes=scopes,
    )


async def _anonymous_principal(session: AsyncSession | None) -> Principal:
    """Return a caller whose tenant is kept in the browser's session; make the tenant on the first request."""
    name = None if session is None else await session.aget(SESSION_TENANT)
    if not isinstance(name, str):
        name = secrets.token_hex(16)
        if session is not None:
            await session.aset(SESSION_TENANT, name)
    return Principal(kind="anonymous", tenant=f"anon:{name}", owner=f"anon:{name}", scopes=frozenset({"chat"}))


def salt_of(tenant: str) -> str:
    """Return the tenant's prefix-cache salt: it cannot be guessed, and no blocks of two tenants match."""
    return hmac.new(
        django_settings.SECRET_KEY.encode(), f"streamserve.salt:{tenant}".encode(), hashlib.sha256
    ).hexdigest()
