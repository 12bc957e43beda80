"""Readers of answers: their requests, how far each has read, and whether it was served at its own pace.

Pure: times are arguments. A reader begins with the first token and reads `pace` tokens a second, each no earlier than
it came. It is served at its own pace if the first token came within the class's TTFT budget plus `FIRST_SLACK_SECONDS`,
and if its waits after that sum up to `STALL_SECONDS` at most until the end of the answer. (Idea: Andes, arXiv
2404.16283.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from streamserve.engine.config import CLASSES

FIRST_SLACK_SECONDS = 2.0
STALL_SECONDS = 1.0
# Tokens a second. Reading aloud is about 4, silent reading 5 to 6, skimming several times that; a class counts on 20.
PACES = (5.0, 10.0, 20.0, 30.0)
# class: share of the requests, median tokens of the prompt and of the answer
MIX = {"chat": (0.6, 120, 200), "document": (0.2, 700, 250), "completion": (0.2, 60, 60)}
LONGEST_PROMPT, LONGEST_ANSWER = 1400, 600
NUM_TENANTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request and its reader. `number` is unique in a workload."""

    number: int
    arrives_at: float
    pace: float
    latency_class: str
    prompt_len: int
    answer_len: int

    @property
    def tenant(self) -> str:
        """The tenant of the request."""
        return f"tenant {self.number % NUM_TENANTS}"

    @property
    def first_due_at(self) -> float:
        """When the first token is due by the class's TTFT budget."""
        return self.arrives_at + CLASSES[self.latency_class].ttft_seconds


def draw_visits(seed: int, per_second: float, seconds: float) -> list[Visit]:
    """Return a Poisson process of visits; the same seed draws the same readers at any rate."""
    rng, visits, at = random.Random(seed), [], 0.0
    while True:
        at += rng.expovariate(1.0) / per_second
        visit = _draw(rng, len(visits), at)
        if at >= seconds:
            return visits
        visits.append(visit)


def _draw(rng: random.Random, number: int, at: float) -> Visit:
    latency_class = rng.choices(list(MIX), [share for share, _, _ in MIX.values()])[0]
    _, prompt_len, answer_len = MIX[latency_class]
    return Visit(
        number=number,
        arrives_at=at,
        pace=rng.choice(PACES),
        latency_class=latency_class,
        prompt_len=min(LONGEST_PROMPT, int(prompt_len * rng.lognormvariate(0.0, 0.6)) + 8),
        answer_len=min(LONGEST_ANSWER, int(answer_len * rng.lognormvariate(0.0, 0.6)) + 8),
    )


class Reading:
    """The progress of one reader."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.came_at: list[float] = []
        self.read_at: list[float] = []
        self.is_whole = False  # the answer is complete

    def take(self, now: float, num_tokens: int = 1) -> None:
        """Note that tokens came, and when each of them is read."""
        for _ in range(num_tokens):
            ready_at = self.read_at[-1] + 1 / self.visit.pace if self.read_at else now
            self.came_at.append(now)
            self.read_at.append(max(now, ready_at))

    def num_read(self, now: float, known: int = 0) -> int:
        """Return how many tokens are read by `now`, of which `known` were before."""
        while known < len(self.read_at) and self.read_at[known] <= now:
            known += 1
        return known

    @property
    def stall_seconds(self) -> float:
        """How long the reader waited for tokens after the first."""
        return self.read_at[-1] - self.read_at[0] - (len(self.read_at) - 1) / self.visit.pace if self.read_at else 0.0

    @property
    def first_seconds(self) -> float:
        """How long after the request the first token came; infinity if none did."""
        return self.came_at[0] - self.visit.arrives_at if self.came_at else float("inf")

    @property
    def is_first_in_time(self) -> bool:
        """Whether the first token came when due, slack included."""
        return bool(self.came_at) and self.came_at[0] <= self.visit.first_due_at + FIRST_SLACK_SECONDS

    @property
    def is_served(self) -> bool:
        """Whether the reader was served at its own pace."""
        return self.is_whole and self.is_first_in_time and self.stall_seconds <= STALL_SECONDS

    @property
    def area(self) -> float:
        """Tokens read over time ÷ the same for a reader that never waits, 0 to 1; 0 for an incomplete answer.

        Both areas lie under the curve "tokens read by t", up to when the later of the two has read everything.
        """
        if not self.is_whole:
            return 0.0
        due_at = [self.visit.first_due_at + index / self.visit.pace for index in range(len(self.read_at))]
        end = max(due_at[-1], self.read_at[-1]) + 1 / self.visit.pace
        return min(1.0, sum(end - at for at in self.read_at) / sum(end - at for at in due_at))


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of one run. Shares of all readers, 0 to 1; `area` is a mean."""

    served: float
    by_pace: tuple[float, ...]
    whole: float
    in_time: float
    area: float
    first_p50: float
    first_p90: float
    num_parks: int = 0
    num_computed: int = 0  # tokens, all prefill and decode


def score(readings: Sequence[Reading], num_parks: int = 0, num_computed: int = 0) -> Score:
    """Return the score of a run."""
    firsts = sorted(one.first_seconds for one in readings)
    return Score(
        served=_share(readings, lambda one: one.is_served),
        by_pace=tuple(
            _share([one for one in readings if one.visit.pace == pace], lambda one: one.is_served) for pace in PACES
        ),
        whole=_share(readings, lambda one: one.is_whole),
        in_time=_share(readings, lambda one: one.is_first_in_time),
        area=fmean(one.area for one in readings),
        first_p50=firsts[len(firsts) // 2],
        first_p90=firsts[int(len(firsts) * 0.9)],
        num_parks=num_parks,
        num_computed=num_computed,
    )


def _share(readings: Sequence[Reading], holds: Callable[[Reading], bool]) -> float:
    return sum(map(holds, readings)) / len(readings) if readings else 0.0
