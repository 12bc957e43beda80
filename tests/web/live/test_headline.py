"""Laws of the live page's words: each state of the engines has its headline, and panels name what is too much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamserve.protocol.alerts import MIN_ANSWERS
from streamserve.protocol.engine import EngineStats, ModelDescription
from streamserve.protocol.figures import Figures
from streamserve.protocol.history import POINT_SECONDS, Point
from streamserve.protocol.measures import Buckets, ModelMeasures
from streamserve.protocol.metrics import Sample
from streamserve.web.live.headline import Seen, headline, panels
from streamserve.web.live.recent import Recent

CHAT = {"ttft_budget": 0.5, "num_answers": 9, "ttft_p95": 0.2}


def seen(state: str = "ready", message: str = "", points: tuple[Point, ...] = (), **counts: Any) -> Seen:
    """A model with these counts, and with blocks of memory."""
    stats = EngineStats(**{"blocks_total": 100, "blocks_free": 100, "classes": {"chat": CHAT}, **counts})
    return Seen(description=ModelDescription(alias="m", state=state, message=message), stats=stats, points=points)


def worked(**last: Any) -> tuple[Point, ...]:
    """A history of an engine that worked without a break, and gave 100 tokens a second."""
    end = {"busy_seconds": 60.0, "generation_tokens": 6000, "computed_tokens": 6000}
    return Point(at=0.0), Point(at=60.0, **{**end, **last})


@pytest.mark.parametrize(
    ("model", "level", "words"),
    [
        (seen(), "idle", "No readers now"),
        (seen(running=1, readers_ahead=1), "ok", "1 reader, served in time"),
        (seen(running=12, readers_ahead=10, readers_away=2), "ok", "12 readers, all served in time"),
        (
            seen(running=3, readers_ahead=2, waiting=1),
            "ok",
            "2 readers, all served in time; 2 requests waiting for the first token",
        ),
        (
            seen(running=2, readers_ahead=2, waiting=7, queued_seconds=0.6),
            "warn",
            "2 readers, all served in time; 7 requests waiting too long",
        ),
        (
            seen(running=2, readers_hungry=2, points=worked(refused=3, expired=1)),
            "bad",
            "2 readers, all served in time; 4 requests refused in the last minute",
        ),
        (
            seen(running=12, readers_late=3, readers_hungry=9, points=worked(readers_pace=140.0)),
            "bad",
            "3 of 12 readers late: they read 1.4 × what the engine can compute",
        ),
        (
            seen(running=2, readers_late=2, points=worked(readers_pace=40.0, recomputed_tokens=1500)),
            "bad",
            "2 of 2 readers late: 25 % of the time the engine computes again what it had to drop",
        ),
        (
            seen(running=2, readers_late=1, readers_ahead=1, points=worked(readers_pace=40.0)),
            "bad",
            "1 of 2 readers late: they have waited over a second for their next token",
        ),
        (seen(running=40, rows=40), "idle", "No readers now"),
        (seen("loading", "Reading weights."), "warn", "M is loading"),
        (seen("failed", "No such folder."), "bad", "M has failed"),
        (
            seen(running=5, blocks_total=0, upstreams={"a": {"requests": 5.0}}, classes={}),
            "ok",
            "No readers now; 5 answers from a server elsewhere",
        ),
    ],
)
def test_each_state_has_its_headline(model: Seen, level: str, words: str) -> None:
    """How the readers are comes first, then what waits."""
    found = headline({"m": model})
    assert (found.level, found.words) == (level, words)


def test_the_headline_is_of_all_models() -> None:
    """Readers are added; a model that is out of use is named beside them, with its reason."""
    models = {"a": seen(running=2, readers_ahead=2), "b": seen(running=3, readers_ahead=3)}
    assert headline(models).words == "5 readers, all served in time"
    found = headline({**models, "c": seen("failed", "No such folder.")})
    assert (found.level, found.meaning) == ("bad", "No such folder.")
    assert found.words == "5 readers, all served in time. C has failed"


def test_only_refusals_of_the_last_minute_count() -> None:
    """Of this engine: an engine begins to count at 0."""
    old = Point(at=0.0, refused=2, busy_seconds=5.0)
    later = replace_at(old, 120.0), replace_at(old, 120.0 + POINT_SECONDS)
    assert seen(points=(old, *later)).num_refused == 0
    assert seen(points=(*later, Point(at=200.0, refused=0), Point(at=205.0, refused=1))).num_refused == 1


def replace_at(point: Point, at: float) -> Point:
    """The same counts at another time."""
    return Point(at=at, refused=point.refused, busy_seconds=point.busy_seconds)


def test_panels_are_at_rest_without_work() -> None:
    """Nothing to judge is no fault."""
    found = panels(seen(classes={"chat": {"ttft_budget": 0.5, "num_answers": 0}}))
    assert {name: verdict.level for name, verdict in found.items()} == {
        "readers": "idle",
        "latency": "idle",
        "memory": "ok",
        "queue": "idle",
        "leaving": "idle",
    }


def test_panels_name_what_is_over_its_threshold() -> None:
    """Each panel by its own threshold: budget, share of memory, first-token budget."""
    slow = {**CHAT, "ttft_p95": 0.8}
    counts = {"running": 4, "readers_ahead": 3, "readers_late": 1, "waiting": 2, "queued_seconds": 0.7}
    found = panels(seen(**counts, classes={"chat": slow}, blocks_used=93, blocks_cached=2, blocks_free=5))
    assert {name: verdict.level for name, verdict in found.items()} == {
        "readers": "bad",
        "latency": "warn",
        "memory": "warn",
        "queue": "warn",
        "leaving": "idle",
    }
    assert found["latency"].words == "chat 800 ms of 500 ms."
    assert found["memory"].words == "93 % used, 2 % cached, 5 % free."
    assert found["queue"].words == "2 requests waiting: 700 ms of computing."


def test_batches_have_no_budget_that_readers_wait_for() -> None:
    """A row that waits for hours is no late reader."""
    one = seen(classes={"chat": CHAT, "batch": {"ttft_budget": 10.0, "num_answers": 5, "ttft_p95": 900.0}})
    assert panels(one)["latency"].level == "ok"
    assert one.queue_limit == 0.5
    assert (
        replace(one, stats=EngineStats(classes={"batch": {"ttft_budget": 10.0, "num_answers": 5}})).queue_limit is None
    )


def recent(num_answers: int, first_token: float, num_left: int = 0, **counts: float) -> Recent:
    """So many answers with that time to their first token; `counts` are of other metrics."""
    model = ModelMeasures()
    for index in range(num_answers):
        end = "cancelled" if index < num_left else "stop"
        model.note(end, is_error=False, latency=2.0, breakdown={"ttft": first_token, "tpot": 0.01}, gaps=Buckets())
    figures = Figures(model.samples("m"))
    figures.add(Sample(name=name, value=value, labels={"model_name": "m"}) for name, value in counts.items())
    return Recent(model="m", figures=figures)


def test_the_headline_names_what_is_beyond_its_threshold() -> None:
    """With its value, the threshold and where to look: the figure that is farthest beyond, and how many others are."""
    one = replace(seen(), recent=recent(MIN_ANSWERS, 7.0))
    verdict = headline({"m": one})
    assert (verdict.level, verdict.model, verdict.place) == ("warn", "m", "streams")
    assert verdict.words.startswith("First tokens come late: p50 ")
    assert verdict.words.endswith(" s, the threshold is 2 s; 1 more figure is beyond its threshold")
    assert "phases" in verdict.meaning
    two = replace(seen(), recent=recent(MIN_ANSWERS, 0.1, num_left=MIN_ANSWERS // 2))
    verdict = headline({"m": two, "other": seen()})
    assert verdict.words == "m: Readers stop or leave their answers: 50 %, the threshold is 10 %"
    assert panels(two)["leaving"].level == "warn"
    late = replace(seen(running=1, readers_late=1), recent=recent(MIN_ANSWERS, 7.0))
    assert headline({"m": late}).level == "bad"


def test_too_few_answers_are_not_judged() -> None:
    """As Prometheus' rules: but for the queue, which needs no answer."""
    assert headline({"m": replace(seen(), recent=recent(MIN_ANSWERS - 1, 7.0))}).level == "idle"
    verdict = headline({"m": replace(seen(), recent=recent(0, 7.0, queue_seconds=3.5))})
    assert verdict.words == "The queue is long: 3.5 s, the threshold is 2 s"
    assert verdict.place == "queue"


def test_hits_below_their_threshold_are_beyond_it() -> None:
    """A figure that should be high is beyond its threshold when it is lower; one that nothing is known of is not."""
    few = recent(MIN_ANSWERS, 0.1, prefix_cache_hits=8, prefix_cache_queries=100)
    assert [one.rule.name for one in few.beyond] == ["StreamserveCacheMisses"]
    [shown] = [one for one in few.as_json()["figures"] if one["name"] == "StreamserveCacheMisses"]
    assert (shown["value"], shown["limit"], shown["words"]) == ("8.0 %", "at least 20 %", "under the threshold")
    assert recent(MIN_ANSWERS, 0.1).beyond == []
