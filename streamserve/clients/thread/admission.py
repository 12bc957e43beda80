"""`AdmissionControl`: whether another request may wait, by the time that it would wait.

Used on the event loops of a client; the engine thread only removes what has ended. Free places in the batch are not
counted as queue, and a request that finds a free place, with no other waiting before it, is accepted however long its
prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from streamserve.clients.timings import RecentTimes
from streamserve.engine.config import EngineConfig
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.policy.waiting import Patience
from streamserve.protocol.engine import CoreStats
from streamserve.protocol.errors import BadRequest, Overloaded
from streamserve.protocol.requests import BATCH, PREFILL_ONLY

# Seconds to retry after where the queue is full and no answer has finished yet.
_FIRST_GUESS = 5.0
# While an overload stands: of the lateness that a class allows, the share that the first of the queue has when the next
# request is refused. With less, requests are refused that could have begun; nearly all later requests could not.
_LAG_SHARE = 0.98
# Weight of the newest prompt in the share that the prefix cache lacks: about the last ten count.
_NEWEST = 0.1


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sequence that waits for its first step. `key` is its place in the order; after `late_at` it goes last."""

    latency_class: str
    tenant: str
    key: float
    late_at: float
    num_tokens: int


@dataclass(slots=True)
class _Running:
    """A sequence that has started. `num_tokens`: of its prompt, until its first token."""

    latency_class: str
    started_at: float
    num_tokens: int


