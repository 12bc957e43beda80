"""`StreamConsumer`: the Channels consumer for `/ws/streams`, and the paths of WebSockets. On the event loop.

It admits the caller of a handshake; what the accepted socket then does is `SocketSession` (socket_session.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from channels.consumer import AsyncConsumer
from channels.exceptions import StopConsumer
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import get_script_prefix as script_prefix_of
from django.urls import NoReverseMatch, get_script_prefix, reverse

from streamserve.api.routes import CHAT_CALLERS, Access
from streamserve.asgi.types import App, Receive, Scope, Send
from streamserve.protocol.errors import NotFound, Refused, StreamserveError
from streamserve.protocol.ids import request_id_of
from streamserve.rows.receivers import note_refusal
from streamserve.web.access import check_access, check_handshake, headers_of
from streamserve.web.auth import authenticate, cookie_headers
from streamserve.web.site import DjangoSite, begin_to_drain, get_site, misconfigured
from streamserve.web.socket_session import Socket, SocketSession


class StreamConsumer(AsyncConsumer):  # type: ignore[misc]  # channels ships no types
    """Admits a socket and hands its messages to a session. One instance per socket; it starts and shows nothing."""

    access = Access(callers=CHAT_CALLERS)
    _session: SocketSession | None = None  # once the handshake is accepted
    _site: DjangoSite  # with it

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one socket. When this returns, its reader is detached from every stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._session is not None:
                self._site.on_drain.discard(self._session.begin_to_leave)
                self._site.permissions.release(self._session)
                await self._session.aclose()

    async def websocket_connect(self, message: Mapping[str, Any]) -> None:
        """Accept a caller with the scope "chat", from a page of this site or from no page."""
        headers = headers_of(self.scope)
        try:
            site = get_site()
            check_handshake(self.scope, headers)
            address = (self.scope.get("client") or ("",))[0]
            user, session = self.scope.get("user"), self.scope.get("session")
            known = await authenticate(headers, user, session, address=address, wrong_keys=site.wrong_keys)
            caller = check_access(self.access, known)
        except ImproperlyConfigured as problem:
            request_id = request_id_of(headers.get("x-request-id", ""))
            await _deny(self.scope, self.send, misconfigured(problem, request_id, self.scope["path"]))
            return
        except Refused as refused:  # not now, as while the database is away
            note_refusal(refused, None, "websocket")
            await _deny(self.scope, self.send, refused)
            return
        except StreamserveError as error:
            note_refusal(error, None, "websocket")
            await self.send({"type": "websocket.close"})  # before accept: HTTP 403
            return
        await self.send({"type": "websocket.accept", "headers": cookie_headers(caller)})
        self._site, services = site, site.services
        socket = Socket(self.send)
        self._session = SocketSession(socket, caller, services.answers, site.settings, services.conversations)
        site.permissions.hold(self._session, caller, SocketSession.lose_permission)
        self._join_drain(self._session)

    async def websocket_receive(self, message: Mapping[str, Any]) -> None:
        """Handle one message."""
        assert self._session is not None  # a server sends none before the handshake is accepted
        await self._session.receive(message.get("text"))

    async def websocket_disconnect(self, message: Mapping[str, Any]) -> None:
        """End the consumer: the client has left."""
        raise StopConsumer

    def _join_drain(self, session: SocketSession) -> None:
        """Have the session leave when the server drains, if the server can (asgi/drain.py)."""
        drain = self.scope.get("extensions", {}).get("streamserve.flow", {}).get("drain")
        if drain is not None:
            drain.on_drain(begin_to_drain)
            self._site.on_drain.add(session.begin_to_leave)
            if drain.is_draining:
                session.begin_to_leave()


class SocketRouter:
    """An ASGI app: our WebSocket at its path, which follows the prefix of the site's urls.py; `others` elsewhere."""

    def __init__(self, ours: App, others: App) -> None:
        self._ours, self._others = ours, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compare the path as Django does: without FORCE_SCRIPT_NAME, or the root path, in front."""
        path = scope["path"].removeprefix(script_prefix_of(scope)).lstrip("/")
        app = self._ours if f"/{path}" == socket_path() else self._others
        await app(scope, receive, send)


def socket_path() -> str:
    """Return the path of our WebSocket, beside the HTTP routes: "/ws/streams", or "/ai/ws/streams" under "ai/"."""
    return f"{path_of('streams').removesuffix('streams')}ws/streams"


def path_of(name: str) -> str:
    """Return the path of a route by its name, without the script name; "/<name>" where urls.py does not include us."""
    try:
        return "/" + reverse(f"streamserve:{name}").removeprefix(get_script_prefix())
    except NoReverseMatch:
        return f"/{name}"


async def deny_unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a handshake at an unknown path: 404 if the server can (ASGI's "WebSocket Denial Response"), else 403."""
    await receive()
    await _deny(scope, send, NotFound("There is no WebSocket at this address."))


async def _deny(scope: Scope, send: Send, error: StreamserveError) -> None:
    """Refuse a handshake with the error's status, where the server can; else it is a 403."""
    if "websocket.http.response" in scope.get("extensions", {}):
        headers = [(b"content-type", b"text/plain; charset=utf-8")]
        if isinstance(error, Refused):
            headers.append((b"retry-after", str(error.retry_after).encode()))
        await send({"type": "websocket.http.response.start", "status": error.http_status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": f"{error.message}\n".encode()})
        return
    await send({"type": "websocket.close"})  # before accept: HTTP 403
