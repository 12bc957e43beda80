"""`Receiver`: the one owner of a request's `receive`. Every part that waits for the client asks it, not the server.

A request's messages are its body's, then one `http.disconnect`. The body goes to the caller of `receive`. When it is
whole, or a task watches for the disconnect before, one task awaits the server for the rest of the request, and keeps
a part of the body for `receive`. Every wait for the disconnect waits for that task: a framework or a view that stops
waiting cancels nothing at the server. Some servers do not forgive a cancelled `receive`: gunicorn 27 answers the next
call with a disconnect although the client is there.

Event loop only; plain ASGI. `Exchange` makes a `Receiver` for each request, and puts it into the scope.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from streamserve.asgi.types import Message, Receive

RECEIVER = "streamserve.receiver"  # in a scope: the `Receiver` of the request

# Messages of a body that are kept for an app which does not read them. The client is not watched while there are more.
_MAX_AHEAD = 16


class Receiver:
    """See above. `has_left`: the client has disconnected. Close it when the request is over."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._turn = asyncio.Lock()  # at the server: ASGI forbids two calls at a time
        self._watching: asyncio.Task[None] | None = None
        self._ahead: deque[Message] = deque()
        self._changed = asyncio.Event()  # a message is ahead, or there is room for a message, or the client has left
        self._is_whole = False  # the body
        self._is_dropped = False  # what is left of it
        self._on_left: list[Callable[[], None]] = []
        self._num_waiting, self._was_told = 0, False
        self.has_left = False

    @property
    def is_told(self) -> bool:
        """Whether the app waits for the client's next message, or has had the disconnect."""
        return self._num_waiting > 0 or self._was_told

    async def receive(self) -> Message:
        """Return the next message. Behind the body that is the disconnect, as often as it is asked for."""
        self._num_waiting += 1
        try:
            message = await self._next()
        finally:
            self._num_waiting -= 1
        self._was_told = message["type"] == "http.disconnect"
        return message

    def watching(self) -> asyncio.Task[None]:
        """Return the task that ends when the client has left; do not cancel it."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="request watch")
        return self._watching

    def drop_body(self) -> None:
        """Keep nothing more of the body, because its app has returned."""
        self._is_dropped = True
        self._ahead.clear()
        self._changed.set()

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

    def leave(self) -> None:
        """Act as if the client had left."""
        self.has_left = True
        self._changed.set()
        calls, self._on_left = self._on_left, []
        for call in calls:
            call()

    def close(self) -> None:
        """End: the request is over."""
        self._on_left.clear()
        if self._watching is not None:
            self._watching.cancel()

    async def _next(self) -> Message:
        while True:
            if self._ahead:
                self._changed.set()
                return self._ahead.popleft()
            if self.has_left:
                return {"type": "http.disconnect"}
            if self._watching is None and not self._is_whole:
                async with self._turn:
                    if self._watching is None and not self._is_whole:
                        return await self._from_server()
                continue  # another caller has had the rest, or a watch has begun
            watching = self.watching()
            self._changed.clear()
            await self._changed.wait()
            if watching.done() and not self.has_left:
                watching.result()  # raises what the server's `receive` has raised

    async def _watch(self) -> None:
        try:
            while not self.has_left:
                if len(self._ahead) == _MAX_AHEAD:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                async with self._turn:
                    message = await self._from_server()
                if not self._is_dropped and message["type"] != "http.disconnect":
                    self._ahead.append(message)
                    self._changed.set()
                await asyncio.sleep(0)  # what is left of a body may be there already, piece for piece
        finally:
            self._changed.set()

    async def _from_server(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.leave()
        elif not message.get("more_body", False):
            self._is_whole = True
            if self._on_left:
                self.watching()
        return message
