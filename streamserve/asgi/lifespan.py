"""`Lifespan`: ASGI lifespan for an app that may not support it (Django and Channels do not).

The inner app is called first; what it leaves unanswered is answered here. Callbacks run at startup and at shutdown,
before the inner app receives it. Stock daphne has no lifespan: there the site's own hooks close engines and logs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from streamserve.asgi.types import App, Message, Receive, Scope, Send

logger = logging.getLogger("streamserve.asgi")

Callback = Callable[[], Awaitable[None]]


class Lifespan:
    """The lifespan messages between one server and one app."""

    def __init__(
        self, receive: Receive, send: Send, *, on_startup: Iterable[Callback], on_shutdown: Iterable[Callback]
    ) -> None:
        self._receive, self._send = receive, send
        self._callbacks = {"lifespan.startup": on_startup, "lifespan.shutdown": on_shutdown}
        self._pending: str | None = None  # received, not yet answered
        self._has_answered = False
        self._is_over = False

    async def serve(self, app: App, scope: Scope) -> None:
        """Answer the server until shutdown is answered, or startup has failed."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if self._has_answered:
                raise
            logger.debug("the inner app does not support lifespan", exc_info=True)
        while not self._is_over:
            if self._pending is None:
                await self.receive()
            await self.send({"type": f"{self._pending}.complete"})

    async def receive(self) -> Message:
        """Pass the server's next message on, after its callbacks."""
        message = await self._receive()
        self._pending = message["type"]
        for callback in self._callbacks[message["type"]]:
            try:
                await callback()
            except Exception:
                logger.exception("a callback of %s failed", message["type"])
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on, and note what it answers."""
        self._has_answered, self._pending = True, None
        self._is_over = message["type"] != "lifespan.startup.complete"
        await self._send(message)
