"""`Receiver`: the one owner of a request's `receive`. Every part that waits for the client asks it, not the server.

A request's messages are its body's, then one `http.disconnect`. The body goes to the caller of `receive`. When it is
whole, one task awaits the server for the rest of the request, and everybody who waits for the disconnect waits for that
task: a framework or a view that stops waiting cancels nothing at the server. Some servers do not forgive that:
gunicorn 27 answers the next call with a disconnect although the client is there.

Event loop only; plain ASGI. `Exchange` makes one for each request, and puts it into the scope.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streamserve.asgi.types import Message, Receive

RECEIVER = "streamserve.receiver"  # in a scope: the `Receiver` of the request


class Receiver:
    """See above. `has_left`: the client has disconnected. Close it when the request is over."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watching: asyncio.Task[None] | None = None
        self._is_whole = False  # the body
        self._on_left: list[Callable[[], None]] = []
        self.has_left = False

    async def receive(self) -> Message:
        """Return the next message. Behind the body that is the disconnect, as often as it is asked for."""
        if self._is_whole or self.has_left:
            if not self.has_left:
                await asyncio.shield(self.watching())
            return {"type": "http.disconnect"}
        message = await self._receive()
        self._note(message)
        if self._is_whole and self._on_left:
            self.watching()
        return message

    def watching(self) -> asyncio.Task[None]:
        """Return the task that ends when the client has left; do not cancel it. Drops what is left of the body."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="request watch")
        return self._watching

    def on_left(self, call: Callable[[], None]) -> None:
        """Call `call` when the client leaves, before anything else runs; at once if it has."""
        if self.has_left:
            call()
            return
        self._on_left.append(call)
        if self._is_whole:
            self.watching()

    def off_left(self, call: Callable[[], None]) -> None:
        """Take back an `on_left`."""
        if call in self._on_left:
            self._on_left.remove(call)

    def close(self) -> None:
        """End: the request is over."""
        self._on_left.clear()
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while not self.has_left:
            self._note(await self._receive())
            await asyncio.sleep(0)  # what is left of a body may be there already, piece for piece

    def _note(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.has_left = True
            calls, self._on_left = self._on_left, []
            for call in calls:
                call()
        elif not message.get("more_body", False):
            self._is_whole = True
