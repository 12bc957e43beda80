"""`Watchdog`: ends an engine process that hangs, with the stack of every thread in its output.

A step that hangs is caught by faulthandler's own thread, even while the step holds the GIL; an engine that hangs
between two steps by the event loop; an event loop that hangs by the workers, who hear nothing. What ends is replaced.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Callable

from streamserve.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

_STDERR = 2
HUNG = 3  # exit status


def _exit_with_stacks() -> None:
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)
    os._exit(HUNG)


class Watchdog:
    """`seconds`: how long an engine with running sequences may be between two steps."""

    def __init__(self, seconds: float, give_up: Callable[[], None] = _exit_with_stacks) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._is_in_step = False
        self._seen: tuple[int, float] | None = None  # steps, and since when there are so many

    def on_step(self, seconds_allowed: float | None) -> None:
        """A step begins, and may take so long; None: it is over. Engine thread; 28 us: faulthandler starts a thread."""
        self._is_in_step = seconds_allowed is not None
        if seconds_allowed is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(seconds_allowed, exit=True, file=_STDERR)

    def look(self, stats: EngineStats, now: float) -> None:
        """Give up if there is work and no step for too long. Event loop, now and then."""
        if stats.running == 0 or self._is_in_step:
            self._seen = None
        elif self._seen is None or self._seen[0] != stats.steps:
            self._seen = (stats.steps, now)
        elif now - self._seen[1] > self._seconds:
            logger.critical("no step for %.0f s with %d running sequences", self._seconds, stats.running)
            self._give_up()
