"""Laws of the alerts: Prometheus reads the rules, each fires on what it names, and the dashboard asks what is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import typing
from collections.abc import Iterator
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test.utils import override_settings

from streamserve.conf import get_problems
from streamserve.protocol.alerts import Alerts, as_yaml, rules
from streamserve.protocol.dashboard import dashboard
from streamserve.protocol.metrics import METRICS, PREFIX

ROOT = Path(__file__).parents[2]
SITE = {"MODELS": {"echo": {"PATH": "echo"}}, "LOG": "memory", "CLIENT": "thread"}
_NAME = re.compile(PREFIX + r"([a-z_0-9]+)")
# Series of a model per minute: what each alert needs to fire, and no other alert does. Histograms by their buckets.
FIRING = {
    "StreamserveQueueLong": {"queue_seconds": "3x20"},
    "StreamserveAnswersFail": {'request_errors_total{error_code="timeout"': "0+1x20"},
    "StreamserveReadersLeave": {'request_success_total{finished_reason="cancelled"': "0+4x20"},
    "StreamserveCacheMisses": {"prefix_cache_hits_total": "0+10x20", "prefix_cache_queries_total": "0+100x20"},
    "StreamserveFirstTokenP50": {"time_to_first_token_seconds_bucket": (2, 5)},
    "StreamserveFirstTokenP95": {"time_to_first_token_seconds_bucket": (5, 10)},
    "StreamserveTokensPerSecondP50": {"request_time_per_output_token_seconds_bucket": (0.05, 0.1)},
    "StreamserveTokensPerSecondP95": {"request_time_per_output_token_seconds_bucket": (0.2, 0.5)},
}


@pytest.fixture(scope="module")
def promtool() -> str:
    path = shutil.which("promtool")
    if path is None:
        if os.environ.get("STREAMSERVE_REQUIRE") == "all":
            pytest.fail("promtool is missing: apt-get install -y prometheus")
        pytest.skip("promtool is missing: apt-get install -y prometheus")
    return path


def printed(*arguments: str) -> str:
    out = StringIO()
    call_command("streamserve_alerts", *arguments, stdout=out)
    return out.getvalue()


def run(promtool: str, *arguments: str) -> None:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def series_of(values: dict[str, Any]) -> list[dict[str, str]]:
    """Return the input series of a test of promtool; a histogram has all its answers between two bounds."""
    found = []
    for name, points in values.items():
        if isinstance(points, tuple):
            low, high = points
            for bound, amount in ((low, "0x20"), (high, "0+5x20"), ("+Inf", "0+5x20")):
                found.append({"series": f'{PREFIX}{name}{{model_name="m",le="{bound}"}}', "values": amount})
            continue
        own = f'{name},model_name="m"}}' if "{" in name else f'{name}{{model_name="m"}}'
        found.append({"series": PREFIX + own, "values": points})
    if "request_success_total" not in str(values):
        found.append(
            {"series": f'{PREFIX}request_success_total{{model_name="m",finished_reason="stop"}}', "values": "0+5x20"}
        )
    return found


def test_every_rule_fires_on_what_it_names(promtool: str, tmp_path: Path) -> None:
    """And on nothing where all is well, or where there are a few answers only."""
    (tmp_path / "rules.yml").write_text(as_yaml(Alerts()))
    run(promtool, "check", "rules", str(tmp_path / "rules.yml"))
    by_name = {rule.name: rule for rule in rules(Alerts())}
    assert by_name.keys() == FIRING.keys()
    tests = []
    for name, values in FIRING.items():
        rule = by_name[name]
        fires = {
            "exp_labels": {"severity": "warning", "model_name": "m"},
            "exp_annotations": {"summary": rule.summary, "description": rule.look},
        }
        checks = [{"eval_time": "16m", "alertname": name, "exp_alerts": [fires]}]
        tests.append({"interval": "1m", "input_series": series_of(values), "alert_rule_test": checks})
    well = series_of(
        {
            "time_to_first_token_seconds_bucket": (0.1, 0.2),
            "request_time_per_output_token_seconds_bucket": (0.01, 0.02),
            "queue_seconds": "0x20",
            "prefix_cache_hits_total": "0+90x20",
            "prefix_cache_queries_total": "0+100x20",
        }
    )
    few = series_of({'request_success_total{finished_reason="cancelled"': "0+1x20"})
    for quiet in (well, few):
        checks = [{"eval_time": "16m", "alertname": name, "exp_alerts": []} for name in FIRING]
        tests.append({"interval": "1m", "input_series": quiet, "alert_rule_test": checks})
    (tmp_path / "tests.yml").write_text(
        json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests})
    )
    run(promtool, "test", "rules", str(tmp_path / "tests.yml"))


def test_the_command_prints_the_sites_thresholds(promtool: str) -> None:
    """A threshold of 0 turns its rule off; the files in docs/deploy are those of the defaults."""
    assert printed() == (ROOT / "docs/deploy/prometheus-alerts.yml").read_text()
    assert printed("--grafana") == (ROOT / "docs/deploy/grafana.json").read_text()
    with override_settings(STREAMSERVE={**SITE, "ALERTS": {"QUEUE_SECONDS": 7.5, "ERROR_SHARE": 0}}):
        text = printed()
    assert "queue_seconds > 7.5" in text
    assert "AnswersFail" not in text
    with override_settings(STREAMSERVE={**SITE, "ALERTS": {"QUEUE": 7.5}}):
        assert get_problems()


def test_the_dashboard_asks_for_metrics_that_there_are(promtool: str, tmp_path: Path) -> None:
    """Each query is one that Prometheus reads, of a metric that is declared; panels do not overlap."""
    made = dashboard(Alerts())
    queries = [target["expr"] for panel in made["panels"] for target in panel["targets"]]
    known = set()
    for name, metric in METRICS.items():
        endings = {"counter": ["_total"], "histogram": ["_bucket"], "gauge": [""]}[metric.kind]
        known |= {name + ending for ending in endings}
    assert {name for query in queries for name in _NAME.findall(query)} <= known
    records = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "queries", "rules": records}]}))
    run(promtool, "check", "rules", str(tmp_path / "rules.yml"))
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in made["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in made["panels"]}) == len(places)


def wrong(value: Any, hint: Any, path: str) -> Iterator[str]:
    """Yield where a value is not of its type, as Grafana's models declare it."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        hint = type(value)
    if kind is typing.Union:
        if value is not None and all(any(wrong(value, one, path)) for one in inner):
            yield f"{path} is {value!r}"
    elif kind is typing.Literal:
        if value not in inner:
            yield f"{path} is {value!r}"
    elif kind in (list, dict):
        if not isinstance(value, kind):
            yield f"{path} is {value!r}"
            return
        pairs = value.items() if kind is dict else enumerate(value)
        for key, one in pairs:
            yield from wrong(one, inner[-1], f"{path}.{key}")
    elif issubclass(hint, Enum):
        if value not in [one.value for one in hint] and value not in hint:
            yield f"{path} is {value!r}"
    elif not isinstance(value, (int, float) if hint is float else hint):
        yield f"{path} is {value!r}"
    elif hasattr(value, "to_json"):
        for name, one in vars(value).items():
            yield from wrong(one, typing.get_type_hints(type(value))[name], f"{path}.{name}")


