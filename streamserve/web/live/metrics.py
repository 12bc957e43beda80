"""`LiveMetrics`: looks at engines, streams and rows once a second, for all viewers of the live page.

Each look is a `Snapshot`: every engine's report is read once, and everything shown is derived from it. An engine
process reports once a second, and keeps the history, so all web processes of a machine show the same of it; a model
without a process of its own has its history here, since this process began. What answers and their readers did in the
last minutes is of all processes of the host (api/host_figures.py). Streams of other processes are shown with the
columns of their rows. Runs on the event loop; holds no database connection between two looks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextvars import Context
from dataclasses import replace
from typing import Any

from django.utils import timezone

from streamserve.api.host_figures import HostFigures, Shared
from streamserve.api.logs import get_logger
from streamserve.api.ops import stream_metrics
from streamserve.clients.base import EmbeddingClient, EngineClient
from streamserve.models import Stream as StreamRow
from streamserve.protocol.alerts import WINDOW_MINUTES, Alerts
from streamserve.protocol.engine import EngineStats
from streamserve.protocol.errors import DatabaseUnavailable
from streamserve.protocol.figures import MINUTE_SECONDS
from streamserve.protocol.history import WINDOW_SECONDS, History, Point, last_seconds, of_one_engine
from streamserve.protocol.metrics import Sample
from streamserve.rows import orm
from streamserve.rows.owners import names_of
from streamserve.streams.registry import Streams
from streamserve.web.live.headline import Seen
from streamserve.web.live.recent import Recent
from streamserve.web.live.snapshot import SPEED_SECONDS, Snapshot

log = get_logger(__name__)

EVERY_SECONDS = 1.0
MAX_ROWS = 200  # of other processes' streams; the admin's list of streams shows all
# An engine process reports once a second; these engines do.
_REPORT_SECONDS, _POLL_SECONDS = 1.2, 0.02
_NAMES_SECONDS = 60.0  # after which owners are asked for their names again
_REPORTING = ("ready", "paused", "draining")


class LiveMetrics:
    """One of a site. `start` begins the history; `latest` gives all viewers the same snapshot of this second.

    `host` has the figures of the host's processes, without the engines of the models in `shared`. Without it they are
    of these streams.
    """

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        streams: Streams,
        *,
        are_shared: bool,
        embedders: Mapping[str, EmbeddingClient] = {},
        host: HostFigures | None = None,
        shared: Collection[str] = (),
        alerts: Alerts | None = None,
    ) -> None:
        self.num_made = 0
        self._clients, self._streams, self._are_shared = clients, streams, are_shared
        self._embedders = embedders
        self._process = {"host": socket.gethostname(), "pid": os.getpid(), "id": secrets.token_hex(2)}
        self._histories = {alias: History() for alias in clients}
        self._pasts: dict[str, tuple[Point, ...]] = {}  # the last of each engine that was merged
        self._host = host or HostFigures(streams.measures.samples, None, None)
        self._shared, self._alerts = shared, alerts or Alerts()
        self._token_counts: dict[str, deque[tuple[float, int]]] = {}  # of the shown streams, in the last seconds
        self._look: asyncio.Task[Snapshot] | None = None
        self._looked_at = 0.0
        self._reports: dict[str, EngineStats] = {}
        self._names: dict[str, str] = {}  # of owners
        self._named_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin the history."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="live history", context=Context())

    async def aclose(self) -> None:
        """End the history."""
        tasks = [task for task in (self._task, self._look) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def latest(self) -> Snapshot:
        """Return the snapshot of this second. The first viewer's call takes it; all viewers get the same."""
        now = time.monotonic()
        if self._look is None or (self._look.done() and now - self._looked_at >= 0.9 * EVERY_SECONDS):
            self._looked_at = now
            self._look = asyncio.get_running_loop().create_task(self.snapshot(), context=Context())
        return await asyncio.shield(self._look)

    async def snapshot(self) -> Snapshot:
        """Return the models, and the streams of all processes, as of one moment: after the last wait."""
        self.num_made += 1
        await self._news()
        others, num_more = await self._others()
        await self._ask_names(others)
        host = await self._host.read()
        seen = {alias: self._see(alias, client) for alias, client in self._clients.items()}
        streams = [stream_metrics(stream) for stream in self._streams.all() if stream.is_live]
        for row in (*streams, *others):
            row["owner_name"] = self._names.get(row["owner"], row["owner"])
        self._set_speeds(streams, time.monotonic())
        known = {stream.id for stream in self._streams.all() if not stream.lease.is_elsewhere}
        return Snapshot(
            id=f"{self._process['id']}-{self.num_made}",
            taken_at=time.time(),
            process={name: self._process[name] for name in ("host", "pid")},
            models=self._with_recent(seen, host),
            streams=[*streams, *(row for row in others if row["id"] not in known)],
            num_more=num_more,
            embedders={
                alias: Seen(description=client.describe(), stats=client.stats())
                for alias, client in self._embedders.items()
            },
        )

    def _see(self, alias: str, client: EngineClient) -> Seen:
        """Read an engine's report, once, and note it in the history."""
        description, stats, history = client.describe(), client.stats(), self._histories[alias]
        if stats.past and stats.past is not self._pasts.get(alias):
            self._pasts[alias] = stats.past
            history.merge(stats.past)
        if description.state in _REPORTING:
            history.note(stats.point(time.time()))
        return Seen(description=description, stats=stats, points=history.points())

    def _with_recent(self, models: Mapping[str, Seen], host: Shared) -> dict[str, Seen]:
        """Return the models with what was counted in the last minutes, and what each engine reports of them itself."""
        now = time.time()
        window, minutes = host.of_last(WINDOW_MINUTES, now), host.by_minute(WINDOW_SECONDS // MINUTE_SECONDS, now)
        for alias, seen in models.items():
            window.add(_of_engine(alias, seen, is_shared=alias in self._shared))
        return {
            alias: replace(seen, recent=Recent(model=alias, alerts=self._alerts, figures=window, minutes=minutes))
            for alias, seen in models.items()
        }

    async def _run(self) -> None:
        """Note each engine's report, also while no page is open."""
        while True:
            for alias, client in self._clients.items():
                try:
                    self._see(alias, client)
                except Exception:  # the edge of the task: a point is lost
                    log.exception("live_history_failed")
            await asyncio.sleep(EVERY_SECONDS)

    def _set_speeds(self, streams: list[dict[str, Any]], now: float) -> None:
        """Give each stream the rate of its last seconds: 0 at rest, whatever its mean was."""
        before, self._token_counts = self._token_counts, {}
        for stream in streams:
            counts = self._token_counts[stream["id"]] = before.get(stream["id"], deque())
            counts.append((now, stream["tokens"]))
            while counts[0][0] < now - SPEED_SECONDS:
                counts.popleft()
            (first_at, first), seconds = counts[0], now - counts[0][0]
            if stream["state"] == "parked":
                stream["tokens_per_second"] = 0.0
            elif len(counts) > 1 and first_at < now:
                stream["tokens_per_second"] = round((stream["tokens"] - first) / seconds, 1)

    async def _news(self) -> None:
        """Wait until each running engine has reported since the last look, for somewhat longer than that takes."""
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

    async def _ask_names(self, others: list[dict[str, Any]]) -> None:
        """Learn the names of the rows' owners: those that are new, and all of them once in `_NAMES_SECONDS`."""
        if time.monotonic() - self._named_at >= _NAMES_SECONDS:
            self._names, self._named_at = {}, time.monotonic()
        owners = {stream.owner for stream in self._streams.all() if stream.is_live} | {row["owner"] for row in others}
        if unknown := owners - self._names.keys():
            try:
                found = await orm.read(names_of, unknown)
            except DatabaseUnavailable:  # the page shows the owners' own texts
                return
            self._names |= {owner: named.name for owner, named in found.items()}


def _of_engine(alias: str, seen: Seen, *, is_shared: bool) -> Iterator[Sample]:
    """Yield what an engine reports of the last minutes; the host's figures have it where the engine is in a process of
    theirs."""
    labels = {"model_name": alias}
    yield Sample(name="queue_seconds", value=seen.stats.queued_seconds, labels=labels)
    points = last_seconds(of_one_engine(seen.points), WINDOW_MINUTES * MINUTE_SECONDS) if is_shared else ()
    if points:
        for name in ("prefix_queries", "prefix_hits"):
            gained = getattr(points[-1], name) - getattr(points[0], name)
            yield Sample(name=name.replace("prefix_", "prefix_cache_"), value=gained, labels=labels)


def _row_metrics(row: StreamRow) -> dict[str, Any]:
    return {
        "id": row.pk,
        "model": row.model,
        "state": "running" if row.producer else "parked",
        "owner": row.owner,
        "age_seconds": round((timezone.now() - row.created_at).total_seconds(), 1),
        "transport": "another process" if row.producer else "",
    }
