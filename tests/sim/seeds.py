"""Random runs by seed: `python -m tests.sim.seeds --seed 17` repeats one, `--seeds 60` runs many.

Exits 1 at the first law that is broken.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import sys
import time
import traceback

from tests.sim.proposals import RandomRun
from tests.sim.simulation import Simulation
from tests.sim.workload import (
    choose_mix,
    choose_shape,
    happen,
    have_few_places,
    hold_many,
    return_ahead,
    wait_behind,
    with_windows,
)

NUM_EVENTS = 250
# One in so many seeds is run twice.
REPEAT_EVERY = 10
# How runs begin, by the seed modulo 20: with what hardly ever happens by chance. All others begin empty.
BEGINNINGS = {
    **dict.fromkeys((1, 6, 11, 16), hold_many),
    **dict.fromkeys((5, 15), wait_behind),
    8: have_few_places,
    18: return_ahead,
}


def run(seed: int) -> Simulation:
    """Run random events in a random engine, mostly steps, to the end."""
    rng = random.Random(seed)
    shape, mix = choose_shape(rng), choose_mix(rng)
    if seed % 4 == 3:
        shape = with_windows(random.Random(seed), shape)
    sim = BEGINNINGS.get(seed % 20, lambda rng, shape: Simulation(shape))(rng, shape)
    for _ in range(NUM_EVENTS):
        happen(rng, sim, mix)
        sim.step()
    sim.finish()
    return sim


def check_repeats(seed: int) -> Simulation:
    """The same seed makes the same plans: nothing in the core depends on time, hashes, addresses, or chance."""
    once, again = run(seed), run(seed)
    assert once.plans == again.plans, "31: other plans the second time"
    return again


def propose(seed: int) -> int:
    """Run random events in an engine that takes several tokens a step; return the number of steps."""
    proposing = RandomRun(seed)
    proposing.play()
    proposing.check()
    return proposing.num_steps


def main() -> int:
    """Run the seeds, count the steps, print the seed that failed."""
    parser = argparse.ArgumentParser(prog="tests.sim.seeds", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--seeds", type=int, default=100, help="how many, from 0 on")
    parser.add_argument("--cpu-seconds", type=int, help="end the process after so many")
    options = parser.parse_args()
    if options.cpu_seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (options.cpu_seconds, resource.RLIM_INFINITY))
    logging.disable()
    num_steps, started_at = 0, time.process_time()
    for seed in range(options.seeds) if options.seed is None else [options.seed]:
        try:
            num_steps += (check_repeats if seed % REPEAT_EVERY == 0 else run)(seed).num_steps
            num_steps += propose(seed)
        except Exception as error:
            traceback.print_exc()
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    seconds = time.process_time() - started_at
    print(f"{num_steps:,} steps checked in {seconds:.1f} s ({num_steps / seconds:,.0f} a second)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
