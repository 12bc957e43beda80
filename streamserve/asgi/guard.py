"""`Guard`: how much clients may have open at a time, and what bodies they may send, under any ASGI server.

A request or WebSocket over a bound is refused before the app inside runs; a body by its announced length, before any of
it is read. FlowServer runs every app behind a guard of its own, with the bounds that the app names for its routes.
An ASGI app sees a connection only with its first request: connections that send none are the server's (FlowServer's
`head_seconds`, a proxy). Event loop only; knows no framework.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamserve.asgi.types import App, Message, Receive, Scope, Send, is_http1
from streamserve.dialects import native
from streamserve.dialects.websocket import CloseCode
from streamserve.protocol.errors import (
    ErrorBody,
    Overloaded,
    QuotaExceeded,
    RequestTimeout,
    StreamserveError,
    TooLarge,
    headers_of,
    to_body,
)
from streamserve.protocol.ids import request_id_of
from streamserve.protocol.json_body import announced_bytes, file_too_large

BODY_BYTES_PER_SECOND = 1024  # of a body that is slow but not too slow
_RETRY_SECONDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteBound:
    """What the bodies of one route may have, and the JSON of its errors. A probe is answered over `max_connections`.

    `file_bytes`: of a route that takes a file in a form, how large that may be. `body_bytes` is the whole form.
    `way_out`: what to do about a body over the limit.
    """

    body_bytes: int
    file_bytes: int = 0
    way_out: str = "Send a shorter conversation."
    is_probe: bool = False
    error_json: Callable[[ErrorBody], dict[str, Any]] = native.error_json

    def too_large(self) -> StreamserveError:
        """Return the error for a body over the limit."""
        if self.file_bytes:
            return file_too_large(self.file_bytes)
        return TooLarge(f"The body is over the limit of {self.body_bytes:,} bytes. {self.way_out}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The bounds of one app. 0 is no bound.

    `max_uploads`: bodies of routes that take a file, where the app stores them before it knows their callers.
    `max_connections`: requests and WebSockets in progress; `max_per_address`: the same for one client address, but not
    for a loopback address or a unix socket, which are a proxy's. `body_seconds`: the app waits so long for a body, and
    a second more for each KiB. `bound_of(path)` names the bounds of a route, None for other addresses.
    """

    max_connections: int = 0
    max_per_address: int = 0
    max_uploads: int = 0
    body_seconds: float = 0.0
    bound_of: Callable[[str], RouteBound | None] = lambda path: None


class GuardedApp:
    """`app` behind `guard`. Of one event loop."""

    def __init__(self, app: App, guard: Guard) -> None:
        self._app, self._guard = app, guard
        self._num_open = self._num_uploads = 0
        self._by_client: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        client = limited_client((scope.get("client") or ("",))[0] or "")
        bound = (
            self._guard.bound_of(scope["path"].removeprefix(scope.get("root_path", "")))
            if scope["type"] == "http"
            else None
        )
        try:
            self._check(scope, client, bound)
        except StreamserveError as error:
            await _refuse(scope, receive, send, error, bound)
            return
        is_upload = bound is not None and bool(bound.file_bytes) and scope["method"] == "POST"
        self._num_open += 1
        self._num_uploads += is_upload
        if client:
            self._by_client[client] += 1
        try:
            if bound is None:
                await self._app(scope, receive, send)
            else:
                await self._serve(scope, receive, send, bound)
        finally:
            self._num_open -= 1
            self._num_uploads -= is_upload
            if client:
                self._note_end(client)

    def _note_end(self, client: str) -> None:
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def _check(self, scope: Scope, client: str, bound: RouteBound | None) -> None:
        guard = self._guard
        is_probe = bound is not None and bound.is_probe
        if guard.max_connections and self._num_open >= guard.max_connections and not is_probe:
            raise Overloaded("The server has as many connections as it takes. Try again.", retry_after=_RETRY_SECONDS)
        if client and guard.max_per_address and self._by_client[client] >= guard.max_per_address:
            raise QuotaExceeded(
                f"This address has {guard.max_per_address} connections open, which is the limit. Close one of them.",
                code="too_many_connections",
                retry_after=_RETRY_SECONDS,
            )
        takes_file = bound is not None and bound.file_bytes and scope["method"] == "POST"
        if takes_file and 0 < guard.max_uploads <= self._num_uploads:
            raise uploads_busy()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, bound: RouteBound) -> None:
        """Run the app with a body that stays within its bounds."""
        length = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"")
        if (announced_bytes(length.decode("latin-1")) or 0) > bound.body_bytes:
            await _refuse(scope, receive, send, bound.too_large(), bound)
            return
        body = _Body(receive, bound, self._guard.body_seconds)
        try:
            await self._app(scope, body.receive, send)
        except StreamserveError as error:
            if error is not body.error:
                raise
            await _refuse(scope, receive, send, error, bound)


