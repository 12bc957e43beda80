"""`Circuit`: whether one of several upstreams gets requests, by how its last requests ended.

    closed ── it fails ──► open ── its time is over ──► half open ── a request has its first token ──► closed
                            ▲  └── a probe finds it ──►    │
                            └── the one request fails: twice as long ──┘

Half open, one request tries first. Apart from that an upstream may be *busy*, for as long as it has asked for by
Retry-After. The pattern is Nygard's circuit breaker ("Release It!"). Pure: the caller passes the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable

# Answers like 500 may be the request's own fault: so many in a row, without a first token in between, open the circuit.
_MAX_FAULTS = 3
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 30.0


class Circuit:
    """See above. `jitter` returns 0 to 1: what spreads the tries of several web processes."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._num_faults = 0
        self._num_opened = 0  # in a row
        self._opens_until: float | None = None  # None: closed
        self._is_tried = False  # half open, and a request is on its way
        self._was_lost = self._is_found = False
        self._busy_until = 0.0

    @property
    def is_well(self) -> bool:
        """Whether it is closed, or half open because a probe has found the server."""
        return self._opens_until is None or self._is_found

    def busy_seconds(self, now: float) -> float:
        """Return for how long it has asked not to be asked; 0: it may be."""
        return max(0.0, self._busy_until - now)

    def may_try(self, now: float) -> bool:
        """Return whether a request may go there."""
        return self._opens_until is None or (now >= self._opens_until and not self._is_tried)

    def begin(self, now: float) -> None:
        """Note that a request goes there."""
        self._is_tried = self._opens_until is not None and now >= self._opens_until

    def leave(self) -> None:
        """Note that a request has ended there, however it did."""
        self._is_tried = False

    def succeed(self) -> None:
        """Note the first token of a request."""
        self._num_faults = self._num_opened = 0
        self._opens_until = None

    def fail(self, now: float, *, lost: bool = False, certain: bool = False) -> None:
        """Note that a request failed. `lost`: its connection did; `certain`: any other request would fail as well."""
        self._num_faults += 1
        if self._opens_until is not None and now < self._opens_until:
            return  # it began before
        if not (lost or certain or self._opens_until is not None or self._num_faults >= _MAX_FAULTS):
            return
        seconds = min(_MOST_SECONDS, _FIRST_SECONDS * 2.0 ** min(self._num_opened, 10))
        self._opens_until = now + seconds * (0.75 + 0.5 * self._jitter())
        self._num_opened += 1
        self._was_lost, self._is_found = lost, False

    def rest(self, now: float, seconds: float) -> None:
        """Note that the server wants no request for so long."""
        self._busy_until = max(self._busy_until, now + seconds)

    def find(self, now: float) -> None:
        """Note that a probe has found the server: one request may try, after the first connection that was lost."""
        if self._opens_until is not None and self._was_lost and self._num_opened == 1:
            self._opens_until, self._is_found = min(self._opens_until, now), True
