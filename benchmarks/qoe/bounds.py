"""Upper bounds on the share of readers that any policy serves at their own pace, and the yardstick "neutral".

A relaxation: a machine that may be divided among readers and stopped at any moment, every token at its price in a full
batch, lengths and paces known beforehand, memory without end, fractions of readers. The first token is due
`FIRST_SLACK_SECONDS` after the class's budget, the k-th one k / pace and `STALL_SECONDS` after that. A policy then
serves a set of readers only if for each interval [s, t] the work that arrives after s and is due by t is at most t - s.
The bounds are linear programs over these; leaving intervals out only raises them.

    by heads   the most readers: it favours cheap requests, and starves documents
    by work    the most work, each reader weighed by its price
    neutral    the largest share of every reader alike: for policies that do not choose by length. No bound
    held       neutral for this machine's memory: at the end of an interval an answer holds the blocks of its prompt and
               of what is due, or all of it is computed. For policies that compute nothing twice
    careful    held for a policy that spends less than readers forgive: an answer starts in time for the engine's queue
               (`standing_queue_seconds`), and its reader is kept `hungry_seconds` of text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from benchmarks.qoe.machines import BLOCK_SIZE, Machine
from streamserve.engine.config import CLASSES, EngineConfig
from streamserve.loadtest.reading import FIRST_SLACK_SECONDS, STALL_SECONDS
from streamserve.loadtest.visits import Visit

# Intervals begin at multiples of this, and last so long or to the end. A grid of 1 s moves the bounds by 0.3 % at most.
GRID_SECONDS = 5.0
_HALVINGS = 20
_LENGTHS = (2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Shares of all readers, 0 to 1. `heads` and `work` weigh by heads and by work, as `Score` does."""

    heads: float
    work: float
    neutral: float
    held: float
    careful: float


@dataclass(frozen=True, slots=True)
class Due:
    """When tokens are due: the first so long after the class's budget, the k-th so long after k / pace from there."""

    first_seconds: float
    later_seconds: float


LATEST = Due(FIRST_SLACK_SECONDS, STALL_SECONDS)
# The classes differ in their budgets, not in what is after them.
CAREFUL = Due(
    CLASSES["chat"].standing_queue_seconds - CLASSES["chat"].ttft_seconds, -EngineConfig().policy.hungry_seconds
)


def bounds(machine: Machine, visits: Sequence[Visit], grid_seconds: float = GRID_SECONDS) -> Bounds:
    """Return the bounds of a workload."""
    prices = np.array([machine.price(visit, batch=machine.seats) for visit in visits])
    rows = list(_rows(machine, visits, grid_seconds))
    return Bounds(
        heads=_best(np.ones(len(visits)), rows) / len(visits),
        work=_best(prices, rows) / float(prices.sum()),
        neutral=min([1.0, *(length / float(work.sum()) for length, _, work in rows)]),
        held=_held(machine, visits, grid_seconds, LATEST),
        careful=_held(machine, visits, grid_seconds, CAREFUL),
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
    work_of = _WorkBy(machine, visits, LATEST)
    for start, stop in _intervals(visits, grid_seconds, LATEST):
        used = work_of.arrived(start, stop)
        work = work_of(used, stop)
        if work.sum() > stop - start:
            is_any = work > 0
            yield stop - start, used[is_any], work[is_any]


def _intervals(visits: Sequence[Visit], grid_seconds: float, due: Due) -> Iterator[tuple[float, float]]:
    """Yield the intervals that are looked at."""
    last = max(visit.arrives_at for visit in visits)
    end = max(_first_due_at(visit, due) + due.later_seconds + visit.answer_len / visit.pace for visit in visits)
    for start in np.arange(0.0, last, grid_seconds):
        for length in (*_LENGTHS, end - start):
            if start + length <= end:
                yield float(start), float(start + length)


def _held(machine: Machine, visits: Sequence[Visit], grid_seconds: float, due: Due) -> float:
    """Return the largest share of every reader alike with the machine's memory.

    Of the answers that are not due whole when an interval ends, those are computed whole that cost the least for the
    memory they give back, until the others fit.
    """
    work_of, most = _WorkBy(machine, visits, due), 1.0
    for start, stop in _intervals(visits, grid_seconds, due):
        used = work_of.arrived(start, stop)
        work = work_of(used, stop)
        used, work = used[work > 0], work[work > 0]
        left, blocks = work_of.left(used, stop)
        order = np.argsort(left / blocks)
        freed = np.concatenate([[0.0], np.cumsum(blocks[order])])
        costs = np.concatenate([[0.0], np.cumsum(left[order])])
        low, high = 0.0, most
        for _ in range(_HALVINGS):
            share = (low + high) / 2
            surplus = freed[-1] - machine.num_blocks / share
            if share * (work.sum() + np.interp(surplus, freed, costs)) <= stop - start:
                low = share
            else:
                high = share
        most = high
    return most


def _first_due_at(visit: Visit, due: Due) -> float:
    return visit.first_due_at + due.first_seconds


class _WorkBy:
    """The work of visits that is due by a time, in one pass of numpy."""

    def __init__(self, machine: Machine, visits: Sequence[Visit], due: Due) -> None:
        self._arrives_at = np.array([visit.arrives_at for visit in visits])
        self._first_due = np.array([_first_due_at(visit, due) for visit in visits])
        self._later_seconds = due.later_seconds
        self._pace = np.array([visit.pace for visit in visits])
        self._prompt = np.array([float(visit.prompt_len) for visit in visits])
        self._answer = np.array([float(visit.answer_len) for visit in visits])
        self._prefill = np.array([machine.price(visit, 1, batch=machine.seats) for visit in visits])
        cost = machine.cost
        self._each = cost.base / machine.seats + cost.sequence + cost.token
        self._per_position = cost.position + cost.pair

    def arrived(self, start: float, stop: float) -> np.ndarray:
        """Return the visits that arrive in an interval."""
        return np.flatnonzero((self._arrives_at >= start) & (self._arrives_at < stop))

    def __call__(self, used: np.ndarray, time: float) -> np.ndarray:
        """Return the seconds of each that are due."""
        return np.where(time >= self._first_due[used], self._seconds(used, self._decodes(used, time)), 0.0)

    def left(self, used: np.ndarray, time: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of each that are not due yet, and the blocks that it holds if these wait.

        Only of those of which something is due. An answer that is due whole holds next to nothing.
        """
        decodes = self._decodes(used, time)
        left = self._seconds(used, self._answer[used] - 1) - self._seconds(used, decodes)
        blocks = np.ceil((self._prompt[used] + decodes) / BLOCK_SIZE)
        return left, np.where(left > 0, blocks, 1e-9)

    def _decodes(self, used: np.ndarray, time: float) -> np.ndarray:
        after = time - self._first_due[used] - self._later_seconds
        return np.clip(np.floor(after * self._pace[used] + 1e-9), 0.0, self._answer[used] - 1)

    def _seconds(self, used: np.ndarray, decodes: np.ndarray) -> np.ndarray:
        positions = decodes * self._prompt[used] + decodes * (decodes + 1) / 2
        return self._prefill[used] + decodes * self._each + self._per_position * positions
