"""CPU of a web process for each token that it streams, on the demo site: by threads, by wakes, and by part.

    python -m benchmarks.web [--streams 1 8 32] [--rounds 5] [--log file memory] [--client process thread]
                             [--server daphne uvicorn] [--tree DIR] [--parts]

The site runs an echo engine, which gives each answer a token every `--step-seconds`, and streams it over SSE
(/v1/chat/completions). The log is on. CPU is that of the web process while all answers are under way: the thread of
the event loop, and all others (the log's writer; with `--client thread` the engine too, which is then no web
process's own). A wake is a voluntary context switch: a thread waited, and something came. `--tree` has the web process
of another checkout take turns with this one's; the ratio is the median of the rounds' ratios.

`--parts` profiles the event loop's thread (cProfile): the shares of its CPU by part, and how often what costs happens
for each token. What the profile does not see, waiting for the kernel and being woken, is "poll and wake"; the profiler
itself makes all of it dearer, most where many small functions are called, so read the shares.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.support.machine import describe_machine, parser, progress
from benchmarks.support.shape import model_folder
from benchmarks.web.measures import flow, profiled
from benchmarks.web.parts import report_parts
from benchmarks.web.site import CLIENTS, LOGS, ROOT, SERVERS, Contender, running


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    options.add_argument("--step-seconds", type=float, default=0.02, help="of the echo engine")
    options.add_argument("--model", default="echo", help="echo, a shape of benchmarks.support.shape, or a folder")
    options.add_argument("--models", type=Path, default=ROOT / "state" / "models", help="where shapes are made, once")
    options.add_argument("--log", nargs="+", default=["file"], choices=LOGS)
    options.add_argument("--client", nargs="+", default=["process"], choices=CLIENTS)
    options.add_argument("--server", nargs="+", default=["daphne"], choices=SERVERS)
    options.add_argument("--tree", type=Path, metavar="DIR", help="another checkout, which takes turns")
    options.add_argument("--parts", action="store_true", help="only: where the CPU of the event loop's thread goes")
    options.add_argument("--json", type=Path, help="write all rounds to this file")
    chosen = options.parse_args()
    print(describe_machine())
    trees = [ROOT] if chosen.tree is None else [chosen.tree.resolve(), ROOT]
    variants = list(itertools.product(chosen.log, chosen.client, chosen.server))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        model = ("echo", "auto")
        if chosen.model != "echo":
            folder, dtype = model_folder(chosen.model, chosen.models)
            model = str(folder), dtype
        groups = [[Contender(tree, *variant) for tree in trees] for variant in variants]
        for number, one in enumerate(itertools.chain(*groups)):
            progress(f"starting {one.name}")
            stack.enter_context(running(one, Path(name) / str(number), model, chosen.step_seconds))
        if chosen.parts:
            for one, num_streams in itertools.product(itertools.chain(*groups), chosen.streams):
                progress(f"profiling {one.name}, {num_streams} streams")
                stats = asyncio.run(profiled(one, num_streams, chosen.seconds))
                print(f"\n{one.tree.name}: {one.name}, {num_streams} streams")
                report_parts(*stats)
            return
        for number in range(chosen.rounds):
            for num_streams, group in itertools.product(chosen.streams, groups):
                progress(f"round {number + 1} of {chosen.rounds}, {num_streams} streams, {group[0].name}")
                for one in group if number % 2 == 0 else group[::-1]:
                    figures = asyncio.run(flow(one, num_streams, chosen.seconds))
                    one.figures.setdefault(num_streams, []).append(figures)
        print(describe_machine())
        for group in groups:
            report(group, chosen.streams)
        if chosen.json:
            chosen.json.write_text(json.dumps([_as_json(one) for one in itertools.chain(*groups)], indent=1))


def report(group: list[Contender], streams: list[int]) -> None:
    """Print a line for each number of streams and each checkout: medians of the rounds."""
    print(f"\n{group[0].name}: for each token")
    print(f"{'streams':>9}{'CPU ms':>9}{'loop us':>9}{'others us':>11}{'loop wakes':>12}{'other wakes':>13}", end="")
    print(f"{'frames':>8}{'ratio':>8}   checkout; rounds")
    for num_streams, one in itertools.product(streams, group):
        rounds = one.figures[num_streams]
        columns = [median(getattr(each, name) for each in rounds) for name in NAMES]
        row = f"{num_streams:9}{median(each.ms for each in rounds):9.3f}{columns[0]:9.0f}{columns[1]:11.0f}"
        row += f"{columns[2]:12.2f}{columns[3]:13.2f}{columns[4]:8.2f}"
        before = group[0].figures[num_streams]
        ratio = median(new.ms / old.ms for new, old in zip(rounds, before, strict=True))
        text = " ".join(f"{each.ms:.3f}" for each in rounds)
        print(f"{row}{ratio:8.2f}   {one.tree.name}; {text}", flush=True)


NAMES = ("loop_us", "others_us", "loop_wakes", "other_wakes", "frames")


def _as_json(one: Contender) -> dict[str, object]:
    rounds = {
        num_streams: [{"ms": each.ms, **{name: getattr(each, name) for name in NAMES}} for each in figures]
        for num_streams, figures in one.figures.items()
    }
    return {"tree": str(one.tree), "name": one.name, "rounds": rounds}


if __name__ == "__main__":
    main()
