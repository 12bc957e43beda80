"""Laws of `POST /streams/{id}/timings`: whose, how often, what is taken, and what a stream then shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext, override_settings

from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.streams.hand_made import Gate

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

TIMES: dict[str, Any] = {
    "headers": 50.0,
    "first_byte": 50.0,
    "first_delta": 51.0,
    "first_paint": 51.5,
    "ended": 60.0,
    "last_paint": 60.25,
    "gap_p95": 0.1,
    "paint_gap_p95": 0.2,
    "render": 0.3,
    "reconnects": 2,
    "hidden": False,
}


async def answered(caller: Caller, **fields: Any) -> str:
    """Ask, read to the end, and return the stream's address."""
    response = await caller.post("/streams", {"prompt": "tell me", "max_tokens": 8, "seed": 7, **fields})
    await body_of(response)
    return f"/streams/{response['X-Stream-Id']}"


def values_of_metrics() -> dict[str, Any]:
    """Return what `/metrics` has of readers, the number of values for a histogram."""
    out: dict[str, Any] = {}
    for sample in site.get_site().streams.measures.samples():
        if sample.name.startswith("reader_"):
            value = sample.value if isinstance(sample.value, int) else sum(sample.value.counts)  # type: ignore[union-attr]
            out[" ".join((sample.name, *sorted(sample.labels.values())))] = value
    return out


async def test_a_report_joins_the_phases_of_its_stream(caller: Caller) -> None:
    """The hops add up to what the reader saw, in this process, and by the row when it is gone; metrics count it."""
    path = await answered(caller, latency_class="completion")
    before = values_of_metrics()
    assert (await caller.post(f"{path}/timings", TIMES)).json() == {"counted": True}
    live = (await caller.get(path)).json()["reader"]
    counted = {name: value - before.get(name, 0) for name, value in values_of_metrics().items()}
    await site.reset()
    await until_ready()
    kept = (await caller.get(path)).json()["reader"]
    for shown in (live, kept):
        assert shown.items() >= TIMES.items()
        assert sum(shown["first"].values()) == pytest.approx(51.5, abs=0.01)
        assert sum(shown["whole"].values()) == pytest.approx(60.25, abs=0.01)
        assert {"auth", "network", "render"} <= shown["whole"].keys()
    assert counted["reader_reports echo"] == counted["reader_network_seconds echo"] == 1
    assert counted["reader_reconnects echo"] == 2
    assert counted["reader_gap_budget completion echo kept"] == 1


async def test_a_second_report_counts_nothing(caller: Caller) -> None:
    """The first one stays, also where the process that took it is gone."""
    path = await answered(caller)
    await caller.post(f"{path}/timings", TIMES)
    for _ in range(2):
        again = await caller.post(f"{path}/timings", {"headers": 1.0})
        assert (again.status_code, again.json()) == (200, {"counted": False})
        await site.reset()
        await until_ready()
    assert (await caller.get(path)).json()["reader"]["headers"] == 50.0


async def test_a_report_comes_when_the_process_is_gone(caller: Caller) -> None:
    """The row has what it is compared with; nothing of the stream is restored."""
    path = await answered(caller)
    await site.reset()
    await until_ready()
    assert (await caller.post(f"{path}/timings", {**TIMES, "gap_p95": 3.0})).json() == {"counted": True}
    assert site.get_site().streams.all() == []
    counted = values_of_metrics()
    assert (counted["reader_network_seconds echo"], counted["reader_gap_budget chat echo missed"]) == (1, 1)


async def test_a_report_of_a_running_answer_ends_nothing(caller: Caller, site_gate: Gate) -> None:
    """A page that closes reports what it has; the answer stays as it is, and its end keeps the report."""
    await site.reset()
    await until_ready()
    site_gate.allow(1)
    response = await caller.post("/streams", {"prompt": "tell me", "max_tokens": 8, "seed": 7})
    path = f"/streams/{response['X-Stream-Id']}"
    assert (await caller.post(f"{path}/timings", {"headers": 0.1})).json() == {"counted": True}
    assert (await caller.get(path)).json()["state"] == "running"
    site_gate.open()
    await body_of(response)
    await site.reset()
    row = await StreamRow.objects.aget()
    assert (row.state, row.reader) == ("finished", {"headers": 0.1, "render": 0.0, "reconnects": 0, "hidden": False})


