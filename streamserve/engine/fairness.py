"""`TenantDebt`: how far each tenant is above, or below, its fair share of what the engine computed lately.

Knows names and token counts; no sequences and no clock (time is an argument). Engine thread only. Everything is O(1)
amortised; memory is bounded by the tenants of the last `WINDOW_SECONDS`. (Idea: the counters of VTC, arXiv 2401.00588,
over a window instead of for ever, so that nobody pays for yesterday.)
"""

from __future__ import annotations

from collections import Counter, deque

WINDOW_SECONDS = 10
# The window moves in slices of one second: it is between nine and ten seconds long.
_SLICE_SECONDS = 1.0


class TenantDebt:
    """Tokens computed per tenant in the last seconds.

    slices:  [ second 91: a 300, b 20 | second 92: a 280 | ... | second 100: b 5 ]
    """

    def __init__(self) -> None:
        self._slices: deque[tuple[int, Counter[str]]] = deque()
        self._tokens: Counter[str] = Counter()
        self._total = 0

    def charge(self, tenant: str, num_tokens: int, now: float) -> None:
        """Note that the engine computed `num_tokens` for a tenant."""
        self._forget_before(now)
        second = int(now // _SLICE_SECONDS)
        if not self._slices or self._slices[-1][0] != second:
            self._slices.append((second, Counter()))
        self._slices[-1][1][tenant] += num_tokens
        self._tokens[tenant] += num_tokens
        self._total += num_tokens

    def seconds(self, tenant: str, now: float) -> float:
        """Return how long the engine worked for what this tenant had above its share; less than 0: it had less.

        A share is everything computed ÷ the tenants it was computed for, a newcomer included: one who comes to a flood
        would else stand behind it, and never be computed for. Who is alone has its share. Idle seconds do not count.
        """
        self._forget_before(now)
        if not self._total:
            return 0.0
        num_tenants = len(self._tokens) + (tenant not in self._tokens)
        excess = self._tokens[tenant] - self._total / num_tenants
        tokens_per_second = self._total / (len(self._slices) * _SLICE_SECONDS)
        return excess / tokens_per_second

    def _forget_before(self, now: float) -> None:
        first = int(now // _SLICE_SECONDS) - WINDOW_SECONDS + 1
        while self._slices and self._slices[0][0] < first:
            for tenant, num_tokens in self._slices.popleft()[1].items():
                self._total -= num_tokens
                self._tokens[tenant] -= num_tokens
                if not self._tokens[tenant]:
                    del self._tokens[tenant]
