"""`Visit`: one request and its reader. `draw_visits`: a Poisson process of them. Pure, and fixed by a seed."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from streamserve.engine.config import CLASSES, LatencyClass

# Tokens a second. Reading aloud is about 4, silent reading 5 to 6, skimming several times that; a class counts on 20.
PACES = (5.0, 10.0, 20.0, 30.0)
# class: share of the requests, median tokens of the prompt and of the answer
MIX = {"chat": (0.6, 120, 200), "document": (0.2, 700, 250), "completion": (0.2, 60, 60)}
LONGEST_PROMPT, LONGEST_ANSWER = 1400, 600
NUM_TENANTS = 8

Mix = Mapping[str, tuple[float, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request and its reader. `number` is unique in a workload; `pace` is in tokens a second, lengths in tokens.

    `ttft_seconds` is the class's budget of the first token.
    """

    number: int
    arrives_at: float
    pace: float
    latency_class: str
    prompt_len: int
    answer_len: int
    ttft_seconds: float
    tenant: str = ""

    @property
    def first_due_at(self) -> float:
        """When the first token is due by the class's TTFT budget."""
        return self.arrives_at + self.ttft_seconds


def draw_visits(
    seed: int,
    per_second: float,
    seconds: float,
    *,
    after: Callable[[float, float], float] = operator.add,
    tenant: str = "",
    first: int = 0,
    mix: Mix = MIX,
    classes: Mapping[str, LatencyClass] = CLASSES,
) -> list[Visit]:
    """Return a Poisson process of visits; the same seed draws the same readers at any rate.

    `after(gap, at)` is the next arrival; `first` the first number.
    """
    rng, at = random.Random(seed), 0.0
    visits: list[Visit] = []
    while True:
        at = after(rng.expovariate(per_second), at)
        visit = _draw(rng, first + len(visits), at, tenant, mix, classes)
        if at >= seconds:
            return visits
        visits.append(visit)


def draw_number(
    seed: int, number: int, seconds: float, *, mix: Mix = MIX, classes: Mapping[str, LatencyClass] = CLASSES
) -> list[Visit]:
    """Return exactly `number` visits of a Poisson process within `seconds`.

    Where the number is known, the arrivals before the next one are spread evenly over the time until it comes.
    """
    per_second, horizon = number / seconds, 2 * seconds
    while len(visits := draw_visits(seed, per_second, horizon, mix=mix, classes=classes)) <= number:
        horizon *= 2
    factor = seconds / visits[number].arrives_at
    return [replace(visit, arrives_at=visit.arrives_at * factor) for visit in visits[:number]]


def _draw(
    rng: random.Random, number: int, at: float, tenant: str, mix: Mix, classes: Mapping[str, LatencyClass]
) -> Visit:
    latency_class = rng.choices(list(mix), [share for share, _, _ in mix.values()])[0]
    _, prompt_len, answer_len = mix[latency_class]
    return Visit(
        number=number,
        arrives_at=at,
        pace=rng.choice(PACES),
        latency_class=latency_class,
        prompt_len=min(LONGEST_PROMPT, int(prompt_len * rng.lognormvariate(0.0, 0.6)) + 8),
        answer_len=min(LONGEST_ANSWER, int(answer_len * rng.lognormvariate(0.0, 0.6)) + 8),
        ttft_seconds=classes[latency_class].ttft_seconds,
        tenant=tenant or f"tenant {number % NUM_TENANTS}",
    )
