"""`hops_of`: which proxies stand on the way, by the marks that each leaves.

Marks: headers of the response, headers that the request has gained by the time Django gets it, and the page with which
the outermost hop refuses bytes that are no request. A proxy that leaves no mark is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

NGINX, APACHE, CADDY, TRAEFIK, HAPROXY = "nginx", "Apache", "Caddy", "Traefik", "HAProxy"
ALB, CLOUDFLARE = "AWS ALB", "Cloudflare"
# From the outermost in, as sites use them.
PROXIES = (CLOUDFLARE, ALB, TRAEFIK, CADDY, HAPROXY, NGINX, APACHE)
SERVERS = ("daphne", "uvicorn", "hypercorn", "granian")

_BY_SERVER = {
    "nginx": NGINX,
    "openresty": NGINX,
    "apache": APACHE,
    "caddy": CADDY,
    "awselb": ALB,
    "cloudflare": CLOUDFLARE,
}
_BY_RESPONSE = {"cf-ray": CLOUDFLARE}
_BY_REQUEST = {"cf-ray": CLOUDFLARE, "cf-connecting-ip": CLOUDFLARE, "x-amzn-trace-id": ALB}
# HAProxy's own error page has no Server, and its reason is written so (haproxy, http_err_msgs).
_HAPROXY_PAGE = re.compile(rb"<h1>400 Bad request</h1>\s*Your browser sent an invalid request\.")
_SERVER_LINE = re.compile(rb"^server: *(.+?)\r?$", re.IGNORECASE | re.MULTILINE)
# Go's HTTP server, under Caddy and Traefik, refuses in this form.
_GO_PAGE = re.compile(
    rb"^HTTP/1\.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400"
)


def hops_of(answer: Mapping[str, str], request: Mapping[str, str], error_page: bytes) -> tuple[str, ...]:
    """Return the proxies that left a mark, the outermost first.

    `answer` are the headers of a response, `request` those that Django got (all names in lower case).
    """
    found = set(_marks(answer, request, error_page))
    return tuple(proxy for proxy in PROXIES if proxy in found)


def _marks(answer: Mapping[str, str], request: Mapping[str, str], error_page: bytes) -> Iterator[str]:
    yield from _servers(answer.get("server", ""))
    yield from _servers(answer.get("via", ""))
    yield from (proxy for name, proxy in _BY_RESPONSE.items() if name in answer)
    yield from (proxy for name, proxy in _BY_REQUEST.items() if name in request)
    yield from _servers(request.get("via", ""))
    named_by = ""
    if "x-forwarded-server" in request:  # Traefik adds the port too
        named_by = TRAEFIK if "x-forwarded-port" in request else APACHE
    shown = _SERVER_LINE.search(error_page)
    if shown is not None:
        yield from _servers(shown[1].decode("latin-1"))
    elif _HAPROXY_PAGE.search(error_page):
        yield HAPROXY
    elif _GO_PAGE.match(error_page):
        yield TRAEFIK if named_by == TRAEFIK else CADDY
    if named_by:
        yield named_by


def _servers(text: str) -> Iterator[str]:
    lowered = text.lower()
    yield from (proxy for word, proxy in _BY_SERVER.items() if word in lowered)


def web_server_of(answer: Mapping[str, str]) -> str:
    """Return the web server behind the proxies; "" where the response does not name it."""
    shown = answer.get("server", "").lower()
    return next((server for server in SERVERS if server in shown), "")
