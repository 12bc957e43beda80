"""The tables and the chart of `benchmarks.qoe`.

Tables have means over the seeds, and in brackets the lowest and the highest. The chart of the docs is the share of
readers served over the load, as an SVG of plain elements and one style sheet. Its background is the page's: colours and
text follow `prefers-color-scheme`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import fmean

from benchmarks.qoe.bounds import Bounds
from benchmarks.qoe.machines import Machine
from benchmarks.qoe.score import Score
from benchmarks.qoe.workload import Workload
from streamserve.loadtest.visits import MIX

_HEAD = (
    f"{'':16}{'served %':>16}{'/neutral':>10}{'by work':>9}{'/'.join(name[:4] for name in MIX):>15}{'whole':>7}"
    f"{'area':>6}{'TTFT p50':>10}{'p90':>6}{'useful/late/stalled/again/idle':>32}"
    f"{'parks':>8}{'pauses':>8}{'preempted':>11}"
)
_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 210, 58, 52
_LABEL_GAP = 17.0
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 15px }
.quiet { fill: #57606a }
.grid { stroke: #d0d7de; stroke-width: 1 }
.line { fill: none; stroke-width: 2.5; stroke-linejoin: round }
.c0 { --c: #0969da } .c1 { --c: #bf3989 } .c2 { --c: #1a7f37 } .c3 { --c: #9a6700 } .c4 { --c: #cf222e }
.bound { --c: #57606a }
.bound .line { stroke-width: 1.5; stroke-dasharray: 6 5 }
.line { stroke: var(--c) } .dot { fill: var(--c) } .name { fill: var(--c) }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9198a1 } .grid { stroke: #3d444d }
  .c0 { --c: #58a6ff } .c1 { --c: #f778ba } .c2 { --c: #3fb950 } .c3 { --c: #d29922 } .c4 { --c: #ff7b72 }
  .bound { --c: #9198a1 }
}
"""

Series = Mapping[str, Sequence[tuple[float, float]]]


def describe(machine: Machine) -> str:
    """Describe a machine."""
    return (
        f"{machine.name}, {machine.seats} seats, {machine.num_blocks} blocks of 32 tokens: a step takes {machine.cost};"
        f" a full one has {machine.full_batch:.0f} sequences, so 1x is {machine.capacity:.2f} requests/s"
    )


def print_head(workload: Workload, all_bounds: Sequence[Bounds]) -> None:
    """Print the workload, its bounds, and the names of the columns."""
    print(f"\n{workload}")
    heads, work, neutral, held, careful = (
        100 * fmean(getattr(one, name) for one in all_bounds)
        for name in ("heads", "work", "neutral", "held", "careful")
    )
    print(f"  at most {heads:.1f} % by heads, {work:.1f} % by work; neutral {neutral:.1f} %", end="")
    print(f", with this memory {held:.1f} %, and careful {careful:.1f} %")
    tail = f"{'others':>9}{'flooder':>9}" if workload.flood else ""
    print(_HEAD + tail, flush=True)


def print_line(name: str, scores: Sequence[Score], all_bounds: Sequence[Bounds]) -> None:
    """Print the results of one contender."""

    def mean(field: str) -> float:
        return fmean(getattr(one, field) for one in scores)

    served = [100 * one.served for one in scores]
    neutral = mean("served") / fmean(one.neutral for one in all_bounds)
    by_class = "/".join(f"{100 * fmean(one.by_class[index] for one in scores):.0f}" for index in range(len(MIX)))
    names = ("useful", "late", "stalled", "recomputed", "idle")
    time = "/".join(f"{100 * fmean(getattr(one.time, field) for one in scores):.0f}" for field in names)
    spread = f"{fmean(served):.1f} ({min(served):.0f}-{max(served):.0f})"
    flooders = [one.flooder for one in scores if one.flooder is not None]
    tail = f"{100 * mean('others'):9.1f}{100 * fmean(flooders):9.1f}" if flooders else ""
    print(
        f"{name:16}{spread:>16}{neutral:10.2f}{100 * mean('by_work'):9.1f}{by_class:>15}{100 * mean('whole'):7.0f}"
        f"{mean('area'):6.2f}{_seconds(mean('first_p50')):>10}{_seconds(mean('first_p90')):>6}{time:>32}"
        f"{mean('parks'):8.0f}{mean('pauses'):8.0f}{mean('preemptions'):11.1f}{tail}",
        flush=True,
    )


def _seconds(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "-"


def draw(title: str, note: str, series: Series, bounds: Series) -> str:
    """Return an SVG with a line for each series of (load, share served); those of `bounds` are dashed."""
    loads = sorted({load for points in (*series.values(), *bounds.values()) for load, _ in points})
    if len(loads) < 2:
        raise ValueError("a chart needs two loads or more: see --loads")
    lines = [(name, points, "bound") for name, points in bounds.items()]
    lines += [(name, points, f"c{index % 5}") for index, (name, points) in enumerate(series.items())]
    places = _spread([_y(points[-1][1]) for _, points, _ in lines])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>',
        f'<text class="quiet" x="{_LEFT}" y="41">{escape(note)}</text>',
        *_axes(loads),
        *(_line(*line, place, loads) for line, place in zip(lines, places, strict=True)),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _x(load: float, loads: Sequence[float]) -> float:
    return _LEFT + (load - loads[0]) / (loads[-1] - loads[0]) * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _axes(loads: Sequence[float]) -> list[str]:
    right, parts = _WIDTH - _RIGHT, []
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text class="quiet" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
    for load in loads:
        parts.append(
            f'<text class="quiet" x="{_x(load, loads):.1f}" y="{_HEIGHT - _BOTTOM + 20}"'
            f' text-anchor="middle">{load:g}×</text>'
        )
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text class="quiet" x="{middle:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">demand ÷ capacity</text>'
    )
    return parts


def _line(name: str, points: Sequence[tuple[float, float]], kind: str, place: float, loads: Sequence[float]) -> str:
    """Return a line with its dots and its name, which a thin line joins where it had to move."""
    corners = [(_x(load, loads), _y(share)) for load, share in points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    is_measured = kind != "bound"
    dots = "".join(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in corners if is_measured)
    x, y = corners[-1]
    label = f"{name} {100 * points[-1][1]:.0f} %"
    return (
        f'<g class="{kind}"><path class="line" d="{path}"/>{dots}'
        f'<path class="grid" d="M{x + 6:.1f} {y:.1f}L{x + 18:.1f} {place:.1f}"/>'
        f'<text class="name" x="{x + 22:.1f}" y="{place + 4:.1f}">{escape(label)}</text></g>'
    )


def _spread(heights: Sequence[float]) -> list[float]:
    """Return the heights of labels, in the same order of lines, moved apart where they would overlap."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    places = list(heights)
    for before, index in pairwise(order):
        places[index] = max(places[index], places[before] + _LABEL_GAP)
    lowest = float(_HEIGHT - _BOTTOM)
    for index in reversed(order):
        places[index] = min(places[index], lowest)
        lowest = places[index] - _LABEL_GAP
    return places
