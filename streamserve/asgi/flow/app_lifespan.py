"""`LifespanTask`: the server's side of ASGI lifespan 2.0, for a server without one (daphne).

An app that raises before it has answered does not support lifespan (Django, Channels), and is served without it, as
with uvicorn's "auto". Event loop only; knows no server.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from streamserve.asgi.types import App, Message

logger = logging.getLogger("streamserve.asgi")


class LifespanTask:
    """One app's lifespan. `state` is the app's, copied into each scope; `failure` is why its startup failed."""

    def __init__(self, app: App, extensions: dict[str, Any]) -> None:
        self.state: dict[str, Any] = {}
        self.failure: str | None = None
        self._app, self._extensions = app, extensions
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._has_started = asyncio.Event()
        self._has_stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        return self._has_started.is_set()

    async def start(self) -> None:
        """Send the startup; return when the app has answered, or does not support lifespan. It may set `failure`."""
        self._task = asyncio.create_task(self._run(), name="lifespan")
        self._incoming.put_nowait({"type": "lifespan.startup"})
        await self._has_started.wait()

    async def wait_started(self) -> None:
        await self._has_started.wait()

    async def stop(self, timeout_seconds: float) -> None:
        """Send the shutdown, and wait up to `timeout_seconds` for its answer."""
        if self._task is None or self._task.done() or not self.is_started:
            return
        self._incoming.put_nowait({"type": "lifespan.shutdown"})
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._has_stopped.wait()
        except TimeoutError:
            logger.warning("the app's shutdown took longer than %g s", timeout_seconds)

    async def _run(self) -> None:
        scope = {
            "type": "lifespan",
            "asgi": {"version": "3.0", "spec_version": "2.0"},
            "state": self.state,
            "extensions": self._extensions,
        }
        try:
            await self._app(scope, self._incoming.get, self._send)
        except Exception as error:
            if self.is_started:
                logger.error("the app failed in its lifespan", exc_info=error)
            else:
                logger.debug("the app does not support lifespan: %s", error)
        finally:
            self._has_started.set()
            self._has_stopped.set()

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "lifespan.startup.failed":
            self.failure = str(message.get("message", "")) or "the app gave no reason"
        elif kind == "lifespan.shutdown.failed":
            logger.error("the app's shutdown failed: %s", message.get("message", ""))
        elif kind not in ("lifespan.startup.complete", "lifespan.shutdown.complete"):
            raise ValueError(f"{kind} is not a lifespan message")
        (self._has_started if "startup" in kind else self._has_stopped).set()
