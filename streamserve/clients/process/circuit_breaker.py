"""`CircuitBreaker`: how often an engine has failed lately, and when to try again (Nygard's pattern). Pure."""

from __future__ import annotations

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5


class CircuitBreaker:
    """`max_failures` within `seconds`: given up for as long, then tried once (half open).

    A failure of that try, or within `seconds` of it, and it is given up again at once.
    """

    def __init__(self, max_failures: int, seconds: float) -> None:
        self.is_given_up = False
        self._max_failures = max_failures
        self._seconds = seconds
        self._recent: list[float] = []

    def note(self, now: float) -> None:
        """Count a failure."""
        window = 2 * self._seconds if self.is_given_up else self._seconds
        is_relapse = self.is_given_up and now - self._recent[-1] < window
        self._recent = [at for at in self._recent if now - at < self._seconds] + [now]
        self.is_given_up = is_relapse or len(self._recent) >= self._max_failures

    def give_up(self, now: float) -> None:
        """Count a failure that trying again soon will not mend."""
        self.note(now)
        self.is_given_up = True

    def pause(self) -> float:
        """Return how many seconds to wait before the next try."""
        if self.is_given_up:
            return self._seconds
        return min(_FIRST_PAUSE * 2.0 ** len(self._recent), _LONGEST_PAUSE)
