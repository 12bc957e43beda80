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
    """One request's. `has_left`: the client; `is_heard`: the app is about to be told, or was."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._turn = asyncio.Lock()
        self._ahead: deque[Message] = deque()
        self._left = asyncio.Event()
        self._num_listening = 0
        self._is_told = False

    @property
    def has_left(self) -> bool:
        return self._left.is_set()

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

    def leave(self) -> None:
        """Be told, and tell the app, that the client has left, though it has not."""
        self._left.set()

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
        """Return the server's next message; when `leave` is called meanwhile, that the client has left."""
        if not self._left.is_set():
            hearing, leaving = asyncio.create_task(_await(self._receive)), asyncio.create_task(self._left.wait())
            try:
                await asyncio.wait({hearing, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if hearing.done() and hearing.result()["type"] != "http.disconnect":
                    return hearing.result()
            finally:
                hearing.cancel()
                leaving.cancel()
                await asyncio.gather(hearing, leaving, return_exceptions=True)
            self._left.set()
        return {"type": "http.disconnect"}


async def _await(receive: Receive) -> Message:
    return await receive()
