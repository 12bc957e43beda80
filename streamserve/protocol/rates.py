"""Limits over time: what a setting says (`Rate`), whose windows a request counts in, and what is left (`Rates`). Pure.

    scope     whose                                 of the request
    owner     a user, a key, or a visitor           every answer
    key       an API key                            what it asks
    tenant    a user with its keys, or a team       every answer
    address   the visitors of a client's address    visitors without a login
    site      all callers, and titles               every answer
    work      an owner's jobs and rows of batches   these alone, and nothing of the above but the site

A window begins with its first request, and its count begins anew when it is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType

from streamserve.protocol.errors import QuotaExceeded

OWNER, KEY, TENANT, ADDRESS, SITE, WORK = SCOPES = ("owner", "key", "tenant", "address", "site", "work")
REQUESTS, TOKENS = "requests", "tokens"
MINUTE, DAY = 60, 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How much one of a scope may ask for; 0: no limit."""

    requests_per_minute: int = 0
    """Answers that begin."""
    tokens_per_minute: int = 0
    """Tokens of prompts and answers."""
    tokens_per_day: int = 0
    """The same, in a day."""
    weight: float = 1.0
    """What a token counts."""

    def windows(self) -> Iterator[tuple[str, int, int]]:
        """Yield what is counted, the window's seconds, and the limit, of each limit that is set."""
        for what, seconds, limit in (
            (REQUESTS, MINUTE, self.requests_per_minute),
            (TOKENS, MINUTE, self.tokens_per_minute),
            (TOKENS, DAY, self.tokens_per_day),
        ):
            if limit:
                yield what, seconds, limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left of a window: of `limit`, until it is over in `seconds`."""

    limit: int
    remaining: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The windows of a request of which the smallest share is left; None where nothing is counted."""

    requests: Left | None = None
    tokens: Left | None = None

    def headers(self) -> dict[str, str]:
        """Return OpenAI's headers: `x-ratelimit-limit-requests`, `-remaining-requests`, `-reset-requests`, …"""
        out = {}
        for name, left in ((REQUESTS, self.requests), (TOKENS, self.tokens)):
            if left is not None:
                out[f"x-ratelimit-limit-{name}"] = str(left.limit)
                out[f"x-ratelimit-remaining-{name}"] = str(left.remaining)
                out[f"x-ratelimit-reset-{name}"] = f"{math.ceil(left.seconds)}s"
        return out


def anthropic_headers(rates: Rates, now: datetime) -> dict[str, str]:
    """Return the same by Anthropic's names, with the moments at which windows are over."""
    out = {}
    for name, left in ((REQUESTS, rates.requests), (TOKENS, rates.tokens)):
        if left is not None:
            reset = (now + timedelta(seconds=math.ceil(left.seconds))).replace(microsecond=0)
            out[f"anthropic-ratelimit-{name}-limit"] = str(left.limit)
            out[f"anthropic-ratelimit-{name}-remaining"] = str(left.remaining)
            out[f"anthropic-ratelimit-{name}-reset"] = reset.isoformat().replace("+00:00", "Z")
    return out


class RateLimited(QuotaExceeded):
    """A window of the caller's has no room for the request. `rates`: what is left.

    `full`: whose windows of requests have none left, and for how many seconds.
    """

    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, retry_after: int, rates: Rates, full: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        self.rates, self.full = rates, full


_WHO: Mapping[str, str] = {
    OWNER: "You",
    KEY: "This API key",
    TENANT: "Your account",
    ADDRESS: "The visitors at your address",
    SITE: "This site",
    WORK: "Your jobs and batches",
}


def refusal(scope: str, what: str, seconds: int, limit: int) -> str:
    """Return what a caller is told whose window is full."""
    span = "minute" if seconds == MINUTE else "day"
    verb = "has" if scope in (KEY, TENANT, SITE) else "have"
    return f"{_WHO[scope]} {verb} used the {limit:,} {what} a {span} that are allowed. Try again later."


def too_long(num_tokens: int, seconds: int, limit: int) -> str:
    """Return what a caller is told whose prompt alone is more than a window."""
    span = "minute" if seconds == MINUTE else "day"
    return f"The prompt has {num_tokens:,} tokens, and {limit:,} a {span} are allowed here. Send less."
