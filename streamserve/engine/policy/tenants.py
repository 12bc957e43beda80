"""`TenantShares`: how much more or less than its share each tenant has had of what the engine computed lately.

Counts tokens; knows no queue and no clock (time is an argument). Engine thread only. O(1) amortised for a charge;
memory is bounded by the tenants of the last `WINDOW_SECONDS`. (Idea: the counters of VTC, arXiv 2401.00588, over a
window instead of all time.)

slices:  [ second 91: a 300, b 20 | second 92: a 280 | ... | second 100: b 5 ]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

WINDOW_SECONDS = 10
# The window moves in slices of one second: it is between nine and ten seconds long.
_SLICE_SECONDS = 1.0
# Less than any weighted token: what is left of sums that are not exact.
_LEAST_TOKENS = 1e-6


class TenantShares:
    """What was computed for each tenant. `max_debt_seconds`: tenants this close to their shares are alike."""

    def __init__(self, max_debt_seconds: float) -> None:
        self._max_debt_seconds = max_debt_seconds
        self._slices: deque[tuple[int, dict[str, float]]] = deque()
        self._tokens: dict[str, float] = {}
        self._total = 0.0

    def charge(self, tenant: str, num_tokens: float, now: float) -> None:
        """Record that the engine computed `num_tokens` for a tenant, by their weight."""
        self._drop_before(now)
        second = int(now // _SLICE_SECONDS)
        if not self._slices or self._slices[-1][0] != second:
            self._slices.append((second, {}))
        newest = self._slices[-1][1]
        newest[tenant] = newest.get(tenant, 0.0) + num_tokens
        self._tokens[tenant] = self._tokens.get(tenant, 0.0) + num_tokens
        self._total += num_tokens

    def ranks(self, waiting: Set[str], now: float) -> dict[str, int]:
        """Return the rank of each waiting tenant: 0 about its share, more above it, less below it.

        A share is everything computed ÷ the tenants that wait or had a part of it. The rank is the seconds that the
        engine worked for the tenant above its share, in whole `max_debt_seconds`. Idle seconds do not count.
        """
        self._drop_before(now)
        if not self._total or len(waiting) < 2:
            return dict.fromkeys(waiting, 0)
        share = self._total / len(self._tokens.keys() | waiting)
        tokens_per_second = self._total / (len(self._slices) * _SLICE_SECONDS)
        unit = tokens_per_second * self._max_debt_seconds or 1.0  # no debt is allowed: every token counts
        return {tenant: int((self._tokens.get(tenant, 0) - share) / unit) for tenant in waiting}

    def _drop_before(self, now: float) -> None:
        first = int(now // _SLICE_SECONDS) - WINDOW_SECONDS + 1
        while self._slices and self._slices[0][0] < first:
            for tenant, num_tokens in self._slices.popleft()[1].items():
                self._total -= num_tokens
                self._tokens[tenant] -= num_tokens
                if self._tokens[tenant] < _LEAST_TOKENS:
                    del self._tokens[tenant]
        if not self._slices:
            self._total = 0.0
