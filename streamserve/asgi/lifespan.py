"""`Lifespan`: ASGI lifespan for an app that may not know it (Django and Channels do not).

The inner app is asked first; what it leaves unanswered is answered here. Callbacks run when shutdown is asked, before
the inner app hears of it. Daphne has no lifespan: there the runtime's own hooks close things.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from streamserve.asgi.types import App, Message, Receive, Scope, Send

logger = logging.getLogger("streamserve.asgi")

Callback = Callable[[], Awaitable[None]]


class Lifespan:
    """One process's lifespan conversation with the server."""

    def __init__(self, receive: Receive, send: Send, on_shutdown: Iterable[Callback]) -> None:
        self._receive, self._send = receive, send
        self._on_shutdown = on_shutdown
        self._pending: str | None = None  # asked, not yet answered
        self._has_answered = False
        self._is_over = False

    async def serve(self, app: App, scope: Scope) -> None:
        """Converse until shutdown is answered, or startup has failed."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if self._has_answered:
                raise
            logger.debug("the inner app does not speak lifespan", exc_info=True)
        while not self._is_over:
            if self._pending is None:
                await self.receive()
            await self.send({"type": f"{self._pending}.complete"})

    async def receive(self) -> Message:
        """Pass the server's next message on; at shutdown the callbacks come first."""
        message = await self._receive()
        self._pending = message["type"]
        if self._pending == "lifespan.shutdown":
            await self._shut_down()
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on and remember what it settled."""
        self._has_answered, self._pending = True, None
        self._is_over = message["type"] != "lifespan.startup.complete"
        await self._send(message)

    async def _shut_down(self) -> None:
        for callback in self._on_shutdown:
            try:
                await callback()
            except Exception:
                logger.exception("a shutdown callback failed")
