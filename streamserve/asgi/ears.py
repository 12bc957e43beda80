"""`Ears`: `receive` for an app, while somebody else waits for its client to leave. asyncio; plain ASGI.

Two who await a server's `receive` at once are not allowed by ASGI: one of them would never hear that the client left.
"""

from __future__ import annotations

import asyncio
from collections import deque

from streamserve.asgi.types import Message, Receive

# Messages of a body that the app does not read, which are kept for it. Then it alone hears.
_MAX_AHEAD = 16


class Ears:
    """One request's. `is_heard`: the app knows, or is about to be told, that the client has left."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._turn = asyncio.Lock()
        self._ahead: deque[Message] = deque()
        self._left = asyncio.Event()
        self._num_listening = 0
        self._is_told = False

    @property
    def is_heard(self) -> bool:
        return self._is_told or self._num_listening > 0

    async def receive(self) -> Message:
        """Return the client's next message: what the app awaits."""
        self._num_listening += 1
        try:
            async with self._turn:
                message = self._ahead.popleft() if self._ahead else await self._hear()
        finally:
            self._num_listening -= 1
        self._is_told = message["type"] == "http.disconnect"
        return message

    async def until_left(self) -> None:
        """Return when the client has left, whoever hears of it."""
        while not self._left.is_set():
            async with self._turn:
                if len(self._ahead) == _MAX_AHEAD:
                    break
                message = await self._hear()
                if message["type"] != "http.disconnect":
                    self._ahead.append(message)
        await self._left.wait()

    async def _hear(self) -> Message:
        if self._left.is_set():
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._left.set()
        return message
