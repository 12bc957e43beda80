"""The live page: `LiveMetrics` makes its metrics once for all viewers, and `LiveDelivery` sends them to one viewer.

The metrics are of this process: its streams, what its answers took in the last minutes, and its engines, which every
process of the machine sees alike. Streams of other processes are shown with the columns of their rows. The history
begins with the server, not with the page. Runs on the event loop; holds no database connection between two events.

Each picture is one snapshot, whose numbers add up:

    streams   = the rows = starting + running + parked, for each model or pipeline and in all (`by_state`, `by_model`)
    sequences = running + waiting in the engine, for all processes; each running sequence is in one of `readers`
    blocks    = used + cached + free; capacity = useful + recomputed + idle

An engine process reports once a second; the rows are read at that moment. A stream has several sequences (choices, a
pipeline's answers), one sequence, or none while it is parked.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from django.utils import timezone

from streamserve.api.logs import get_logger
from streamserve.api.ops import live_metrics
from streamserve.clients.base import EngineClient
from streamserve.models import Stream as StreamRow
from streamserve.protocol.engine import EngineStats
from streamserve.protocol.errors import DatabaseUnavailable
from streamserve.protocol.measures import ITL, TTFT, Recently
from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, frame, one_line_json
from streamserve.rows import orm
from streamserve.streams.reader.channel import nothing
from streamserve.streams.reader.delivery import Closing
from streamserve.streams.registry import Streams

log = get_logger(__name__)

EVERY_SECONDS = 1.0
MAX_ROWS = 200  # of other processes' streams; the admin's list of streams shows all
LIFE_SECONDS = 300.0  # then the page reconnects, and its permission is checked again

# The charts and the percentiles cover so much; a point, and a copy of the buckets, is taken that often.
WINDOW_SECONDS = 300
POINT_SECONDS = 2
_TURN_POINTS = 10
# A stream's speed is measured over its last seconds, as an engine's is.
_SPEED_SECONDS = 5.0
# An engine process reports once a second; these engines do.
_REPORT_SECONDS, _POLL_SECONDS = 1.2, 0.02
_REPORTING = ("ready", "paused", "draining")
_CHARTS = ("tokens_per_second", "running", "waiting")


class Capacity:
    """Where an engine's time went: the share of the last minutes that it spent on each thing.

    The engine counts tokens and the seconds that it worked; these are split by tokens. An engine that is replaced
    begins to count anew.
    """

    def __init__(self, num_points: int) -> None:
        self._points: deque[tuple[float, EngineStats]] = deque(maxlen=num_points)

    def note(self, stats: EngineStats, now: float) -> None:
        """Take a point."""
        if self._points and stats.busy_seconds < self._points[-1][1].busy_seconds:
            self._points.clear()
        self._points.append((now, stats))

    def shares(self) -> dict[str, float] | None:
        """Return the shares, which add up to 1; None before there are two points. See `seconds`."""
        if len(self._points) < 2:
            return None
        (begun_at, begin), (ended_at, end) = self._points[0], self._points[-1]
        busy = min(1.0, (end.busy_seconds - begin.busy_seconds) / (ended_at - begun_at))
        num_tokens = end.computed_tokens - begin.computed_tokens
        recomputed = busy * (end.recomputed_tokens - begin.recomputed_tokens) / num_tokens if num_tokens else 0.0
        return {"useful": busy - recomputed, "recomputed": recomputed, "idle": 1.0 - busy}

    @property
    def seconds(self) -> float:
        """How long the time is that the shares are of."""
        return self._points[-1][0] - self._points[0][0] if self._points else 0.0


class _History:
    """One model's last minutes: a point every `POINT_SECONDS` for each chart, percentiles, and where its time went."""

    def __init__(self, client: EngineClient, recently: Recently) -> None:
        self._client, self._recently = client, recently
        num_points = WINDOW_SECONDS // POINT_SECONDS
        self._points: dict[str, deque[float]] = {name: deque(maxlen=num_points) for name in _CHARTS}
        self._num_points = 0
        self._capacity = Capacity(num_points)

    def note(self) -> None:
        """Take a point."""
        stats = self._client.stats()
        for name, points in self._points.items():
            points.append(round(getattr(stats, name), 1))
        self._capacity.note(stats, time.monotonic())
        self._num_points += 1
        if self._num_points % _TURN_POINTS == 0:
            self._recently.turn()

    def as_json(self) -> dict[str, Any]:
        """Return the charts, oldest point first, percentiles in seconds and shares, None where nothing was measured."""
        parts = {"p50": 0.5, "p95": 0.95}
        names = {"ttft": TTFT, "itl": ITL}
        found = {
            f"{key}_{p}": self._recently.quantile(names[key], share) for key in names for p, share in parts.items()
        }
        shares = self._capacity.shares()
        return {
            "capacity": None if shares is None else {name: round(share, 4) for name, share in shares.items()},
            "capacity_seconds": round(self._capacity.seconds),
            "latency": {key: None if seconds is None else round(seconds, 4) for key, seconds in found.items()},
            "history": {name: list(points) for name, points in self._points.items()},
        }


