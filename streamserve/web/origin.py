"""Who may open a WebSocket: Host as Django checks it for HTTP, and an Origin of ours wherever cookies speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings as django_settings
from django.http.request import split_domain_port, validate_host

from streamserve.protocol.errors import Forbidden
from streamserve.web.auth import check_same_origin


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the handshake's headers by lower-case name. One sent twice is joined, and then matches nothing."""
    out: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        out[name] = f"{out[name]},{value}" if name in out else value
    return out


def check_handshake(scope: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """Raise Forbidden for a host that is not ours, and for cookies that no page of ours has sent."""
    host = headers.get("host", "")
    allowed = django_settings.ALLOWED_HOSTS or ([".localhost", "127.0.0.1", "[::1]"] if django_settings.DEBUG else [])
    if not validate_host(split_domain_port(host)[0], allowed):
        raise Forbidden("This host is not in ALLOWED_HOSTS.")
    if "authorization" in headers or "x-api-key" in headers:
        return
    if "cookie" in headers and "origin" not in headers:
        raise Forbidden("A handshake with cookies needs an Origin.", code="cross_origin")
    check_same_origin(headers, scheme=_page_scheme(scope, headers), host=host)


def _page_scheme(scope: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Return the scheme of the pages that this socket belongs to; behind a proxy with TLS, as Django is told of it."""
    if django_settings.SECURE_PROXY_SSL_HEADER:
        name, secure = django_settings.SECURE_PROXY_SSL_HEADER
        told = headers.get(name.removeprefix("HTTP_").replace("_", "-").lower())
        if told is not None:
            return "https" if told.partition(",")[0].strip() == secure else "http"
    return {"ws": "http", "wss": "https"}.get(scope.get("scheme", "ws"), "http")