class AdmissionControl:
    """Counts sequences from acceptance to their end, and refuses those that would wait too long.

    The bound in time is `Patience`, as in the scheduler: what the scheduler would end later is refused here, before
    anything was promised. `max_waiting` bounds memory, for each class by itself; of its places each tenant has a share,
    which no other can fill. Rows of batches are before no other class, neither in the queue nor in a seat.
    """

    def __init__(self, config: EngineConfig, times: RecentTimes, clock: Callable[[], float]) -> None:
        self._config = config
        self._times = times
        self._clock = clock
        self._patience = Patience(config.classes)
        # Of each request whose prompt is being tokenised: its class, its tenant, how many sequences.
        self._preparing: dict[object, tuple[str, str, int]] = {}
        # The sequences that have not started, and those that have, with the tokens of their prompt until their first
        # token: then it is known how many were cached. The engine thread removes.
        self._waiting: dict[int, _Waiting] = {}
        self._running: dict[int, _Running] = {}
        self._seconds_per_token = 0.0
        self._cold_share = 1.0  # of the tokens of recent prompts, those that had to be computed

    @property
    def num_in_preparation(self) -> int:
        """Sequences whose prompt is being tokenised."""
        return sum(number for _, _, number in self._preparing.copy().values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing is counted any more."""
        return not (self._waiting or self._running or self.num_in_preparation)

    @contextmanager
    def reserve(self, num_new: int, latency_class: str, tenant: str = "", *, may_refuse: bool = True) -> Iterator[None]:
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
        waiting = self._num_waiting(latency_class)
        num_waiting, own = waiting.total(), waiting[tenant] + num_new
        num_places = self._config.max_waiting + max(0, self._config.max_num_seqs - len(self._running))
        is_full = num_waiting + num_new > num_places and own > num_places // len(waiting.keys() | {tenant})
        if may_refuse and is_full:
            self._times.note_refused(latency_class, has_waited=False)
            raise Overloaded(
                f"{num_waiting:,} answers are waiting already. Try again later.",
                retry_after=math.ceil(self._seconds_for(num_waiting, 0, CoreStats()) or _FIRST_GUESS),
            )
        key = object()
        self._preparing[key] = latency_class, tenant, num_new
        try:
            yield
        finally:
            del self._preparing[key]

    def _num_waiting(self, latency_class: str) -> Counter[str]:
        """Return how many sequences of the class wait or are being prepared, of each tenant that has some."""
        waiting = Counter(one.tenant for one in self._waiting.copy().values() if one.latency_class == latency_class)
        for name, tenant, number in self._preparing.copy().values():
            if name == latency_class:
                waiting[tenant] += number
        return waiting

    def check_wait(
        self,
        latency_class: str,
        stats: CoreStats,
        *,
        tenant: str = "",
        num_tokens: int = 0,
        waited_seconds: float = 0.0,
        may_refuse: bool = True,
    ) -> tuple[int, float]:
        """Refuse a request that would wait longer for its first step than it may; `stats` are the core's.

        `waited_seconds` of its patience it has spent before.
        Returns the queue position, which is how many sequences wait for their first step, and how long it may wait.
        """
        seconds, most = self.predict(latency_class, stats, tenant=tenant, num_tokens=num_tokens)
        most = max(0.0, most - waited_seconds)
        if may_refuse and seconds > most:
            self._patience.note_refusal(self._clock())
            self._times.note_refused(latency_class, has_waited=False)
            raise Overloaded(
                f"this request would wait {seconds:,.1f} s, and may wait {most:,.1f} s. Try again later.",
                retry_after=max(1, math.ceil(seconds - most)),
            )
        patience = self._patience.seconds(latency_class, self._clock())
        return len(self._waiting), max(0.0, patience - waited_seconds)

    def predict(
        self, latency_class: str, stats: CoreStats, *, tenant: str = "", num_tokens: int = 0
    ) -> tuple[float, float]:
        """Return how long a request of `num_tokens` that comes now would wait for its first step, and how long it may.

        While an overload stands it will be as late as the first of the queue is. Otherwise a request that can only be
        late may wait behind all other requests.
        """
        if stats.queued_tokens and stats.queued_seconds:
            self._seconds_per_token = stats.queued_seconds / stats.queued_tokens
        now, config = self._clock(), self._config.classes[latency_class]
        self._note_queue(now)
        patience, order_seconds = (
            self._patience.seconds(latency_class, now),
            self._order_seconds(latency_class, num_tokens),
        )
        if self._patience.is_standing(latency_class, now):
            most = config.ttft_seconds + _LAG_SHARE * (patience - config.ttft_seconds)
            return order_seconds + self._key_lag(now, tenant), most
        key, of_batch = now + order_seconds, latency_class == BATCH
        seconds = self._seconds_for(*self._ahead(now, key, tenant, of_batch), stats, of_batch=of_batch)
        if seconds > config.standing_queue_seconds:
            seconds = self._seconds_for(*self._ahead(-math.inf, key, tenant, of_batch), stats, of_batch=of_batch)
        return seconds, patience

    def add(self, seq_id: int, num_tokens: int, latency_class: str = "chat", tenant: str = "") -> None:
        """Count a new sequence with `num_tokens` to compute."""
        now, config = self._clock(), self._config.classes[latency_class]
        self._waiting[seq_id] = _Waiting(
            latency_class,
            tenant,
            now + self._order_seconds(latency_class, num_tokens),
            now + config.standing_queue_seconds,
            num_tokens,
        )

    def note(self, update: SequenceUpdate) -> None:
        """Count a sequence's start, or that it has waited too long for it; then what its prompt's cache lacked."""
        waiting = self._waiting.get(update.seq_id)
        if waiting is not None and update.error == "queue_timeout":
            self._patience.note_refusal(self._clock())
            self._times.note_refused(waiting.latency_class, has_waited=True)
        if waiting is not None and update.scheduled_at is not None:
            self._waiting.pop(update.seq_id, None)
            self._running[update.seq_id] = _Running(waiting.latency_class, update.scheduled_at, waiting.num_tokens)
            self._note_queue(self._clock())
        running = self._running.get(update.seq_id)
        if running is not None and running.num_tokens and update.token_ids:
            self._cold_share += _NEWEST * (1 - update.num_cached_tokens / running.num_tokens - self._cold_share)
            running.num_tokens = 0

    def remove(self, seq_id: int) -> None:
        """Stop counting a sequence."""
        self._waiting.pop(seq_id, None)
        self._running.pop(seq_id, None)

    def _order_seconds(self, latency_class: str, num_tokens: int) -> float:
        config = self._config
        return config.classes[latency_class].order_seconds(num_tokens, config.policy.prompt_token_seconds)

    def _note_queue(self, now: float) -> None:
        waiting = (one for one in self._waiting.copy().values() if one.latency_class != PREFILL_ONLY)
        self._patience.note(now, has_in_time=any(now <= one.late_at < math.inf for one in waiting))

    def _ahead(self, now: float, key: float, tenant: str, of_batch: bool) -> tuple[int, float]:
        """Return how many are in time and go before a request with this key, and their tokens.

        Of each other tenant no more than of its own, and one.
        """
        others = [one for one in self._others(of_batch) if one.late_at >= now]
        first = [one for one in others if one.key <= key or (of_batch and one.latency_class != BATCH)]
        numbers = Counter(one.tenant for one in first)
        own = numbers.pop(tenant, 0)
        num_ahead = own + sum(min(number, own + 1) for number in numbers.values())
        return num_ahead, sum(one.num_tokens for one in first) * num_ahead / max(1, len(first))

    def _others(self, of_batch: bool) -> list[_Waiting]:
        """Return those that wait, and can be before a row of a batch, or before any other request."""
        return [one for one in self._waiting.copy().values() if of_batch or one.latency_class != BATCH]

    def _seconds_for(self, num_waiting: int, num_tokens: float, stats: CoreStats, *, of_batch: bool = False) -> float:
        """Return how long it takes until a request behind these begins: prompts to compute, or seats to come free.

        The prompts that are being computed do not count: each step has room for a new prompt beside them. 0 while
        nothing is known of either.
        """
        prefill = num_tokens * self._seconds_per_token * self._cold_share
        return max(prefill, self._seconds_to_seat(num_waiting + 1, stats, of_batch))

    def _seconds_to_seat(self, number: int, stats: CoreStats, of_batch: bool) -> float:
        """Return when so many seats have come free: each when its answer has run for as long as recent answers did.

        There are more seats than a step has, where readers are slower than the engine.
        """
        seconds, running = self._times.running_seconds(), self._running.copy().values()
        started = [one.started_at for one in running if of_batch or one.latency_class != BATCH]
        num_seats = max(self._config.max_num_seqs, stats.running)
        if stats.running and stats.blocks_used:  # there may be memory for fewer
            num_seats = max(1, min(num_seats, stats.running * stats.blocks_total // stats.blocks_used))
        num_ends = number - (num_seats - len(started))
        if num_ends <= 0 or seconds is None:
            return 0.0
        now, num_free = self._clock(), max(0, num_seats - len(started))
        left = [max(0.0, started_at + seconds - now) for started_at in started] + [seconds] * num_free
        rounds, index = divmod(num_ends - 1, len(left))
        return sorted(left)[index] + rounds * seconds

    def _key_lag(self, now: float, tenant: str) -> float:
        """Return by how much the first of the queue in time is behind its key: the next request will be behind as much.

        A tenant with more requests in the queue than this tenant takes no place from it.
        """
        in_time = [one for one in self._others(of_batch=False) if one.late_at >= now]
        numbers = Counter(one.tenant for one in in_time)
        keys = (one.key for one in in_time if numbers[one.tenant] <= numbers[tenant] + 1)
        return now - min(keys, default=math.inf)
