"""`Patience`: whether an overload stands, and how long a request may wait for its first step.

A request that is late, so that its first token can no longer come in time, waits behind all that are not. It costs them
nothing, and what they leave over is its own: a burst is answered, be it late. Where for four times the class's
`max_late_seconds` they have left nothing over, or would have left nothing without refusals, the overload stands. Then a
late request would wait for its turn in vain, and is refused.
No queue and no clock: the queue's state and the time are arguments. (Idea: CoDel, as in "Fail at Scale", ACM Queue
2015: a queue that does not empty is no burst.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from streamserve.engine.config import LatencyClass

# Of a class's `max_late_seconds`: longer than one of its requests with a usual budget is in time.
_STANDING_FACTOR = 4.0
# Of the shortest `max_late_seconds`: so long after a refusal a queue may be empty because of it.
_REFUSAL_FACTOR = 3.0


class Patience:
    """Remembers when no request was left waiting that was not late yet, and when one was refused."""

    def __init__(self, classes: Mapping[str, LatencyClass]) -> None:
        self._classes = classes
        self._refusal_seconds = _REFUSAL_FACTOR * min(one.max_late_seconds for one in classes.values())
        self._empty_at: float | None = None
        self._refused_at = -math.inf

    def note(self, now: float, *, has_in_time: bool) -> None:
        """Record whether a request waits that is not late."""
        is_empty = not has_in_time and now - self._refused_at > self._refusal_seconds
        if self._empty_at is None or is_empty:
            self._empty_at = now

    def note_refusal(self, now: float) -> None:
        """Record that a request was refused, or has waited too long: without that the queue would be longer."""
        self._refused_at = now

    def is_standing(self, name: str, now: float) -> bool:
        """Whether an overload stands for the class: requests have long been waiting without a break."""
        seconds = _STANDING_FACTOR * self._classes[name].max_late_seconds
        return self._empty_at is not None and now - self._empty_at > seconds

    def seconds(self, name: str, now: float) -> float:
        """Return how long a request of the class that comes now may wait."""
        latency_class = self._classes[name]
        return latency_class.standing_queue_seconds if self.is_standing(name, now) else latency_class.queue_seconds
