"""The contenders: policies of the same engine, by its configuration and by what it knows of readers.

ours              the engine as it comes; a reader's position is what it has read (a page that acknowledges)
ours, received    the same; a reader's position is all that was sent to it (a fast connection)
ours, any length  the same as ours, but that the length of a prompt counts nothing in the queue
in time           no positions, no parks; in the order of the budgets, each class refused when it would be late
fcfs              the same with one class for the order: first come, first served; refused after 2.5 s
fcfs, endless     the same, never refused: the queue of engines without a bound in time
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.qoe.simulation import READ, RECEIVED, UNKNOWN
from streamserve.engine.config import CLASSES, EngineConfig, LatencyClass, Policy
from streamserve.loadtest.reading import FIRST_SLACK_SECONDS

NEVER = 1 << 40
OURS, RECEIVED_ONLY, ANY_LENGTH = "ours", "ours, received", "ours, any length"
IN_TIME, FCFS, ENDLESS = "in time", "fcfs", "fcfs, endless"
# What a chat's first token may take, as a queue without classes would have it.
FCFS_SECONDS = 2.5
# The first token comes so long after the first step, at most, that a request need not wait longer for that.
_STEP_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy: the engine's configuration, and the meaning of a reader's position (see `simulation`)."""

    config: EngineConfig
    acks: str


def contenders() -> dict[str, Contender]:
    """Return the contenders in the order of the tables."""
    ours = EngineConfig(speculation="off")  # a simulated answer repeats no text: there is nothing to try
    plain = replace(
        ours,
        lead_tokens=NEVER,
        policy=Policy(
            min_ahead_seconds=float(NEVER),
            hungry_seconds=math.inf,
            max_debt_seconds=math.inf,
            prompt_token_seconds=0.0,
        ),
    )
    any_length = replace(ours, policy=Policy(prompt_token_seconds=0.0))
    in_time = replace(plain, classes=classes_in_time())
    one_queue = replace(plain, classes=one_class(FCFS_SECONDS))
    return {
        OURS: Contender(ours, READ),
        RECEIVED_ONLY: Contender(ours, RECEIVED),
        ANY_LENGTH: Contender(any_length, READ),
        IN_TIME: Contender(in_time, UNKNOWN),
        FCFS: Contender(one_queue, UNKNOWN),
        ENDLESS: Contender(replace(one_queue, classes=one_class(float(NEVER))), UNKNOWN),
    }


def classes_in_time() -> Mapping[str, LatencyClass]:
    """Return the classes, each with a queue that ends when the first token would no longer be in time."""
    late = FIRST_SLACK_SECONDS - _STEP_SECONDS
    return {name: replace(one, max_queue_seconds=one.ttft_seconds + late) for name, one in CLASSES.items()}


def one_class(queue_seconds: float) -> Mapping[str, LatencyClass]:
    """Return classes that are alike to the order; a request waits for its first step so long at most."""
    alike = {"ttft_seconds": 0.5, "max_queue_seconds": queue_seconds, "max_late_seconds": queue_seconds}
    return {name: replace(one, **alike) for name, one in CLASSES.items()}
