"""`RecentFigures`: what the last requests and seconds were like, for the admin page and for honest Retry-After values.

Noted on the event loop, read from anywhere; bounded memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from streamserve.engine.output import SequenceUpdate
from streamserve.protocol.metrics import percentile

# How many finished requests, and how many seconds, the figures look back on.
_NUM_RECENT = 256
_RATE_SECONDS = 5.0
# Seconds an answer is taken to last before one has finished.
_FIRST_GUESS = 5.0


class RecentFigures:
    """Rates and percentiles of what has just happened."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._breakdowns: deque[dict[str, float]] = deque(maxlen=_NUM_RECENT)
        self._seat_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        self._tokens: deque[tuple[float, int]] = deque()

    def note(self, update: SequenceUpdate) -> None:
        """Count an update's tokens; those of one step are one entry."""
        if not update.token_ids:
            return
        if self._tokens and self._tokens[-1][0] == update.at:
            self._tokens[-1] = (update.at, self._tokens[-1][1] + len(update.token_ids))
        else:
            self._tokens.append((update.at, len(update.token_ids)))
        self._drop_old(update.at)

    def note_finished(self, breakdown: dict[str, float], *, is_whole: bool = True) -> None:
        """Remember how long a request's parts took; of one run of an answer that parked, only how long it sat."""
        self._seat_seconds.append(breakdown["prefill"] + breakdown["decode"])
        if is_whole:
            self._breakdowns.append(breakdown)

    def tokens_per_second(self) -> float:
        """Return the rate of the last seconds."""
        since = self._clock() - _RATE_SECONDS
        return sum(count for at, count in self._tokens.copy() if at >= since) / _RATE_SECONDS

    def latency(self) -> dict[str, float]:
        """Return medians and 95th percentiles of queue and ttft, and the typical answer's ITL, in seconds."""
        recent = list(self._breakdowns.copy())
        out: dict[str, float] = {}
        for name in ("queue", "ttft"):
            values = [breakdown[name] for breakdown in recent]
            out[f"{name}_p50"] = percentile(values, 0.5) or 0.0
            out[f"{name}_p95"] = percentile(values, 0.95) or 0.0
        for name in ("itl_p50", "itl_p95"):
            out[name] = percentile([breakdown[name] for breakdown in recent], 0.5) or 0.0
        return out

    def retry_after(self, num_waiting: int, num_seats: int) -> int:
        """Return whole seconds until those waiting have probably been seated, from how long others sat."""
        typical = percentile(self._seat_seconds.copy(), 0.5)
        if typical is None:
            typical = _FIRST_GUESS
        return max(1, math.ceil(typical * num_waiting / num_seats))

    def _drop_old(self, now: float) -> None:
        while self._tokens and self._tokens[0][0] < now - _RATE_SECONDS:
            self._tokens.popleft()
