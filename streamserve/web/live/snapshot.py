"""`Snapshot`: what was read at one moment, and all that the live page shows of it. Pure: nothing is read later.

    streams   = the rows = starting + running + parked, for each model or pipeline and in all (`by_state`, `by_model`)
    sequences = running + waiting in the engine, for all processes; each running sequence is in one of `readers`
    blocks    = used + cached + free; capacity = useful + recomputed + idle
    charts    end with the figures of this snapshot

A stream has several sequences (choices, a pipeline's answers), one sequence, or none while it is parked. `figures` have
the names and the values of `/metrics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from streamserve.api.ops import OF_EMBEDDERS, OF_STATS, engine_metrics, load_metrics, readers_of
from streamserve.protocol.engine import NUM_RECENT, RATE_SECONDS
from streamserve.protocol.history import POINT_SECONDS, WINDOW_SECONDS, Point, of_one_engine, shares
from streamserve.protocol.sse import frame, one_line_json
from streamserve.web.live.headline import MEMORY_LIMIT, Seen, headline, panels

SPEED_SECONDS = 5.0  # a stream's speed is measured over its last seconds, as an engine's is
# The newest points are sent with each snapshot: more than a page waits before it connects again.
_NUM_TAIL = 6
_STATES = ("starting", "running", "parked")
# What the charts show, by the names of `/metrics`.
_CHARTED = (
    "tokens_per_second",
    "readers_tokens_per_second",
    "num_readers_late",
    "num_readers_hungry",
    "num_readers_ahead",
    "num_readers_away",
    "kv_blocks_used",
    "queue_seconds",
    "num_requests_waiting",
)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One look at everything."""

    id: str
    taken_at: float  # Unix seconds
    process: Mapping[str, Any]
    models: Mapping[str, Seen]
    streams: Sequence[Mapping[str, Any]]
    num_more: int = 0
    embedders: Mapping[str, Seen] = field(default_factory=dict)  # without a history

    @cached_property
    def whole(self) -> bytes:
        """The event for a page that begins: with all points of the charts."""
        return frame(one_line_json(self.as_json()), event="figures")

    @cached_property
    def next(self) -> bytes:
        """The event for a page that has the earlier points."""
        return frame(one_line_json(self.as_json(num_points=_NUM_TAIL)), event="figures")

    def as_json(self, num_points: int | None = None) -> dict[str, Any]:
        """Return everything on the page; of the charts the newest points, or all."""
        return {
            "snapshot": self.id,
            "taken_at": round(self.taken_at, 3),
            "process": self.process,
            "headline": asdict(headline(self.models)),
            "models": [self._model(alias, seen, num_points) for alias, seen in self.models.items()],
            "embedders": [_embedder(alias, seen) for alias, seen in self.embedders.items()],
            "streams": self.streams,
            "by_state": _by_state(self.streams),
            "by_model": dict(Counter(stream["model"] for stream in self.streams)),
            "num_more": self.num_more,
            "is_whole": num_points is None,
            "window_seconds": WINDOW_SECONDS,
            "point_seconds": POINT_SECONDS,
            "speed_seconds": SPEED_SECONDS,
        }

    def _model(self, alias: str, seen: Seen, num_points: int | None) -> dict[str, Any]:
        stats, times = seen.stats, shares(seen.points)
        own = of_one_engine(seen.points)
        streams = [stream for stream in self.streams if stream["model"] == alias]
        return {
            **load_metrics(seen.description),
            "alias": alias,
            "streams": len(streams),
            "by_state": _by_state(streams),
            "figures": {name: round(value, 3) for name, value in engine_metrics(stats).items()},
            "readers": readers_of(stats) if seen.knows_readers else {},
            "classes": {name: _rounded(one) for name, one in stats.classes.items()},
            "num_recent": NUM_RECENT,
            "rate_seconds": RATE_SECONDS,
            "load": None if seen.load is None else round(seen.load, 2),
            "capacity": None if times is None else _rounded(times, 4),
            "capacity_seconds": round(own[-1].at - own[0].at) if own else 0,
            "recent": seen.recent.as_json(),
            "panels": {name: asdict(verdict) for name, verdict in panels(seen).items()},
            "limits": {"kv_blocks_used": MEMORY_LIMIT * stats.blocks_total, "queue_seconds": seen.queue_limit},
            "points": columns(seen, num_points),
        }


def _embedder(alias: str, seen: Seen) -> dict[str, Any]:
    """Return what is shown of an embedding model."""
    figures = {name: getattr(seen.stats, counted) for name, counted in OF_EMBEDDERS.items()}
    return {**load_metrics(seen.description), "alias": alias, "figures": figures}


def columns(seen: Seen, num_points: int | None = None) -> dict[str, Any]:
    """Return a column for each metric of the charts: a value for each slot, None for a slot that was not seen.

    `at`: when the slots begin. `ttft_of_budget`: by class, the 95th percentile ÷ the budget.
    """
    points = {point.slot: point for point in seen.points}
    if not points:
        return {"at": [], "ttft_of_budget": {}, **{name: [] for name in _CHARTED}}
    last = max(points)
    slots = range(min(points) if num_points is None else max(min(points), last - num_points + 1), last + 1)
    rows = [points.get(slot) for slot in slots]
    out: dict[str, Any] = {"at": [slot * POINT_SECONDS for slot in slots]}
    for name in _CHARTED:
        out[name] = [None if row is None else round(getattr(row, OF_STATS[name]), 2) for row in rows]
    out["ttft_of_budget"] = {
        name: [_of_budget(row, name, budget) for row in rows] for name, budget in seen.budgets.items()
    }
    return out


def _of_budget(point: Point | None, name: str, budget: float) -> float | None:
    late = None if point is None else point.ttft_p95.get(name)
    return None if late is None else round(late / budget, 3)


def _by_state(streams: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count streams by what they are doing: they have no token yet, they are being made, or they wait for readers."""
    counts = Counter(stream["state"] for stream in streams)
    return {state: counts[state] for state in _STATES}


def _rounded(numbers: Mapping[str, float], digits: int = 3) -> dict[str, float]:
    return {name: round(number, digits) for name, number in numbers.items()}
