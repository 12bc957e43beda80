"""The sequences that wait for blocks: which of them is next, and which have waited for too long.

    TenantShares    what each tenant has had lately: those further below their share go first
    WaitingQueue    the sequences, and their order by these shares and by the values of `backlog`

Knows sequences, no blocks; time is an argument. Engine thread only, but for `WaitingQueue.ticket`.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Set
from dataclasses import replace
from operator import attrgetter

from streamserve.engine.config import EngineConfig
from streamserve.engine.policy.backlog import Patience, Rank, Ticket
from streamserve.engine.policy.pace import ReaderPace
from streamserve.engine.sequence import Sequence, SequenceRequest
from streamserve.protocol.requests import BATCH, PREFILL_ONLY

WINDOW_SECONDS = 10
# The window moves in slices of one second: it is between nine and ten seconds long.
_SLICE_SECONDS = 1.0
# Less than any weighted token: what is left of sums that are not exact.
_LEAST_TOKENS = 1e-6


class TenantShares:
    """How much more or less than its share each tenant has had of what the engine computed lately.

    `max_debt_seconds`: tenants this close to their shares are alike. O(1) amortised for a charge; memory is bounded by
    the tenants of the last `WINDOW_SECONDS`. (Idea: the counters of VTC, arXiv 2401.00588, over a window instead of all
    time.)

    slices:  [ second 91: a 300, b 20 | second 92: a 280 | ... | second 100: b 5 ]
    """

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


_RANKS = {BATCH: Rank.ROWS, PREFILL_ONLY: Rank.PREFILL_ONLY}
# Order of the queue and of the batch: smaller goes first. It begins with the rank. Set by `WaitingQueue.add`.
order_key = attrgetter("ticket.order_key")


def rank_of(sequence: Sequence) -> int:
    """Return the rank of a sequence that was added to the queue."""
    return sequence.ticket.order_key[0]


class WaitingQueue:
    """`sequences` are in order of their keys; `shares` is charged with what steps compute.

    The key is arrival + the class's TTFT budget + a little for a long prompt. It is fixed when a sequence is added, so
    a sequence that comes back has its old place. In each rank sequences that have begun go first: they were preempted
    or parked, and their readers wait for them. What is late goes behind what is in time.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.sequences: list[Sequence] = []
        self.shares = TenantShares(config.policy.max_debt_seconds)
        self._config = config
        self.patience = Patience(config.classes)

    def ticket(self, request: SequenceRequest, now: float) -> Ticket:
        """Return the place of a request that comes now. May be called on any thread."""
        latency_class = self._config.classes[request.latency_class]
        rank = _RANKS.get(request.latency_class, Rank.ANSWERS)
        num_tokens, token_seconds = len(request.prompt_token_ids), self._config.policy.prompt_token_seconds
        key = request.arrived_at + latency_class.order_seconds(num_tokens, token_seconds)
        is_new = not request.output_token_ids
        return Ticket(
            order_key=(rank, key, request.seq_id),
            latency_class=request.latency_class,
            tenant=request.admission.share_of,
            late_at=now + latency_class.standing_queue_seconds if is_new else math.inf,
            num_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
            is_new=is_new,
        )

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence that is new to the engine."""
        request = sequence.request
        latency_class = self._config.classes[request.latency_class]
        sequence.ticket = self.ticket(request, now)
        sequence.reader = ReaderPace(request.reader_tokens, latency_class.pace)
        if sequence.num_output_tokens:
            sequence.reader.begin(sequence.num_output_tokens, now)
        else:
            self.note(now)
            wanted = self.patience.seconds(request.latency_class, now)
            expires_at = now + (wanted if request.queue_seconds is None else request.queue_seconds)
            sequence.ticket = replace(sequence.ticket, expires_at=expires_at)
        self.put(sequence)

    def put(self, sequence: Sequence) -> None:
        """Queue a sequence in its place, which it may have had before."""
        insort(self.sequences, sequence, key=order_key)

    def note(self, now: float) -> None:
        """Note whether a sequence waits that is in time: for long, that is an overload."""
        has_in_time = any(one.is_new and one.ticket.is_in_time(now) for one in self.sequences)
        self.patience = self.patience.noted(now, has_in_time=has_in_time)

    def head(self, rank: int, now: float) -> Sequence | None:
        """Return the next to start, if it is of this rank: no rank waits behind a later rank.

        What has begun goes first, by key alone; then what is in time; of several tenants the first one of whom is
        furthest below its share. Classes that are never late go by their keys alone, too.
        """
        best: tuple[bool, bool] | None = None  # whether it is late, and whether it ever can be
        firsts: dict[str, Sequence] = {}  # of each tenant, like the best
        for sequence in self.sequences:
            if rank_of(sequence) != rank:
                break
            if not sequence.is_new:
                return sequence
            kind = sequence.ticket.late_at < now, _is_limited(sequence)
            if best is None or kind[0] < best[0]:
                best, firsts = kind, {sequence.ticket.tenant: sequence}
            elif kind == best:
                firsts.setdefault(sequence.ticket.tenant, sequence)
        ranks = self.shares.ranks(firsts.keys(), now)
        return min(firsts.values(), key=lambda one: (ranks[one.ticket.tenant], one.ticket.order_key), default=None)

    def expired(self, now: float) -> list[Sequence]:
        """Return the sequences that waited too long for their first step; resumed sequences may wait."""
        refused = []
        for sequence in self.sequences:
            ticket = sequence.ticket
            if sequence.is_new and (ticket.expires_at < now or ticket.late_at < now):
                name = ticket.latency_class
                if ticket.expires_at < now or self.patience.is_standing(name, now):
                    refused.append(sequence)
        if refused:
            self.patience = self.patience.refused(now)
        return refused


def _is_limited(sequence: Sequence) -> bool:
    """Whether its class limits the wait: between these sequences and other classes' keys decide, and not tenants."""
    return sequence.ticket.late_at < math.inf
