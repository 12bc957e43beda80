"""Alerts: thresholds of a site's figures, as Prometheus rules over the metrics of metrics.py. Pure.

    ALERTS ──► `rules` ──► manage.py streamserve_alerts ──► a file for Prometheus

A rule needs `MIN_ANSWERS` answers in its window, so that one slow answer at night wakes nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from streamserve.protocol.metrics import PREFIX

WINDOW, FOR = "10m", "5m"
MIN_ANSWERS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Alerts:
    """What is worth a look. 0 turns a rule off."""

    first_token_p50_seconds: float = 2.0
    """Half of the first tokens come later than this."""
    first_token_p95_seconds: float = 5.0
    """One first token of twenty comes later than this."""
    tokens_per_second_p50: float = 20.0
    """Half of the answers are slower than this after their first token."""
    tokens_per_second_p95: float = 5.0
    """One answer of twenty is slower than this."""
    queue_seconds: float = 2.0
    """What waits takes longer to compute than this."""
    error_share: float = 0.01
    """Of the answers more than this end in an error."""
    cancel_share: float = 0.10
    """Of the answers more than this are stopped, or given up by their readers."""
    cache_hit_share: float = 0.20
    """Of the prompts' tokens fewer than this are found in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A Prometheus alert: its name, its condition, and what it says."""

    name: str
    expr: str
    summary: str
    look: str

    def lines(self) -> Iterator[str]:
        """Yield its YAML, as an item of a list."""
        yield f"      - alert: {self.name}"
        yield f"        expr: {self.expr}"
        yield f"        for: {FOR}"
        yield "        labels: {severity: warning}"
        yield "        annotations:"
        yield f'          summary: "{self.summary}"'
        yield f'          description: "{self.look}"'


def quantile(share: float, metric: str) -> str:
    """Return PromQL of a quantile of a histogram in the window, of each model."""
    return f"histogram_quantile({share}, sum by (le, model_name) (rate({PREFIX}{metric}_bucket[{WINDOW}])))"


def _increase(metric: str, where: str = "") -> str:
    return f"sum by (model_name) (increase({PREFIX}{metric}_total{where}[{WINDOW}]))"


_DONE, _FAILED = _increase("request_success"), _increase("request_errors")
_ENDED = f"(({_DONE} or 0 * {_FAILED}) + ({_FAILED} or 0 * {_DONE}))"
_LEFT = _increase("request_success", '{finished_reason=~"cancelled|abandoned"}')
_HITS, _QUERIES = _increase("prefix_cache_hits"), _increase("prefix_cache_queries")
_ENOUGH = f"and {_ENDED} >= {MIN_ANSWERS}"


def rules(alerts: Alerts) -> list[Rule]:
    """Return the rules that are not turned off."""
    first, gap = "time_to_first_token_seconds", "request_time_per_output_token_seconds"
    found = [
        (alerts.first_token_p50_seconds, *_late(0.5, first, alerts.first_token_p50_seconds, "Half")),
        (alerts.first_token_p95_seconds, *_late(0.95, first, alerts.first_token_p95_seconds, "One of twenty")),
        (alerts.tokens_per_second_p50, *_slow(0.5, gap, alerts.tokens_per_second_p50, "Half")),
        (alerts.tokens_per_second_p95, *_slow(0.95, gap, alerts.tokens_per_second_p95, "One of twenty")),
        (
            alerts.queue_seconds,
            "QueueLong",
            f"{PREFIX}queue_seconds > {alerts.queue_seconds:g}",
            f"What waits takes over {alerts.queue_seconds:g} s to compute.",
            "More readers than the engine serves: docs/fairness.md, streamserve_capacity.",
        ),
        (
            alerts.error_share,
            "AnswersFail",
            f"{_FAILED} / {_ENDED} > {alerts.error_share:g} {_ENOUGH}",
            f"Over {100 * alerts.error_share:g} % of the answers end in an error.",
            "The codes are in request_errors_total, their meanings in docs/reference/errors.md.",
        ),
        (
            alerts.cancel_share,
            "ReadersLeave",
            f"{_LEFT} / {_ENDED} > {alerts.cancel_share:g} {_ENOUGH}",
            f"Over {100 * alerts.cancel_share:g} % of the answers are stopped, or left by their readers.",
            "Compare with the times to the first token; look at bad answers in the admin.",
        ),
        (
            alerts.cache_hit_share,
            "CacheMisses",
            f"{_HITS} / {_QUERIES} < {alerts.cache_hit_share:g} {_ENOUGH}",
            f"Under {100 * alerts.cache_hit_share:g} % of the prompts' tokens are found in the prefix cache.",
            "Do prompts begin alike? Is the memory of the cache full? docs/engines.md.",
        ),
    ]
    return [
        Rule(name=f"Streamserve{name}", expr=expr, summary=summary, look=look)
        for is_on, name, expr, summary, look in found
        if is_on
    ]


def _late(share: float, metric: str, seconds: float, who: str) -> tuple[str, str, str, str]:
    return (
        f"FirstTokenP{100 * share:g}",
        f"{quantile(share, metric)} > {seconds:g} {_ENOUGH}",
        f"{who} of the first tokens come after {seconds:g} s.",
        "The phases of a stream's row name what it waited for: docs/reference/metrics.md#phases.",
    )


def _slow(share: float, metric: str, rate: float, who: str) -> tuple[str, str, str, str]:
    return (
        f"TokensPerSecondP{100 * share:g}",
        f"1 / {quantile(share, metric)} < {rate:g} {_ENOUGH}",
        f"{who} of the answers come slower than {rate:g} tokens a second.",
        "Too many readers at once, or slow readers: the live page tells which.",
    )


def as_yaml(alerts: Alerts) -> str:
    """Return a file of rules, as Prometheus reads it."""
    lines = ["groups:", "  - name: streamserve", "    rules:"]
    for rule in rules(alerts):
        lines += rule.lines()
    return "\n".join(lines) + "\n"