class _Body:
    """The body of one request on its way to the app. `receive` raises `error` when a bound is broken."""

    def __init__(self, receive: Receive, bound: RouteBound, seconds: float) -> None:
        self._receive, self._bound, self._seconds = receive, bound, seconds
        self._waited_seconds = 0.0  # for the client: what the app does between two pieces does not count
        self._num_bytes = 0
        self._is_whole = False
        self.error: StreamserveError | None = None

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        left, asked_at = (
            self._seconds + self._num_bytes / BODY_BYTES_PER_SECOND - self._waited_seconds,
            time.monotonic(),
        )
        try:
            async with asyncio.timeout(left if self._seconds else None):
                message = await self._receive()
        except TimeoutError:
            self.error = RequestTimeout("The request's body did not arrive in time. Send it again.")
            raise self.error from None
        self._waited_seconds += time.monotonic() - asked_at
        self._num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._num_bytes > self._bound.body_bytes:
            self.error = self._bound.too_large()
            raise self.error
        return message


def uploads_busy() -> Overloaded:
    """Return the error for an upload beyond those that the process receives at a time."""
    message = "The server receives as many files as it can at a time. Send it again."
    return Overloaded(message, code="uploads_busy", retry_after=_RETRY_SECONDS)


def client_of(address: str) -> str:
    """Return whom an address is counted for: of IPv6 its /64, whose addresses one client has (RFC 6177); "" if unknown.

    An IPv4 address in IPv6 form, as a socket for both has it, is the IPv4 address.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ip.ipv4_mapped or ("::1" if ip.is_loopback else ipaddress.IPv6Address(int(ip) >> 64 << 64)))


@functools.lru_cache(maxsize=4096)  # each request asks twice, and parsing takes longer than what is done with it
def limited_client(address: str) -> str:
    """Return the client that is limited; "" for a unix socket or a loopback address: a proxy may stand there."""
    client = client_of(address)
    return "" if not client or ipaddress.ip_address(client).is_loopback else client


async def _refuse(
    scope: Scope, receive: Receive, send: Send, error: StreamserveError, bound: RouteBound | None
) -> None:
    """Answer without the app. The connection is closed: what is left of the body is not read."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": CloseCode.TRY_LATER, "reason": error.message[:120]})
        return
    given = next((value for name, value in scope["headers"] if name.lower() == b"x-request-id"), b"")
    request_id = request_id_of(given.decode("latin-1"))
    error_json = native.error_json if bound is None else bound.error_json
    body = json.dumps(error_json(to_body(error, request_id))).encode()
    headers = {
        "content-type": "application/json",
        "cache-control": "no-store",
        "content-length": str(len(body)),
        **({"connection": "close"} if is_http1(scope) else {}),
        "x-request-id": request_id,
        **{name.lower(): value for name, value in headers_of(error).items()},
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.http_status, "headers": raw})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
