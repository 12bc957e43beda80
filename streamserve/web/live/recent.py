"""`Recent`: what the processes of this host have counted of a model in the last minutes, judged by ALERTS. Pure.

The names are those of `/metrics`, and the thresholds mean what Prometheus' rules mean: protocol/alerts.py has both. The
history by the minute is the host's, so each of its web processes shows the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from streamserve.protocol.alerts import ENDED, LEFT_REASONS, MIN_ANSWERS, WINDOW_MINUTES, Alerts, Judged, judged
from streamserve.protocol.figures import Figures
from streamserve.protocol.glass import parting
from streamserve.protocol.measures import (
    FIRST_PAINT,
    ITL,
    NETWORK,
    READER_ITL_P95,
    READER_TTFT,
    RENDER,
    TTFT,
)
from streamserve.web.words import in_words

SHARES = (0.5, 0.95, 0.99)
# What the server measured beside what readers have reported of the same answers.
_SIDES = (
    ("Time to the first token", TTFT, READER_TTFT),
    ("Gap between tokens; of readers each answer's p95", ITL, READER_ITL_P95),
    ("Network: on the way, beyond the server's own time", "", NETWORK),
    ("First paint", "", FIRST_PAINT),
    ("Render: in the page, until it is painted", "", RENDER),
)
_LEFT = "left"  # in the columns: `request_success` by the reasons of LEFT_REASONS


@dataclass(frozen=True, kw_only=True)
class Recent:
    """Figures of one model: of the last `WINDOW_MINUTES`, and what was counted at the bounds of each minute."""

    model: str
    alerts: Alerts = field(default_factory=Alerts)
    figures: Figures = field(default_factory=Figures)
    minutes: Sequence[tuple[int, Figures, Figures]] = ()

    @property
    def num_answers(self) -> int:
        """How many answers have ended."""
        return round(ENDED.of(self.figures, self.model))

    @property
    def num_left(self) -> int:
        """How many of them were stopped, or left by their readers."""
        return self._count("request_success", finished_reason=LEFT_REASONS)

    @property
    def num_disconnects(self) -> int:
        """How many connections of readers ended before their answer."""
        return self._count("reader_disconnects")

    @property
    def num_resumes(self) -> int:
        """How many readers came back."""
        return self._count("stream_resumes")

    @cached_property
    def judged(self) -> Sequence[Judged]:
        """Each rule's figure."""
        return judged(self.alerts, self.figures, self.model)

    @property
    def beyond(self) -> Sequence[Judged]:
        """Those beyond their thresholds, the farthest first."""
        return sorted((one for one in self.judged if one.is_beyond), key=distance, reverse=True)

    def quantile(self, metric: str, share: float) -> float | None:
        """Return a percentile of a histogram; None if nothing was observed."""
        return self.figures.histogram(metric, model_name=self.model).quantile(share)

    def as_json(self) -> dict[str, Any]:
        """Return what the live page shows."""
        return {
            "minutes": WINDOW_MINUTES,
            "least_answers": MIN_ANSWERS,
            "answers": self.num_answers,
            "figures": [_shown(one) for one in self.judged],
            "num_reports": self._count("reader_reports"),
            "parting": parting(*[self.quantile(metric, 0.95) for metric in (TTFT, NETWORK, RENDER)]).words,
            "sides": [
                {"label": label, "server": self._percentiles(here), "reader": self._percentiles(there)}
                for label, here, there in _SIDES
            ],
            "by_minute": self._by_minute(),
        }

    def _percentiles(self, metric: str) -> list[float | None]:
        found = [self.quantile(metric, share) if metric else None for share in SHARES]
        return [None if seconds is None else round(seconds, 4) for seconds in found]

    def _by_minute(self) -> dict[str, list[int]]:
        """Return columns: when each minute began, and what was counted in it."""
        out: dict[str, list[int]] = {"at": [at for at, _, _ in self.minutes]}
        for name in ("request_success", "request_errors", _LEFT, "reader_disconnects", "stream_resumes"):
            metric, reasons = ("request_success", {"finished_reason": LEFT_REASONS}) if name == _LEFT else (name, {})
            counts = [
                [one.total(metric, model_name=self.model, **reasons) for one in bounds] for _, *bounds in self.minutes
            ]
            out[name] = [max(0, round(end - begin)) for begin, end in counts]
        return out

    def _count(self, metric: str, **labels: Any) -> int:
        return round(self.figures.total(metric, model_name=self.model, **labels))


def sentence(one: Judged) -> str:
    """Return what is beyond its threshold, and what that is: "First tokens come late: p95 7.2 s, …"."""
    assert one.value is not None
    return f"{one.rule.says} {_amount(one.value, one.rule.unit)}, the threshold is {_threshold(one)}"


def _threshold(one: Judged) -> str:
    limit, unit = one.rule.limit, one.rule.unit
    return f"{100 * limit:g} %" if unit == "%" else f"{limit:g} {unit}"


def _amount(value: float, unit: str) -> str:
    if unit == "s":
        return in_words(value) if value else "0 s"
    if unit == "%":
        return f"{100 * value:.{0 if value >= 0.1 or not value else 1}f} %"
    return f"{value:,.{0 if value >= 100 else 1}f} {unit}"


def _shown(one: Judged) -> dict[str, Any]:
    """Return a figure in words: the level is not told by a colour alone."""
    rule = one.rule
    level, words = "ok", "in order"
    if not rule.limit:
        level, words = "idle", "no threshold"
    if one.value is None:
        level, words = "idle", "too few answers"
    if one.is_beyond:
        level, words = "warn", f"{'under' if rule.is_least else 'over'} the threshold"
    return {
        "name": rule.name,
        "label": rule.label,
        "value": "–" if one.value is None else _amount(one.value, rule.unit),
        "limit": f"at {'least' if rule.is_least else 'most'} {_threshold(one)}" if rule.limit else "",
        "level": level,
        "words": words,
        "look": rule.look,
        "place": rule.place,
    }


def distance(one: Judged) -> float:
    """Return how many times its threshold a figure is beyond it."""
    assert one.value is not None
    return one.rule.limit / max(one.value, 1e-9) if one.rule.is_least else one.value / one.rule.limit
