"""`KnownCaller`: a caller known by an API key, a session, or (only where ANONYMOUS is on) a browser without a login.

Made once per request or handshake; the code below trusts it. Knows nothing of routes (see access.py). Runs on the event
loop; the look-ups are Django's ORM. A browser without a login is known by a signed cookie, which takes no row.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from django.conf import settings as django_settings
from django.contrib.auth import SESSION_KEY
from django.core.signing import BadSignature, Signer
from django.db.models.signals import post_delete, post_save
from django.http import HttpRequest, HttpResponse, HttpResponseBase, parse_cookie
from django.utils import timezone

from streamserve.api.call import Caller
from streamserve.asgi.guard import limited_client
from streamserve.asgi.handover import MORE_HEADERS
from streamserve.conf import get_settings
from streamserve.keys import digest_of, secret_digest
from streamserve.models import LAST_USED_EVERY, SCOPES, ApiKey, keys_revoked
from streamserve.protocol.errors import QuotaExceeded, Unauthorized
from streamserve.rows import orm
from streamserve.streams.store import counted_at
from streamserve.web.local import is_local

# A key that is revoked by another process is taken for so long. Its running answers are stopped as late as that
# (permissions.py), so a longer look-up would protect nothing.
KNOWN_SECONDS = 30.0
_MAX_KNOWN = 10_000
WINDOW_SECONDS = 60.0  # in which wrong keys are counted
_MAX_ADDRESSES = 10_000
_MAX_RIGHT = 10_000
VISITOR_COOKIE = "streamserve_visitor"
_VISITOR = "_streamserve_visitor"  # an attribute of a request
_BEARER = re.compile(r"bearer(?: +(.*))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCaller(Caller):
    """A caller that the site knows. `tenant` decides which objects it reaches; quotas count per `owner`.

    The owner is this user, key or browser.
    """

    kind: str  # "session", "key" or "anonymous"
    user_id: Any = None
    key_id: int | None = None
    session_key: str = ""  # of the session that has signed a "session" caller in
    scopes: frozenset[str] = field(default_factory=frozenset)
    new_cookie: str = ""  # the value of VISITOR_COOKIE for an "anonymous" caller that sent none


class Session(Protocol):
    """The part of Django's session that we use."""

    @property
    def session_key(self) -> str | None: ...

    async def aget(self, key: str) -> Any: ...


async def authenticate(
    headers: Mapping[str, str],
    user: Any,
    session: Session | None,
    *,
    address: str = "",
    wrong_keys: WrongKeys | None = None,
) -> KnownCaller | None:
    """Return the caller, or None for an unknown caller. Raises Unauthorized for a key that is not active.

    If a key is sent, it alone decides. `headers` has lower-case names; `user` is the session's user or None; `address`
    is the client's: `wrong_keys` counts its wrong keys, and raises QuotaExceeded after too many; visitors without a
    cookie are counted by it.
    """
    key = key_in(headers)
    if key is not None:
        known = _keys.known(key)
        if known is not None or wrong_keys is None:
            return known or await _keys.caller_of(key)
        wrong_keys.check(address, key)
        try:
            caller = await _keys.caller_of(key)
        except Unauthorized:
            wrong_keys.note_wrong(address, key)
            raise
        wrong_keys.note_right(key)
        return caller
    if user is not None and user.is_authenticated and user.is_active:
        tenant = f"user:{user.pk}"
        return KnownCaller(
            kind="session",
            tenant=tenant,
            owner=tenant,
            user_id=user.pk,
            session_key=await _login_key(session, user),
            scopes=frozenset({"chat", "watch"}),
        )
    if get_settings().anonymous:
        return visitor(headers, address)
    return _visitor_of_ready_page(headers, address)


def _visitor_of_ready_page(headers: Mapping[str, str], address: str) -> KnownCaller | None:
    """Return the visitor from this machine to whom the ready chat page has given the cookie (ready_page.py)."""
    has_cookie = VISITOR_COOKIE in headers.get("cookie", "")
    if not has_cookie or get_settings().chat_page != "debug" or not is_local(headers, address):
        return None
    caller = visitor(headers, address)
    return None if caller.new_cookie else caller