async def test_others_find_nothing(caller: Caller, lonely_key: str) -> None:
    """Another tenant's stream is a 404 like an id that no stream has, before and after the process."""
    path = await answered(caller)
    stranger = Caller(key=lonely_key)
    unknown = await caller.post(f"/streams/{'0' * 32}/timings", TIMES)
    for _ in range(2):
        foreign = await stranger.post(f"{path}/timings", TIMES)
        assert (foreign.status_code, foreign.json()["error"]) == (404, unknown.json()["error"])
        await site.reset()
        await until_ready()
    assert (await StreamRow.objects.aget()).reader is None


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"headers": None}, "missing_field", "headers"),
        ({"headers": -0.1}, "invalid_value", "headers"),
        ({"first_byte": "1"}, "invalid_type", "first_byte"),
        ({"ended": 1e9}, "invalid_value", "ended"),
        ({"first_delta": 0.5}, "conflicting_fields", "first_delta"),
        ({"last_paint": 59.0}, "conflicting_fields", "last_paint"),
        ({"reconnects": 1.5}, "invalid_type", "reconnects"),
        ({"reconnects": 10**9}, "invalid_value", "reconnects"),
        ({"hidden": 1}, "invalid_type", "hidden"),
        ({"text": "what was asked"}, "unknown_field", "text"),
    ],
)
async def test_a_report_that_cannot_be_is_refused(
    caller: Caller, change: dict[str, Any], code: str, param: str
) -> None:
    """By its first wrong field; nothing is kept."""
    path = await answered(caller)
    refused = await caller.post(f"{path}/timings", {**TIMES, **change})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, code, param)
    assert (await StreamRow.objects.aget()).reader is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
async def test_a_number_is_finite(caller: Caller, number: float) -> None:
    """What JSON does not have is refused."""
    path = await answered(caller)
    refused = await caller.post(f"{path}/timings", {"headers": number})
    assert refused.status_code == 400


async def test_a_long_report_is_refused(caller: Caller) -> None:
    """It has some numbers: a body of kilobytes is none."""
    path = await answered(caller)
    refused = await caller.post(f"{path}/timings", {"headers": 0.1, "x" * 5000: 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    assert "4,096" in refused.json()["error"]["message"]


async def test_a_flood_of_reports_writes_one_column_once(caller: Caller) -> None:
    """Of fifty reports one is written, and metrics count one."""
    path = await answered(caller)
    before = values_of_metrics()["reader_reports echo"]
    replies = [(await caller.post(f"{path}/timings", TIMES)).json()["counted"] for _ in range(50)]
    assert replies == [True, *[False] * 49]
    assert values_of_metrics()["reader_reports echo"] == before + 1


async def test_a_site_may_take_no_reports(caller: Caller) -> None:
    """READER_TIMINGS off: a 404 with a code of its own, and nothing is kept."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "READER_TIMINGS": False}):
        await until_ready()
        path = await answered(caller)
        refused = await caller.post(f"{path}/timings", TIMES)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "timings_off")
        assert "reader" not in (await caller.get(path)).json()
        await site.reset()


def test_the_report_is_one_statement() -> None:
    """The write is one UPDATE of one column, which does nothing where there is a report."""
    StreamRow.objects.create(id="0" * 32, log_id="a" * 12, owner="user:1", tenant="user:1", model="m")
    with CaptureQueriesContext(connection) as queries:
        assert StreamRow.objects.keep_reader("0" * 32, {"headers": 0.1}) == 1
        assert StreamRow.objects.keep_reader("0" * 32, {"headers": 9.9}) == 0
    assert len(queries) == 2
    assert all(query["sql"].startswith("UPDATE") for query in queries)
    assert json.loads(json.dumps(StreamRow.objects.get().reader)) == {"headers": 0.1}
