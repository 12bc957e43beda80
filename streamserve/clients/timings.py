"""The times of requests, as a client measures them: `RequestTimes` of one request, `RecentTimes` of the last requests.

Every client that makes answers uses these two: the engine's on a thread and a server elsewhere. What a stream measures
is `Timings` in protocol/measures.py. Pure but for the clock.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from streamserve.engine.config import LatencyClass
from streamserve.protocol.engine import NUM_RECENT, RATE_SECONDS
from streamserve.protocol.metrics import percentile


@dataclass(slots=True)
class RequestTimes:
    """The times of one request, in seconds of its client's clock, and what is computed from them.

    `scheduled_at`: its first step began, or it was sent to the server elsewhere. Gaps are between tokens of one choice;
    of tokens that came together each has the same part of the time since the token before them.
    """

    accepted_at: float
    latency_class: str = "chat"
    scheduled_at: float | None = None
    first_token_at: float | None = None
    _last_at: float | None = None
    _first_decode: float = 0.0
    _gaps: list[float] = field(default_factory=list)
    _last_token_at: dict[int, float] = field(default_factory=dict)

    def note(self, at: float, num_tokens: int, *, choice: int = 0, scheduled_at: float | None = None) -> None:
        """Count `num_tokens` of a choice that came together at that time."""
        self._last_at = at
        if self.scheduled_at is None:
            self.scheduled_at = scheduled_at
        if not num_tokens:
            return
        if self.first_token_at is None:
            self.first_token_at = at
        before = self._last_token_at.get(choice)
        if before is not None:
            self._first_decode = self._first_decode if self._gaps else at - before
            self._gaps += [(at - before) / num_tokens] * num_tokens
        self._last_token_at[choice] = at

    def tell(self, queue_seconds: float | None, prefill_seconds: float | None) -> None:
        """Count as queue what a server elsewhere tells of the time until its first token: its queue, or its prefill."""
        if self.scheduled_at is None or self.first_token_at is None:
            return
        waited = self.first_token_at - self.scheduled_at
        if queue_seconds is None and prefill_seconds is not None:
            queue_seconds = waited - prefill_seconds
        self.scheduled_at += max(0.0, min(waited, queue_seconds or 0.0))

    @property
    def latency(self) -> float:
        """Seconds from acceptance to the last that came."""
        return 0.0 if self._last_at is None else self._last_at - self.accepted_at

    def breakdown(self) -> dict[str, float]:
        """Return the `done` event's breakdown; a part that did not happen took no time.

        The queue of a server elsewhere is a part of `prefill`, unless the server has told it.
        """
        last = self.accepted_at if self._last_at is None else self._last_at
        scheduled = last if self.scheduled_at is None else self.scheduled_at
        first = last if self.first_token_at is None else self.first_token_at
        return {
            "queue": max(0.0, scheduled - self.accepted_at),
            "prefill": max(0.0, first - scheduled),
            "decode": max(0.0, last - first),
            "first_decode": self._first_decode,
            "ttft": max(0.0, first - self.accepted_at),
            "itl_p50": percentile(self._gaps, 0.50) or 0.0,
            "itl_p95": percentile(self._gaps, 0.95) or 0.0,
        }


class RecentTimes:
    """Rates and percentiles of the last requests and seconds. Written on the event loop, read from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._breakdowns: deque[Mapping[str, float]] = deque(maxlen=NUM_RECENT)
        self._running_seconds: deque[float] = deque(maxlen=NUM_RECENT)
        self._tokens: deque[tuple[float, int]] = deque()
        self._latency: dict[str, float] | None = None  # computed once after each request that ends
        # Time to the first token, and to the end, of each class.
        self._by_class: dict[str, deque[tuple[float, float]]] = {}
        self._refused, self._expired = Counter[str](), Counter[str]()  # by class

    @property
    def num_refused(self) -> int:
        """How many requests were refused before they waited."""
        return self._refused.total()

    def note_refused(self, latency_class: str, *, has_waited: bool) -> None:
        """Count a request that was refused, at once or when it had waited too long."""
        (self._expired if has_waited else self._refused)[latency_class] += 1

    def note(self, at: float, num_tokens: int) -> None:
        """Count tokens that came at that time; the tokens of a step are one entry."""
        if not num_tokens:
            return
        if self._tokens and self._tokens[-1][0] == at:
            self._tokens[-1] = (at, self._tokens[-1][1] + num_tokens)
        else:
            self._tokens.append((at, num_tokens))
        while self._tokens and self._tokens[0][0] < at - RATE_SECONDS:
            self._tokens.popleft()

    def note_finished(
        self, breakdown: Mapping[str, float], *, is_whole: bool = True, latency_class: str = "chat"
    ) -> None:
        """Record a request's breakdown; of a part of an answer that parked, only how long it ran."""
        self._running_seconds.append(breakdown["prefill"] + breakdown["decode"])
        if is_whole:
            self._breakdowns.append(breakdown)
            self._latency = None
            recent = self._by_class.setdefault(latency_class, deque(maxlen=NUM_RECENT))
            recent.append((breakdown["ttft"], breakdown["queue"] + breakdown["prefill"] + breakdown["decode"]))

    def tokens_per_second(self) -> float:
        """Return the rate of the last seconds."""
        since = self._clock() - RATE_SECONDS
        return sum(count for at, count in self._tokens.copy() if at >= since) / RATE_SECONDS

    def latency(self) -> dict[str, float]:
        """Return medians and 95th percentiles of queue and ttft, and the typical answer's ITL, in seconds."""
        known = self._latency
        if known is not None:
            return known
        recent = list(self._breakdowns.copy())
        out: dict[str, float] = {}
        for name in ("queue", "ttft"):
            values = [breakdown[name] for breakdown in recent]
            out[f"{name}_p50"] = percentile(values, 0.5) or 0.0
            out[f"{name}_p95"] = percentile(values, 0.95) or 0.0
        for name in ("itl_p50", "itl_p95"):
            out[name] = percentile([breakdown[name] for breakdown in recent], 0.5) or 0.0
        self._latency = out
        return out

    def by_class(self, classes: Mapping[str, LatencyClass]) -> dict[str, dict[str, float]]:
        """Return each class's budgets beside what its last answers took; see `EngineStats`."""
        return {name: self._of_class(name, latency_class) for name, latency_class in classes.items()}

    def _of_class(self, name: str, latency_class: LatencyClass) -> dict[str, float]:
        out = {"ttft_budget": latency_class.ttft_seconds}
        if latency_class.total_seconds is not None:
            out["total_budget"] = latency_class.total_seconds
        recent = list(self._by_class.get(name, deque()).copy())
        out |= {"num_answers": len(recent), "refused": self._refused[name] + self._expired[name]}
        if not recent:
            return out
        for column, what in enumerate(("ttft", "total")):
            values = [times[column] for times in recent]
            out[f"{what}_p50"] = percentile(values, 0.5) or 0.0
            out[f"{what}_p95"] = percentile(values, 0.95) or 0.0
        most = out["ttft_budget"], out.get("total_budget", math.inf)
        out["in_time"] = sum(ttft <= most[0] and total <= most[1] for ttft, total in recent) / len(recent)
        return out

    def running_seconds(self) -> float | None:
        """Return how long a recent answer ran, on average; None before any has finished."""
        recent = self._running_seconds.copy()
        return sum(recent) / len(recent) if recent else None
