"""Alerts: thresholds of a site's figures. A rule is defined once and read twice: as a Prometheus alert over the metrics
of metrics.py, and by the live page over the same metrics of the last ten minutes. Pure.

    ALERTS ──► `rules` ──► manage.py streamserve_alerts ──► a file for Prometheus
                       └─► `judged` ──────────────────────► the live page

A rule needs `MIN_ANSWERS` answers in its window, so that one slow answer at night wakes nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from streamserve.protocol.figures import Figures
from streamserve.protocol.metrics import PREFIX

WINDOW_MINUTES = 10
WINDOW, FOR = f"{WINDOW_MINUTES}m", "5m"
MIN_ANSWERS = 20
# Answers that their readers did not want to the end.
LEFT_REASONS = ("cancelled", "abandoned")


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


class Figure(Protocol):
    """A figure of each model, as Prometheus asks for it and as it is computed here."""

    @property
    def promql(self) -> str:
        """The expression, by `model_name`."""

    def of(self, figures: Figures, model: str) -> float | None:
        """Return its value in a window; None where there is nothing to compute it of."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value of now."""

    metric: str

    @property
    def promql(self) -> str:
        """The metric."""
        return f"{PREFIX}{self.metric}"

    def of(self, figures: Figures, model: str) -> float | None:
        """Return it."""
        return figures.total(self.metric, model_name=model)


@dataclass(frozen=True, slots=True)
class Quantile:
    """What `share` of a histogram do not exceed; `is_rate`: one divided by that."""

    metric: str
    share: float
    is_rate: bool = False

    @property
    def promql(self) -> str:
        """The quantile of the histogram in the window."""
        return f"{'1 / ' if self.is_rate else ''}{quantile(self.share, self.metric)}"

    def of(self, figures: Figures, model: str) -> float | None:
        """Return it; None of an empty histogram."""
        value = figures.histogram(self.metric, model_name=model).quantile(self.share)
        return 1.0 / value if self.is_rate and value else value


@dataclass(frozen=True, slots=True)
class Count:
    """How much a counter grew; of `reasons`, where these are given."""

    metric: str
    reasons: tuple[str, ...] = ()

    @property
    def promql(self) -> str:
        """The increase in the window."""
        where = f'{{finished_reason=~"{"|".join(self.reasons)}"}}' if self.reasons else ""
        return f"sum by (model_name) (increase({PREFIX}{self.metric}_total{where}[{WINDOW}]))"

    def of(self, figures: Figures, model: str) -> float:
        """Return it."""
        reasons = {"finished_reason": self.reasons} if self.reasons else {}
        return figures.total(self.metric, model_name=model, **reasons)


_DONE, _FAILED = Count("request_success"), Count("request_errors")
_LEFT = Count("request_success", LEFT_REASONS)
_HITS, _QUERIES = Count("prefix_cache_hits"), Count("prefix_cache_queries")


class _Ended:
    """How many answers have ended, in any way. To Prometheus a counter that was never counted is not there."""

    promql = f"(({_DONE.promql} or 0 * {_FAILED.promql}) + ({_FAILED.promql} or 0 * {_DONE.promql}))"

    def of(self, figures: Figures, model: str) -> float:
        """Return it."""
        return _DONE.of(figures, model) + _FAILED.of(figures, model)


ENDED = _Ended()


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a whole."""

    part: Count
    whole: Count | _Ended

    @property
    def promql(self) -> str:
        """The quotient."""
        return f"{self.part.promql} / {self.whole.promql}"

    def of(self, figures: Figures, model: str) -> float | None:
        """Return it; None of nothing."""
        whole = self.whole.of(figures, model)
        return self.part.of(figures, model) / whole if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A threshold of a figure: `limit` is its highest good value, or with `is_least` its lowest; 0 turns it off.

    `label` and `unit` ("s", "tokens/s", "%") are for tables, `says` begins the live page's sentence of a value beyond
    the threshold, `summary` is Prometheus' sentence. `look` is what helps, `place` where that is in the admin: the
    streams, the failed streams, or a panel of the live page.
    """

    name: str
    figure: Figure
    limit: float
    is_least: bool = False
    needs_answers: bool = True
    label: str
    unit: str
    says: str
    summary: str
    look: str
    place: str

    @property
    def expr(self) -> str:
        """Prometheus' condition."""
        enough = f" and {ENDED.promql} >= {MIN_ANSWERS}" if self.needs_answers else ""
        return f"{self.figure.promql} {'<' if self.is_least else '>'} {self.limit:g}{enough}"

    def is_beyond(self, value: float) -> bool:
        """Return whether a value is beyond the threshold."""
        return bool(self.limit) and (value < self.limit if self.is_least else value > self.limit)

    def lines(self) -> Iterator[str]:
        """Yield its YAML, as an item of a list."""
        yield f"      - alert: {self.name}"
        yield f"        expr: {self.expr}"
        yield f"        for: {FOR}"
        yield "        labels: {severity: warning}"
        yield "        annotations:"
        yield f'          summary: "{self.summary}"'
        yield f'          description: "{self.look}"'