def unread(given: Any, read: Any, path: str) -> Iterator[str]:
    """Yield what is not in what was read."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            yield from unread(value, read.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for index, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from unread(one, other, f"{path}.{index}")
    elif given != read:
        yield path


def test_grafanas_own_models_read_the_dashboard() -> None:
    """Grafana's generated types (Foundation SDK, Grafana 11.6) know each field of the file, and each has its type."""
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason="pip install grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard
    from grafana_foundation_sdk.models.prometheus import Dataquery
    from grafana_foundation_sdk.models.timeseries import Options

    plugins.register_default_plugins()
    given = json.loads((ROOT / "docs/deploy/grafana.json").read_text())
    read = Dashboard.from_json(given)
    assert list(unread(given, json.loads(JSONEncoder().encode(read)), "dashboard")) == []
    assert list(wrong(read, Dashboard, "dashboard")) == []
    assert {type(panel.options) for panel in read.panels} == {Options}
    assert {type(target) for panel in read.panels for target in panel.targets} == {Dataquery}
    # What the check finds: a field of no panel, and a value of another type.
    assert list(unread({"made_up": 1}, {}, "panel")) == ["panel.made_up"]
    given["panels"][0]["gridPos"]["x"] = "left"
    given["panels"][0]["fieldConfig"]["defaults"]["thresholds"]["mode"] = "sometimes"
    found = " ".join(wrong(Dashboard.from_json(given), Dashboard, "dashboard"))
    assert found.startswith("dashboard.panels")
