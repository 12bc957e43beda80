"""docs/reference/metrics.md: every metric, and the times of the `done` event, from their tables in the code."""

from __future__ import annotations

from collections.abc import Mapping

from docs.generate.text import head, table
from streamserve.protocol.metrics import BREAKDOWN, METRICS, PHASES, PREFIX, Metric

_INTRO = """
What `GET /metrics` shows, in Prometheus' text format. [Monitoring](../monitoring.md) has who may read it, and what to
watch. Names are vLLM's where it has the metric, with `streamserve_` for `vllm:`.
"""
_TIMES = """
The `done` event of an answer has its times in seconds. [Events](../events.md#times) explains how they are measured.
"""


def page() -> str:
    """Return the page."""
    rows = [_row(metric) for metric in METRICS.values()]
    return "".join(
        [
            head("Reference: metrics", _INTRO, "streamserve/protocol/metrics.py"),
            f"\n{table(['metric', 'kind', 'unit', 'labels', 'what it counts'], rows)}",
            f"\n## Times of an answer\n\n{_TIMES.strip()}\n",
            f"\n### breakdown\n\n{_keys(BREAKDOWN)}",
            f"\n### phases\n\nThey add up to `latency`, `network_in` aside.\n\n{_keys(PHASES)}",
        ]
    )


def _row(metric: Metric) -> list[str]:
    name = PREFIX + metric.name + ("_total" if metric.kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return [f"`{name}`", metric.kind, metric.unit, labels, metric.help]


def _keys(meanings: Mapping[str, str]) -> str:
    return table(["key", "what it measures"], [[f"`{key}`", text] for key, text in meanings.items()])
