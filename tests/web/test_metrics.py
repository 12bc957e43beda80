"""Laws of `/metrics` on a real site: every declared metric is there, and the counts are those of the requests."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test.utils import override_settings
from django.utils import timezone

from streamserve.models import Batch, Job
from streamserve.protocol.events import FINISH_REASONS
from streamserve.protocol.metrics import BREAKDOWN, METRICS, PREFIX
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready

pytestmark = pytest.mark.django_db(transaction=True)

_NAMES = re.compile(r'(\w+)="')
_LINE = re.compile(r"([a-z_0-9]+)(?:\{(.*)\})? (\S+)")
ASK = {"prompt": "tell me", "max_tokens": 8}
# What a reader reports of its answer, in seconds since its request.
SEEN = {"headers": 50.0, "first_delta": 51.0, "first_paint": 51.5, "ended": 60.0, "last_paint": 60.2, "gap_p95": 0.1}


async def scrape(ops_key: str) -> dict[tuple[str, str], float]:
    """Return the value of each line by name and labels."""
    response = await Caller(key=ops_key).get("/metrics")
    assert response.status_code == 200
    lines = [line for line in response.content.decode().splitlines() if not line.startswith("#")]
    return {(match[1], _sorted(match[2] or "")): float(match[3]) for match in map(_LINE.fullmatch, lines) if match}


def _sorted(labels: str) -> str:
    return ",".join(sorted(labels.split(",")))


async def test_every_declared_metric_is_scraped(alice_key: str, ops_key: str) -> None:
    """After answers that end, are stopped, fail and are refused, no metric is missing, and each has counted."""
    conf = {"TESTING": True, "ECHO_STEP_SECONDS": 0.005, "EMBEDDING_MODELS": {"search": {"PATH": "echo"}}}
    with override_settings(STREAMSERVE=conf):
        await until_ready()
        alice = Caller(key=alice_key)
        before = await scrape(ops_key)
        for _ in range(3):
            answer = await alice.post("/streams", ASK)
            assert b"event: done" in await body_of(answer)
        assert (await alice.post(f"/streams/{answer['X-Stream-Id']}/timings", SEEN)).status_code == 200
        chat = {"prompt": "tell me", "messages": [], "max_tokens": 8}
        assert (await alice.post("/v1/chat/completions", chat)).status_code == 200
        endless = {"prompt": "tell me", "ignore_eos": True, "max_tokens": 4000}
        assert b'"code":"timeout"' in await body_of(await alice.post("/streams", {**endless, "timeout_seconds": 0.1}))
        answer = await alice.post("/streams", endless)
        assert (await alice.post(f"/streams/{answer['X-Stream-Id']}/stop")).status_code == 200
        assert b'"cancelled"' in await body_of(answer)
        assert (await alice.post("/streams", {**ASK, "model": "nope"})).status_code == 404
        assert (await Caller().post("/streams", ASK)).status_code == 401
        streams = site.get_site().streams
        await until(lambda: not any(stream.is_live for stream in streams.all()))
        after = await scrape(ops_key)
        await site.reset()

    shown = {name for name, _ in after}
    for name, metric in METRICS.items():
        if name.startswith(("upstream_", "mcp_")):  # of models and tools elsewhere: test_remote_model.py, test_mcp.py
            continue
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}[metric.kind]
        for suffix in suffixes:
            assert f"{PREFIX}{name}{suffix}" in shown, name
            labels = {
                label for key, names in after if key == f"{PREFIX}{name}{suffix}" for label in _NAMES.findall(names)
            }
            assert labels <= {*metric.labels, "le"}, name

    def more(name: str, labels: str = 'model_name="echo"') -> float:
        key = f"{PREFIX}{name}", _sorted(labels)
        return after[key] - before.get(key, 0.0)

    ended = {
        reason: more("request_success_total", f'model_name="echo",finished_reason="{reason}"')
        for reason in FINISH_REASONS
    }
    assert {reason: count for reason, count in ended.items() if count} == {"length": 4, "cancelled": 1}
    assert more("request_errors_total", 'model_name="echo",error_code="timeout"') == 1
    assert more("http_requests_total", 'handler="streams",status="200"') == 5
    assert more("http_requests_total", 'handler="streams",status="404"') == 1
    assert more("http_requests_total", 'handler="streams",status="401"') == 1
    assert more("http_requests_total", 'handler="stop_stream",status="200"') == 1
    assert more("http_errors_total", 'error_code="model_not_found"') == 1
    for name, metric in METRICS.items():
        if metric.kind == "histogram":
            assert more(f"{name}_count") > 0, name
    assert more("e2e_request_latency_seconds_count") == 6
    assert more("request_queue_time_seconds_count") == 4
    assert more("inter_token_latency_seconds_count") >= 4 * 7


async def test_done_has_its_times(alice_key: str) -> None:
    """`done` has the latency in both units, and the times from the request's arrival; they are in order."""
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.05}):
        await until_ready()
        answer = await Caller(key=alice_key).post("/streams", {**ASK, "ignore_eos": True})
        await body_of(answer)
        stream = site.get_site().streams.find(answer["X-Stream-Id"])
        assert stream is not None
        assert stream.terminal is not None
        done = stream.terminal.payload()
        await site.reset()
    assert done["latency_ms"] == pytest.approx(1000 * done["latency"], abs=0.1)
    times = done["breakdown"]
    assert times.keys() == BREAKDOWN.keys()
    assert sum(done["phases"].values()) == pytest.approx(done["latency"], abs=1e-3)
    assert 0 < times["intake"] <= times["ttfb"]
    assert times["intake"] <= times["ttft"] <= done["latency"]
    assert times["tpot"] == pytest.approx(times["decode"] / 7, abs=1e-4)


async def test_durable_work_is_counted(alice: Any, ops_key: str) -> None:
    """What waits and what runs, of each kind, whichever process has it; what has ended is not."""
    await until_ready()
    for index, state in enumerate(("queued", "queued", "running", "done", "failed")):
        await Job.objects.acreate(id=f"{index:032x}", stream_id=f"{index:032x}", pipeline="p", owner="o", state=state)
    await Batch.objects.acreate(id="batch_1", owner="o", tenant="o", state="running", expires_at=timezone.now())
    shown = await scrape(ops_key)
    work = {
        (name.removeprefix(f"{PREFIX}work_"), labels): value
        for (name, labels), value in shown.items()
        if name.startswith(f"{PREFIX}work_")
    }
    assert work == {
        ("queued", 'kind="jobs"'): 2,
        ("running", 'kind="jobs"'): 1,
        ("queued", 'kind="batch"'): 0,
        ("running", 'kind="batch"'): 1,
        ("queued", 'kind="webhooks"'): 0,
        ("running", 'kind="webhooks"'): 0,
    }
    await site.reset()
