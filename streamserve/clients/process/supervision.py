"""When an engine has failed: `CircuitBreaker` in the worker, `Watchdog` in the engine process.

A step that hangs is caught by faulthandler's own thread, even while the step holds the GIL; an engine that hangs
between two steps by the event loop; an event loop that hangs by the workers, which miss its heartbeat. Each ends the
process with the stack of every thread in its output, and a worker starts the next one.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Callable

from streamserve.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
_STDERR = 2
HUNG = 3  # exit status


class CircuitBreaker:
    """Counts the failures of an engine and says when to try again (Nygard's pattern). Pure.

    It opens after `max_failures` within `seconds`, and after as long allows one try (half open). A failure of that try,
    or within `seconds` of it, opens it again at once.
    """

    def __init__(self, max_failures: int, seconds: float) -> None:
        self.is_open = False
        self._max_failures = max_failures
        self._seconds = seconds
        self._recent: list[float] = []

    def note(self, now: float) -> None:
        """Count a failure."""
        window = 2 * self._seconds if self.is_open else self._seconds
        is_relapse = self.is_open and now - self._recent[-1] < window
        self._recent = [at for at in self._recent if now - at < self._seconds] + [now]
        self.is_open = is_relapse or len(self._recent) >= self._max_failures

    def trip(self, now: float) -> None:
        """Count a failure that an early retry cannot mend."""
        self.note(now)
        self.is_open = True

    def pause(self) -> float:
        """Return how many seconds to wait before the next try."""
        if self.is_open:
            return self._seconds
        return min(_FIRST_PAUSE * 2.0 ** len(self._recent), _LONGEST_PAUSE)


def _exit_with_stacks() -> None:
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)
    os._exit(HUNG)


class Watchdog:
    """Ends the process of an engine that hangs. `seconds`: the most that running sequences may wait between steps."""

    def __init__(self, seconds: float, give_up: Callable[[], None] = _exit_with_stacks) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._is_in_step = False
        self._seen: tuple[int, float] | None = None  # the number of steps, and when it was first seen

    def on_step(self, seconds_allowed: float | None) -> None:
        """A step begins, and may take so long; None: it is over. Engine thread; 28 us: faulthandler starts a thread."""
        self._is_in_step = seconds_allowed is not None
        if seconds_allowed is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(seconds_allowed, exit=True, file=_STDERR)

    def check(self, stats: EngineStats, now: float) -> None:
        """Give up if there is work and no step for too long. Event loop, a few times a second."""
        if stats.running == 0 or self._is_in_step:
            self._seen = None
        elif self._seen is None or self._seen[0] != stats.steps:
            self._seen = (stats.steps, now)
        elif now - self._seen[1] > self._seconds:
            logger.critical("no step for %.0f s with %d running sequences", self._seconds, stats.running)
            self._give_up()
