"""The last minutes of an engine: `Point`, one look at its counts, and `History`, a ring of them. Pure.

The engine's process keeps a history and gives it to each web process that connects, so that all of them show the same,
and a web process that was restarted shows what was before it. A point belongs to a slot of `POINT_SECONDS` of the
engine's wall clock; in a slot the last look counts.

    slots:  | 12:00:00 | 12:00:05 | (nothing was seen) | 12:00:15 | ≤ NUM_POINTS
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

POINT_SECONDS = 5
NUM_POINTS = 180
WINDOW_SECONDS = POINT_SECONDS * NUM_POINTS
# What the engine can compute is measured over so many seconds; where it worked for less than a tenth, not at all.
_LOAD_SECONDS, _LEAST_BUSY = 60, 0.1


class Point(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An engine's counts at `at` (Unix seconds), by their names in `EngineStats`. `ttft_p95`: by latency class."""

    at: float
    running: int = 0
    waiting: int = 0
    queued_seconds: float = 0.0
    tokens_per_second: float = 0.0
    readers_late: int = 0
    readers_hungry: int = 0
    readers_ahead: int = 0
    readers_away: int = 0
    readers_pace: float = 0.0
    rows: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    busy_seconds: float = 0.0
    refused: int = 0
    expired: int = 0
    ttft_p95: dict[str, float] = {}
    prefix_queries: int = 0
    prefix_hits: int = 0

    @property
    def slot(self) -> int:
        """The number of its slot."""
        return int(self.at // POINT_SECONDS)


class History:
    """The points of the last `WINDOW_SECONDS`, oldest first, one for each slot in which there was a look."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._points: dict[int, Point] = {}
        self.merge(points)

    def note(self, point: Point) -> None:
        """Take a look at the engine. After a clock that went back, what it has not reached yet is dropped."""
        while self._points and next(reversed(self._points)) > point.slot:
            self._points.popitem()
        self._points[point.slot] = point
        self._trim()

    def merge(self, points: Iterable[Point]) -> None:
        """Take the points that another process has seen; where both have one, the later look counts."""
        known = self._points
        for point in points:
            if point.slot not in known or known[point.slot].at <= point.at:
                known[point.slot] = point
        self._points = dict(sorted(known.items()))
        self._trim()

    def points(self) -> tuple[Point, ...]:
        """Return them, oldest first."""
        return tuple(self._points.values())

    def _trim(self) -> None:
        if self._points:
            newest = next(reversed(self._points))
            while next(iter(self._points)) <= newest - NUM_POINTS:
                del self._points[next(iter(self._points))]


def shares(points: Sequence[Point]) -> dict[str, float] | None:
    """Return the share of the time of `points` that the engine spent on each thing; they add up to 1.

    The engine counts tokens and the seconds that it worked; these are split by tokens. None before there are two points
    of the engine that runs.
    """
    points = of_one_engine(points)
    if len(points) < 2:
        return None
    begin, end = points[0], points[-1]
    busy = min(1.0, (end.busy_seconds - begin.busy_seconds) / (end.at - begin.at))
    num_tokens = end.computed_tokens - begin.computed_tokens
    recomputed = busy * (end.recomputed_tokens - begin.recomputed_tokens) / num_tokens if num_tokens else 0.0
    return {"useful": busy - recomputed, "recomputed": recomputed, "idle": 1.0 - busy}


def load(points: Sequence[Point]) -> float | None:
    """Return what the readers read ÷ what the engine gave in a second of work, in the last minute.

    Above 1 it cannot give all of them their pace. None while it works too little to know.
    """
    points = last_seconds(of_one_engine(points), _LOAD_SECONDS)
    if len(points) < 2:
        return None
    begin, end = points[0], points[-1]
    busy, num_tokens = end.busy_seconds - begin.busy_seconds, end.generation_tokens - begin.generation_tokens
    if num_tokens <= 0 or busy < _LEAST_BUSY * (end.at - begin.at):
        return None
    return end.readers_pace / (num_tokens / busy)


def of_one_engine(points: Sequence[Point]) -> Sequence[Point]:
    """Return the points of the engine that runs: its counts never fall, and an engine begins with none."""
    for index in range(len(points) - 1, 0, -1):
        before, after = points[index - 1], points[index]
        if after.busy_seconds < before.busy_seconds or after.computed_tokens < before.computed_tokens:
            return points[index:]
    return points


def last_seconds(points: Sequence[Point], seconds: float) -> Sequence[Point]:
    """Return the newest points, `seconds` at most between the first of them and the last."""
    return [point for point in points if point.at >= points[-1].at - seconds]
