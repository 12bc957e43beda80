"""`Channel`: where one reader's frames go, and when there is room for another. Event loop only.

FlowServer has one of its own, which writes at once (asgi/flow/requests.py). `PullChannel` is for everything else: one
frame at a time for a task that sends it (uvicorn, stock daphne, a WebSocket) or for an `async for`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


def nothing() -> int:
    """Stand for a transport that does not know what is untaken: what it accepted counts as taken."""
    return 0


class Channel(Protocol):
    """A frame may be written while `is_writable`; `on_writable` is called when that is so again.

    `accepts_at_once`: a frame that is written is with the transport; else it is when `on_writable` is called.
    `num_untaken` returns how many bytes of what the transport has accepted the reader's system has not taken.
    """

    accepts_at_once: bool
    num_untaken: Callable[[], int]
    on_writable: Callable[[], None] | None

    @property
    def is_writable(self) -> bool: ...

    def write(self, frame: Any) -> None: ...

    def end(self, error: Exception | None) -> None:
        """Nothing more is written; `error` is why the frames are not all, None if they are."""


class DirectChannel(Channel, Protocol):
    """A server's own channel, which writes at once."""

    async def wait_ended(self) -> None:
        """Return when `end` was called; raise its error."""


class PullChannel:
    """See above. `pull` says that the frame before is sent, and returns the next one."""

    accepts_at_once = False

    def __init__(self, num_untaken: Callable[[], int] = nothing) -> None:
        self.num_untaken = num_untaken
        self.on_writable: Callable[[], None] | None = None
        self._frame: Any = None
        self._is_pulled = True  # the frame before
        self._is_ended = False
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None

    @property
    def is_writable(self) -> bool:
        return self._is_pulled and not self._is_ended

    def write(self, frame: Any) -> None:
        self._frame, self._is_pulled = frame, False
        self._wake()

    def end(self, error: Exception | None) -> None:
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self._wake()

    async def pull(self) -> Any:
        """Return the next frame, None after the last. Raises what kept the frames from being all."""
        if self._frame is None and not self._is_pulled:
            self._is_pulled = True
            if self.on_writable is not None:
                self.on_writable()
        while self._frame is None:
            if self._is_ended:
                if self._error is not None:
                    raise self._error
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        frame, self._frame = self._frame, None
        return frame

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
