"""Share of readers served at their own pace under overload: order key and parks beside a plain queue.

    python -m benchmarks.qoe [--seats 16,64] [--loads 1,1.5,2] [--seeds 3] [--cost a,b,c,d,e] [--real 1.5]

Simulated: the real core with a fake clock. The time of a step comes from a linear model, fitted to the demo model's
steps on this machine (or given by `--cost`, as printed). Requests come as a Poisson process; their readers read 5, 10,
20 or 30 tokens a second, the class assumes 20. "1x" is the rate of requests that the engine finishes when its queue is
never empty. Every contender gets the same requests:

    ours            the order key, both parks; a reader's position is what it has read (a page that acks as it shows)
    ours, received  the same; a reader's position is all that was sent to it (as on a fast connection without acks)
    no park         the order key alone
    fcfs            one class for the order, no debt, no park; a request that waits too long is refused, as with ours
    fcfs, endless   the same without refusals

`--real LOAD` runs the demo model through `Streams` with readers in real time: ours and fcfs, in turns.
"served" is the share of readers served at their own pace: benchmarks/readers.py has the definition.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from benchmarks.clients import HELPDESK
from benchmarks.machine import describe_machine, parser, progress
from benchmarks.readers import FIRST_SLACK_SECONDS, PACES, STALL_SECONDS, Score, draw_visits, score
from benchmarks.simulated import Simulation, StepCost, fit_step_cost
from streamserve.engine.config import CLASSES, EngineConfig, LatencyClass, ModelConfig

NEVER = 1 << 40
# At this rate the queue of an engine of this size is never empty; the first seconds fill it.
FLOOD_PER_SECOND, FILL_SECONDS = 40.0, 30.0
_LATE = (("first_p50", 10), ("first_p90", 8))


def main() -> None:
    """Simulate, and run in real time with --real."""
    options = parse_options()
    print(describe_machine())
    print(
        f"served: first token within the class's budget + {FIRST_SLACK_SECONDS:g} s, and after that no more than"
        f" {STALL_SECONDS:g} s of waiting in all"
    )
    if options.seeds:
        cost = StepCost.parse(options.cost) if options.cost else fit()
        print(f"a step: {cost}")
        for seats in map(int, options.seats.split(",")):
            simulate(cost, seats, options)
    if options.real:
        from benchmarks.paced import run_real

        seats = int(options.seats.split(",")[0])
        asyncio.run(run_real(contenders(seats, options.blocks), options))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--loads", default="1,1.5,2")
    options.add_argument("--seats", default="16,64", help="max_num_seqs; the first is that of --real")
    options.add_argument("--blocks", type=int, default=2048, help="of 32 tokens")
    options.add_argument("--seeds", type=int, default=3, help="0: no simulation")
    options.add_argument("--seconds", type=float, default=90.0, help="in which requests come")
    options.add_argument("--cost", help="of a step, instead of fitting it: five numbers as printed, comma separated")
    options.add_argument("--only", help="contenders, separated by ;")
    options.add_argument("--real", type=float, help="a load to run with the demo model, e.g. 1.5")
    options.add_argument("--rounds", type=int, default=2, help="of --real")
    return options.parse_args()


def contenders(seats: int, num_blocks: int) -> dict[str, tuple[EngineConfig, str]]:
    """Return each contender's configuration, and the meaning of a reader's position."""
    ours = EngineConfig(num_blocks=num_blocks, max_num_seqs=seats)
    no_park = replace(ours, lead_tokens=NEVER, min_ahead_seconds=float(NEVER))
    plain = replace(no_park, hungry_seconds=math.inf, max_debt_seconds=math.inf)
    return {
        "ours": (ours, "read"),
        "ours, received": (ours, "received"),
        "no park": (no_park, "read"),
        "fcfs": (replace(plain, classes=one_class()), "read"),
        "fcfs, endless": (replace(plain, classes=one_class(float(NEVER))), "read"),
    }


def one_class(queue_seconds: float | None = None) -> Mapping[str, LatencyClass]:
    """Return classes that are alike to the order key; each keeps the bound of its queue unless one is given."""
    return {
        name: replace(
            one,
            ttft_seconds=0.5,
            max_queue_seconds=queue_seconds or one.max_queue_seconds,
            max_late_seconds=queue_seconds or one.ttft_seconds - 0.5 + one.max_late_seconds,
        )
        for name, one in CLASSES.items()
    }


def fit() -> StepCost:
    """Measure the demo model in fp32 on one thread."""
    import torch

    from streamserve.engine.model.runner import load_runner

    progress("fitting the step time to the demo model")
    torch.set_num_threads(1)
    model = ModelConfig(alias="helpdesk", path=str(HELPDESK), dtype="float32", num_threads=1)
    runner = load_runner(model, EngineConfig(num_blocks=2048))
    cost, error = fit_step_cost(runner, runner.vocab_size)
    print(f"demo model, fp32, one thread, CPU time; half of the steps are within {error:.0%} of the fit")
    runner.close()
    return cost


def simulate(cost: StepCost, seats: int, options: argparse.Namespace) -> None:
    """Print a table: every load, every contender."""
    chosen = contenders(seats, options.blocks)
    capacity = measure_capacity(cost, chosen["fcfs, endless"][0], options.seconds)
    if options.only:
        chosen = {name: chosen[name] for name in options.only.split(";")}
    print(f"\n{seats} seats; 1x is {capacity:.2f} requests/s for {options.seconds:g} s; means of {options.seeds} seeds")
    print_head()
    for load in map(float, options.loads.split(",")):
        seen: dict[str, list[Score]] = {name: [] for name in chosen}
        for seed in range(1, options.seeds + 1):
            visits = draw_visits(seed, capacity * load, options.seconds)
            for name, (config, acks) in chosen.items():
                progress(f"{seats} seats, {load:g}x, seed {seed}, {name}: {len(visits)} requests")
                simulation = Simulation(cost, config, visits, acks=acks)
                readings = simulation.run()
                seen[name].append(score(readings, simulation.num_parks, simulation.runner.num_computed))
        for name, scores in seen.items():
            print_line(f"{load:g}x {name}", scores)


def measure_capacity(cost: StepCost, config: EngineConfig, seconds: float) -> float:
    """Return the requests per second that the engine finishes when its queue is never empty."""
    progress("measuring what the engine can do")
    simulation = Simulation(cost, config, draw_visits(99, FLOOD_PER_SECOND, FILL_SECONDS + seconds))
    readings = simulation.run(until=FILL_SECONDS + seconds)
    return sum(one.is_whole and one.came_at[-1] > FILL_SECONDS for one in readings) / seconds


def print_head() -> None:
    """Print the names of the columns."""
    paces = "".join(f"{f'at {pace:g}/s':>9}" for pace in PACES)
    print(
        f"{'':22}{'served':>8}{paces}{'whole':>8}{'area':>7}{'TTFT p50':>10}{'p90':>8}{'parks':>8}{'computed':>10}",
        flush=True,
    )


def print_line(title: str, scores: list[Score]) -> None:
    """Print the means of the runs."""

    def mean(name: str) -> float:
        return fmean(getattr(one, name) for one in scores)

    paces = "".join(f"{fmean(one.by_pace[index] for one in scores):9.0%}" for index in range(len(PACES)))
    late = "".join(f"{mean(name):{width}.2f}" for name, width in _LATE)
    print(
        f"{title:22}{mean('served'):8.1%}{paces}{mean('whole'):8.0%}{mean('area'):7.2f}{late}"
        f"{mean('num_parks'):8.0f}{mean('num_computed'):10.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
