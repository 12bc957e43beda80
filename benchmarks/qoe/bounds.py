"""Upper bounds on the share of readers that any policy serves at their own pace, and the yardstick "neutral".

A relaxation: a machine that may be divided among readers and stopped at any moment, every token at its price in a full
batch, lengths and paces known beforehand, memory without end, fractions of readers. The first token is due
`FIRST_SLACK_SECONDS` after the class's budget, the k-th one k / pace and `STALL_SECONDS` after that. A policy then
serves a set of readers only if for each interval [s, t] the work that arrives after s and is due by t is at most t - s.
The bounds are linear programs over these; leaving intervals out only raises them.

    by heads   the most readers: it favours cheap requests, and starves documents
    by work    the most work, each reader weighed by its price
    neutral    the largest share of every reader alike: for policies that do not choose by length. No bound
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from benchmarks.qoe.machines import Machine
from benchmarks.qoe.readers import FIRST_SLACK_SECONDS, STALL_SECONDS
from benchmarks.qoe.workload import Visit

# Intervals begin at multiples of this, and last so long or to the end. A grid of 1 s moves the bounds by 0.3 % at most.
GRID_SECONDS = 5.0
_LENGTHS = (2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Shares of all readers, 0 to 1. `heads` and `work` weigh by heads and by work, as `Score` does."""

    heads: float
    work: float
    neutral: float


def bounds(machine: Machine, visits: Sequence[Visit], grid_seconds: float = GRID_SECONDS) -> Bounds:
    """Return the bounds of a workload."""
    prices = np.array([machine.price(visit, batch=machine.seats) for visit in visits])
    rows = list(_rows(machine, visits, grid_seconds))
    return Bounds(
        heads=_best(np.ones(len(visits)), rows) / len(visits),
        work=_best(prices, rows) / float(prices.sum()),
        neutral=min([1.0, *(length / float(work.sum()) for length, _, work in rows)]),
    )


def _best(values: np.ndarray, rows: list[tuple[float, np.ndarray, np.ndarray]]) -> float:
    """Return the largest sum of values that keeps every interval."""
    if not rows:
        return float(values.sum())
    indices = np.concatenate([used for _, used, _ in rows])
    work = np.concatenate([one for _, _, one in rows])
    ends = np.cumsum([0, *(len(used) for _, used, _ in rows)])
    matrix = csr_matrix((work, indices, ends), shape=(len(rows), len(values)))
    result = linprog(-values, A_ub=matrix, b_ub=[length for length, _, _ in rows], bounds=(0, 1), method="highs-ipm")
    if not result.success:
        raise RuntimeError(f"the linear program has no solution: {result.message}")
    return float(-result.fun)


def _rows(
    machine: Machine, visits: Sequence[Visit], grid_seconds: float
) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
    """Yield (length, visits, their work) of each interval that the work of all visits would overfill."""
    arrivals = np.array([visit.arrives_at for visit in visits])
    lasts = np.array([_due_at(visit, visit.answer_len - 1) for visit in visits])
    end = float(lasts.max())
    work_of = _WorkBy(machine, visits)
    for start in np.arange(0.0, float(arrivals.max()), grid_seconds):
        for length in (*_LENGTHS, end - start):
            stop = start + length
            if stop > end:
                continue
            used = np.flatnonzero((arrivals >= start) & (arrivals < stop))
            work = work_of(used, stop)
            if work.sum() > length:
                is_any = work > 0
                yield float(length), used[is_any], work[is_any]


def _due_at(visit: Visit, index: int) -> float:
    first = visit.first_due_at + FIRST_SLACK_SECONDS
    return first + index / visit.pace + STALL_SECONDS if index else first


class _WorkBy:
    """The work of visits that is due by a time, in one pass of numpy."""

    def __init__(self, machine: Machine, visits: Sequence[Visit]) -> None:
        self._first_due = np.array([_due_at(visit, 0) for visit in visits])
        self._pace = np.array([visit.pace for visit in visits])
        self._prompt = np.array([float(visit.prompt_len) for visit in visits])
        self._answer = np.array([float(visit.answer_len) for visit in visits])
        self._prefill = np.array([machine.price(visit, 1, batch=machine.seats) for visit in visits])
        cost = machine.cost
        self._each = cost.base / machine.seats + cost.sequence + cost.token
        self._per_position = cost.position + cost.pair

    def __call__(self, used: np.ndarray, time: float) -> np.ndarray:
        left = time - self._first_due[used]
        decodes = np.floor((left - STALL_SECONDS) * self._pace[used] + 1e-9)
        decodes = np.clip(decodes, 0.0, self._answer[used] - 1)
        positions = decodes * self._prompt[used] + decodes * (decodes + 1) / 2
        work = self._prefill[used] + decodes * self._each + self._per_position * positions
        return np.where(left >= 0, work, 0.0)
