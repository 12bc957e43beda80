"""`FlowChannel`: the pieces of a streamed response, written to the socket at once. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from streamserve.asgi.flow.transport import FlowControl
from streamserve.asgi.types import Send

if TYPE_CHECKING:
    from streamserve.asgi.flow.requests import FlowRequest


class FlowChannel:
    """Writes pieces of a chunked response that has begun, at once; see `DirectChannel`. `send` is the app's `send`.

    Of a frame larger than `piece_bytes` (a snapshot) Twisted would hold the whole, twice while it joins what it has.
    The channel keeps the rest of it, and writes a piece whenever there is room.
    """

    __slots__ = (
        "_control", "_ended", "_error", "_is_ended", "_num_untaken", "_on_writable", "_piece_bytes", "_request",
        "_rest", "send",
    )  # fmt: skip

    accepts_at_once = True

    def __init__(
        self, request: FlowRequest, control: FlowControl, send: Send, num_untaken: Callable[[], int], piece_bytes: int
    ) -> None:
        self._request, self._control, self.send, self._num_untaken = request, control, send, num_untaken
        self._piece_bytes = piece_bytes
        self._rest = memoryview(b"")  # of a large frame
        self._is_ended, self._error = False, cast(Exception | None, None)
        self._ended: asyncio.Future[None] | None = None
        self._on_writable: Callable[[], None] | None = None

    @property
    def on_writable(self) -> Callable[[], None] | None:
        return self._on_writable

    @on_writable.setter
    def on_writable(self, call: Callable[[], None] | None) -> None:
        self._on_writable, self._control.on_open = call, self._on_open

    @property
    def is_writable(self) -> bool:
        """Whether a frame can be written now, with nothing unsent before it."""
        control, request = self._control, self._request
        is_free = control.is_open and not control.is_gone and not control.write_lock.locked() and not self._rest
        return bool(is_free and request.chunked and not request.finished and not request._disconnected)

    def num_untaken(self) -> int:
        """Return how many bytes of the frames written the reader's system has not taken."""
        return self._num_untaken() + len(self._rest)

    def write(self, frame: bytes) -> None:
        """Write a piece of the body, not the last; of a large one as much as there is room for."""
        if len(frame) > self._piece_bytes:
            self._rest = memoryview(frame)
            self._write_rest()
            return
        request = self._request
        request.sentLength += len(frame)
        request.channel.transport.write(b"%x\r\n%b\r\n" % (len(frame), frame))

    def _write_rest(self, *, at_once: bool = False) -> None:
        while self._rest and (at_once or self._control.is_open) and self._request.channel is not None:
            piece, self._rest = self._rest[: self._piece_bytes], self._rest[self._piece_bytes :]
            self.write(bytes(piece))

    def _on_open(self) -> None:
        """There is room: for the rest of a frame, then for the next one, or for the end."""
        self._write_rest()
        if not self._rest:
            if self._is_ended:
                self._finish()
            elif self._on_writable is not None:
                self._on_writable()

    def end(self, error: Exception | None) -> None:
        """Note that no frame follows, and the error that ended the delivery."""
        if not self._is_ended:
            self._is_ended, self._error = True, error
            if error is not None or self._control.is_gone:
                self._rest = memoryview(b"")
            if not self._rest:
                self._finish()

    def _finish(self) -> None:
        self._control.on_open = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def wait_ended(self) -> None:
        """Wait until `end` is called and every frame is written; raise its error. Cancelled, it writes them at once."""
        try:
            while self._rest or not self._is_ended:
                self._ended = asyncio.get_running_loop().create_future()
                await self._ended
        finally:
            if not self._control.is_gone:
                self._write_rest(at_once=True)  # what follows, the place to resume from, must not lie inside a frame
        if self._error is not None:
            raise self._error
