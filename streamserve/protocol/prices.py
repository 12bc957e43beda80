"""`Price`: what tokens of a model cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

BATCH_FACTOR = Decimal("0.5")  # of the price: rows of batches take what others leave
_MILLION = Decimal(1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a million tokens cost, in the site's currency."""

    prompt: float = 0.0
    """Of the prompt."""
    cached: float | None = None
    """Tokens of the prompt that were found in the prefix cache; `None`: as the others."""
    completion: float = 0.0
    """Of the answer, thinking included."""

    def of(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, *, is_batch: bool = False) -> Decimal:
        """Return the cost of an answer; rows of batches cost half."""
        cached = self.prompt if self.cached is None else self.cached
        cost = _cost(prompt_tokens - cached_tokens, self.prompt) + _cost(cached_tokens, cached)
        cost += _cost(completion_tokens, self.completion)
        return cost * BATCH_FACTOR if is_batch else cost


def _cost(num_tokens: int, price: float) -> Decimal:
    return num_tokens * Decimal(str(price)) / _MILLION
