"""`Held`: what a reader has taken from its stream and not written yet: when it leaves, and joined with what. Pure.

Tokens are joined by Nagle's rule with a clock: a token that comes `coalesce_seconds` after the last frame, or is the
first, leaves at once; later tokens wait at most that long, or until there are `coalesce_tokens`. A token that no other
token will join in that time, as far apart as they come, does not wait for the clock: that would be a wake of the loop
for nothing. Other events leave at once, and the tokens before them. With `credit`, no more events than that are
unacknowledged.
"""

from __future__ import annotations

import math
from collections import deque

from streamserve.dialects.encoder import coalesce
from streamserve.protocol.events import LoggedEvent, Token

# A frame that is due so soon is written now, however close tokens come: a wake costs more than the joining saves.
_SOON_SECONDS = 0.01


class Held:
    """See above. `is_large`: tokens with other candidates are held, or were."""

    def __init__(self, coalesce_seconds: float, coalesce_tokens: int, credit: int | None) -> None:
        self.events: list[LoggedEvent] = []
        self.is_large = False
        self._num_tokens = 0
        self._is_urgent = False  # what is held waits for no more tokens
        self._joins = coalesce_tokens > 1 and coalesce_seconds > 0
        self._coalesce_seconds, self._coalesce_tokens = coalesce_seconds, coalesce_tokens
        self._tokens_due_at = -math.inf  # until then tokens wait to be joined: not the first
        self._added_at = -math.inf
        self._credit, self._unacked = credit, deque[int]()

    def add(self, events: list[LoggedEvent], now: float) -> None:
        """Hold these, too."""
        gap, self._added_at = now - self._added_at, now
        if now + max(gap, _SOON_SECONDS) > self._tokens_due_at:
            self._is_urgent = True
        self.events += events
        for logged in events:
            if isinstance(logged.event, Token):
                self._num_tokens += len(logged.event.token_ids) or 1
                self.is_large |= logged.event.logprobs is not None
            else:
                self._is_urgent = True

    @property
    def has_credit(self) -> bool:
        """Whether its reader acknowledges, and gets no more events than that beyond."""
        return self._credit is not None

    def hurry(self) -> None:
        """Have what is held wait for no more tokens."""
        self._is_urgent = True

    def ack(self, seq: int) -> None:
        """Note that the reader has every event up to `seq`."""
        while self._unacked and self._unacked[0] <= seq:
            self._unacked.popleft()

    @property
    def due_at(self) -> float:
        """When the held events must leave; -inf is now, inf is not before an acknowledgement."""
        if self._credit is not None and len(self._unacked) >= self._credit:
            return math.inf
        is_due = self._is_urgent or self._num_tokens >= self._coalesce_tokens
        return -math.inf if is_due else self._tokens_due_at

    def take(self, now: float) -> list[LoggedEvent]:
        """Return the held events, tokens joined, as far as the credit allows."""
        events, self.events = self.events, []
        if self._num_tokens:
            self._tokens_due_at = now + self._coalesce_seconds
        self._num_tokens, self._is_urgent = 0, False
        if len(events) > 1 and self._joins:
            events = coalesce(events, max_tokens=self._coalesce_tokens)
        if self._credit is not None:
            num_allowed = self._credit - len(self._unacked)
            if len(events) > num_allowed:
                self.add(events[num_allowed:], now)
                self.hurry()  # they have been joined, and wait for credit only
                events = events[:num_allowed]
            self._unacked.extend(logged.seq for logged in events)
        return events
