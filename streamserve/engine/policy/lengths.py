"""`AnswerLengths`: how long the answers of each class are, from those that have ended, to reserve memory for them.

Knows classes by name and counts of tokens. Engine thread only. (Idea: reserving for `max_tokens` holds memory free that
most answers never take; SGLang lets such a reserve decay, which guesses.)
"""

from __future__ import annotations

# Fewer answers say little: until then memory is reserved for a share of what was asked for.
NUM_TO_KNOW = 8
_NEWEST = 1 / 32
# An answer that is longer than the mean already has this share of the mean left, as far as anything is known.
_LEAST_LEFT = 0.25


class AnswerLengths:
    """The running mean of each class."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._numbers: dict[str, int] = {}

    def note(self, latency_class: str, num_tokens: int) -> None:
        """Record that an answer has ended after `num_tokens`."""
        number = self._numbers.get(latency_class, 0) + 1
        mean = self._means.get(latency_class, 0.0)
        self._numbers[latency_class] = number
        self._means[latency_class] = mean + (num_tokens - mean) * max(1 / number, _NEWEST)

    def left(self, latency_class: str, num_tokens: int) -> float | None:
        """Return how many tokens may still come in an answer that has `num_tokens`; None: too few answers ended."""
        if self._numbers.get(latency_class, 0) < NUM_TO_KNOW:
            return None
        mean = self._means[latency_class]
        return max(mean - num_tokens, _LEAST_LEFT * mean)
