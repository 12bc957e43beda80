"""`AdmissionControl`: what waits for its first step, and whether more may: bounded by number and by time.

Used on the event loops of a client; the engine thread only forgets. Free seats in the batch are no queue, and a request
that nobody waits before is always taken, however long its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from streamserve.clients.thread.recent import RecentFigures
from streamserve.engine.config import EngineConfig
from streamserve.engine.output import SequenceUpdate
from streamserve.protocol.errors import Overloaded
from streamserve.protocol.stats import CoreStats

# Weight of the newest prompt in the share that the prefix cache lacks: about the last ten count.
_NEWEST = 0.1


class AdmissionControl:
    """Counts sequences from acceptance to their end, and tokens from acceptance to the first step."""

    def __init__(self, config: EngineConfig, figures: RecentFigures) -> None:
        self._config = config
        self._figures = figures
        self.num_in_preparation = 0
        # Tokens to compute of each sequence that no step has held yet, and those that one has.
        self._waiting: dict[int, int] = {}
        self._seated: set[int] = set()
        self._seconds_per_token = 0.0
        self._cold_share = 1.0  # of the tokens of late prompts, those that had to be computed

    @property
    def num_waiting(self) -> int:
        """Sequences that no step has held yet."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is counted any more."""
        return not (self._waiting or self._seated or self.num_in_preparation)

    @contextmanager
    def place(self, num_new: int) -> Iterator[None]:
        """Hold places while a prompt is read; refuse what would make the queue longer than its bound."""
        num_waiting = len(self._waiting) + self.num_in_preparation
        num_seats_free = max(0, self._config.max_num_seqs - len(self._seated))
        if num_waiting + num_new > self._config.max_waiting + num_seats_free:
            raise Overloaded(
                f"{num_waiting:,} answers are waiting already. Try again later.",
                retry_after=self._figures.retry_after(num_waiting, self._config.max_num_seqs),
            )
        self.num_in_preparation += num_new
        try:
            yield
        finally:
            self.num_in_preparation -= num_new

    def check_prefill(self, num_tokens: int, stats: CoreStats) -> None:
        """Refuse `num_tokens` more to compute if the queue would take too long. `stats` tell how long a token does."""
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

    def add(self, seq_id: int, num_tokens: int) -> None:
        """Count a new sequence with `num_tokens` to compute."""
        self._waiting[seq_id] = num_tokens

    def note(self, update: SequenceUpdate) -> None:
        """Count a sequence's first step."""
        if update.scheduled_at is None:
            return
        num_tokens = self._waiting.pop(update.seq_id, None)
        if num_tokens is not None:
            self._seated.add(update.seq_id)
            self._cold_share += _NEWEST * (1 - update.num_cached_tokens / num_tokens - self._cold_share)

    def forget(self, seq_id: int) -> None:
        """Count a sequence out, wherever it is."""
        self._waiting.pop(seq_id, None)
        self._seated.discard(seq_id)
