"""Laws of the live page's snapshot: each thing is read once, and every figure of the page is derived from that."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from streamserve.api.ops import render_metrics
from streamserve.clients.base import EngineClient
from streamserve.protocol.engine import EngineStats, ModelDescription
from streamserve.protocol.history import NUM_POINTS, POINT_SECONDS, Point
from streamserve.protocol.metrics import METRICS
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.registry import Streams
from streamserve.web.live.headline import Seen
from streamserve.web.live.metrics import LiveMetrics
from streamserve.web.live.snapshot import Snapshot, columns

READY = ModelDescription(alias="m", state="ready")


class Restless(EngineClient):
    """An engine whose report differs each time it is read, in every count; it counts the reads."""

    def __init__(self) -> None:
        self.reads = Counter[str]()
        self.num = 0

    def describe(self) -> ModelDescription:
        self.reads["describe"] += 1
        return READY

    def stats(self) -> EngineStats:
        self.num += 1
        num = self.num
        return EngineStats(
            running=4 * num,
            readers_late=num,
            readers_hungry=num,
            readers_ahead=num,
            readers_away=num,
            waiting=num,
            queued_seconds=float(num),
            blocks_total=3 * num,
            blocks_used=num,
            blocks_cached=num,
            blocks_free=num,
            tokens_per_second=float(num),
        )


async def test_every_figure_is_of_one_report() -> None:
    """An engine that changes at each look shows no mixture: headline, panels, figures and charts agree."""
    client = Restless()
    live = LiveMetrics({"m": client}, Streams({}, MemoryLog()), are_shared=False)
    shown = json.loads((await live.snapshot()).whole.partition(b"data: ")[2])
    num, [model] = client.num, shown["models"]
    assert shown["headline"]["words"].startswith(f"{num} of {4 * num} readers late")
    assert model["panels"]["readers"]["words"] == f"{num} late, {num} hungry, {num} ahead, {num} away."
    assert model["panels"]["queue"]["words"].startswith(f"{num} request")
    assert sum(model["readers"].values()) == model["figures"]["num_requests_running"] == 4 * num
    for name in ("num_readers_late", "kv_blocks_used", "queue_seconds", "tokens_per_second"):
        assert model["figures"][name] == model["points"][name][-1] == num
    assert model["limits"]["kv_blocks_used"] == pytest.approx(0.9 * 3 * num)
    assert shown["snapshot"].endswith("-1")
    assert (await live.snapshot()).id.endswith("-2")


def snapshot_of(seen: Seen, **more: Any) -> Snapshot:
    """A snapshot of one model and no stream."""
    fields = {"id": "a-1", "taken_at": 100.0, "process": {"host": "h", "pid": 1}, "streams": []}
    return Snapshot(**{**fields, **more}, models={"m": seen})


class Still(Restless):
    """An engine whose report stays."""

    report = EngineStats(
        running=3, readers_ahead=2, rows=1, blocks_total=8, blocks_used=3, blocks_free=5, queued_seconds=1.25, steps=9
    )

    def stats(self) -> EngineStats:
        return self.report


def test_names_and_values_are_those_of_the_metrics() -> None:
    """Each figure is declared, and `/metrics` has it with the same value."""
    model = snapshot_of(Seen(description=READY, stats=Still.report)).as_json()["models"][0]
    lines = render_metrics({"m": Still()}, Streams({}, MemoryLog())).splitlines()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if 'model_name="m"} ' in line}
    for name, value in model["figures"].items():
        suffix = "_total" if METRICS[name].kind == "counter" else ""
        assert values[f"streamserve_{name}{suffix}"] == pytest.approx(value, abs=1e-3)
    assert {name for name in model["points"] if name not in ("at", "ttft_of_budget")} <= set(model["figures"])


def test_time_that_was_not_seen_is_a_gap() -> None:
    """A column has a place for each slot from the first point to the last; the newest are sent alone."""
    classes = {"chat": {"ttft_budget": 0.5}, "document": {"ttft_budget": 3.0}}
    points = [Point(at=slot * POINT_SECONDS, running=slot, ttft_p95={"chat": 1.0}) for slot in (3, 4, 7)]
    seen = Seen(description=READY, stats=EngineStats(classes=classes), points=points)
    whole = columns(seen)
    assert whole["at"] == [slot * POINT_SECONDS for slot in (3, 4, 5, 6, 7)]
    assert whole["num_readers_late"] == [0, 0, None, None, 0]
    assert whole["ttft_of_budget"] == {"chat": [2.0, 2.0, None, None, 2.0], "document": [None] * 5}
    assert columns(seen, 2)["at"] == [6 * POINT_SECONDS, 7 * POINT_SECONDS]
    assert columns(Seen(description=READY, stats=EngineStats()))["at"] == []


def test_a_viewer_is_sent_the_history_once() -> None:
    """The event of a page that has the earlier points is short."""
    points = [Point(at=slot * POINT_SECONDS) for slot in range(NUM_POINTS)]
    snapshot = snapshot_of(Seen(description=READY, stats=EngineStats(), points=points))
    whole, later = (json.loads(event.partition(b"data: ")[2]) for event in (snapshot.whole, snapshot.next))
    assert (whole["is_whole"], later["is_whole"]) == (True, False)
    num_sent = [len(shown["models"][0]["points"]["at"]) for shown in (whole, later)]
    assert num_sent == [NUM_POINTS, 6]


async def test_the_history_goes_on_at_another_web_process() -> None:
    """An engine gives its past to whom connects: a page of a web process that begins shows what was before it."""
    past = tuple(Point(at=slot * POINT_SECONDS, running=slot) for slot in range(5))

    class Known(Still):
        report = EngineStats(running=9, past=past, reported_at=5.0 * POINT_SECONDS)

    live = LiveMetrics({"m": Known()}, Streams({}, MemoryLog()), are_shared=False)
    seen = (await live.snapshot()).models["m"]
    assert [point.running for point in seen.points] == [0, 1, 2, 3, 4, 9]


def test_an_embedding_model_shows_what_it_has_computed() -> None:
    """Requests, inputs and tokens, by the names of `/metrics`; it has no streams."""
    stats = EngineStats(embedded_requests=3, embedded_inputs=40, prompt_tokens=500, waiting=2)
    seen = Seen(description=ModelDescription(alias="search", state="ready", kind="embedding"), stats=stats)
    shown = Snapshot(id="a-1", taken_at=0.0, process={}, models={}, streams=[], embedders={"search": seen}).as_json()
    (embedder,) = shown["embedders"]
    assert (embedder["alias"], embedder["state"]) == ("search", "ready")
    figures = embedder["figures"]
    assert (figures["embedding_requests"], figures["embedding_inputs"], figures["prompt_tokens"]) == (3, 40, 500)
    assert figures.keys() <= METRICS.keys()
    assert shown["models"] == []