async def _login_key(session: Session | None, user: Any) -> str:
    """Return the key of the session if it has signed `user` in; "" where a middleware of the site has.

    Then the session has no login that could end. It is in memory, where the user was taken from it.
    """
    key = None if session is None else session.session_key
    if session is None or not key or await session.aget(SESSION_KEY) != str(user.pk):
        return ""
    return key


def key_in(headers: Mapping[str, str]) -> str | None:
    """Return the API key sent, None for no key: `Authorization: Bearer` or `x-api-key`. "" is a wrong key.

    Other schemes may belong to a proxy in front of the site.
    """
    bearer = _BEARER.fullmatch(headers.get("authorization", "").strip())
    return (bearer.group(1) or "").strip() if bearer else headers.get("x-api-key")


class KnownKeys:
    """Keys that were found active, by digest, for `KNOWN_SECONDS`. A change in this process forgets all of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[KnownCaller, float, datetime | None]] = {}
        for signal, sender in ((post_save, ApiKey), (post_delete, ApiKey), (keys_revoked, ApiKey)):
            signal.connect(self.forget, sender=sender)
        # A user who is deactivated or deleted takes the keys along.
        post_save.connect(self.forget, sender=django_settings.AUTH_USER_MODEL)
        post_delete.connect(self.forget, sender=django_settings.AUTH_USER_MODEL)

    def forget(self, **kwargs: Any) -> None:
        """Look every key up again."""
        self._known = {}

    def known(self, key: str) -> KnownCaller | None:
        """Return the caller of a key that was found active within `KNOWN_SECONDS`."""
        caller, until, expires_at = self._known.get(digest_of(key), (None, 0.0, None))
        is_known = self._clock() < until and not (expires_at and expires_at <= timezone.now())
        return caller if is_known else None

    async def caller_of(self, key: str) -> KnownCaller:
        """Return the caller of an active key, which is known from then on. Raises Unauthorized."""
        caller, known = self.known(key), self._known  # a later `forget` also forgets what is read now
        if caller is not None:
            return caller
        row = await orm.read(ApiKey.objects.find_active, key)
        if row is None:
            known.pop(digest_of(key), None)
            raise Unauthorized("This API key is unknown, expired or revoked.", code="invalid_api_key")
        if row.last_used_at is None or row.last_used_at < timezone.now() - LAST_USED_EVERY:
            orm.post(ApiKey.objects.filter(pk=row.pk).touch)
        scopes, owner = frozenset(row.scopes) & frozenset(SCOPES), f"key:{row.pk}"
        caller = KnownCaller(
            kind="key",
            tenant=row.tenant,
            owner=owner,
            latency_class=row.latency_class or "",
            user_id=row.user_id,
            key_id=row.pk,
            scopes=scopes,
        )
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[digest_of(key)] = (caller, self._clock() + KNOWN_SECONDS, row.expires_at)
        return caller


_keys = KnownKeys()  # of the process, as the door to the ORM is


def visitor(headers: Mapping[str, str], address: str = "") -> KnownCaller:
    """Return the caller whose tenant is in the signed cookie; a new tenant, with its cookie, where there is none.

    A cookie that this site has not signed counts as no cookie. All new tenants of one client address are counted as one
    caller, so that requests without a cookie take no more places, and no larger share of the engine, than one visitor.
    Where the address may be a proxy's, all tenants are.
    Raises Unauthorized for a program's `Authorization` of another scheme, so that it is no visitor by mistake.
    """
    if "authorization" in headers and not headers.get("cookie"):
        scheme = headers["authorization"].strip().partition(" ")[0][:32]
        message = (
            f"The scheme {scheme!r} is not taken here. Send 'Authorization: Bearer <key>', or nothing as a visitor."
        )
        raise Unauthorized(message, code="unknown_scheme")
    signer, new_cookie = Signer(salt=VISITOR_COOKIE), ""
    try:
        name = signer.unsign(parse_cookie(headers.get("cookie", "")).get(VISITOR_COOKIE, ""))
    except BadSignature:
        name = secrets.token_hex(16)
        new_cookie = signer.sign(name)
    tenant, client = f"anon:{name}", limited_client(address)
    digest = secret_digest("address", client)[:16] if client else ""  # rows hold no address
    return KnownCaller(
        kind="anonymous",
        tenant=tenant,
        owner=tenant,
        scopes=frozenset({"chat"}),
        new_cookie=new_cookie,
        counted_as=counted_at(digest, "" if new_cookie else name),
    )


def give_cookie(response: HttpResponseBase, caller: Caller) -> None:
    """Set the cookie of a new visitor, with the attributes of the site's session cookie."""
    if not isinstance(caller, KnownCaller) or not caller.new_cookie:
        return
    response.set_cookie(
        VISITOR_COOKIE,
        caller.new_cookie,
        max_age=django_settings.SESSION_COOKIE_AGE,
        domain=django_settings.SESSION_COOKIE_DOMAIN,
        path=django_settings.SESSION_COOKIE_PATH,
        secure=django_settings.SESSION_COOKIE_SECURE,
        httponly=True,
        samesite=django_settings.SESSION_COOKIE_SAMESITE,
    )


