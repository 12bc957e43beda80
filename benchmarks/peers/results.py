"""What was measured, by contender, load and figure; medians over the rounds, and ratios of like with like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.peers.readers import Figures
from benchmarks.peers.servers import LIKE, OURS, Contender

BEST = "best peer"
MORE_IS_BETTER = ("tokens_per_second", "floor_share")
# CPU is compared within a server, not between servers.
_NOT_COMPARED = ("engine_cpu_ms", "web_cpu_ms", "floor_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender as the report knows it."""

    name: str
    kind: str
    precision: str
    variant: str
    weight_bytes: float

    @classmethod
    def of(cls, contender: Contender) -> Entry:
        """Return what is kept of a contender when its server has ended."""
        return cls(
            name=contender.name,
            kind=contender.kind,
            precision=contender.precision,
            variant=contender.variant,
            weight_bytes=contender.weight_bytes,
        )


@dataclass(slots=True, kw_only=True)
class Results:
    """All rounds of a run. `missing`: why a contender is not among them. `bandwidth`: bytes a second, of all cores."""

    about: dict[str, Any]
    bandwidth: float
    entries: list[Entry] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    noise: list[str] = field(default_factory=list)
    is_quiet: bool = True
    rounds: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)

    def add(self, name: str, load: str, figures: Figures) -> None:
        """Keep what one round of a load showed."""
        kept = self.rounds.setdefault(name, {}).setdefault(load, {})
        for figure, value in figures.items():
            kept.setdefault(figure, []).append(value)

    @property
    def loads(self) -> list[str]:
        """All loads, in the order in which they were first measured."""
        return list(dict.fromkeys(load for loads in self.rounds.values() for load in loads))

    def medians(self, load: str) -> dict[str, Figures]:
        """Return each contender's medians over the rounds; with one stream also its share of the weight-read floor."""
        found = {}
        for entry in self.entries:
            rounds = self.rounds.get(entry.name, {}).get(load)
            if rounds:
                found[entry.name] = {figure: median(values) for figure, values in rounds.items()}
                if load == at_once(1) and found[entry.name]["itl_ms"]:
                    floor_ms = entry.weight_bytes / self.bandwidth * 1e3
                    found[entry.name]["floor_share"] = floor_ms / found[entry.name]["itl_ms"]
        return found

    def ratios(self, load: str) -> dict[str, Figures]:
        """Return ours ÷ each peer of the same precision, and ÷ the best of them where there are several."""
        medians, found = self.medians(load), {}
        for ours, peers in self._pairs():
            alike = {name: medians[name] for name in peers if name in medians}
            if ours not in medians or not alike:
                continue
            if len(alike) > 1:
                alike[BEST] = _best(list(alike.values()))
            for name, figures in alike.items():
                found[f"{ours} ÷ {name}"] = {
                    figure: medians[ours][figure] / value
                    for figure, value in figures.items()
                    if value and figure in medians[ours] and figure not in _NOT_COMPARED
                }
        return found

    def _pairs(self) -> Iterator[tuple[str, list[str]]]:
        """Yield ours and its peers; of a variant of ours, ours without it."""
        for ours in self.entries:
            if ours.kind == OURS and ours.variant:
                yield ours.name, [f"{OURS} {ours.precision}"]
            elif ours.kind == OURS:
                peers = [entry for entry in self.entries if entry.kind != OURS]
                yield ours.name, [entry.name for entry in peers if entry.precision in LIKE[ours.precision]]


def at_once(num_streams: int) -> str:
    """Return the name of the load of as many streams."""
    return f"{num_streams} at once"


def _best(figures: list[Figures]) -> Figures:
    names = set.intersection(*(set(one) for one in figures))
    return {
        name: (max if name in MORE_IS_BETTER else min)(one[name] for one in figures)
        for name in figures[0]
        if name in names
    }
