"""`Timers`: the named one-shot timers of one stream. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context


class Timers:
    """Named one-shot timers. Arming a name that is armed already changes nothing."""

    def __init__(self) -> None:
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def arm(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` once after `seconds`, unless disarmed."""

        def fire() -> None:
            del self._handles[name]
            action()

        if name not in self._handles:
            loop = asyncio.get_running_loop()
            # An empty context: a timer must not keep alive the request that armed it.
            self._handles[name] = loop.call_later(max(0.0, seconds), fire, context=Context())

    def disarm(self, *names: str) -> None:
        """Cancel these timers; a name that is not armed is skipped."""
        for name in names:
            handle = self._handles.pop(name, None)
            if handle is not None:
                handle.cancel()

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def disarm_all(self) -> None:
        """Cancel every timer."""
        self.disarm(*list(self._handles))
