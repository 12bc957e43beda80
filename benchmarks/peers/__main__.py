"""Our site beside llama-server, vLLM and `transformers serve`, over HTTP, in turns.

    python -m benchmarks.peers --llama f16,q8_0,q4_0,q4_K_M --vllm --transformers [--ours fp32,bf16,int8,int4]
                               [--model S|qwen3-0.6b|qwen3-1.7b|DIR] [--streams 1,8,32] [--rounds 5] [--busy] [--quick]

Each peer is installed into a virtual environment of its own, and the models are made, both in `--cache` and once. A
peer that cannot be installed or does not start is named with the reason, and the others run. All servers stay up; in
each round every contender gets the same loads, each when the contender before rests, and the order rotates:

    streams     as many prompts at once: ITL, TTFT, tok/s, CPU ms a token, and the share of the weight-read floor
    long        a prompt of `--long` tokens, and the same again
    mixed       a prompt of `--mixed` tokens beside 8 streams: the gaps of these
    prefix      prompts that share a long beginning which the server has seen
    arrivals    an open loop: readers come by a Poisson process, `--rate` a second

Requests name a temperature; for the rest each server's defaults stand. Before each round, and over it, the CPU that
other programs take is measured: on a busy machine no ratios are printed (`--busy`: medians alone). peers.json,
peers.md and peers.svg go to `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.install import PEERS, NotInstalled, install
from benchmarks.peers.quiet import free_bytes, read_bandwidth
from benchmarks.peers.readers import Lengths
from benchmarks.peers.report import NOISE, write
from benchmarks.peers.results import Entry, Results
from benchmarks.peers.rounds import LOADS, Busy, Rounds
from benchmarks.peers.servers import (
    FORMATS,
    LIKE,
    LLAMA,
    OURS,
    TRANSFORMERS,
    VLLM,
    Bench,
    Contender,
    Start,
    make_bench,
)
from benchmarks.qoe_http.readers import Prompts
from benchmarks.qoe_http.servers import ROOT
from benchmarks.support.machine import describe_machine, parser, progress
from benchmarks.support.shape import model_folder

_BUSY_STATUS = 3


def main() -> int:
    """Install, make, serve, measure in rounds, report; return the exit status."""
    options = parse_options()
    print(describe_machine())
    options.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="peers-") as name, contextlib.ExitStack() as stack:
        folder, _ = model_folder(options.model, options.cache)
        results = Results(about=describe(options), bandwidth=read_bandwidth())
        seats = max(*options.streams, options.lengths.beside + 1)
        bench = make_bench(folder.resolve(), seats, Path(name), options.cache, options.threads)
        install_all(bench, options, results)
        contenders = start_all(bench, planned(bench, options), results, stack)
        try:
            asyncio.run(Rounds(contenders, Prompts(folder), results, options).run())
        except Busy as busy:
            print(f"{busy}. {NOISE} Wait, or take --busy for the medians alone.", file=sys.stderr)
            return _BUSY_STATUS
    print(write(results, options.out))
    return 0


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--model", default="S", help="S, qwen3-0.6b, qwen3-1.7b, tiny or a folder")
    options.add_argument("--ours", default="fp32,bf16,int8,int4", help="precisions of our site")
    options.add_argument("--llama", default="", metavar="FORMATS", help="f32, f16, bf16, q8_0, q4_0, q4_K_M")
    options.add_argument("--vllm", nargs="?", const="fp32,bf16", default="", metavar="PRECISIONS")
    options.add_argument("--transformers", nargs="?", const="bf16", default="", metavar="PRECISIONS")
    options.add_argument("--environ", action="append", default=[], metavar="NAME=VALUE", help="a variant of ours")
    options.add_argument("--streams", default="1,8,32", help="streams at once, separated by commas")
    options.add_argument("--loads", default=",".join(LOADS), help="which loads")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--long", type=int, default=Lengths().long, help="tokens of the long prompt")
    options.add_argument("--mixed", type=int, default=Lengths().mixed, help="tokens of the prompt beside 8 streams")
    options.add_argument("--rate", type=float, help="arrivals a second; else half of what can be served")
    options.add_argument("--threads", type=int, help="of every engine but vLLM's; else all cores")
    options.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "streamserve-peers", metavar="DIR")
    options.add_argument("--out", type=Path, default=ROOT / "build" / "peers", metavar="DIR")
    options.add_argument("--busy", action="store_true", help="measure on a busy machine: medians, no ratios")
    options.add_argument("--quick", action="store_true", help="one round with a tiny model, as a smoke test")
    chosen = options.parse_args()
    chosen.cache = chosen.cache.resolve()  # servers run in the repository's folder
    chosen.lengths = Lengths(long=chosen.long, mixed=chosen.mixed)
    if chosen.quick:
        chosen.model, chosen.rounds, chosen.streams, chosen.rate, chosen.busy = "tiny", 1, "1,4", 2.0, True
        chosen.lengths = Lengths(answer=8, long=100, mixed=300, beside=4, beside_answer=160, arrivals_seconds=2.0)
    chosen.streams = sorted(int(number) for number in _listed(chosen.streams))
    known = {"loads": LOADS, "ours": LIKE, LLAMA: FORMATS, VLLM: ("fp32", "bf16"), TRANSFORMERS: ("fp32", "bf16")}
    for name, names in known.items():
        listed = _listed(getattr(chosen, name))
        setattr(chosen, name, listed)
        if not set(listed) <= set(names):
            options.error(f"--{name} knows {', '.join(names)}")
    return chosen


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the report says of the run; the command is without the folders of this machine."""
    words = ["python -m benchmarks.peers", *sys.argv[1:]]
    for name in ("--cache", "--out"):
        if name in words:
            at = words.index(name)
            del words[at : at + 2]
    return {
        "command": " ".join(words),
        "model": options.model,
        "rounds": options.rounds,
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
    }


