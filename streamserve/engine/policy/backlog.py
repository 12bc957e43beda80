"""What waits for an engine, and what runs in it, as values: the queue orders by them, and the door predicts with them.

    Rank        what goes first, at any age
    Ticket      a sequence's place in the queue
    Patience    whether an overload stands, and so how long a request may wait
    Backlog     all of these after a step, with what has come and gone since

Values and pure functions: no sequence, no blocks; time is an argument. May be read on any thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from streamserve.engine.config import CLASSES, LatencyClass


class Rank(IntEnum):
    """What goes first, in the queue and in each step, at any age: answers to readers before all others."""

    ANSWERS = 0
    ROWS = 1  # of batches: computed in what answers leave
    PREFILL_ONLY = 2  # only to be cached: computed while there is nothing else to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A sequence's place in the queue, which never changes.

    `order_key`: smaller goes first; its rank, its key and its id. After `late_at` a first step is too late for the
    class; after `expires_at` it is too late for this request, which the queue decides when it is added. `num_tokens`
    are known. `is_new` False: a part of the answer was shown before.
    """

    order_key: tuple[int, float, int] = (Rank.ANSWERS, 0.0, 0)
    latency_class: str = ""
    tenant: str = ""
    late_at: float = math.inf
    expires_at: float = math.inf
    num_tokens: int = 0
    is_new: bool = True

    @property
    def rank(self) -> int:
        """The first part of its key."""
        return self.order_key[0]

    @property
    def seq_id(self) -> int:
        """The last part of its key."""
        return self.order_key[2]

    @property
    def key(self) -> float:
        """Arrival + the class's TTFT budget + a little for a long prompt."""
        return self.order_key[1]

    def is_in_time(self, now: float) -> bool:
        """Whether it waits in time, though its class can be late. Without such a request the queue counts as empty."""
        return self.is_new and self.rank == Rank.ANSWERS and now <= self.late_at < math.inf


# Of a class's `max_late_seconds`: longer than a request of it with a usual budget is in time.
_STANDING_FACTOR = 4.0
# Of the shortest `max_late_seconds`: so long after a refusal a queue may be empty because of it.
_REFUSAL_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Remembers when no request was left waiting that was not late yet, and when a request was refused.

    A request that is late, so that its first token can no longer come in time, waits behind all that are not. It costs
    them nothing, and what they leave over is its own: a burst is answered, be it late. Where for four times the class's
    `max_late_seconds` they have left no room, or would have left no room without refusals, the overload stands.
    Then a late request would not get its turn, and is refused. (Idea: CoDel, as in "Fail at Scale", ACM Queue
    2015: a queue that does not empty is no burst.)
    """

    classes: Mapping[str, LatencyClass]
    empty_at: float | None = None
    refused_at: float = -math.inf

    def noted(self, now: float, *, has_in_time: bool) -> Patience:
        """Return it after a look at the queue: whether a request waits that is not late."""
        quiet_seconds = _REFUSAL_FACTOR * min(one.max_late_seconds for one in self.classes.values())
        is_empty = not has_in_time and now - self.refused_at > quiet_seconds
        if self.empty_at is None or is_empty:
            return replace(self, empty_at=now)
        return self

    def refused(self, at: float) -> Patience:
        """Return it after a request was refused, or has waited too long: without that the queue would be longer."""
        return replace(self, refused_at=at) if at > self.refused_at else self

    def merged(self, other: Patience) -> Patience:
        """Return what two observers of one queue know together: the later of both times."""
        is_newer = other.empty_at is not None and (self.empty_at is None or other.empty_at > self.empty_at)
        newer = replace(self, empty_at=other.empty_at) if is_newer else self
        return newer.refused(other.refused_at)

    def is_standing(self, name: str, now: float) -> bool:
        """Whether an overload stands for the class: requests have long been waiting without a break."""
        seconds = _STANDING_FACTOR * self.classes[name].max_late_seconds
        return self.empty_at is not None and now - self.empty_at > seconds

    def seconds(self, name: str, now: float) -> float:
        """Return how long a request of the class that comes now may wait."""
        latency_class = self.classes[name]
        return latency_class.standing_queue_seconds if self.is_standing(name, now) else latency_class.queue_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What an engine has taken on: what a door needs to predict the wait of one more request.

    `waiting` have had no step in this engine, and are in no order. `running` have, since the times beside them.
    `seconds_per_token`: what a waiting token takes, when that was known last; 0 until then. `cold_share`: of the tokens
    of recent prompts, those that had to be computed. Blocks as in `CoreStats`.
    """

    waiting: tuple[Ticket, ...] = ()
    running: tuple[tuple[Ticket, float], ...] = ()
    patience: Patience = Patience(CLASSES)
    seconds_per_token: float = 0.0
    cold_share: float = 1.0
    blocks_used: int = 0
    blocks_total: int = 0

    def changed(self, changes: Mapping[int, Ticket | None], patience: Patience) -> Backlog:
        """Return it with sequences that were added, or ended (None), by id."""
        waiting = [one for one in self.waiting if one.seq_id not in changes]
        return replace(
            self,
            waiting=(*waiting, *(one for one in changes.values() if one is not None)),
            running=tuple(one for one in self.running if changes.get(one[0].seq_id, one) is not None),
            patience=patience,
        )

    def patience_at(self, now: float) -> Patience:
        """Return the patience after a look at the queue as it is now."""
        return self.patience.noted(now, has_in_time=any(one.is_in_time(now) for one in self.waiting))
