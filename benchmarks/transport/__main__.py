"""CPU of a server per streamed event, from the source to the socket: streamserve and other libraries, in turns.

    python -m benchmarks.transport [--streams 1 50 200] [--rounds 5] [--only NAME ...] [--quick] [--never-readers]
    python -m benchmarks.transport --tree DIR     # this checkout and another one, FileLog under FlowServer

Every server streams the same words from the same source (apps.py); an event is one token. CPU is that of the
server's process, all threads, while all answers are under way. Start and end of an answer, which are mostly Django's
request, have a line of their own. "At a pace": a step every 50 ms gives each stream a token, as an engine does. "At
once": as fast as the server can. Ratios are to Django's StreamingHttpResponse on the same server (FlowServer: on
daphne), medians of the rounds' ratios. MemoryLog is the transport alone; FileLog commits every token to a file before
it is shown. Needs tests/requirements.txt and benchmarks/requirements.txt.

`--tree` runs the applications of another checkout with its own `.venv`, if it has one, and prints the CPU of an event
at a pace: both medians, the ratio of the medians, and the ratio of each round. The two take turns, and the one that
begins changes from round to round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.support.machine import describe_machine, parser, progress
from benchmarks.transport.measures import NUM_NEVER, answer, flow, idle, leave, resume, share
from benchmarks.transport.servers import Contender, chosen_of, contenders, running

PACE_SECONDS = 0.05


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--streams", type=int, nargs="+", default=[1, 50, 200])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    options.add_argument("--only", nargs="+", metavar="NAME", help="these contenders, and what they are compared with")
    options.add_argument("--never-readers", action="store_true", help="only: 20 readers beside 50 that never read")
    options.add_argument("--quick", action="store_true", help="one short round, as a smoke test")
    options.add_argument("--tree", type=Path, metavar="DIR", help="only: this checkout and the one in DIR")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.seconds = 1, 0.5
    print(describe_machine())
    if chosen.tree is not None:
        compare_trees(chosen.tree.resolve(), chosen)
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = chosen_of(contenders(), chosen.only)
        for one in servers:
            stack.enter_context(running(one, folder))
        if chosen.never_readers:
            report_never(servers, chosen.rounds)
            return
        for one in servers:  # first: idle streams would reuse memory that later measurements free
            progress(f"idle: {one.name}")
            one.idle = asyncio.run(idle(one))
        for number in range(chosen.rounds):
            for one in servers:
                one.answer.append(asyncio.run(answer(one)) * 1e3)
            for num_streams in chosen.streams:
                progress(f"round {number + 1} of {chosen.rounds}, {num_streams} streams")
                for pace in (PACE_SECONDS, 0.0):
                    for one in servers:
                        cpu, speed = asyncio.run(flow(one, num_streams, pace, chosen.seconds))
                        one.cpu.setdefault((num_streams, pace), []).append(cpu * 1e6)
                        one.speed.setdefault((num_streams, pace), []).append(speed)
        for num_streams in chosen.streams:
            report(servers, num_streams)
        report_costs(servers, chosen.rounds)


def compare_trees(other: Path, chosen: argparse.Namespace) -> None:
    """Measure FileLog under FlowServer in this checkout and in `other`; print the CPU of an event."""
    new = Contender("this checkout", "FlowServer", "ours_app", log="file")
    old = Contender(str(other), "FlowServer", "ours_app", log="file", tree=other)
    with tempfile.TemporaryDirectory() as folder, running(new, folder), running(old, folder):
        for number in range(chosen.rounds):
            for num_streams in chosen.streams:
                progress(f"round {number + 1} of {chosen.rounds}, {num_streams} streams")
                for one in (old, new) if number % 2 == 0 else (new, old):
                    cpu, _ = asyncio.run(flow(one, num_streams, PACE_SECONDS, chosen.seconds))
                    one.cpu.setdefault((num_streams, PACE_SECONDS), []).append(cpu * 1e6)
    print(f"\nCPU us of an event, FileLog, at a pace; old: {other}")
    print(f"{'streams':>9}{'old':>9}{'new':>9}{'ratio':>8}   rounds")
    for num_streams in chosen.streams:
        before, after = old.cpu[num_streams, PACE_SECONDS], new.cpu[num_streams, PACE_SECONDS]
        rounds = " ".join(f"{ours / theirs:.3f}" for ours, theirs in zip(after, before, strict=True))
        row = f"{num_streams:9}{median(before):9.1f}{median(after):9.1f}{median(after) / median(before):8.3f}"
        print(f"{row}   {rounds}", flush=True)


def report(servers: list[Contender], num_streams: int) -> None:
    """Print one line per contender."""
    print(f"\n{num_streams} streams{'':21}  at a pace: CPU us    ratio   at once: CPU us    ratio   events/s")
    by_name = {one.name: one for one in servers}
    for one in servers:
        columns = []
        for pace in (PACE_SECONDS, 0.0):
            base = by_name.get(one.base)
            columns += [f"{median(one.cpu[num_streams, pace]):8.0f}", ratio(one, base, (num_streams, pace))]
        speed = median(one.speed[num_streams, 0.0])
        print(f"  {one.name:32}{columns[0]:>16}{columns[1]:>9}{columns[2]:>18}{columns[3]:>9}{speed:11.0f}", flush=True)


def ratio(one: Contender, base: Contender | None, what: tuple[int, float]) -> str:
    """Return the CPU divided by the base's, the median of the rounds' ratios."""
    if base is None:
        return "-"
    return f"{median(ours / theirs for ours, theirs in zip(one.cpu[what], base.cpu[what], strict=True)):.2f}"


def report_costs(servers: list[Contender], rounds: int) -> None:
    """Print the memory of an idle stream, the time until a disconnect is noticed, of a resume, and an answer's CPU."""
    print(f"\n{'an idle stream':34}{'kB':>8}{'threads':>9}{'left ms':>10}{'resume ms':>11}{'an answer, CPU ms':>20}")
    for one in servers:
        progress(f"left, resumed: {one.name}")
        left = median(asyncio.run(leave(one)) for _ in range(4 * rounds))
        is_resumable = one.app == "ours_app" and not one.is_websocket
        resumed = median(asyncio.run(resume(one)) for _ in range(4 * rounds)) if is_resumable else None
        text = "-" if resumed is None else f"{resumed * 1e3:.2f}"
        idle_text = f"{one.idle[0]:8.1f}{one.idle[1]:9.2f}"
        print(f"  {one.name:32}{idle_text}{left * 1e3:10.2f}{text:>11}{median(one.answer):20.2f}", flush=True)


def report_never(servers: list[Contender], rounds: int) -> None:
    """Print the memory of a client that never reads, and the throughput of 20 readers beside 50 such clients."""
    print(f"\n{f'{NUM_NEVER} that never read 20 MB':34}{'kB each':>9}{'at rest':>9}", end="")
    print(f"{'20 readers: tokens/s alone, beside':>34}{'ratio':>7}")
    for one in (one for one in servers if not one.is_websocket):
        progress(f"never read: {one.name}")
        grown, rests, without, beside, ratio = share(one, rounds)
        print(f"  {one.name:32}{grown:9.0f}{rests!s:>9}{without:24.0f}{beside:10.0f}{ratio:7.2f}", flush=True)


if __name__ == "__main__":
    main()
