"""`Timers`: the named one-shot timers of one stream. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context


class Timers(dict[str, asyncio.TimerHandle]):
    """Named one-shot timers that are armed. Arming an armed timer changes nothing."""

    def arm(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` once after `seconds`, unless disarmed."""

        def fire() -> None:
            del self[name]
            action()

        if name not in self:
            loop = asyncio.get_running_loop()
            # An empty context: a timer must not keep alive the request that armed it.
            self[name] = loop.call_later(max(0.0, seconds), fire, context=Context())

    def disarm(self, *names: str) -> None:
        """Cancel these timers; a name that is not armed is skipped."""
        for name in names:
            handle = self.pop(name, None)
            if handle is not None:
                handle.cancel()

    def disarm_all(self) -> None:
        """Cancel every timer."""
        self.disarm(*self)
