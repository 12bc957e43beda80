"""Requests and their readers: Poisson arrivals, bursts, and a tenant that floods. Pure, and fixed by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from streamserve.engine.config import CLASSES

# Tokens a second. Reading aloud is about 4, silent reading 5 to 6, skimming several times that; a class counts on 20.
PACES = (5.0, 10.0, 20.0, 30.0)
# class: share of the requests, median tokens of the prompt and of the answer
MIX = {"chat": (0.6, 120, 200), "document": (0.2, 700, 250), "completion": (0.2, 60, 60)}
LONGEST_PROMPT, LONGEST_ANSWER = 1400, 600
NUM_TENANTS = 8
FLOODER = "flooder"

BURST_FACTOR, BURST_SECONDS = 5.0, 10.0
# The first burst, and the time from one to the next.
BURST_AT, BURST_EVERY = 20.0, 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request and its reader. `number` is unique in a workload."""

    number: int
    arrives_at: float
    pace: float
    latency_class: str
    prompt_len: int
    answer_len: int
    tenant: str = ""

    @property
    def first_due_at(self) -> float:
        """When the first token is due by the class's TTFT budget."""
        return self.arrives_at + CLASSES[self.latency_class].ttft_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What comes, as shares of the machine's capacity: a load, bursts of it, and a flood by one more tenant."""

    load: float
    has_bursts: bool = False
    flood: float = 0.0

    def __str__(self) -> str:
        if self.has_bursts:
            return f"{self.load:g}x, bursts of x{BURST_FACTOR:g} for {BURST_SECONDS:g} s every {BURST_EVERY:g} s"
        if self.flood:
            return f"{self.load:g}x of {NUM_TENANTS} tenants and {self.flood:g}x of one that floods"
        return f"{self.load:g}x"

    def draw(self, seed: int, per_second: float, seconds: float) -> list[Visit]:
        """Return the visits of a run on a machine that finishes `per_second` requests of the mix."""
        visits = draw_visits(seed, per_second * self.load, seconds, has_bursts=self.has_bursts)
        if self.flood:
            flood = draw_visits(seed + 1_000_000, per_second * self.flood, seconds, tenant=FLOODER, first=len(visits))
            visits = sorted([*visits, *flood], key=lambda visit: visit.arrives_at)
        return visits


def draw_visits(
    seed: int, per_second: float, seconds: float, *, has_bursts: bool = False, tenant: str = "", first: int = 0
) -> list[Visit]:
    """Return a Poisson process of visits; the same seed draws the same readers at any rate."""
    rng, visits, at = random.Random(seed), [], 0.0
    while True:
        at = _after(rng.expovariate(per_second), at) if has_bursts else at + rng.expovariate(per_second)
        visit = _draw(rng, first + len(visits), at, tenant)
        if at >= seconds:
            return visits
        visits.append(visit)


def _after(gap: float, at: float) -> float:
    """Return when a gap is over in which the time of bursts counts `BURST_FACTOR` times."""
    while True:
        into = (at - BURST_AT) % BURST_EVERY if at >= BURST_AT else BURST_EVERY + at - BURST_AT
        is_burst = into < BURST_SECONDS
        left = BURST_SECONDS - into if is_burst else BURST_EVERY - into
        factor = BURST_FACTOR if is_burst else 1.0
        if gap <= left * factor:
            return at + gap / factor
        gap, at = gap - left * factor, at + left + 1e-9


def _draw(rng: random.Random, number: int, at: float, tenant: str) -> Visit:
    latency_class = rng.choices(list(MIX), [share for share, _, _ in MIX.values()])[0]
    _, prompt_len, answer_len = MIX[latency_class]
    return Visit(
        number=number,
        arrives_at=at,
        pace=rng.choice(PACES),
        latency_class=latency_class,
        prompt_len=min(LONGEST_PROMPT, int(prompt_len * rng.lognormvariate(0.0, 0.6)) + 8),
        answer_len=min(LONGEST_ANSWER, int(answer_len * rng.lognormvariate(0.0, 0.6)) + 8),
        tenant=tenant or f"tenant {number % NUM_TENANTS}",
    )
