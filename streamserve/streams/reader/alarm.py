"""`Alarm`: one timer of a reader, which may be set to an earlier time. Event loop only."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import Context


class Alarm:
    """`at` is when it rings, by `time.monotonic`; inf while it is not set."""

    __slots__ = ("_timer", "at")

    def __init__(self) -> None:
        self.at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float, call: Callable[[], None]) -> None:
        """Have `call` called at `at`. A time that is earlier stays, and `call` sets the alarm anew then."""
        if at >= self.at:
            return
        self.cancel()
        self.at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._ring, call, context=Context())

    def cancel(self) -> None:
        """Ring no more, until it is set again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.at = None, math.inf

    def _ring(self, call: Callable[[], None]) -> None:
        self._timer, self.at = None, math.inf
        call()
