"""The chart of the docs: the share of readers served over the load, as an SVG of plain elements and one style sheet.

Its background is the page's: colours and text follow `prefers-color-scheme`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

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
