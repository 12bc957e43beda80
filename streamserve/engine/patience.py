"""`Patience`: how long a request may wait for its first step, by controlled delay.

A queue that was empty a while ago is a burst, and a burst is waited for, until its time is over: by then the queue
holds none of it. A queue that has not been empty for as long as a request may wait is an overload: waiting would serve
no request sooner, and every answer would begin late. Then a request waits no longer than still makes a useful answer. A
queue that is empty because requests were refused does not count: under an overload that happens by chance, and the next
burst of it would be waited for.
No queue and no clock: the queue's state and the time are arguments. (Idea: CoDel, as in "Fail at Scale", ACM Queue
2015, which lacks the last rule.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from streamserve.engine.config import LatencyClass


class Patience:
    """Remembers for each class when its queue was last empty, and when a request was last refused."""

    def __init__(self, classes: Mapping[str, LatencyClass]) -> None:
        self._classes = classes
        self._empty_at: dict[str, float] = {}
        self._refused_at: dict[str, float] = {}

    def seconds(self, name: str, now: float, *, is_empty: bool) -> float:
        """Return how long a request that comes now may wait. `is_empty`: no other of its class waits."""
        latency_class = self._classes[name]
        since_refusal = now - self._refused_at.get(name, -math.inf)
        if name not in self._empty_at or (is_empty and since_refusal > latency_class.queue_seconds):
            self._empty_at[name] = now
        left = self._empty_at[name] + latency_class.queue_seconds - now
        return max(left, latency_class.standing_queue_seconds)

    def note_refusal(self, name: str, now: float) -> None:
        """Record that a request of the class was refused, or has waited too long."""
        self._refused_at[name] = now
