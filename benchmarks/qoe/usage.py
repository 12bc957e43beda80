"""`Usage`: whose tokens a machine's time went to, and how often sequences stop and continue.

A step's time is divided among its chunks: each pays for its own size and an equal part of the base. What was computed
before, and is computed again after a park or a preemption, counts as recomputed, for whichever sequence it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.qoe.machines import StepCost
from streamserve.engine.plan import Chunk
from streamserve.loadtest.reading import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where the time of a run went; the sum is 1. After the last request, idle time does not count.

    `late`, `stalled`: answers that were not served. One without a first token in time is late; one whose reader waited
    later, or that did not end, is stalled.
    """

    useful: float
    late: float
    stalled: float
    recomputed: float
    idle: float


class Usage:
    """Counts while a simulation runs. A visit is known by its number."""

    def __init__(self, cost: StepCost) -> None:
        self.num_computed = 0  # tokens
        self.num_pauses = 0
        self._cost = cost
        self._seconds: dict[int, float] = defaultdict(float)
        self._recomputed = self._idle = 0.0
        self._computed_to: dict[int, int] = defaultdict(int)  # the end of what was computed once
        self._decoding: set[int] = set()  # visits of the latest step that got a token

    def note_step(self, parts: Iterable[tuple[int, Chunk]], decoding: set[int], running: set[int]) -> float:
        """Record a step's (visit, chunk) pairs; return its seconds.

        `decoding`: the visits that get a token. One that got a token in the step before, is still `running` and is not
        in this step is paused.
        """
        parts = list(parts)
        cost, each = self._cost, self._cost.base / max(1, len(parts))
        total = 0.0
        for number, chunk in parts:
            num_tokens, known = len(chunk.token_ids), self._computed_to[number]
            end = chunk.start + num_tokens
            seconds = each + cost.of_tokens(chunk.start, num_tokens)
            again = max(0, min(end, known) - chunk.start) / num_tokens
            self._computed_to[number] = max(end, known)
            self._recomputed += again * seconds
            self._seconds[number] += (1 - again) * seconds
            self.num_computed += num_tokens
            total += seconds
        self.num_pauses += len((self._decoding - {number for number, _ in parts}) & running)
        self._decoding = decoding
        return total

    def note_idle(self, seconds: float) -> None:
        """Record that there was nothing to compute while requests were still to come."""
        self._idle += seconds

    def shares(self, readings: Iterable[Reading]) -> Shares:
        """Return where the time went, now that the answers are known."""
        useful = late = stalled = 0.0
        for reading in readings:
            seconds = self._seconds[reading.visit.number]
            if reading.is_served:
                useful += seconds
            elif not reading.is_first_in_time:
                late += seconds
            else:
                stalled += seconds
        total = useful + late + stalled + self._recomputed + self._idle or 1.0
        return Shares(
            useful=useful / total,
            late=late / total,
            stalled=stalled / total,
            recomputed=self._recomputed / total,
            idle=self._idle / total,
        )
