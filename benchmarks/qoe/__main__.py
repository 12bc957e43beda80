"""Share of readers served at their own pace under overload: the engine beside plain queues and beside upper bounds.

    python -m benchmarks.qoe [--machines cpu,gpu,h200] [--seats 16,64,256] [--loads 1,1.5,2,3] [--bursts 0.6,0.8]
                             [--flood 1.2] [--seconds 300] [--seeds 3] [--results FILE] [--chart FILE] [--quick]

Simulated: the real core on a fake clock. Requests come as a Poisson process; their readers read 5, 10, 20 or 30 tokens
a second. "Served": the first token within the class's budget + 2 s, and after that no more than 1 s of waiting in all.
1x is demand ÷ capacity: the requests of the mix whose prices in full batches add up to the machine's time
(machines.py). Every contender gets the same requests:

    ours              the engine as it comes; a reader's position is what it has read (a page that acknowledges)
    ours, received    the same; a reader's position is all that was sent to it (a fast connection)
    in time           no positions, no parks; the order key, and each class refused when its first token would be late
    fcfs              first come, first served; refused after 2.5 s
    fcfs, endless     the same, never refused

Columns: served by heads, with the lowest and the highest of the seeds, and ÷ neutral; by work; by class; answers that
ended; area (delivered ÷ wanted over time); first token (- where most got none); where the machine's time went; parks,
pauses (a step without a sequence that decoded in the one before), and preemptions a minute. bounds.py defines "at most"
and "neutral".

A 300 s run takes 10 to 100 s. `--quick` is one of 60 s for each contender. `--results FILE` keeps what has run, and a
later call continues from there. `--fit DIR` measures the step cost of a model on this machine and simulates with it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.qoe.bounds import Bounds
from benchmarks.qoe.contenders import contenders
from benchmarks.qoe.machines import MACHINES, Machine, StepCost, machine_of
from benchmarks.qoe.report import describe, draw, print_head, print_line
from benchmarks.qoe.results import BOUNDS, Job, Results
from benchmarks.qoe.score import Score
from benchmarks.qoe.step_fit import NUM_BLOCKS, fit_model
from benchmarks.qoe.workload import Workload
from benchmarks.support.machine import describe_machine, parser, progress

FLOOD_BASE = 0.8


def main() -> None:
    """Simulate, print, and draw."""
    options = parse_options()
    print(describe_machine())
    results = Results(options.results)
    for machine in chosen_machines(options):
        print(f"\n{describe(machine)}")
        for workload in chosen_workloads(options):
            measure(machine, workload, results, options)
        if options.chart is not None:
            draw_chart(machine, results, options)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--machines", default="cpu", help=f"of {','.join(MACHINES)}")
    options.add_argument("--seats", default="16", help="most sequences of a step, e.g. 16,64,256")
    options.add_argument("--loads", default="1,1.5,2,3", help="demand ÷ capacity; empty: none")
    options.add_argument("--bursts", default="", help="base loads with bursts, e.g. 0.6,0.8")
    options.add_argument("--flood", type=float, default=0.0, help=f"load of a flooding tenant beside {FLOOD_BASE}")
    options.add_argument("--seconds", type=float, default=300.0, help="in which requests come")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--only", help="contenders, separated by ;")
    options.add_argument("--cost", help="of a step: five numbers (ms, us, us, us, ns) instead of --machines")
    options.add_argument("--fit", type=Path, metavar="DIR", help="measure the cost with the model of a folder")
    options.add_argument("--dtype", default="float32", help="of --fit")
    options.add_argument("--fit-steps", type=int, default=240, help="steps that --fit measures")
    options.add_argument("--results", type=Path, metavar="FILE", help="keep results here, and continue from them")
    options.add_argument("--chart", type=Path, metavar="FILE", help="draw the loads of the last machine as an SVG")
    options.add_argument("--jobs", type=int, default=1, help="processes")
    options.add_argument("--quick", action="store_true", help="one load, one seed, 60 s")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.loads, chosen.seeds, chosen.seconds = "1.5", 1, 60.0
    chosen.contenders = chosen.only.split(";") if chosen.only else list(contenders())
    if unknown := set(chosen.contenders) - set(contenders()):
        options.error(f"no contender {', '.join(unknown)}; there are: {'; '.join(contenders())}")
    if unknown := set(chosen.machines.split(",")) - set(MACHINES):
        options.error(f"no machine {', '.join(unknown)}; there are: {', '.join(MACHINES)}")
    return chosen


def chosen_machines(options: argparse.Namespace) -> list[Machine]:
    """Return the machines, each with each number of seats."""
    seats = [int(number) for number in options.seats.split(",")]
    if options.fit is not None:
        fit = fit_model(options.fit, options.dtype, options.fit_steps)
        print(
            f"{options.fit.name}, {options.dtype}, one thread, CPU time: {fit.cost}; of {fit.num_steps} steps, half are"
            f" within {fit.error_p50:.0%} of the fit and nine in ten within {fit.error_p90:.0%}"
        )
        return [Machine(options.fit.name, fit.cost, NUM_BLOCKS, number) for number in seats]
    if options.cost:
        return [Machine("given", StepCost.parse(options.cost), NUM_BLOCKS, number) for number in seats]
    return [machine_of(name, number) for name in options.machines.split(",") for number in seats]


def chosen_workloads(options: argparse.Namespace) -> list[Workload]:
    """Return the workloads in the order of the tables."""
    workloads = [Workload(load=load) for load in _numbers(options.loads)]
    workloads += [Workload(load=load, has_bursts=True) for load in _numbers(options.bursts)]
    if options.flood:
        calm = Workload(load=FLOOD_BASE)
        workloads += [calm, replace(calm, flood=options.flood)]
    return workloads


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def jobs_of(machine: Machine, workload: Workload, contender: str, options: argparse.Namespace) -> list[Job]:
    """Return a contender's runs, one for each seed."""
    job = Job(machine=machine, workload=workload, seconds=options.seconds, seed=1, contender=contender)
    return [replace(job, seed=seed) for seed in range(1, options.seeds + 1)]


