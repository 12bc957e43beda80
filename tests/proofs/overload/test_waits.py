"""The bound on a request's wait in an engine with ten times the load it can serve. Pure core, fake clock, steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streamserve.engine.config import CLASSES
from streamserve.protocol.requests import BATCH, PREFILL_ONLY
from tests.proofs.scale import scaled
from tests.proofs.support.crowd import Crowd, Life

TIMES = 10
SECONDS = scaled(1_200)
MOST_WAITING = 256
PROMPT_LEN = 40
SMALLEST_TTFT = min(one.ttft_seconds for one in CLASSES.values())
# Of the classes that others go before whatever their age; of all others: 0.
RANKS = {BATCH: 1, PREFILL_ONLY: 2}
# No request times out: the order alone decides which requests wait, and how long.
PATIENT = {name: replace(one, max_queue_seconds=1e9, max_late_seconds=1e9) for name, one in CLASSES.items()}
# The light tenant's interval between requests; its prompt takes twenty steps of an idle engine.
SECONDS_BETWEEN = 3.0
# By then the flood has had more than its share.
BURST_SECONDS = 4.0
STEP_TOKENS, LIGHT_PROMPT_LEN = 32, 640


def crowd_of(**config: Any) -> Crowd:
    return Crowd(num_blocks=1025, max_num_seqs=8, **config)


def flood_rate(**config: Any) -> float:
    """Return `TIMES` the requests that a second answers while every seat is taken."""
    crowd = crowd_of(**{**config, "classes": PATIENT})
    for _ in range(200):
        crowd.add(PROMPT_LEN, some_tokens(crowd))
    began_at = crowd.clock.now
    while crowd.core.has_work:
        crowd.step()
    return TIMES * len(crowd.lives) / (crowd.clock.now - began_at)


def some_tokens(crowd: Crowd) -> int:
    return crowd.rng.randint(8, 40)


def _rank(life: Life) -> int:
    return RANKS.get(life.request.latency_class, 0)


class WaitBound:
    """Waiting requests, and which of them overtook which: every pair is checked against the bound."""

    def __init__(self) -> None:
        self.waiting: dict[int, Life] = {}
        self.num_overtakings = 0
        self.largest_share = 0.0

    def came(self, life: Life) -> None:
        """Note that the request waits from now on."""
        self.waiting[life.request.seq_id] = life

    def admitted(self, life: Life) -> None:
        """An admitted request overtakes no waiting request that arrived earlier by more than the bound.

        Of any tenant none overtakes one of a class that goes first: rows wait for all others, prompts to warm for rows.
        """
        del self.waiting[life.request.seq_id]
        name, rank = life.request.latency_class, _rank(life)
        for other in self.waiting.values():
            assert rank <= _rank(other), f"{name}: {life.request.seq_id} goes before {other.request.seq_id}"
            if rank < _rank(other) or other.request.admission.share_of != life.request.admission.share_of:
                continue
            later = life.request.arrived_at - other.request.arrived_at
            bound = self._bound(other)
            assert later <= bound + 1e-9, (
                f"{life.request.seq_id} came {later} s later and goes before {other.request.seq_id}"
            )
            self.num_overtakings += later > 0
            self.largest_share = max(self.largest_share, later / bound if bound else 0.0)

    def _bound(self, life: Life) -> float:
        """Seconds by which a request may arrive later and still be admitted first. See scheduler.py."""
        num_tokens = len(life.request.prompt_token_ids)
        return CLASSES[life.request.latency_class].order_seconds(num_tokens) - SMALLEST_TTFT


def test_wait_bound() -> None:
    """Of one tenant and rank none later than r by more than r's order_seconds - the smallest TTFT goes first."""
    crowd = crowd_of(classes=PATIENT, seed=1)
    bound = WaitBound()
    crowd.on_admitted = bound.admitted
    rate, end_at, num_refused = flood_rate(), crowd.clock.now + SECONDS, 0
    while crowd.clock.now < end_at:
        crowd.step()
        for arrived_at in crowd.late_arrivals(rate):
            if len(bound.waiting) == MOST_WAITING:
                num_refused += 1
            else:
                bound.came(add_random_request(crowd, arrived_at))
    while crowd.core.has_work:
        crowd.step()
    assert {life.end for life in crowd.lives.values()} == {"length"}
    num = len(crowd.lives)
    # In the long version rows and prompts to warm fill most places, and overtake nothing.
    assert bound.num_overtakings > num // 10, "too few requests were overtaken for a proof"
    print(
        f"\nwait bound, {TIMES}x for {SECONDS} s: {num:,} requests ({num_refused:,} more refused) in"
        f" {crowd.num_steps:,} steps, {num * (num - 1) // 2:,} pairs, {bound.num_overtakings:,} overtakings, 0 beyond"
        f" the bound; the longest used {bound.largest_share:.0%} of it"
    )


def add_random_request(crowd: Crowd, arrived_at: float) -> Life:
    """Add a request of any class, of a tenant with a heavy, medium or light load."""
    name = crowd.rng.choice(tuple(CLASSES))
    tenant = crowd.rng.choices(("flood", "some", "little"), (20, 5, 1))[0]
    return crowd.add(PROMPT_LEN, some_tokens(crowd), latency_class=name, tenant=tenant, arrived_at=arrived_at)


def test_light_tenant() -> None:
    """Beside a tenant that floods, a light one's first token takes at most three times its steps when alone.

    This holds once the flood has had more than its share. Half of each step may go to shorter prompts.
    """
    rate = flood_rate(max_num_batched_tokens=STEP_TOKENS)
    alone = {waited(life) for life in light_lives(0.0)}
    assert alone == {LIGHT_PROMPT_LEN // STEP_TOKENS}
    idle = max(alone)
    beside = [waited(life) for life in light_lives(rate)]
    print(
        f"\nlight tenant, beside a flood of {TIMES}x for {SECONDS} s: {len(beside)} requests, first token after"
        f" {min(beside)} to {max(beside)} steps, {sum(beside) / len(beside):.1f} in the mean; {idle} on an idle engine"
    )
    assert max(beside) <= 3 * idle


def light_lives(flood_per_second: float) -> list[Life]:
    """Return the requests of a light tenant, one every few seconds; the flood has begun before."""
    crowd = crowd_of(max_num_batched_tokens=STEP_TOKENS, seed=2)
    lives: list[Life] = []
    began_at = crowd.clock.now + BURST_SECONDS
    while crowd.clock.now < began_at + SECONDS:
        crowd.step()
        if crowd.clock.now >= began_at + SECONDS_BETWEEN * (1 + len(lives)):
            lives.append(crowd.add(LIGHT_PROMPT_LEN, some_tokens(crowd), tenant="light"))
        for arrived_at in crowd.late_arrivals(flood_per_second) if flood_per_second else ():
            if crowd.core.stats.waiting < MOST_WAITING:
                crowd.add(PROMPT_LEN, some_tokens(crowd), tenant="flood", arrived_at=arrived_at)
    return lives[:-1]  # the last may not have ended


def waited(life: Life) -> int:
    """Return the steps up to its first token, the one that gave it included."""
    assert life.first_token_at_step is not None, f"it ended with {life.end}, without a token"
    return life.first_token_at_step - life.came_at_step
