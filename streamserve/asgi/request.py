"""`Request`: one HTTP request to the framework-free app, read within limits, and the ways to answer it. Plain ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from streamserve.asgi.respond import respond
from streamserve.asgi.types import Message, Receive, Scope, Send
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.ids import request_id_of
from streamserve.protocol.json_body import check_head, read_body, too_large
from streamserve.protocol.limits import Limits
from streamserve.streams.reader.delivery import Delivery

T = TypeVar("T")

_MAX_QUERY_FIELDS = 100


class ClientLeft(Exception):
    """The client has left before it was answered: there is nobody to tell."""


class Request:
    """Header names are in lower case; `path` has neither the mount's root_path nor the app's prefix."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, prefix: str = "") -> None:
        self.method: str = scope["method"]
        self.path = _below(_below(scope["path"], scope.get("root_path", "")), prefix)
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.id = request_id_of(self.headers.get("x-request-id", ""))
        self.has_begun = False  # to be answered
        self.scope = scope
        self._receive, self._send = receive, send
        self._limits = limits

    def query(self) -> dict[str, str]:
        """Return the query parameters; one given twice is a mistake, not a choice."""
        text = self.scope.get("query_string", b"").decode("latin-1")
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS)
        except ValueError:
            raise BadRequest("The query has too many parameters.") from None
        out = dict(pairs)
        if len(out) != len(pairs):
            raise BadRequest("A parameter is given twice. Give it once.")
        return out

    async def json(self, *, optional: bool = False) -> dict[str, Any]:
        """Return the JSON object in the body. What the head says of it is checked before a byte of it is read."""
        check_head(self.headers.get("content-length", ""), self.headers.get("content-encoding", ""), self._limits)
        body = await self._read_all()
        return read_body(body, self.headers.get("content-type", ""), self._limits, optional=optional)

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` does; when the client leaves, cancel it and raise ClientLeft. The body has been read."""
        working = asyncio.create_task(work, name="whole answer")
        leaving = asyncio.create_task(self._until_left(), name="whole answer watch")
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientLeft
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def send_json(self, body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON that nobody caches."""
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        head = {"content-type": "application/json", "cache-control": "no-store", **(headers or {})}
        await self._send_whole(status, {**head, "content-length": str(len(data))}, data)

    async def send_nothing(self, status: int) -> None:
        """Answer with a status alone."""
        await self._send_whole(status, {}, b"")

    async def send_stream(self, delivery: Delivery) -> None:
        """Answer with a delivery; it is handed over where a StreamMiddleware waits for it."""
        self.has_begun = True
        await respond(self.scope, self._receive, self._send, delivery, headers=_raw({"x-request-id": self.id}))

    async def _send_whole(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        self.has_begun = True
        raw = _raw({**headers, "x-request-id": self.id})
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else data})

    async def _read_all(self) -> bytes:
        body = bytearray()
        while True:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            if len(body) > self._limits.max_body_bytes:
                raise too_large(self._limits)
            if not message.get("more_body", False):
                return bytes(body)

    async def _until_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _below(path: str, root: str) -> str:
    """Return `path` without `root`. Servers and mounts differ in whether it is still in there."""
    root = root.rstrip("/")
    return path[len(root) :] if root and (path + "/").startswith(root + "/") else path


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
