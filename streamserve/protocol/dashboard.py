"""A Grafana dashboard of the metrics of metrics.py, with the thresholds of alerts.py. Pure.

Grafana's JSON model, version 39 (Grafana 10 and later): its importer migrates what is older than itself.
"""

from __future__ import annotations

from typing import Any

from streamserve.protocol.alerts import LEFT_REASONS, WINDOW, Alerts, quantile
from streamserve.protocol.measures import FIRST_PAINT, ITL, NETWORK, READER_ITL_P95, READER_TTFT, RENDER, TTFT
from streamserve.protocol.metrics import PREFIX

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 8


def _rate(metric: str, where: str = "") -> str:
    return f"sum by (model_name) (rate({PREFIX}{metric}_total{where}[{WINDOW}]))"


def _gauge(metric: str) -> str:
    return f"sum by (model_name) ({PREFIX}{metric})"


def dashboard(alerts: Alerts) -> dict[str, Any]:
    """Return the dashboard as JSON."""
    left = f'{{finished_reason=~"{"|".join(LEFT_REASONS)}"}}'
    panels = (
        ("First token, at the server", "s", _percentiles(TTFT), alerts.first_token_p95_seconds),
        ("First token, as readers reported it", "s", _percentiles(READER_TTFT), alerts.first_token_p95_seconds),
        (
            "From the server to the screen, p95",
            "s",
            tuple(
                (name, quantile(0.95, metric))
                for name, metric in (("network", NETWORK), ("render", RENDER), ("first paint", FIRST_PAINT))
            ),
            0.0,
        ),
        ("Gap between tokens, at the server", "s", _percentiles(ITL), 0.0),
        ("Gap p95 of each answer, as readers reported it", "s", _percentiles(READER_ITL_P95), 0.0),
        (
            "Readers who leave, and come back",
            "reqps",
            (
                ("stopped or left", _rate("request_success", left)),
                ("ended early", _rate("reader_disconnects")),
                ("came back", _rate("stream_resumes")),
            ),
            0.0,
        ),
        ("Time of an answer", "s", _percentiles("e2e_request_latency_seconds"), 0.0),
        ("Answers", "reqps", (("ended", _rate("request_success")), ("failed", _rate("request_errors"))), 0.0),
        ("Tokens", "short", (("made", _rate("generation_tokens")), ("of prompts", _rate("prompt_tokens"))), 0.0),
        ("Queue, in seconds of computing", "s", (("queue", _gauge("queue_seconds")),), alerts.queue_seconds),
        (
            "Readers",
            "short",
            tuple((name, _gauge(f"num_readers_{name}")) for name in ("late", "hungry", "ahead", "away")),
            0.0,
        ),
        ("KV memory used", "percentunit", (("used", f"{PREFIX}kv_cache_usage_perc"),), 0.9),
        (
            "Prefix cache",
            "percentunit",
            (("hits", f"{_rate('prefix_cache_hits')} / {_rate('prefix_cache_queries')}"),),
            0.0,
        ),
        ("Streams", "short", (("active", _gauge("streams_active")), ("parked", _gauge("streams_parked"))), 0.0),
        ("Refused and failed requests", "reqps", (("{{error_code}}", _by_code()),), 0.0),
        (
            "Durable work",
            "short",
            (("{{kind}} queued", f"{PREFIX}work_queued"), ("{{kind}} running", f"{PREFIX}work_running")),
            0.0,
        ),
    )
    return {
        "title": "streamserve",
        "uid": "streamserve",
        "tags": ["streamserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate(panels)],
    }


def _percentiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"p{100 * share:g}", quantile(share, metric)) for share in (0.5, 0.95, 0.99))


def _by_code() -> str:
    return f"sum by (error_code) (rate({PREFIX}http_errors_total[{WINDOW}]))"


def _panel(number: int, title: str, unit: str, series: tuple[tuple[str, str], ...], threshold: float) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 8}
    if threshold:
        steps.append({"color": "red", "value": threshold})
        custom["thresholdsStyle"] = {"mode": "line"}
    across = _COLUMNS // _WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"x": _WIDTH * (number % across), "y": _HEIGHT * (number // across), "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": custom, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expr, "legendFormat": _legend(name)}
            for index, (name, expr) in enumerate(series)
        ],
    }


def _legend(name: str) -> str:
    return name if "{{" in name else f"{name} {{{{model_name}}}}"
