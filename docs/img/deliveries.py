"""Draw the decision guide of deliveries.md: `python docs/img/deliveries.py` writes deliveries.svg.

Above: three questions lead to a delivery. Below: what the engine does with all of them at once, as seats over steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 1000, 700
DESCRIBED = (
    "Three questions lead to a response, a stream, a job or a batch. Below: three ways to fill an engine's steps."
)
PICTURE = Path(__file__).with_name("deliveries.svg")

STYLE = """
text { font: 14px system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: #20242a }
.ground { fill: #fff; stroke: #e3e0da }
.question { fill: #f2f0ec }
.card { fill: #e6f0ec; stroke: #1f6b59; stroke-width: 1.5 }
.head { font-size: 17px; font-weight: 650 }
.name { font-size: 16px; font-weight: 650 }
.small, .quiet { font-size: 12.5px }
.quiet { fill: #656b73 }
.arrow { fill: none; stroke: #656b73; stroke-width: 1.6 }
.tip { fill: #656b73 }
.label { font-size: 12.5px; fill: #1f6b59; font-weight: 600 }
.rule { stroke: #e3e0da }
.seat { fill: #f2f0ec }
.a { fill: #1f6b59 } .b { fill: #7a5200 } .c { fill: #3b5fa0 } .d { fill: #a63a2b }
.idle { fill: none; stroke: #b9b4aa; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e7e5e1 }
  .ground { fill: #1e2125; stroke: #31363c }
  .question, .seat { fill: #2b3036 }
  .card { fill: #22332e; stroke: #7fcab3 }
  .quiet { fill: #9ba1a8 }
  .arrow { stroke: #9ba1a8 }
  .tip { fill: #9ba1a8 }
  .label { fill: #7fcab3 }
  .rule { stroke: #31363c }
  .a { fill: #7fcab3 } .b { fill: #e8c47a } .c { fill: #8fb0ea } .d { fill: #f0a294 }
  .idle { stroke: #5a6068 }
}
"""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A card: its name, who waits, how long it takes, how many there are."""

    name: str
    who: str
    how_long: str
    how_many: str
    example: str


DELIVERIES = (
    Delivery("response", "a program, for all of it", "seconds", "one", "a title, a label"),
    Delivery("stream", "a person, reading along", "seconds to a minute", "one", "a chat"),
    Delivery("job", "a webhook, a later visit", "minutes, past a restart", "some", "the review of a case"),
    Delivery("batch", "no reader", "as the engine has time", "thousands", "tonight's summaries"),
)


@dataclass(frozen=True, slots=True)
class Batching:
    """A way to fill the engine's steps: for each seat what it computes, as (kind, steps); "." is an idle place."""

    name: str
    lines: tuple[str, str]
    seats: tuple[tuple[tuple[str, int], ...], ...]


BATCHINGS = (
    Batching(
        "Static batching",
        ("A fixed set starts together and is padded: all", "wait for the longest, and its places stand idle."),
        (
            (("a", 4), (".", 8), ("a", 7), (".", 1)),
            (("b", 12), ("b", 3), (".", 5)),
            (("c", 6), (".", 6), ("c", 8)),
            (("d", 9), (".", 3), ("d", 5), (".", 3)),
        ),
    ),
    Batching(
        "Dynamic batching",
        ("What has come within a few milliseconds is a", "batch, full or not. It still ends with its longest."),
        (
            ((".", 2), ("a", 4), (".", 5), ("a", 7), (".", 2)),
            ((".", 2), ("b", 9), ("b", 3), (".", 6)),
            ((".", 2), ("c", 6), (".", 3), ("c", 8), (".", 1)),
            ((".", 11), ("d", 9)),
        ),
    ),
    Batching(
        "Continuous batching, as here",
        ("Decided anew at each step: an answer joins", "when a seat is free, and leaves when it ends."),
        (
            (("a", 4), ("b", 3), ("c", 8), ("d", 5)),
            (("b", 12), ("a", 8)),
            (("c", 6), ("d", 5), ("b", 9)),
            (("d", 9), ("a", 7), ("c", 4)),
        ),
    ),
)


def text(x: float, y: float, words: str, style: str = "", anchor: str = "") -> str:
    """Return a line of text."""
    anchored = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{style}" x="{x:g}" y="{y:g}"{anchored}>{escape(words)}</text>'


def question(x: float, y: float, lines: Sequence[str]) -> str:
    """Return a question, centred at (x, y)."""
    width, height = 250, 20 + 20 * len(lines)
    corner = f'x="{x - width / 2:g}" y="{y - height / 2:g}"'
    box = f'<rect class="question" {corner} width="{width}" height="{height}" rx="10"/>'
    first = y - 10 * (len(lines) - 1) + 5
    return box + "".join(text(x, first + 20 * row, line, anchor="middle") for row, line in enumerate(lines))


def arrow(points: Sequence[tuple[float, float]], label: str, at: tuple[float, float], anchor: str = "middle") -> str:
    """Return a line with a tip at its end, which leads down or aside, and its label."""
    way = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    (x, y), (before_x, _) = points[-1], points[-2]
    turn = 0 if x == before_x else (-90 if x > before_x else 90)
    tip = f'<path class="tip" d="M-5 -8L0 0L5 -8z" transform="translate({x:g} {y:g}) rotate({turn})"/>'
    return f'<path class="arrow" d="{way}"/>{tip}{text(*at, label, "label", anchor)}'


def card(delivery: Delivery, x: float, y: float) -> str:
    """Return a delivery's card, with its left upper corner at (x, y)."""
    rows = (
        ("Waits", delivery.who),
        ("Takes", delivery.how_long),
        ("Number", delivery.how_many),
        ("Like", delivery.example),
    )
    out = f'<rect class="card" x="{x:g}" y="{y:g}" width="228" height="124" rx="12"/>'
    out += text(x + 14, y + 27, delivery.name.capitalize(), "name")
    for row, (name, words) in enumerate(rows):
        at = y + 50 + 20 * row
        out += text(x + 14, at, name, "quiet") + text(x + 74, at, words, "small")
    return out


def timeline(batching: Batching, x: float, y: float) -> str:
    """Return a way of batching: its name, two lines, and its seats over twenty steps."""
    out = text(x, y, batching.name, "name")
    out += "".join(text(x, y + 22 + 17 * row, line, "quiet") for row, line in enumerate(batching.lines))
    for seat, pieces in enumerate(batching.seats):
        left, top = x, y + 54 + 22 * seat
        for kind, steps in pieces:
            width = 15 * steps
            shape = f'x="{left + 1:g}" y="{top:g}" width="{width - 2:g}" height="17" rx="4"'
            out += f'<rect class="{"idle" if kind == "." else kind}" {shape}/>'
            left += width
    return out


def drawn() -> str:
    """Return the picture."""
    top, ask, cards = 84, 190, 268
    lefts = [20 + 244 * index for index in range(4)]
    middles = [left + 114 for left in lefts]
    parts = [
        text(24, 38, "Which delivery?", "head"),
        question(500, top, ["Does a connection stay open", "until the answer is there?"]),
        question(256, ask, ["Does a person read along?"]),
        question(744, ask, ["How many are there?"]),
        arrow([(375, top), (256, top), (256, ask - 20)], "yes: seconds to a minute", (364, top - 9), "end"),
        arrow([(625, top), (744, top), (744, ask - 20)], "no: longer, or no reader waits", (636, top - 9), "start"),
        arrow([(256, ask + 20), (256, 232), (middles[0], 232), (middles[0], cards)], "no, a program", (190, 226)),
        arrow([(256, ask + 20), (256, 232), (middles[1], 232), (middles[1], cards)], "yes", (316, 226)),
        arrow([(744, ask + 20), (744, 232), (middles[2], 232), (middles[2], cards)], "some", (684, 226)),
        arrow([(744, ask + 20), (744, 232), (middles[3], 232), (middles[3], cards)], "thousands", (806, 226)),
        *(card(delivery, left, cards) for delivery, left in zip(DELIVERIES, lefts, strict=True)),
        f'<path class="rule" d="M20 424H{WIDTH - 20}"/>',
        text(24, 458, "All four share the engine's steps", "head"),
        text(
            976, 458, "A line is a seat, a block an answer; dashes are a place that computes nothing.", "quiet", "end"
        ),
        *(timeline(batching, 24 + 326 * index, 496) for index, batching in enumerate(BATCHINGS)),
        text(24, 672, "steps of the engine →", "quiet"),
    ]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{DESCRIBED}">
<style>{STYLE}</style>
<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="14"/>
{chr(10).join(parts)}
</svg>
"""


if __name__ == "__main__":
    PICTURE.write_text(drawn())
