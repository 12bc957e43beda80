"""`Request`: one HTTP request to the ASGI app: its head, its body in pieces, its client's disconnect. Plain ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from streamserve.api.call import Reply
from streamserve.asgi.handover import respond
from streamserve.asgi.types import Receive, Scope, Send
from streamserve.protocol.ids import request_id_of

T = TypeVar("T")


class ClientLeft(Exception):
    """The client disconnected before the response began; no response is sent."""


class Request:
    """Header names are lower-case. `path` is without the mount's root_path and the app's prefix."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, prefix: str = "") -> None:
        self.method: str = scope["method"]
        self.path = _below(_below(scope["path"], scope.get("root_path", "")), prefix)
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.id = request_id_of(self.headers.get("x-request-id", ""))
        self.scope = scope
        self._receive, self._send = receive, send

    @property
    def query_string(self) -> str:
        """The query as text; one that is not UTF-8 is decoded as Latin-1."""
        raw = self.scope.get("query_string", b"")
        try:
            return raw.decode()  # type: ignore[no-any-return]
        except UnicodeDecodeError:
            return raw.decode("latin-1")  # type: ignore[no-any-return]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive. Raises ClientLeft."""
        has_more = True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            yield message.get("body", b"")
            has_more = message.get("more_body", False)

    async def wait(self, work: Coroutine[Any, Any, T], /) -> T:
        """Return the result of `work`; on a disconnect cancel it and raise ClientLeft. The body was read before."""
        working = asyncio.create_task(work, name="whole answer")
        leaving = asyncio.create_task(self._wait_left(), name="whole answer watch")
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientLeft
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def send(self, reply: Reply) -> None:
        """Send the response. Inside a StreamMiddleware a body that streams is handed over."""
        body = reply.body
        if not isinstance(body, bytes):
            headers = _raw({**reply.headers, "x-request-id": self.id})
            await respond(self.scope, self._receive, self._send, body, status=reply.status, headers=headers)
            return
        length = {} if reply.status == 204 else {"content-length": str(len(body))}
        headers = _raw({**reply.headers, **length, "x-request-id": self.id})
        await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def _wait_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _below(path: str, root: str) -> str:
    """Return `path` without `root`. Some servers and mounts leave `root` in `path`, some remove it."""
    root = root.rstrip("/")
    return path[len(root) :] if root and (path + "/").startswith(root + "/") else path


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
