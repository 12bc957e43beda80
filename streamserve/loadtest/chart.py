"""`chart`: a run as an SVG: a line for each reader, from its question to the end of its answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from streamserve.loadtest.report import Report
from streamserve.loadtest.run import Outcome

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 16, 744, 84, 34
_ROW, _LEAST_HEIGHT = 5, 120
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 15px }
.quiet { fill: #57606a }
.grid { stroke: #d0d7de; stroke-width: 1 }
.wait { stroke: #afb8c1; stroke-width: 3 }
.comes { stroke: #0969da; stroke-width: 3 }
.late { stroke: #bc4c00; stroke-width: 3 }
.ended { stroke: #cf222e; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9198a1 } .grid { stroke: #3d444d }
  .wait { stroke: #656c76 } .comes { stroke: #58a6ff } .late { stroke: #f0883e } .ended { stroke: #ff7b72 }
}
"""
_KEY = (
    ("wait", "waits for the first token", 16),
    ("comes", "the answer comes", 222),
    ("late", "its first token was late", 378),
    ("ended", "not served", 570),
)


def chart(report: Report, outcomes: Sequence[Outcome]) -> str:
    """Return the SVG of a run that is over. It follows the page's light or dark scheme, and loads nothing."""
    end = max([report.seconds, *(one.ended_at or 0.0 for one in outcomes)])
    height = max(_LEAST_HEIGHT, _ROW * len(outcomes)) + _TOP + _BOTTOM
    scale = (_RIGHT - _LEFT) / end
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(report.verdict())}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="24">{escape(_title(report))}</text>',
        f'<text class="quiet" x="{_LEFT}" y="44">{escape(_subtitle(report))}</text>',
        *_key(),
        *_axis(end, scale, height),
    ]
    for index, one in enumerate(outcomes):
        parts += _bars(one, _TOP + 4 + index * _ROW, scale)
    return "\n".join([*parts, "</svg>", ""])


def _title(report: Report) -> str:
    return (
        f"{report.num_readers} readers in {report.seconds:g} s: the budgets {'hold' if report.holds else 'do not hold'}"
    )


def _subtitle(report: Report) -> str:
    served = f"{report.goodput:.2f} of {report.num_readers / report.seconds:.2f} requests a second kept their budgets"
    return f"{report.site}, model {report.model}: {served}"


def _key() -> list[str]:
    return [
        f'<path class="{name}" d="M{x} 62H{x + 18}"/><text class="quiet" x="{x + 24}" y="66">{words}</text>'
        for name, words, x in _KEY
    ]


def _axis(end: float, scale: float, height: int) -> list[str]:
    step = next((step for step in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600) if end / step <= 10), 1200)
    parts = []
    for second in range(0, int(end) + 1, step):
        x = _LEFT + second * scale
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP - 6}V{height - _BOTTOM + 4}"/>')
        parts.append(f'<text class="quiet" x="{x:.1f}" y="{height - 12}" text-anchor="middle">{second}</text>')
    return [*parts, f'<text class="quiet" x="{_RIGHT}" y="{height - 12}" text-anchor="end">s</text>']


def _bars(one: Outcome, y: float, scale: float) -> list[str]:
    reading, ended_at = one.reading, one.ended_at or 0.0
    begun = reading.came_at[0] if reading.came_at else ended_at
    is_late = begun > reading.visit.first_due_at
    name = "ended" if not one.is_whole else "late" if is_late else "comes"
    spans = [("wait", reading.visit.arrives_at, begun), (name, begun, max(ended_at, begun + 2 / scale))]
    return [
        f'<path class="{kind}" d="M{_LEFT + start * scale:.1f} {y}H{_LEFT + until * scale:.1f}"/>'
        for kind, start, until in spans
        if until > start
    ]
