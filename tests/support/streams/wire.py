"""`Wire`: a transport for tests that keeps what it receives, through `send` or a channel that writes directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streamserve.streams.reader.channel import nothing
from streamserve.streams.reader.delivery import Flow


class Go(asyncio.Event):
    """An event that also calls `on_set`."""

    on_set: Callable[[], None] | None = None

    def set(self) -> None:
        super().set()
        if self.on_set is not None:
            self.on_set()


class Wire:
    """`go` holds it. With `is_direct` it offers a channel, as FlowServer does."""

    is_direct = False
    accepts_at_once = True

    def __init__(self, num_untaken: Callable[[], int] = nothing) -> None:
        self.num_untaken = num_untaken
        self.flow = Flow(num_untaken, self if self.is_direct else None)
        self.sent: list[bytes] = []
        self.go = Go()
        self.go.set()
        self.num_waiting = 0
        self._error: Exception | None = None
        self._ended = asyncio.Event()

    async def send(self, data: bytes) -> None:
        self.num_waiting += 1
        await self.go.wait()
        self.num_waiting -= 1
        self.sent.append(data)

    @property
    def is_writable(self) -> bool:
        return self.go.is_set()

    @property
    def on_writable(self) -> Callable[[], None] | None:
        return self.go.on_set

    @on_writable.setter
    def on_writable(self, call: Callable[[], None] | None) -> None:
        self.go.on_set = call

    def write(self, frame: bytes) -> None:
        assert self.go.is_set()
        self.sent.append(frame)

    def end(self, error: Exception | None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    async def wait_ended(self) -> None:
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    @property
    def data(self) -> bytes:
        return b"".join(self.sent)
