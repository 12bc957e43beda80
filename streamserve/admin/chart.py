"""Bars of the admin's charts: plain SVG from the server, for pages without a script. The template is chart.html."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH, HEIGHT = 900, 160  # the chart's units; the page stretches them
FILLED = 0.8  # of a column's width


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle. Lengths are in the units of the chart, from its top; `name` gives its colour, `title` its words."""

    name: str
    x: float
    y: float
    width: float
    height: float
    title: str


def bar(name: str, x: float, y: float, width: float, height: float, title: str) -> Bar:
    """Return a bar whose lengths are rounded, so that the page is short."""
    return Bar(name, round(x, 2), round(y, 2), round(width, 2), round(height, 2), title)
