"""Who is asking: `Principal`, from an API key, a session, or nobody in particular (only where ANONYMOUS is on).

One value, made once per request or handshake; everything below trusts it. Knows nothing of routes (see routes.py).
Runs on the event loop; the look-ups are Django's async ORM.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.http import HttpRequest
from django.middleware.csrf import CsrfViewMiddleware
from django.utils.http import is_same_domain

from streamserve.conf import get_settings
from streamserve.models import SCOPES, ApiKey
from streamserve.protocol.errors import Forbidden, Unauthorized

SESSION_TENANT = "streamserve_tenant"
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller. `tenant` says whose objects it reaches; `owner` (this user, key or browser) is what quotas count by."""

    kind: str  # "session", "key" or "anonymous"
    tenant: str
    owner: str
    user_id: Any = None
    key_id: int | None = None
    is_staff: bool = False
    scopes: frozenset[str] = field(default_factory=frozenset)


class AsyncSession(Protocol):
    """The part of Django's session that we use."""

    async def aget(self, key: str, default: Any = None) -> Any: ...

    async def aset(self, key: str, value: Any) -> None: ...


async def authenticate(headers: Mapping[str, str], user: Any, session: AsyncSession | None) -> Principal | None:
    """Return the caller, or None when nobody is named. Raises Unauthorized for a key that does not open.

    A key, where one is sent, decides alone. `headers` has lower-case names; `user` is the session's user or None.
    """
    key = key_in(headers)
    if key is not None:
        return await _key_principal(key)
    if user is not None and user.is_authenticated and user.is_active:
        return _session_principal(user)
    if get_settings().anonymous:
        return await _anonymous_principal(session)
    return None


async def authenticate_request(request: HttpRequest) -> Principal | None:
    """Return the caller of an HTTP request."""
    user = await request.auser() if hasattr(request, "auser") else None
    headers = {name.lower(): value for name, value in request.headers.items()}
    return await authenticate(headers, user, getattr(request, "session", None))


def key_in(headers: Mapping[str, str]) -> str | None:
    """Return the API key sent, if any: `Authorization: Bearer` or `x-api-key`. Other schemes are not for us."""
    bearer = _BEARER.fullmatch(headers.get("authorization", "").strip())
    return bearer.group(1) if bearer else headers.get("x-api-key")


async def _key_principal(key: str) -> Principal:
    row = await sync_to_async(_use_key)(key)
    if row is None:
        raise Unauthorized("This API key is unknown, expired or revoked.", code="invalid_api_key")
    scopes = frozenset(row.scopes) & frozenset(SCOPES)
    owner = f"key:{row.pk}"
    return Principal(kind="key", tenant=row.tenant, owner=owner, user_id=row.user_id, key_id=row.pk, scopes=scopes)


def _use_key(key: str) -> ApiKey | None:
    row = ApiKey.objects.find_active(key)
    if row is not None:
        ApiKey.objects.filter(pk=row.pk).touch()
    return row


def _session_principal(user: Any) -> Principal:
    tenant = f"user:{user.pk}"
    return Principal(
        kind="session",
        tenant=tenant,
        owner=tenant,
        user_id=user.pk,
        is_staff=bool(user.is_staff),
        scopes=frozenset({"chat", "watch", "ops"} if user.is_staff else {"chat", "watch"}),
    )


async def _anonymous_principal(session: AsyncSession | None) -> Principal:
    """Give a browser without a login a tenant of its own, kept in its session (made here, lazily)."""
    name = None if session is None else await session.aget(SESSION_TENANT)
    if not isinstance(name, str):
        name = secrets.token_hex(16)
        if session is not None:
            await session.aset(SESSION_TENANT, name)
    return Principal(kind="anonymous", tenant=f"anon:{name}", owner=f"anon:{name}", scopes=frozenset({"chat"}))


def salt_of(tenant: str) -> str:
    """Return the tenant's prefix-cache salt: blocks of two tenants never match, and nobody can guess a salt."""
    return hmac.new(
        django_settings.SECRET_KEY.encode(), f"streamserve.salt:{tenant}".encode(), hashlib.sha256
    ).hexdigest()


# -- where a browser's request comes from -------------------------------------------------------------------------


def check_same_origin(headers: Mapping[str, str], *, scheme: str, host: str) -> None:
    """Raise Forbidden unless a cookie-bearing GET or handshake comes from our own pages, or from no page at all.

    `Origin` decides where it is sent, else `Sec-Fetch-Site`, else `Referer`. None of them: not a browser.
    """
    origin = headers.get("origin")
    if origin is not None:
        if not _is_trusted_origin(origin, scheme, host):
            raise Forbidden("Cross-origin use needs an API key, not cookies.", code="cross_origin")
        return
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise Forbidden("Cross-site use needs an API key, not cookies.", code="cross_origin")
    referer = headers.get("referer")
    if "sec-fetch-site" not in headers and referer and not _is_trusted_origin(_origin_of(referer), scheme, host):
        raise Forbidden("Cross-origin use needs an API key, not cookies.", code="cross_origin")


def _is_trusted_origin(origin: str, scheme: str, host: str) -> bool:
    if origin == f"{scheme}://{host}" or origin in django_settings.CSRF_TRUSTED_ORIGINS:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    wildcards = [urlsplit(entry) for entry in django_settings.CSRF_TRUSTED_ORIGINS if "*" in entry]
    return any(
        parts.scheme == wildcard.scheme and is_same_domain(parts.netloc, wildcard.netloc.lstrip("*"))
        for wildcard in wildcards
    )


def _origin_of(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return "null"
    return f"{parts.scheme}://{parts.netloc}"


class _CsrfCheck(CsrfViewMiddleware):
    """Django's own check, with the reason returned: our routes answer in their dialect, not with an HTML page."""

    def _reject(self, request: HttpRequest, reason: str) -> str:
        return reason


def check_csrf(request: HttpRequest) -> None:
    """Raise Forbidden unless an unsafe request made with cookies carries the CSRF token.

    Touches no database: with CSRF_USE_SESSIONS the session was loaded by `authenticate_request` before.
    """
    check = _CsrfCheck(lambda request: None)  # type: ignore[arg-type]
    check.process_request(request)
    reason = check.process_view(request, lambda request: None, (), {})  # type: ignore[arg-type,return-value]
    if reason is not None:
        message = "The CSRF token is missing or wrong. Reload the page, or call with an API key."
        raise Forbidden(message, code="csrf_failed")
