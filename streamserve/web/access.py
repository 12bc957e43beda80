"""Access to routes: the caller's kind and scope, the CSRF token, and the origin of a browser's request.

For HTTP requests (`admit`) and WebSocket handshakes (`check_handshake`). A key cannot be sent by a foreign page; a
request with cookies can, so its origin is checked. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings as django_settings
from django.contrib.auth.middleware import auser, get_user
from django.contrib.sessions.backends.db import SessionStore as DatabaseSession
from django.core.exceptions import DisallowedHost
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, QueryDict
from django.middleware.csrf import CsrfViewMiddleware
from django.utils.http import is_same_domain

from streamserve.api.call import ANONYMOUS, Caller
from streamserve.api.routes import ANYONE, CHAT_CALLERS, Access, Route
from streamserve.conf import get_settings
from streamserve.protocol.errors import Forbidden, StreamserveError, Unauthorized
from streamserve.rows import orm
from streamserve.web.auth import KnownCaller, authenticate, key_in
from streamserve.web.site import get_site

SAFE_METHODS = ("GET", "HEAD")
METRICS_PERMISSION = "streamserve.view_live"
CHAT = Access(callers=CHAT_CALLERS)
# What a page of another origin may read and send, with a key (Fetch Standard, 3.2.3).
_EXPOSED = (
    "X-Stream-Id, X-Conversation-Id, X-Question-Id, X-Message-Id, Streamserve-From, Streamserve-Reader, X-Request-Id, "
    "Request-Id, Retry-After, ETag, Mcp-Session-Id"
)
_ALLOWED = (
    "Authorization, Content-Type, Idempotency-Key, If-None-Match, Last-Event-ID, X-Api-Key, X-Request-Id, "
    "X-Request-Start, Anthropic-Version, Anthropic-Beta, Anthropic-Dangerous-Direct-Browser-Access, "
    "Mcp-Session-Id, Mcp-Protocol-Version, Mcp-Method, Mcp-Name"
)
_PREFLIGHT_SECONDS = 600


async def admit(access: Access, request: HttpRequest, headers: Mapping[str, str]) -> Caller:
    """Return the caller, or raise Unauthorized or Forbidden. Header names are in lower case."""
    if access.identifies:
        return await _known_caller(request, headers)
    if access.callers == ANYONE or (access.open_in_debug and django_settings.DEBUG):
        return ANONYMOUS
    user = await _user_of(request) if key_in(headers) is None else None  # a key alone decides: no session is read
    address = request.META.get("REMOTE_ADDR") or ""
    session, wrong_keys = getattr(request, "session", None), get_site().wrong_keys
    known = await authenticate(headers, user, session, address=address, wrong_keys=wrong_keys)
    if known is not None and known.kind == "session" and access.scope == "ops" and await _may_see_metrics(user):
        known = replace(known, scopes=known.scopes | {"ops"})
    caller = check_access(access, known)
    if caller.kind == "key":
        return caller
    # Unsafe methods need the CSRF token; reads, and anonymous requests without any cookie, need the same origin.
    has_no_cookie = caller.kind == "anonymous" and not request.COOKIES
    # A beacon has no header for the token. Every browser that sends one names its origin; else the token is needed.
    is_beacon = access.takes_beacons and ("origin" in headers or "sec-fetch-site" in headers)
    if request.method in SAFE_METHODS or has_no_cookie or is_beacon:
        check_same_origin(headers, scheme=request.scheme or "http", host=_host_of(request))
    else:
        check_csrf(request)
    return caller


async def _user_of(request: HttpRequest) -> Any:
    """Return the signed-in user, or None where the site has no users.

    Django loads a session on a thread that it makes for the request. One of the database is loaded through the
    door (rows/orm.py).
    """
    if not hasattr(request, "auser"):
        return None
    session = getattr(request, "session", None)
    if session is None or session.session_key is None or not isinstance(session, DatabaseSession):
        return await request.auser()
    if getattr(request.auser, "func", None) is not auser:  # the site's own
        return await request.auser()
    return await orm.read(get_user, request)


async def _known_caller(request: HttpRequest, headers: Mapping[str, str]) -> Caller:
    """Return the caller if it may chat, else ANONYMOUS."""
    try:
        return await admit(CHAT, request, headers)
    except StreamserveError:
        return ANONYMOUS


async def _may_see_metrics(user: Any) -> bool:
    """Return whether a signed-in user has the live page's permission, which shows the same metrics."""
    return bool(await user.ahas_perm(METRICS_PERMISSION))


