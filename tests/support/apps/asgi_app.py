"""A framework-free app that hands over streams of an echo engine, and a driver that plays the server.

`Client` speaks ASGI to an app as a server does: it feeds the request, keeps what is sent, and can leave at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from streamserve.asgi.handover import HEADER, offer
from streamserve.asgi.types import App, Message, Receive, Scope, Send
from streamserve.streams.reader.delivery import Delivery

MakeDelivery = Callable[[], Awaitable[Delivery]]


class HandingOver:
    """An inner app: reads the body, makes a delivery, hands it over with headers of its own, and then waits."""

    def __init__(self, make: MakeDelivery) -> None:
        self.make = make
        self.scope: Scope = {}
        self.body = b""
        self.has_returned = False
        self.before_start = asyncio.Event()
        self.before_start.set()
        self.before_return = asyncio.Event()
        self.before_return.set()
        self.headers = [(b"Content-Type", b"text/html"), (b"Content-Length", b"0"), (b"Set-Cookie", b"a=1")]
        self.status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.body = (await receive())["body"]
        ticket = offer(await self.make())
        await self.before_start.wait()
        headers = [*self.headers, (HEADER.encode(), ticket.encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"this is swallowed"})
        await self.before_return.wait()
        self.has_returned = True


class Client:
    """One request to an app."""

    def __init__(self, app: App, *, method: str = "GET", body: bytes = b"", **scope: Any) -> None:
        self.messages: list[Message] = []
        self.on_send: Callable[[Message], None] = lambda message: None
        self.is_blocked = False
        self.go = asyncio.Event()  # while it is cleared the client takes nothing
        self.go.set()
        self._scope = {"type": "http", "method": method, "path": "/", "headers": [], **scope}
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.task = asyncio.create_task(app(self._scope, self._incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        self.on_send(message)
        self.is_blocked = not self.go.is_set()
        await self.go.wait()
        self.messages.append(message)
        await asyncio.sleep(0)

    def leave(self) -> None:
        """Disconnect. As with daphne, the app gets one message for it."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def start(self) -> Message:
        return self.messages[0]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return list(self.start["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def is_complete(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", False)
