"""`WaitingQueue`: the sequences that wait for blocks, which of them is next, and which have waited for too long.

In the order of the key: arrival + the class's TTFT budget + a little for a long prompt. It is fixed when a sequence is
added, so one that comes back has its old place. Answers that have begun go first: they were preempted or parked, and
their readers wait for them. What is late goes behind what is in time (see `Patience`), and rows of batches behind all
other classes. Among tenants those further below their share go first (see `TenantShares`). Knows sequences, no blocks;
time is an argument. Engine thread only.
"""

from __future__ import annotations

import math
from bisect import insort
from operator import attrgetter

from streamserve.engine.config import BATCH, WARM, EngineConfig
from streamserve.engine.patience import Patience
from streamserve.engine.policy.reader import ReaderPace
from streamserve.engine.policy.tenants import TenantShares
from streamserve.engine.sequence import Sequence

# Order of the queue and of the batch: smaller goes first. Set by `WaitingQueue.add`.
order_key = attrgetter("order_key")
# The tiers of the queue: no sequence starts before one of an earlier tier.
_BEGUN, _IN_TIME, _LATE, _BATCH_BEGUN, _BATCH, _WARM = range(6)
# The classes that others go before whatever their age; smaller goes first.
_RANKS = {BATCH: 1, WARM: 2}


class WaitingQueue:
    """`sequences` are in order of their keys; `shares` is charged with what steps compute."""

    def __init__(self, config: EngineConfig) -> None:
        self.sequences: list[Sequence] = []
        self.shares = TenantShares(config.max_debt_seconds)
        self._config = config
        self._patience = Patience(config.classes)

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence that is new to the engine."""
        request = sequence.request
        latency_class = self._config.classes[request.latency_class]
        rank = _RANKS.get(request.latency_class, 0)
        key = request.arrived_at + latency_class.order_seconds(len(request.prompt_token_ids))
        sequence.order_key = rank, key, request.seq_id
        sequence.reader = ReaderPace(request.reader_tokens, latency_class.pace)
        if sequence.num_output_tokens:
            sequence.reader.begin(sequence.num_output_tokens, now)
        else:
            self.note(now)
            wanted = self._patience.seconds(request.latency_class, now)
            sequence.expires_at = now + (wanted if request.queue_seconds is None else request.queue_seconds)
            sequence.late_at = now + latency_class.standing_queue_seconds
        self.put(sequence)

    def put(self, sequence: Sequence) -> None:
        """Queue a sequence in its place, which it may have had before."""
        insort(self.sequences, sequence, key=order_key)

    def note(self, now: float) -> None:
        """Note whether a sequence waits that is in time: for long, that is an overload."""
        in_time = (one for one in self.sequences if _is_limited(one))
        self._patience.note(now, has_in_time=any(_tier(one, now) == _IN_TIME for one in in_time))

    def is_turn(self, *, of_batch: bool) -> bool:
        """Whether the next to start is a row of a batch, or is none."""
        return bool(self.sequences) and is_batch(self.sequences[0]) is of_batch

    def head(self, now: float) -> Sequence | None:
        """Return the next to start. By tier; of several tenants one furthest below its share; by key.

        An answer that has begun goes by its key alone. So do those of classes that are never late.
        """
        best, is_limited = _WARM + 1, False
        firsts: dict[str, Sequence] = {}  # of each tenant, in the best tier
        for sequence in self.sequences:
            tier = _tier(sequence, now)
            if tier == _BEGUN:
                return sequence
            if tier < best:
                best, is_limited = tier, _is_limited(sequence)
                firsts = {sequence.request.tenant: sequence}
            elif tier == best and tier != _BATCH_BEGUN and is_limited == _is_limited(sequence):
                firsts.setdefault(sequence.request.tenant, sequence)
        ranks = self.shares.ranks(firsts.keys(), now)
        return min(firsts.values(), key=lambda one: (ranks[one.request.tenant], one.order_key), default=None)

    def expired(self, now: float) -> list[Sequence]:
        """Return the sequences that waited too long for their first step; resumed ones may wait."""
        refused = []
        for sequence in self.sequences:
            if sequence.is_new and (sequence.expires_at < now or sequence.late_at < now):
                name = sequence.request.latency_class
                if sequence.expires_at < now or self._patience.is_standing(name, now):
                    refused.append(sequence)
        if refused:
            self._patience.note_refusal(now)
        return refused


def is_batch(sequence: Sequence) -> bool:
    """Whether it is a row of a batch: computed in what the others leave."""
    return sequence.request.latency_class == BATCH


def is_warm(sequence: Sequence) -> bool:
    """Whether it is computed only while there is nothing else to do."""
    return sequence.request.latency_class == WARM


def _tier(sequence: Sequence, now: float) -> int:
    if is_warm(sequence):
        return _WARM
    if is_batch(sequence):
        return _BATCH if sequence.is_new else _BATCH_BEGUN
    if not sequence.is_new:
        return _BEGUN
    return _LATE if sequence.late_at < now else _IN_TIME


def _is_limited(sequence: Sequence) -> bool:
    """Whether its class limits the wait: between these and those of other classes keys decide, and not tenants."""
    return sequence.late_at < math.inf
