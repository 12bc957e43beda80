"""How fast the reader of one answer reads, from the reports of its position.

Knows reports, and how many tokens the answer has; no sequence, no blocks and no clock (time is an argument). Engine
thread only.
"""

from __future__ import annotations

# A reader reports each time that it has read so many tokens, or fewer when it has read all: between two reports it has
# read no more than these.
REPORT_TOKENS = 32
# The class's pace counts as much as so many measured seconds. Of what was measured, about the last of these count.
_PRIOR_SECONDS = 1.0
_WINDOW_SECONDS = 16.0
# Tokens a second. Readers that report what they have received, and not what they have read, seem to read any number. A
# reader that reports nothing at all is taken to read slowly, so that its answer is not left out for ever.
MAX_PACE = 100.0
MIN_PACE = 1.0


class ReaderPace:
    """How fast the reader of one answer reads, and for how long it can do so without a new token.

    `num_read` None: the engine does not know of a reader. Then a reader at the class's pace is assumed, never ahead.
    (Idea: Andes, arXiv 2404.16283, which assumes a pace; here it is measured.)

    tokens:  [ read, by the last report | read since, by its pace | unread ...... )
                                                                  ahead: the seconds that these last

    Invariant: a measured pace never falls because of what the engine did not give. An interval between two reports
    counts in full only if the answer had all of its tokens when the interval began, as then the reader never waited in
    it. Of any other interval the rate is a lower bound of the pace: it counts if it is higher than what is known.
    """

    __slots__ = ("_num_known", "_num_seconds", "_num_tokens", "_reported_at", "is_away", "num_read", "pace")

    def __init__(self, num_read: int | None, pace: float = 20.0) -> None:
        self.num_read = num_read
        self.is_away = False
        self.pace = pace
        self._num_tokens, self._num_seconds = pace * _PRIOR_SECONDS, _PRIOR_SECONDS
        self._num_known = 0
        self._reported_at: float | None = None

    def begin(self, num_tokens: int, now: float) -> None:
        """Note that the reader can read from now on: the answer has so many tokens. Only the first call counts."""
        if self._reported_at is None:
            self._num_known, self._reported_at = num_tokens, now

    def report(self, num_read: int | None, num_tokens: int, now: float, *, is_away: bool = False) -> None:
        """Note the reader's position, while the answer has `num_tokens`. `is_away`: it reads nothing from now on."""
        before, was_away = self.num_read, self.is_away
        self.num_read, self.is_away = num_read, is_away
        if self._reported_at is None or (num_read == before and is_away == was_away):
            return
        if num_read is not None and before is not None and num_read > before and not was_away:
            self._measure(num_read - before, now - self._reported_at, has_waited=num_read > self._num_known)
        self._num_known, self._reported_at = num_tokens, now

    def still_seconds(self, now: float) -> float:
        """Return for how long the position has not moved, since the reader can read."""
        return 0.0 if self._reported_at is None else now - self._reported_at

    def ahead_seconds(self, num_tokens: int, now: float) -> float:
        """Return how long the reader's tokens last without a new token; negative: for how long it has been waiting."""
        if self._reported_at is None:
            return 0.0
        seconds = now - self._reported_at
        if self.num_read is None:
            return min(0.0, (num_tokens - self._num_known) / self.pace - seconds)
        if self.is_away:
            return float("inf")
        unread = num_tokens - self.num_read
        if unread <= 0:
            return -seconds
        read = max(min(self.pace * seconds, REPORT_TOKENS), MIN_PACE * seconds)
        return (unread - read) / self.pace

    def _measure(self, num_tokens: int, seconds: float, *, has_waited: bool) -> None:
        if has_waited and num_tokens <= self.pace * seconds:
            return
        if self._num_seconds > _WINDOW_SECONDS:
            self._num_tokens, self._num_seconds = self._num_tokens / 2, self._num_seconds / 2
        self._num_tokens += num_tokens
        self._num_seconds += seconds
        self.pace = max(MIN_PACE, min(self._num_tokens / self._num_seconds, MAX_PACE))
