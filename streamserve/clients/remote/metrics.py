"""`RemoteMetrics`: counts of a remote model's client, for `stats()`, the live page and `/metrics`. Event loop only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from streamserve.protocol.engine import NUM_RECENT, RATE_SECONDS
from streamserve.protocol.metrics import percentile


@dataclass(slots=True)
class Counts:
    """What has happened since the client was made. Each is a metric with the prefix `upstream_` (protocol/metrics.py).

    `requests` were sent, `retries` of them again because a kept connection was closed; `refused` were answered by an
    error, `lost` broke off in the middle, of which `continued` were sent again with the text so far. `holds`: how often
    the server was not read from because a reader was behind.
    """

    requests: int = 0
    retries: int = 0
    refused: int = 0
    lost: int = 0
    continued: int = 0
    holds: int = 0


class Timings:
    """The times of one response, in seconds of the client's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.accepted_at = self.last_at = clock()
        self.sent_at: float | None = None
        self.first_at: float | None = None
        self._gaps: list[float] = []

    def sent(self) -> None:
        """Note that the request has a place and is sent."""
        self.sent_at = self._clock()

    def token(self, num: int) -> None:
        """Note `num` tokens that came now; those of one read have no gap between them."""
        now = self._clock()
        if self.first_at is None:
            self.first_at = now
        else:
            self._gaps.append(now - self.last_at)
        self._gaps += [0.0] * (num - 1)
        self.last_at = now

    @property
    def latency(self) -> float:
        """Seconds from acceptance to the last token."""
        return self.last_at - self.accepted_at

    def breakdown(self) -> dict[str, float]:
        """Return the `done` event's breakdown. The server's own queue is a part of `prefill`."""
        sent = self.sent_at if self.sent_at is not None else self.last_at
        first = self.first_at if self.first_at is not None else self.last_at
        return {
            "queue": max(0.0, sent - self.accepted_at),
            "prefill": max(0.0, first - sent),
            "decode": max(0.0, self.last_at - first),
            "first_decode": self._gaps[0] if self._gaps else 0.0,
            "ttft": max(0.0, first - self.accepted_at),
            "itl_p50": percentile(self._gaps, 0.50) or 0.0,
            "itl_p95": percentile(self._gaps, 0.95) or 0.0,
        }


class RemoteMetrics:
    """Counts and recent rates of all requests of one client."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.counts = Counts()
        self.prompt_tokens = self.generation_tokens = self.num_parks = 0
        self._tokens: deque[tuple[float, int]] = deque()
        self._breakdowns: deque[dict[str, float]] = deque(maxlen=NUM_RECENT)

    def tokens(self, num: int) -> None:
        """Count tokens that came now."""
        now = self._clock()
        self.generation_tokens += num
        self._tokens.append((now, num))
        while self._tokens[0][0] < now - RATE_SECONDS:
            self._tokens.popleft()

    def finished(self, breakdown: dict[str, float], prompt_tokens: int) -> None:
        """Count an answer that is whole."""
        self.prompt_tokens += prompt_tokens
        self._breakdowns.append(breakdown)

    def tokens_per_second(self) -> float:
        """Return the rate of the last seconds."""
        since = self._clock() - RATE_SECONDS
        return sum(num for at, num in self._tokens if at >= since) / RATE_SECONDS

    def latency(self) -> dict[str, float]:
        """Return medians and 95th percentiles of queue and ttft, and the typical answer's ITL, in seconds."""
        out: dict[str, float] = {}
        for name in ("queue", "ttft"):
            values = [breakdown[name] for breakdown in self._breakdowns]
            out[f"{name}_p50"] = percentile(values, 0.5) or 0.0
            out[f"{name}_p95"] = percentile(values, 0.95) or 0.0
        for name in ("itl_p50", "itl_p95"):
            out[name] = percentile([breakdown[name] for breakdown in self._breakdowns], 0.5) or 0.0
        return out
