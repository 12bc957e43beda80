"""Share of readers served at their own pace, over HTTP in real time: our site, first come first served, and vLLM.

    python -m benchmarks.qoe_http [--model helpdesk|S|DIR] [--load 1.5] [--seats 16] [--seconds 40] [--rounds 5]
                                  [--pace 1] [--vllm PYTHON] [--quick]

Each server is a site of its own with an engine process and one daphne worker under FlowServer, or vLLM; all stay up.
In each round every contender gets the same open-loop readers (arrivals, lengths and paces as in `benchmarks.qoe`), one
contender after the other, and the one that begins changes. 1x is the rate at which the site that serves first come,
first served makes the tokens of the mix with all seats taken, measured before the first round and printed.

    ours              readers over WebSockets, who acknowledge what they have read, every 0.25 s
    ours, received    the same site; readers over SSE, who take all at once: their position is all that was sent
    fcfs              one class for the order, no parks, refused after 2.5 s; readers over SSE
    vllm              vLLM's own queue without a bound; readers over SSE. `--vllm` is the Python of its environment

Client, servers and whatever else the machine does share its cores: read the ratios of one run. `--pace 0.5` halves the
paces of all readers, for a machine that is too slow for 30 tokens a second a seat.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from benchmarks.qoe.contenders import FCFS, OURS, RECEIVED_ONLY
from benchmarks.qoe.score import share_served
from benchmarks.qoe_http.readers import ACKS, TAKEN, VLLM, Prompts, read_all
from benchmarks.qoe_http.servers import Model, Server, site, vllm
from benchmarks.support.machine import describe_machine, parser, progress
from benchmarks.support.shape import model_folder
from streamserve.loadtest.reading import Reading
from streamserve.loadtest.visits import MIX, Visit, draw_visits

# So many requests a second are more than any of these servers can answer; the first seconds fill the seats.
FLOOD_PER_SECOND, _CAPACITY_FROM, _CAPACITY_UNTIL = 16.0, 6.0, 18.0


@dataclass(frozen=True, slots=True)
class Contender:
    """A server and how its readers read."""

    server: Server
    kind: str


def main() -> None:
    """Serve, measure in rounds, print."""
    options = parse_options()
    print(describe_machine())
    with tempfile.TemporaryDirectory(prefix="qoe-http-") as name:
        parent = Path(name)
        folder, dtype = model_folder(options.model, options.keep or parent)
        num_threads = 1 if options.model == "helpdesk" else None
        model = Model(folder=folder, dtype=dtype, seats=options.seats, num_threads=num_threads)
        with serving(model, parent, options.vllm) as contenders:
            asyncio.run(measure(contenders, Prompts(folder), options))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--model", default="helpdesk", help="helpdesk, S or a folder")
    options.add_argument("--keep", type=Path, metavar="DIR", help="where S is made, and found the next time")
    options.add_argument("--load", type=float, default=1.5)
    options.add_argument("--seats", type=int, default=16)
    options.add_argument("--seconds", type=float, default=40.0, help="in which readers come")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--pace", type=float, default=1.0, help="factor of all readers' paces")
    options.add_argument("--per-second", type=float, help="requests a second that are 1x, instead of measuring it")
    options.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="vLLM beside ours, by the Python of its environment"
    )
    options.add_argument("--quick", action="store_true", help="one round of 10 s, as a smoke test")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.seconds = 1, 10.0
    return chosen


@contextlib.contextmanager
def serving(model: Model, parent: Path, python: Path | None) -> Iterator[dict[str, Contender]]:
    """Run all servers while the block runs."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(site(model, parent / "ours", is_fcfs=False))
        fcfs = stack.enter_context(site(model, parent / "fcfs", is_fcfs=True))
        contenders = {
            OURS: Contender(ours, ACKS),
            RECEIVED_ONLY: Contender(ours, TAKEN),
            FCFS: Contender(fcfs, TAKEN),
        }
        if python is not None:
            contenders["vllm"] = Contender(stack.enter_context(vllm(model, parent / "vllm", python)), VLLM)
        yield contenders


async def measure(contenders: dict[str, Contender], prompts: Prompts, options: argparse.Namespace) -> None:
    """Measure all contenders in rounds, and print."""
    for number, one in enumerate(contenders.values()):
        await read_all(one.server, draw_visits(0, 2.0, 2.0), one.kind, prompts, -number - 1, 60.0)  # warms up
    per_second = options.per_second or await measure_capacity(contenders[FCFS], prompts)
    print(
        f"{options.model}, {options.seats} seats, 1x = {per_second:.2f} requests/s, load {options.load:g}x for"
        f" {options.seconds:g} s, paces x{options.pace:g}, {options.rounds} rounds"
    )
    names = list(contenders)
    seen: dict[str, list[list[Reading]]] = {name: [] for name in names}
    for number in range(options.rounds):
        visits = _visits(number + 1, per_second * options.load, options)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            load = os.getloadavg()[0]
            progress(f"round {number + 1} of {options.rounds}, {name}: {len(visits)} readers, load average {load:.1f}")
            one, give_up = contenders[name], 3 * options.seconds + 60
            readings = await read_all(one.server, visits, one.kind, prompts, number * 10 + names.index(name), give_up)
            progress(f"  served {share_served(readings):.0%}")
            seen[name].append(readings)
    report(seen)


def _visits(seed: int, per_second: float, options: argparse.Namespace) -> list[Visit]:
    visits = draw_visits(seed, per_second, options.seconds)
    return [replace(visit, pace=visit.pace * options.pace) for visit in visits]


async def measure_capacity(contender: Contender, prompts: Prompts) -> float:
    """Return how many answers' worth of tokens a server makes in a second while more wait than it has seats."""
    progress("measuring the capacity")
    visits = draw_visits(99, FLOOD_PER_SECOND, _CAPACITY_UNTIL)
    readings = await read_all(contender.server, visits, contender.kind, prompts, -10, _CAPACITY_UNTIL)
    num_tokens = sum(at > _CAPACITY_FROM for one in readings for at in one.came_at)
    return num_tokens / (_CAPACITY_UNTIL - _CAPACITY_FROM) / fmean(visit.answer_len for visit in visits)


def report(seen: dict[str, list[list[Reading]]]) -> None:
    """Print a line for each contender: the mean and the spread of the rounds, and the ratio to fcfs by rounds."""
    print(
        f"{'':16}{'served %':>18}{'/'.join(name[:4] for name in MIX):>16}{'whole':>7}{'TTFT p50':>10}{'ours ÷ it':>20}"
    )
    for name, rounds in seen.items():
        served = [100 * share_served(readings) for readings in rounds]
        every = [one for readings in rounds for one in readings]
        by_class = "/".join(
            f"{100 * share_served([one for one in every if one.visit.latency_class == kind]):.0f}" for kind in MIX
        )
        whole = 100 * sum(one.is_whole for one in every) / len(every)
        spread = f"{fmean(served):.1f} ({min(served):.0f}-{max(served):.0f})"
        first = sorted(one.first_seconds for one in every)[len(every) // 2]
        print(
            f"{name:16}{spread:>18}{by_class:>16}{whole:7.0f}{first:10.1f}{_ratio(seen[OURS], rounds):>20}", flush=True
        )


def _ratio(ours: Sequence[Sequence[Reading]], other: Sequence[Sequence[Reading]]) -> str:
    """Return the median of the rounds' ratios, with the lowest and the highest; rounds without a reader served drop."""
    pairs = [(share_served(one), share_served(two)) for one, two in zip(ours, other, strict=True)]
    ratios = [one / two for one, two in pairs if two]
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"


if __name__ == "__main__":
    main()
