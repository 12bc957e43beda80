"""Laws of the tenants' shares."""

from __future__ import annotations

import math
import random

import pytest

from streamserve.engine.policy.waiting import WINDOW_SECONDS, TenantShares

BOTH = {"flood", "light"}


def charged(num_flood: int, num_light: int, max_debt_seconds: float = 1.0) -> TenantShares:
    """Ten seconds of so many tokens each."""
    shares = TenantShares(max_debt_seconds)
    for second in range(10):
        shares.charge("flood", num_flood, second)
        shares.charge("light", num_light, second)
    return shares


def test_lone_tenant_has_rank_0() -> None:
    """Whatever it had: no other waits."""
    assert charged(100, 1).ranks({"flood"}, 9.9) == {"flood": 0}


def test_rank_is_excess_in_seconds_of_work() -> None:
    """Ten seconds of 100 tokens, 90 of them for one of two: it has 400 above its half, 4 s of the engine's work."""
    assert charged(90, 10).ranks(BOTH, 9.9) == {"flood": 4, "light": -4}
    assert charged(90, 10, max_debt_seconds=3.0).ranks(BOTH, 9.9) == {"flood": 1, "light": -1}


def test_tenants_near_their_shares_are_alike() -> None:
    """Less than `max_debt_seconds` of work off its share changes no order; with an infinite one nothing does."""
    assert charged(59, 41).ranks(BOTH, 9.9) == {"flood": 0, "light": 0}
    assert charged(99, 1, max_debt_seconds=math.inf).ranks(BOTH, 9.9) == {"flood": 0, "light": 0}


def test_newcomer_has_a_share_to_come() -> None:
    """A tenant that waits counts, though nothing was computed for it: it goes before the flood."""
    shares = TenantShares(1.0)
    for second in range(10):
        shares.charge("flood", 100, second)
    assert shares.ranks({"flood", "stranger"}, 9.9) == {"flood": 5, "stranger": -5}


def test_idle_seconds_do_not_make_work_dearer() -> None:
    """A burst of one second is worth at most that second."""
    shares = TenantShares(0.1)
    shares.charge("flood", 990, 5.2)
    shares.charge("light", 10, 5.4)
    assert shares.ranks(BOTH, 12.0) == {"flood": 4, "light": -4}


def test_work_is_forgotten_with_the_window() -> None:
    """Work older than the window is dropped, and costs no memory."""
    shares = TenantShares(1.0)
    for index in range(1000):
        shares.charge(f"tenant {index}", 1 + index, index / 100)
    shares.charge("late", 1, 100.0)
    ranks = shares.ranks({"tenant 999", "stranger"}, 100.0)
    assert ranks["tenant 999"] == ranks["stranger"]
    assert (len(shares._slices), list(shares._tokens)) == (1, ["late"])


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_plain_count(seed: int) -> None:
    """The running sums equal those over a list of all charges, at every moment."""
    rng, shares, now = random.Random(seed), TenantShares(0.5), 50.0
    charges: list[tuple[str, int, int]] = []
    for _ in range(500):
        now += rng.expovariate(5)
        tenant, num_tokens = rng.choice("aabc"), rng.randint(1, 100)
        shares.charge(tenant, num_tokens, now)
        charges.append((tenant, num_tokens, int(now)))
        recent = [one for one in charges if one[2] > int(now) - WINDOW_SECONDS]
        total = sum(tokens for _, tokens, _ in recent)
        share = total / len({name for name, _, _ in recent} | {"a", "b"})
        rate = total / len({second for _, _, second in recent})
        mine = {name: sum(tokens for one, tokens, _ in recent if one == name) for name in "ab"}
        assert shares.ranks({"a", "b"}, now) == {name: int((mine[name] - share) / (rate * 0.5)) for name in "ab"}


def test_no_debt_at_all_ranks_by_every_token() -> None:
    """With a bound of 0 seconds the rank is the tokens above the share."""
    assert charged(31, 30, max_debt_seconds=0.0).ranks(BOTH, 9.9) == {"flood": 5, "light": -5}