class LiveMetrics:
    """One of a site. `start` begins the history; `frame` gives each viewer the metrics of this second."""

    def __init__(self, clients: Mapping[str, EngineClient], streams: Streams, *, are_shared: bool) -> None:
        self.num_made = 0
        self._clients, self._streams, self._are_shared = clients, streams, are_shared
        num_copies = WINDOW_SECONDS // (POINT_SECONDS * _TURN_POINTS)
        self._histories = {
            alias: _History(client, Recently(streams.measures.of(alias), (TTFT, ITL), num_copies))
            for alias, client in clients.items()
        }
        self._token_counts: dict[str, deque[tuple[float, int]]] = {}  # of the shown streams, in the last seconds
        self._frame: asyncio.Task[bytes] | None = None
        self._frame_at = 0.0
        self._reports: dict[str, EngineStats] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin the history."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="live history", context=Context())

    async def aclose(self) -> None:
        """End the history."""
        tasks = [task for task in (self._task, self._frame) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def frame(self) -> bytes:
        """Return the `figures` event of this second. The first viewer's call makes it; all viewers get the same."""
        now = time.monotonic()
        if self._frame is None or (self._frame.done() and now - self._frame_at >= 0.9 * EVERY_SECONDS):
            self._frame_at = now
            self._frame = asyncio.get_running_loop().create_task(self._make_frame(), context=Context())
        return await asyncio.shield(self._frame)

    async def snapshot(self) -> dict[str, Any]:
        """Return the models, and the streams of all processes, as of one moment: after the last wait."""
        self.num_made += 1
        await self._news()
        others, num_more = await self._others()
        metrics = live_metrics(self._clients, self._streams)
        streams = metrics["streams"]
        self._set_speeds(streams, time.monotonic())
        known = {stream.id for stream in self._streams.all() if not stream.lease.is_elsewhere}
        streams += [row for row in others if row["id"] not in known]
        for model in metrics["models"]:
            shown = [stream for stream in streams if stream["model"] == model["alias"]]
            model |= {"streams": len(shown), "by_state": _by_state(shown)}
            model |= self._histories[model["alias"]].as_json()
        return {
            **metrics,
            "by_state": _by_state(streams),
            "by_model": dict(Counter(stream["model"] for stream in streams)),
            "num_more": num_more,
            "window_seconds": WINDOW_SECONDS,
            "point_seconds": POINT_SECONDS,
            "speed_seconds": _SPEED_SECONDS,
        }

    async def _make_frame(self) -> bytes:
        return frame(one_line_json(await self.snapshot()), event="figures")

    async def _run(self) -> None:
        while True:
            for history in self._histories.values():
                try:
                    history.note()
                except Exception:  # the edge of the task: a point is lost
                    log.exception("live_history_failed")
            await asyncio.sleep(POINT_SECONDS)

    def _set_speeds(self, streams: list[dict[str, Any]], now: float) -> None:
        """Give each stream the rate of its last seconds: 0 at rest, whatever its mean was."""
        before, self._token_counts = self._token_counts, {}
        for stream in streams:
            counts = self._token_counts[stream["id"]] = before.get(stream["id"], deque())
            counts.append((now, stream["tokens"]))
            while counts[0][0] < now - _SPEED_SECONDS:
                counts.popleft()
            (first_at, first), seconds = counts[0], now - counts[0][0]
            if stream["state"] == "parked":
                stream["tokens_per_second"] = 0.0
            elif len(counts) > 1 and first_at < now:
                stream["tokens_per_second"] = round((stream["tokens"] - first) / seconds, 1)

    async def _news(self) -> None:
        """Wait until each running engine has reported since the last picture, for somewhat longer than that takes."""
        until, before, self._reports = time.monotonic() + _REPORT_SECONDS, self._reports, {}
        for alias, client in self._clients.items():
            while client.describe().state in _REPORTING and client.stats() is before.get(alias):
                if time.monotonic() > until:
                    break
                await asyncio.sleep(_POLL_SECONDS)
            self._reports[alias] = client.stats()

    async def _others(self) -> tuple[list[dict[str, Any]], int]:
        """Return the streams that other processes of the site run, or none does, and how many more there are."""
        if not self._are_shared:
            return [], 0
        ours = {stream.id for stream in self._streams.all() if not stream.lease.is_elsewhere}
        others = StreamRow.objects.unfinished().exclude(pk__in=ours)
        try:
            rows, num_rows = await orm.read(lambda: (list(others.order_by("created_at")[:MAX_ROWS]), others.count()))
        except DatabaseUnavailable:  # the page shows what is known here
            return [], 0
        return [_row_metrics(row) for row in rows], max(0, num_rows - len(rows))


@dataclass(frozen=True, slots=True)
class _Source:
    """The id of this delivery in log lines."""

    id: str = "live-page"


class LiveDelivery(Closing):
    """Sends a viewer the metrics until it leaves, for `LIFE_SECONDS` at most. A `Body`, like a stream's Delivery."""

    stream = _Source()

    def __init__(self, live: LiveMetrics, *, every_seconds: float = EVERY_SECONDS) -> None:
        self._live = live
        self._every_seconds = every_seconds

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, in ASGI form."""
        return [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"cache-control", b"no-cache, no-transform"),
            (b"x-accel-buffering", b"no"),
            (b"content-encoding", b"identity"),
        ]

    async def run(self, send: Callable[[bytes], Awaitable[None]], num_untaken: Callable[[], int] = nothing) -> None:
        """Send everything, waiting for `send` each time."""
        async for data in self:
            await send(data)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield FIRST_BYTES
        ends_at = asyncio.get_running_loop().time() + LIFE_SECONDS
        while not self.is_closed and asyncio.get_running_loop().time() < ends_at:
            yield await self._live.frame()
            await asyncio.sleep(self._every_seconds)

    def cut_off(self) -> None:
        """Close. The page reconnects by itself, so there are no last bytes."""
        self.close()


def _by_state(streams: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count streams by what they are doing: they have no token yet, they are being made, or they wait for readers."""
    counts = Counter(stream["state"] for stream in streams)
    return {state: counts[state] for state in ("starting", "running", "parked")}


def _row_metrics(row: StreamRow) -> dict[str, Any]:
    return {
        "id": row.pk,
        "model": row.model,
        "state": "running" if row.producer else "parked",
        "owner": row.owner,
        "age_seconds": round((timezone.now() - row.created_at).total_seconds(), 1),
        "transport": "another process" if row.producer else "",
    }
