"""`AdmissionControl`: whether one more request may wait, by number and by time; `RecentTimings`, which it judges by.

Used on the event loops of a client; the engine thread only removes what has ended. Free places in the batch are not
counted as queue, and a request with no other waiting before it is always accepted, however long its prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from streamserve.engine.config import EngineConfig
from streamserve.engine.output import SequenceUpdate
from streamserve.protocol.errors import Overloaded
from streamserve.protocol.metrics import percentile
from streamserve.protocol.stats import CoreStats

# How many finished requests, and how many seconds, `RecentTimings` covers.
_NUM_RECENT = 256
_RATE_SECONDS = 5.0
# Seconds an answer is assumed to take before one has finished.
_FIRST_GUESS = 5.0
# Weight of the newest prompt in the share that the prefix cache lacks: about the last ten count.
_NEWEST = 0.1


class RecentTimings:
    """Rates and percentiles of the last requests and seconds. Written on the event loop, read from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._breakdowns: deque[dict[str, float]] = deque(maxlen=_NUM_RECENT)
        self._running_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        self._tokens: deque[tuple[float, int]] = deque()
        self._latency: dict[str, float] | None = None  # computed once after each request that ends

    def note(self, update: SequenceUpdate) -> None:
        """Count an update's tokens; those of one step are one entry."""
        if not update.token_ids:
            return
        if self._tokens and self._tokens[-1][0] == update.at:
            self._tokens[-1] = (update.at, self._tokens[-1][1] + len(update.token_ids))
        else:
            self._tokens.append((update.at, len(update.token_ids)))
        while self._tokens and self._tokens[0][0] < update.at - _RATE_SECONDS:
            self._tokens.popleft()

    def note_finished(self, breakdown: dict[str, float], *, is_whole: bool = True) -> None:
        """Record a request's breakdown; of a part of an answer that parked, only how long it ran."""
        self._running_seconds.append(breakdown["prefill"] + breakdown["decode"])
        if is_whole:
            self._breakdowns.append(breakdown)
            self._latency = None

    def tokens_per_second(self) -> float:
        """Return the rate of the last seconds."""
        since = self._clock() - _RATE_SECONDS
        return sum(count for at, count in self._tokens.copy() if at >= since) / _RATE_SECONDS

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

    def retry_after(self, num_waiting: int, max_num_seqs: int) -> int:
        """Return whole seconds until the waiting sequences probably run, from how long recent ones ran."""
        typical = percentile(self._running_seconds.copy(), 0.5)
        if typical is None:
            typical = _FIRST_GUESS
        return max(1, math.ceil(typical * num_waiting / max_num_seqs))


class AdmissionControl:
    """Counts sequences from acceptance to their end, and their tokens from acceptance to the first step."""

    def __init__(self, config: EngineConfig, timings: RecentTimings) -> None:
        self._config = config
        self._timings = timings
        self.num_in_preparation = 0
        # Tokens to compute of each sequence that no step has held yet, and the sequences that one has.
        self._waiting: dict[int, int] = {}
        self._running: set[int] = set()
        self._seconds_per_token = 0.0
        self._cold_share = 1.0  # of the tokens of recent prompts, those that had to be computed

    @property
    def is_empty(self) -> bool:
        """Whether nothing is counted any more."""
        return not (self._waiting or self._running or self.num_in_preparation)

    @contextmanager
    def reserve(self, num_new: int) -> Iterator[None]:
        """Reserve places in the queue while a prompt is tokenised; refuse more than its bound."""
        num_waiting = len(self._waiting) + self.num_in_preparation
        num_free = max(0, self._config.max_num_seqs - len(self._running))
        if num_waiting + num_new > self._config.max_waiting + num_free:
            raise Overloaded(
                f"{num_waiting:,} answers are waiting already. Try again later.",
                retry_after=self._timings.retry_after(num_waiting, self._config.max_num_seqs),
            )
        self.num_in_preparation += num_new
        try:
            yield
        finally:
            self.num_in_preparation -= num_new

    def check_prefill(self, num_tokens: int, stats: CoreStats) -> int:
        """Refuse `num_tokens` more to compute if the queue would take too long, by the time a token takes now.

        Returns the queue position: how many sequences wait for their first step.
        """
        if stats.queued_tokens and stats.queued_seconds:
            self._seconds_per_token = stats.queued_seconds / stats.queued_tokens
        num_queued = sum(self._waiting.copy().values())
        seconds_each = self._seconds_per_token * self._cold_share
        excess = (num_queued + num_tokens) * seconds_each - self._config.max_queued_prefill_seconds
        if num_queued and excess > 0:
            raise Overloaded(
                f"the prompts that wait take {num_queued * seconds_each:,.0f} s to compute. Try again later.",
                retry_after=math.ceil(excess),
            )
        return len(self._waiting)

    def add(self, seq_id: int, num_tokens: int) -> None:
        """Count a new sequence with `num_tokens` to compute."""
        self._waiting[seq_id] = num_tokens

    def note(self, update: SequenceUpdate) -> None:
        """Count a sequence's first step."""
        if update.scheduled_at is None:
            return
        num_tokens = self._waiting.pop(update.seq_id, None)
        if num_tokens is not None:
            self._running.add(update.seq_id)
            self._cold_share += _NEWEST * (1 - update.num_cached_tokens / num_tokens - self._cold_share)

    def remove(self, seq_id: int) -> None:
        """Stop counting a sequence."""
        self._waiting.pop(seq_id, None)
        self._running.discard(seq_id)
