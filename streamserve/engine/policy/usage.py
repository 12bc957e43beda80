"""`Usage`: where the engine's time goes, and how its readers are: the counts behind the live page.

Knows steps, and sequences only to count them; decides nothing. Engine thread only; time is an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from streamserve.engine.in_flight import Launched
from streamserve.engine.policy.backlog import Rank
from streamserve.engine.sequence import Sequence
from streamserve.protocol.engine import LATE_SECONDS

# The readers are looked at so often; the counts leave the engine once a second.
_LOOK_SECONDS = 0.25
_UNREAD = ("away", "row")  # nobody reads these answers now


class Usage:
    """Counts since the engine began. `hungry_seconds` is the scheduler's."""

    def __init__(self, hungry_seconds: float) -> None:
        self.num_computed = 0  # tokens
        self.num_recomputed = 0
        self.busy_seconds = 0.0
        self.num_expired = 0
        self._states: dict[Sequence, str] = {}  # of readers: "late", "hungry", "ahead", "away"; "row"
        self._hungry_seconds = hungry_seconds
        self._looked_at = -math.inf

    def note_step(self, step: Launched, seconds: float) -> None:
        """Count a step before its result is recorded: what it computed, and of that what had been computed before."""
        self.busy_seconds += seconds
        for part in step.parts:
            start, end = part.chunk.start, part.chunk.start + len(part.chunk.token_ids)
            self.num_computed += end - start
            self.num_recomputed += max(0, min(end, part.sequence.num_once_computed) - start)

    def look(self, running: Iterable[Sequence], now: float) -> None:
        """Look at the readers of the answers that have begun, now and then."""
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        self._states = {one: self._state_of(one, now) for one in running if one.first_token_at is not None}

    def readers(self, running: Iterable[Sequence]) -> Counter[str]:
        """Count the running answers by their readers' states, of answers that had a token at the last look."""
        states = self._states
        return Counter(states[one] for one in running if one in states)

    def readers_pace(self, running: Iterable[Sequence]) -> float:
        """Return how many tokens a second the readers of these answers read, without those that are away."""
        states = self._states
        return sum(one.reader.pace for one in running if states.get(one, "away") not in _UNREAD)

    def _state_of(self, sequence: Sequence, now: float) -> str:
        if sequence.ticket.rank == Rank.ROWS:
            return "row"
        if sequence.reader.is_away:
            return "away"
        seconds = sequence.ahead_seconds(now)
        if seconds >= self._hungry_seconds:
            return "ahead"
        return "hungry" if seconds >= -LATE_SECONDS else "late"