def check_access(access: Access, caller: KnownCaller | None) -> KnownCaller:
    """Return `caller`. Raises Unauthorized or Forbidden unless it may call a route with this `access`."""
    if caller is None or (caller.kind == "anonymous" and "anonymous" not in access.callers):
        raise Unauthorized("Sign in, or send an API key as 'Authorization: Bearer <key>'.")
    if access.callers == ("key",) and caller.kind != "key":
        message = "This address takes API keys, and no login. Send 'Authorization: Bearer <key>'."
        raise Forbidden(message, code="insufficient_scope")
    if caller.kind not in access.callers or access.scope not in caller.scopes:
        raise Forbidden(f"This needs the scope '{access.scope}', which you do not have.", code="insufficient_scope")
    return caller


class _CsrfCheck(CsrfViewMiddleware):
    """Django's own check; it returns the reason, because routes answer in their dialect and not with an HTML page."""

    def _reject(self, request: HttpRequest, reason: str) -> str:
        return reason


def check_csrf(request: HttpRequest) -> None:
    """Raise Forbidden unless an unsafe request made with cookies carries the CSRF token in its header.

    Touches no database: with CSRF_USE_SESSIONS the session was loaded when the caller was authenticated.
    """
    if not hasattr(request, "_post"):  # Django looks for the token in a form first, and would take an upload's body
        request.POST = QueryDict()
    check = _CsrfCheck(lambda request: None)  # type: ignore[arg-type]
    check.process_request(request)
    reason = check.process_view(request, lambda request: None, (), {})  # type: ignore[arg-type,return-value]
    if reason is not None:
        message = "The CSRF token is missing or wrong. Reload the page, or call with an API key."
        raise Forbidden(message, code="csrf_failed")


def check_same_origin(headers: Mapping[str, str], *, scheme: str, host: str) -> None:
    """Raise Forbidden unless a GET or handshake with cookies comes from a page of this site or from no page.

    `Origin` decides if it is sent, else `Sec-Fetch-Site`, else `Referer`. Without all three it is not a browser's.
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


def cors_headers(route: Route, headers: Mapping[str, str], *, is_preflight: bool) -> dict[str, str]:
    """Return the headers by which a page of an origin in CORS_ORIGINS may use `route` with a key; cookies do not count.

    Empty for any other origin. The request has an `Origin`.
    """
    origin = headers["origin"]
    if origin not in get_settings().cors_origins:
        return {}
    out = {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": _EXPOSED}
    if is_preflight:
        out |= {
            "Access-Control-Allow-Methods": ", ".join(route.methods),
            "Access-Control-Allow-Headers": _ALLOWED,
            "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        }
    return out


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


# -- WebSocket handshakes -----------------------------------------------------------------------------------------


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the handshake's headers by lower-case name. A header sent twice is joined, so that it matches no value."""
    out: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        out[name] = f"{out[name]},{value}" if name in out else value
    return out


def check_handshake(scope: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """Raise Forbidden for a host that is not in ALLOWED_HOSTS, and for cookies from a foreign page.

    Host and scheme are those that Django gives a page of this site: by USE_X_FORWARDED_HOST, SECURE_PROXY_SSL_HEADER.
    """
    scheme = {"ws": "http", "wss": "https"}.get(scope.get("scheme", "ws"), "http")
    page = ASGIRequest({**scope, "type": "http", "method": "GET", "scheme": scheme, "query_string": b""}, BytesIO())
    host = _host_of(page)
    if key_in(headers) is not None:
        return  # a key alone decides, whatever cookies come with it
    if "cookie" in headers and "origin" not in headers:
        raise Forbidden("A handshake with cookies needs an Origin.", code="cross_origin")
    check_same_origin(headers, scheme=page.scheme or "http", host=host)


def _host_of(request: HttpRequest) -> str:
    try:
        return request.get_host()
    except DisallowedHost:
        raise Forbidden("This host is not in ALLOWED_HOSTS.", code="host_not_allowed") from None
