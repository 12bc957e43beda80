"""`AdmissionControl`: whether another request may wait, by the time that it would wait.

Used on the event loops of a client. What waits and runs is the engine's `Backlog`; here are only the prompts that are
being tokenised. Free places in the batch are not counted as queue, and a request that finds a free place, with no other
waiting before it, is accepted however long its prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from streamserve.clients.timings import RecentTimes
from streamserve.engine.config import EngineConfig
from streamserve.engine.policy.backlog import Backlog, Rank, Ticket
from streamserve.protocol.errors import BadRequest, Overloaded
from streamserve.protocol.requests import BATCH

# Seconds to retry after where the queue is full and no answer has finished yet.
_FIRST_GUESS = 5.0
# While an overload stands: of the lateness that a class allows, the share that the first of the queue has when the next
# request is refused. With less, requests are refused that could have begun; nearly all later requests could not.
_LAG_SHARE = 0.98


class Engine(Protocol):
    """What the door asks of an `EngineCore`."""

    @property
    def backlog(self) -> Backlog:
        """What waits and runs."""

    def note_refusal(self) -> None:
        """Record that a request was refused at the door."""


class AdmissionControl:
    """Refuses requests that would wait too long.

    The bound in time is the engine's `Patience`: what the scheduler would end later is refused here, before anything
    was promised. `max_waiting` bounds memory, for each class by itself; of its places each tenant has a share, which no
    other can fill. Rows of batches are before no other class, neither in the queue nor in a seat.
    """

    def __init__(self, config: EngineConfig, times: RecentTimes, clock: Callable[[], float]) -> None:
        self._config = config
        self._times = times
        self._clock = clock
        # Of each request whose prompt is being tokenised: its class, its tenant, how many sequences.
        self._preparing: dict[object, tuple[str, str, int]] = {}

    @property
    def num_in_preparation(self) -> int:
        """Sequences whose prompt is being tokenised."""
        return sum(number for _, _, number in self._preparing.copy().values())

    @contextmanager
    def reserve(
        self, engine: Engine, num_new: int, latency_class: str, tenant: str = "", *, may_refuse: bool = True
    ) -> Iterator[None]:
        """Reserve places in the queue while a prompt is tokenised; refuse more than its bound.

        Raises BadRequest for a request that has more choices than there are places at all.
        A full queue still has places for a tenant with less than its share, which no other can fill: with n
        tenants it holds at most 1 + ln n times its bound. Answers that were accepted before come on top (`may_refuse`
        False): they are no more than the site has streams.
        """
        most = self._config.max_waiting + self._config.max_num_seqs
        if num_new > most:
            message = f"n is {num_new}; this engine holds {most} answers, running and waiting. Lower n."
            raise BadRequest(message, code="invalid_value", param="n")
        backlog = engine.backlog
        waiting = self._num_waiting(backlog, latency_class)
        num_waiting, own = waiting.total(), waiting[tenant] + num_new
        num_places = self._config.max_waiting + max(0, self._config.max_num_seqs - len(backlog.running))
        is_full = num_waiting + num_new > num_places and own > num_places // len(waiting.keys() | {tenant})
        if may_refuse and is_full:
            self._times.note_refused(latency_class, has_waited=False)
            raise Overloaded(
                f"{num_waiting:,} answers are waiting already. Try again later.",
                retry_after=math.ceil(
                    self._seconds_to_seat(backlog, num_waiting + 1, self._config.max_num_seqs) or _FIRST_GUESS
                ),
            )
        key = object()
        self._preparing[key] = latency_class, tenant, num_new
        try:
            yield
        finally:
            del self._preparing[key]

    def _num_waiting(self, backlog: Backlog, latency_class: str) -> Counter[str]:
        """Return how many sequences of the class wait or are being prepared, of each tenant that has some."""
        waiting = Counter(one.tenant for one in backlog.waiting if one.latency_class == latency_class)
        for name, tenant, number in self._preparing.copy().values():
            if name == latency_class:
                waiting[tenant] += number
        return waiting

    def check_wait(
        self,
        engine: Engine,
        latency_class: str,
        *,
        tenant: str = "",
        num_tokens: int = 0,
        waited_seconds: float = 0.0,
        may_refuse: bool = True,
    ) -> tuple[int, float]:
        """Refuse a request that would wait longer for its first step than it may.

        `waited_seconds` of its patience it has spent before.
        Returns the queue position, which is how many sequences wait for their first step, and how long it may wait.
        """
        backlog, now = engine.backlog, self._clock()
        seconds, most = self.predict(backlog, latency_class, tenant=tenant, num_tokens=num_tokens)
        most = max(0.0, most - waited_seconds)
        if may_refuse and seconds > most:
            engine.note_refusal()
            self._times.note_refused(latency_class, has_waited=False)
            raise Overloaded(
                f"this request would wait {seconds:,.1f} s, and may wait {most:,.1f} s. Try again later.",
                retry_after=max(1, math.ceil(seconds - most)),
            )
        patience = backlog.patience_at(now).seconds(latency_class, now)
        return len(backlog.waiting), max(0.0, patience - waited_seconds)

    def predict(
        self, backlog: Backlog, latency_class: str, *, tenant: str = "", num_tokens: int = 0
    ) -> tuple[float, float]:
        """Return how long a request of `num_tokens` that comes now would wait for its first step, and how long it may.

        While an overload stands it will be as late as the first of the queue is. Otherwise a request that can only be
        late may wait behind all other requests.
        """
        now, config = self._clock(), self._config.classes[latency_class]
        overload = backlog.patience_at(now)
        patience = overload.seconds(latency_class, now)
        order_seconds = config.order_seconds(num_tokens, self._config.policy.prompt_token_seconds)
        if overload.is_standing(latency_class, now):
            most = config.ttft_seconds + _LAG_SHARE * (patience - config.ttft_seconds)
            return order_seconds + _key_lag(backlog, now, tenant), most
        rank = Rank.ROWS if latency_class == BATCH else Rank.ANSWERS
        key = now + order_seconds
        seconds = self._seconds_for(backlog, rank, *_ahead(backlog, now, key, rank, tenant))
        if seconds > config.standing_queue_seconds:
            seconds = self._seconds_for(backlog, rank, *_ahead(backlog, -math.inf, key, rank, tenant))
        return seconds, patience

    def _seconds_for(self, backlog: Backlog, rank: Rank, num_waiting: int, num_tokens: float) -> float:
        """Return how long it takes until a request behind these begins: prompts to compute, or seats to come free.

        The prompts that are being computed do not count: each step has room for a new prompt beside them. There are
        more seats than a step has, where readers are slower than the engine. 0 while nothing is known of either.
        """
        prefill = num_tokens * backlog.seconds_per_token * backlog.cold_share
        num_running = len(backlog.running)
        num_seats = max(self._config.max_num_seqs, num_running)
        if num_running and backlog.blocks_used:  # there may be memory for fewer
            num_seats = max(1, min(num_seats, num_running * backlog.blocks_total // backlog.blocks_used))
        return max(prefill, self._seconds_to_seat(backlog, num_waiting + 1, num_seats, rank))

    def _seconds_to_seat(self, backlog: Backlog, number: int, num_seats: int, rank: Rank = Rank.ANSWERS) -> float:
        """Return when so many seats have come free: each when its answer has run for as long as recent answers did."""
        seconds = self._times.running_seconds()
        started = [begun_at for ticket, begun_at in backlog.running if ticket.rank != Rank.ROWS or rank == Rank.ROWS]
        num_ends = number - (num_seats - len(started))
        if num_ends <= 0 or seconds is None:
            return 0.0
        now, num_free = self._clock(), max(0, num_seats - len(started))
        left = [max(0.0, begun_at + seconds - now) for begun_at in started] + [seconds] * num_free
        rounds, index = divmod(num_ends - 1, len(left))
        return sorted(left)[index] + rounds * seconds


def _before(backlog: Backlog, rank: Rank) -> list[Ticket]:
    """Return those that wait, and can be before a request of the rank: rows of batches are before rows only."""
    return [one for one in backlog.waiting if one.rank != Rank.ROWS or rank == Rank.ROWS]


def _ahead(backlog: Backlog, now: float, key: float, rank: Rank, tenant: str) -> tuple[int, float]:
    """Return how many are in time and go before a request with this key, and their tokens.

    Of each other tenant no more than of its own, and one.
    """
    others = [one for one in _before(backlog, rank) if one.late_at >= now]
    first = [one for one in others if one.key <= key or (rank == Rank.ROWS and one.rank != Rank.ROWS)]
    numbers = Counter(one.tenant for one in first)
    own = numbers.pop(tenant, 0)
    num_ahead = own + sum(min(number, own + 1) for number in numbers.values())
    return num_ahead, sum(one.num_tokens for one in first) * num_ahead / max(1, len(first))


def _key_lag(backlog: Backlog, now: float, tenant: str) -> float:
    """Return by how much the first of the queue in time is behind its key: the next request will be behind as much.

    A tenant with more requests in the queue than this tenant takes no place from it. Parked answers that come back go
    first of all: their keys are no measure of the queue.
    """
    in_time = [one for one in _before(backlog, Rank.ANSWERS) if one.is_new and one.late_at >= now]
    numbers = Counter(one.tenant for one in in_time)
    keys = (one.key for one in in_time if numbers[one.tenant] <= numbers[tenant] + 1)
    return now - min(keys, default=math.inf)
