"""The report as Markdown, JSON and a chart: an SVG of plain elements, whose colours follow `prefers-color-scheme`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path

from benchmarks.peers.readers import Figures
from benchmarks.peers.results import Results
from benchmarks.peers.servers import LLAMA, OURS, TRANSFORMERS, VLLM

NOISE = "The machine was busy: these figures are noise, and no ratios are drawn from them."
_HEADS = {
    "itl_ms": "ITL, ms",
    "ttft_ms": "TTFT, ms",
    "ttft_p95_ms": "TTFT p95, ms",
    "tokens_per_second": "tok/s",
    "floor_share": "share of the weight-read floor",
    "engine_cpu_ms": "engine, CPU ms a token",
    "web_cpu_ms": "web process, CPU ms a token",
    "cold_ms": "TTFT, ms",
    "again_ms": "again, ms",
    "gap_p99_ms": "gaps p99, ms",
    "gap_max_ms": "gaps max, ms",
}
_COLOURS = {OURS: "c0", LLAMA: "c1", VLLM: "c2", TRANSFORMERS: "c3"}
_WIDTH, _LEFT, _RIGHT, _BAR, _PANEL_GAP, _TOP = 760, 190, 70, 22, 46, 84
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 15px } .quiet { fill: #57606a }
.c0 { fill: #0969da } .c1 { fill: #bf3989 } .c2 { fill: #1a7f37 } .c3 { fill: #9a6700 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #9198a1 }
  .c0 { fill: #58a6ff } .c1 { fill: #f778ba } .c2 { fill: #3fb950 } .c3 { fill: #d29922 }
}
"""


def write(results: Results, folder: Path) -> str:
    """Write peers.json, peers.md and peers.svg into `folder`; return the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    text = as_markdown(results)
    (folder / "peers.md").write_text(text)
    (folder / "peers.json").write_text(json.dumps(as_json(results), indent=1) + "\n")
    (folder / "peers.svg").write_text(as_svg(results))
    return text


def as_json(results: Results) -> dict[str, object]:
    """Return all rounds, their medians and, of a quiet machine, the ratios."""
    loads = results.loads
    found: dict[str, object] = asdict(results) | {"medians": {load: results.medians(load) for load in loads}}
    if results.is_quiet:
        found["ratios"] = {load: results.ratios(load) for load in loads}
    return found


def as_markdown(results: Results) -> str:
    """Return a table of medians and a table of ratios for each load."""
    about = results.about
    lines = [
        f"`{about['command']}`: model {about['model']}, medians of {about['rounds']} rounds, {about['date']};"
        f" {about['machine']}, DRAM {results.bandwidth / 1e9:.1f} GB/s.",
        "",
    ]
    if not results.is_quiet:
        lines += [f"**{NOISE}**", *(f"- {noise}" for noise in results.noise), ""]
    for load in results.loads:
        lines += [f"## {load}", "", *_table("contender", results.medians(load)), ""]
        ratios = results.ratios(load) if results.is_quiet else {}
        if ratios:
            lines += [*_table("ratio", ratios), ""]
    if results.missing:
        lines += ["## Not measured", "", *(f"- {name}: {reason}" for name, reason in results.missing.items()), ""]
    return "\n".join(lines)


def _table(head: str, rows: Mapping[str, Figures]) -> list[str]:
    figures = [figure for figure in _HEADS if any(figure in row for row in rows.values())]
    is_ratio = head == "ratio"
    lines = [f"| {head} | {' | '.join(_HEADS[figure].removesuffix(', ms' * is_ratio) for figure in figures)} |"]
    lines.append(f"|---{'|---' * len(figures)}|")
    for name, row in rows.items():
        cells = (_number(row[figure], is_ratio) if figure in row else "" for figure in figures)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _number(value: float, is_ratio: bool) -> str:
    return f"{value:.2f}" if is_ratio or value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def as_svg(results: Results) -> str:
    """Return bars of the inter-token latency, a panel for each number of streams; each panel has its own scale."""
    panels = {load: results.medians(load) for load in results.loads if load.endswith("at once")}
    kinds = {entry.name: entry.kind for entry in results.entries}
    y, parts = float(_TOP), []
    for load, rows in panels.items():
        parts.append(f'<text x="16" y="{y:.0f}" class="title">{escape(load)}</text>')
        most = max((row["itl_ms"] for row in rows.values()), default=0.0) or 1.0
        for name, row in rows.items():
            y += _BAR
            width = row["itl_ms"] / most * (_WIDTH - _LEFT - _RIGHT)
            parts.append(f'<text x="{_LEFT - 8}" y="{y:.0f}" text-anchor="end">{escape(name)}</text>')
            bar = f'x="{_LEFT}" y="{y - 12:.0f}" width="{width:.1f}" height="{_BAR - 7}" rx="2"'
            parts.append(f'<rect {bar} class="{_COLOURS[kinds[name]]}"/>')
            value = _number(row["itl_ms"], is_ratio=False)
            parts.append(f'<text x="{_LEFT + width + 6:.1f}" y="{y:.0f}" class="quiet">{value}</text>')
        y += _PANEL_GAP
    note = NOISE if not results.is_quiet else f"{results.about['model']}, {results.about['machine']}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y:.0f}" role="img">'
    title = '<text x="16" y="28" class="title">Milliseconds between tokens, by streams at once</text>'
    note = f'<text x="16" y="50" class="quiet">{escape(note)}</text>'
    return "\n".join([head, f"<style>{_STYLE}</style>", title, note, *parts, "</svg>"]) + "\n"
