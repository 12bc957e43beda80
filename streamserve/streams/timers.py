"""`Timers`: the few named times one stream waits for; `Patience`: a limit to each of many waits. Event loop only."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextvars import Context


class Timers:
    """Named one-shot timers. Arming a name that is armed keeps the earlier one."""

    def __init__(self) -> None:
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def arm(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` once after `seconds`, unless disarmed."""

        def fire() -> None:
            del self._handles[name]
            action()

        if name not in self._handles:
            loop = asyncio.get_running_loop()
            # An empty context: a timer must not keep alive the request in which it was armed.
            self._handles[name] = loop.call_later(max(0.0, seconds), fire, context=Context())

    def disarm(self, *names: str) -> None:
        """Forget these timers; those that are not armed do not matter."""
        for name in names:
            handle = self._handles.pop(name, None)
            if handle is not None:
                handle.cancel()

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def disarm_all(self) -> None:
        """Forget every timer."""
        self.disarm(*list(self._handles))


class Patience:
    """`asyncio.timeout` for a task that waits again and again and is rarely out of time: one timer for many waits.

    A timer that fires too early for the wait of now is set anew. Used by one task at a time. `close` ends the timer, or
    has the wait of now be the last. `when_due` is asked when time is up, and may return another time to wait until.
    """

    def __init__(self, when_due: Callable[[], float | None] | None = None) -> None:
        self._when_due = when_due
        self._timer: asyncio.TimerHandle | None = None
        self._until = math.inf  # of the wait of now
        self._task: asyncio.Task[object] | None = None  # who waits
        self._is_over = self._is_closed = False

    async def wait(self, awaitable: Awaitable[None], until: float) -> bool:
        """Await; return False if the time (as `loop.time()`, which is `time.monotonic()`) came first."""
        task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        self._task, self._until, self._is_over = task, until, False
        if self._timer is None or self._timer.when() > until:
            self._set()
        try:
            await awaitable
        except asyncio.CancelledError:
            if self._is_over and task.uncancel() <= num_cancelled:
                return False
            raise
        finally:
            self._task = None
            if self._is_closed:
                self._unset()
        return True

    def hasten(self, until: float) -> None:
        """Have the wait of now end earlier."""
        if until < self._until:
            self._until = until
            if self._timer is None or self._timer.when() > until:
                self._set()

    def close(self) -> None:
        """Keep no timer any longer."""
        self._is_closed = True
        if self._task is None:
            self._unset()

    def _unset(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self._unset()
        if self._until < math.inf:
            self._timer = asyncio.get_running_loop().call_at(self._until, self._ring, context=Context())

    def _ring(self) -> None:
        due_at, self._timer = self._until, None
        if self._task is None:
            return
        if due_at > asyncio.get_running_loop().time():
            self._set()
            return
        until = None if self._when_due is None else self._when_due()
        if until is None:
            self._is_over = True
            self._task.cancel()
        else:
            self._until = until
            self._set()