@dataclass(frozen=True, slots=True)
class Judged:
    """A rule's figure of a model: its value, None where too few answers ended, and if that is beyond the threshold."""

    rule: Rule
    value: float | None
    is_beyond: bool


def quantile(share: float, metric: str) -> str:
    """Return PromQL of a quantile of a histogram in the window, of each model."""
    return f"histogram_quantile({share}, sum by (le, model_name) (rate({PREFIX}{metric}_bucket[{WINDOW}])))"


def rules(alerts: Alerts) -> list[Rule]:
    """Return the rules that are not turned off."""
    return [rule for rule in _all(alerts) if rule.limit]


def judged(alerts: Alerts, figures: Figures, model: str) -> list[Judged]:
    """Return every figure of a model in a window of `WINDOW_MINUTES`, also where its rule is turned off."""
    is_enough = ENDED.of(figures, model) >= MIN_ANSWERS
    out = []
    for rule in _all(alerts):
        value = rule.figure.of(figures, model) if is_enough or not rule.needs_answers else None
        out.append(Judged(rule, value, value is not None and rule.is_beyond(value)))
    return out


def _all(alerts: Alerts) -> list[Rule]:
    return [
        _late(0.5, alerts.first_token_p50_seconds, "Half"),
        _late(0.95, alerts.first_token_p95_seconds, "One of twenty"),
        _slow(0.5, alerts.tokens_per_second_p50, "Half"),
        _slow(0.95, alerts.tokens_per_second_p95, "One of twenty"),
        Rule(
            name="StreamserveQueueLong",
            figure=Gauge("queue_seconds"),
            limit=alerts.queue_seconds,
            needs_answers=False,
            label="Queue",
            unit="s",
            says="The queue is long:",
            summary=f"What waits takes over {alerts.queue_seconds:g} s to compute.",
            look="More readers than the engine serves: docs/fairness.md, streamserve_capacity.",
            place="queue",
        ),
        Rule(
            name="StreamserveAnswersFail",
            figure=Share(_FAILED, ENDED),
            limit=alerts.error_share,
            label="Answers that failed",
            unit="%",
            says="Answers fail:",
            summary=f"Over {100 * alerts.error_share:g} % of the answers end in an error.",
            look="The codes are in request_errors_total, their meanings in docs/reference/errors.md.",
            place="failed",
        ),
        Rule(
            name="StreamserveReadersLeave",
            figure=Share(_LEFT, ENDED),
            limit=alerts.cancel_share,
            label="Answers stopped or left",
            unit="%",
            says="Readers stop or leave their answers:",
            summary=f"Over {100 * alerts.cancel_share:g} % of the answers are stopped, or left by their readers.",
            look="Compare with the times to the first token; look at bad answers in the admin.",
            place="leaving",
        ),
        Rule(
            name="StreamserveCacheMisses",
            figure=Share(_HITS, _QUERIES),
            limit=alerts.cache_hit_share,
            is_least=True,
            label="Prefix cache hits",
            unit="%",
            says="The prefix cache has little of the prompts:",
            summary=f"Under {100 * alerts.cache_hit_share:g} % of the prompts' tokens are found in the prefix cache.",
            look="Do prompts begin alike? Is the memory of the cache full? docs/engines.md.",
            place="memory",
        ),
    ]


def _late(share: float, seconds: float, who: str) -> Rule:
    return Rule(
        name=f"StreamserveFirstTokenP{100 * share:g}",
        figure=Quantile("time_to_first_token_seconds", share),
        limit=seconds,
        label=f"First token p{100 * share:g}",
        unit="s",
        says=f"First tokens come late: p{100 * share:g}",
        summary=f"{who} of the first tokens come after {seconds:g} s.",
        look="The phases of a stream's row name what it waited for: docs/reference/metrics.md#phases.",
        place="streams",
    )


def _slow(share: float, rate: float, who: str) -> Rule:
    return Rule(
        name=f"StreamserveTokensPerSecondP{100 * share:g}",
        figure=Quantile("request_time_per_output_token_seconds", share, is_rate=True),
        limit=rate,
        is_least=True,
        label=f"Tokens a second p{100 * share:g}",
        unit="tokens/s",
        says=f"Answers come slowly: p{100 * share:g}",
        summary=f"{who} of the answers come slower than {rate:g} tokens a second.",
        look="Too many readers at once, or slow readers: the live page tells which.",
        place="readers",
    )


def as_yaml(alerts: Alerts) -> str:
    """Return a file of rules, as Prometheus reads it."""
    lines = ["groups:", "  - name: streamserve", "    rules:"]
    for rule in rules(alerts):
        lines += rule.lines()
    return "\n".join(lines) + "\n"