def measure(machine: Machine, workload: Workload, results: Results, options: argparse.Namespace) -> None:
    """Run what has no result yet; print a table."""
    names = [BOUNDS, *options.contenders]
    jobs = {name: jobs_of(machine, workload, name, options) for name in names}
    num_left = sum(job not in results for one in jobs.values() for job in one)
    started_at = time.monotonic()
    for job in results.run([job for one in jobs.values() for job in one], options.jobs):
        num_left -= 1
        where = f"{machine.name}, {machine.seats} seats, {workload}, seed {job.seed}, {job.contender}"
        progress(f"{where}: {time.monotonic() - started_at:.0f} s; {num_left} left of this table")
    all_bounds = [one for job in jobs[BOUNDS] if isinstance(one := results.get(job), Bounds)]
    print_head(workload, all_bounds)
    for name in options.contenders:
        print_line(name, _scores(results, jobs[name]), all_bounds)


def _scores(results: Results, jobs: Sequence[Job]) -> list[Score]:
    return [one for job in jobs if isinstance(one := results.get(job), Score)]


def draw_chart(machine: Machine, results: Results, options: argparse.Namespace) -> None:
    """Write the chart of a machine's loads."""
    loads = [Workload(load=load) for load in _numbers(options.loads)]

    def points(name: str, field: str) -> list[tuple[float, float]]:
        means = [
            fmean(getattr(results.get(job), field) for job in jobs_of(machine, load, name, options)) for load in loads
        ]
        return [(load.load, mean) for load, mean in zip(loads, means, strict=True)]

    options.chart.write_text(
        draw(
            "Readers served at their own pace",
            f"simulated: {machine.name}, {machine.seats} seats, {options.seconds:g} s, seeds: {options.seeds}",
            {name: points(name, "served") for name in options.contenders},
            {"at most": points(BOUNDS, "heads"), "neutral": points(BOUNDS, "neutral")},
        )
    )
    progress(f"{options.chart} is written")


if __name__ == "__main__":
    main()