def cookie_headers(caller: Caller) -> list[tuple[bytes, bytes]]:
    """Return the header that sets the cookie of a new visitor, in ASGI form."""
    response = HttpResponse()
    give_cookie(response, caller)
    return [(b"set-cookie", morsel.OutputString().encode()) for morsel in response.cookies.values()]


def keep_visitor(request: HttpRequest, caller: KnownCaller) -> KnownCaller:
    """Return `caller`; for a new visitor the first one of this request, whose cookie its response will set.

    For views of the site, whose response is not ours: StreamMiddleware adds the header.
    """
    if not caller.new_cookie:
        return caller
    kept: KnownCaller | None = getattr(request, _VISITOR, None)
    if kept is None:
        kept = caller
        setattr(request, _VISITOR, kept)
        getattr(request, "scope", {}).get(MORE_HEADERS, []).extend(cookie_headers(kept))
    return kept


class WrongKeys:
    """Refuses keys from an address that has sent `limit` wrong keys within a minute. `clock` gives seconds.

    A key that was right before is taken from any address, so that one bad client behind a shared address harms no
    other. Of one process; its memory is bounded.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._windows: OrderedDict[str, tuple[float, int]] = OrderedDict()  # address → (start, wrong keys since)
        self._right: OrderedDict[str, None] = (
            OrderedDict()
        )  # digests of keys that were right, the last found at the end

    def check(self, address: str, key: str) -> None:
        """Raise QuotaExceeded if `address` has sent too many wrong keys in this window and `key` is not known as right.

        A unix socket and a loopback address are not limited: all clients of a proxy may come from there.
        """
        address = limited_client(address)
        started_at, num_wrong = self._windows.get(address, (0.0, 0))
        left = started_at + WINDOW_SECONDS - self._clock()
        if not address or num_wrong < self._limit or left <= 0 or digest_of(key) in self._right:
            return
        raise QuotaExceeded(
            f"This address has sent {self._limit} wrong API keys within a minute. Check the key, and try again later.",
            code="too_many_wrong_keys",
            retry_after=max(1, round(left)),
        )

    def note_wrong(self, address: str, key: str) -> None:
        """Count a wrong key."""
        self._right.pop(digest_of(key), None)
        address = limited_client(address)
        if not address:
            return
        now = self._clock()
        started_at, num_wrong = self._windows.pop(address, (now, 0))
        if now - started_at >= WINDOW_SECONDS:
            started_at, num_wrong = now, 0
        self._windows[address] = (started_at, num_wrong + 1)
        if len(self._windows) > _MAX_ADDRESSES:
            self._windows.popitem(last=False)

    def note_right(self, key: str) -> None:
        """Remember a key that was found active."""
        digest = digest_of(key)
        self._right[digest] = None
        self._right.move_to_end(digest)
        if len(self._right) > _MAX_RIGHT:
            self._right.popitem(last=False)