def install_all(bench: Bench, options: argparse.Namespace, results: Results) -> None:
    """Install the peers that are asked for; why one can't be goes to `results.missing`."""
    for name, peer in PEERS.items():
        if getattr(options, name):
            try:
                bench.pythons[name] = install(peer, options.cache)
            except NotInstalled as reason:
                results.missing[name] = str(reason)


def planned(bench: Bench, options: argparse.Namespace) -> Iterator[tuple[str, Start]]:
    """Yield a name and a start for each contender that is asked for and installed."""
    for precision in options.ours:
        yield f"{OURS} {precision}", partial(bench.ours, precision, {})
        for text in options.environ:
            yield f"{OURS} {precision} {text}", partial(bench.ours, precision, dict([text.split("=", 1)]))
    for name in bench.pythons:
        for precision in getattr(options, name):
            yield f"{name} {precision}", partial(getattr(bench, name), precision)


def start_all(
    bench: Bench, plan: Iterable[tuple[str, Start]], results: Results, stack: contextlib.ExitStack
) -> list[Contender]:
    """Start every contender that can be; why the others can't goes to `results.missing`."""
    contenders: list[Contender] = []
    for name, start in plan:
        try:
            if free_bytes() < bench.least_bytes:
                raise RuntimeError("the memory is full; name fewer contenders")
            contenders.append(stack.enter_context(start()))
            results.entries.append(Entry.of(contenders[-1]))
        except RuntimeError as error:
            results.missing[name] = _reason(str(error))
            progress(f"{name} is left out: {results.missing[name]}")
    return contenders


def _reason(text: str) -> str:
    """Return the first line of a failure, and the end of the log below it from the last error that it names."""
    first, *log = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    at = max((number for number, line in enumerate(log) if re.search(r"\bError\b|\w+Error: ", line)), default=-1)
    return " ".join([first, *log[at:]])[:400]


if __name__ == "__main__":
    sys.exit(main())
