"""`Score`: the result of one run, by heads, by work and by class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.qoe.machines import Machine
from benchmarks.qoe.simulation import Simulation
from benchmarks.qoe.usage import Shares
from benchmarks.qoe.workload import FLOODER
from streamserve.loadtest.reading import Reading
from streamserve.loadtest.visits import MIX


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Shares of all readers, 0 to 1.

    `by_work` weighs each reader by what the request costs the machine. `by_class` follows `MIX`. `others`: of the
    tenants that do not flood. `area` is a mean (see `Reading.area`). `parks`, `pauses`, `preemptions`: a minute.
    """

    served: float
    by_work: float
    by_class: tuple[float, ...]
    whole: float
    area: float
    first_p50: float
    first_p90: float
    flooder: float | None
    others: float
    time: Shares
    parks: float
    pauses: float
    preemptions: float


def score(simulation: Simulation, machine: Machine) -> Score:
    """Return the score of a simulation that is over."""
    readings = simulation.readings
    firsts = sorted(one.first_seconds for one in readings)
    work = [machine.price(one.visit) for one in readings]
    done = sum(seconds for seconds, one in zip(work, readings, strict=True) if one.is_served)
    flood = [one for one in readings if one.visit.tenant == FLOODER]
    minutes, usage = simulation.clock.now / 60, simulation.runner.usage
    return Score(
        served=share_served(readings),
        by_work=done / sum(work),
        by_class=tuple(share_served([one for one in readings if one.visit.latency_class == name]) for name in MIX),
        whole=_share(readings, lambda one: one.is_whole),
        area=fmean(one.area for one in readings),
        first_p50=firsts[len(firsts) // 2],
        first_p90=firsts[int(len(firsts) * 0.9)],
        flooder=share_served(flood) if flood else None,
        others=share_served([one for one in readings if one.visit.tenant != FLOODER]),
        time=usage.shares(readings),
        parks=simulation.num_parks / minutes,
        pauses=usage.num_pauses / minutes,
        preemptions=simulation.core.stats.preemptions / minutes,
    )


def share_served(readings: Sequence[Reading]) -> float:
    """Return the share of readers served at their own pace."""
    return _share(readings, lambda one: one.is_served)


def _share(readings: Iterable[Reading], holds: Callable[[Reading], bool]) -> float:
    answers = [holds(one) for one in readings]
    return sum(answers) / len(answers) if answers else 0.0
