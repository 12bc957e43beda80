"""The tables of `benchmarks.qoe`: means over the seeds, and in brackets the lowest and the highest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from benchmarks.qoe.bounds import Bounds
from benchmarks.qoe.machines import Machine
from benchmarks.qoe.score import Score
from benchmarks.qoe.workload import MIX, Workload

_HEAD = (
    f"{'':16}{'served %':>16}{'/neutral':>10}{'by work':>9}{'/'.join(name[:4] for name in MIX):>15}{'whole':>7}"
    f"{'area':>6}{'TTFT p50':>10}{'p90':>6}{'useful/late/stalled/again/idle':>32}"
    f"{'parks':>8}{'pauses':>8}{'preempted':>11}"
)


def describe(machine: Machine) -> str:
    """Describe a machine."""
    return (
        f"{machine.name}, {machine.seats} seats, {machine.num_blocks} blocks of 32 tokens: a step takes {machine.cost};"
        f" a full one has {machine.full_batch:.0f} sequences, so 1x is {machine.capacity:.2f} requests/s"
    )


def print_head(workload: Workload, all_bounds: Sequence[Bounds]) -> None:
    """Print the workload, its bounds, and the names of the columns."""
    print(f"\n{workload}")
    heads, work, neutral, held, careful = (
        100 * fmean(getattr(one, name) for one in all_bounds)
        for name in ("heads", "work", "neutral", "held", "careful")
    )
    print(f"  at most {heads:.1f} % by heads, {work:.1f} % by work; neutral {neutral:.1f} %", end="")
    print(f", with this memory {held:.1f} %, and careful {careful:.1f} %")
    tail = f"{'others':>9}{'flooder':>9}" if workload.flood else ""
    print(_HEAD + tail, flush=True)


def print_line(name: str, scores: Sequence[Score], all_bounds: Sequence[Bounds]) -> None:
    """Print the results of one contender."""

    def mean(field: str) -> float:
        return fmean(getattr(one, field) for one in scores)

    served = [100 * one.served for one in scores]
    neutral = mean("served") / fmean(one.neutral for one in all_bounds)
    by_class = "/".join(f"{100 * fmean(one.by_class[index] for one in scores):.0f}" for index in range(len(MIX)))
    names = ("useful", "late", "stalled", "recomputed", "idle")
    time = "/".join(f"{100 * fmean(getattr(one.time, field) for one in scores):.0f}" for field in names)
    spread = f"{fmean(served):.1f} ({min(served):.0f}-{max(served):.0f})"
    flooders = [one.flooder for one in scores if one.flooder is not None]
    tail = f"{100 * mean('others'):9.1f}{100 * fmean(flooders):9.1f}" if flooders else ""
    print(
        f"{name:16}{spread:>16}{neutral:10.2f}{100 * mean('by_work'):9.1f}{by_class:>15}{100 * mean('whole'):7.0f}"
        f"{mean('area'):6.2f}{_seconds(mean('first_p50')):>10}{_seconds(mean('first_p90')):>6}{time:>32}"
        f"{mean('parks'):8.0f}{mean('pauses'):8.0f}{mean('preemptions'):11.1f}{tail}",
        flush=True,
    )


def _seconds(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "-"
