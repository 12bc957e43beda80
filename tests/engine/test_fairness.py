"""Laws of the tenants' debt."""

from __future__ import annotations

import random

import pytest

from streamserve.engine.budget import WINDOW_SECONDS, TenantDebt


def test_single_tenant_has_no_debt() -> None:
    """A lone tenant has no debt."""
    debt = TenantDebt()
    for second in range(30):
        debt.charge("a", 1000, second)
    assert debt.seconds("a", 29.5) == 0.0


def test_equal_tenants_have_no_debt() -> None:
    """Equal shares give no debt, however many tenants there are."""
    debt = TenantDebt()
    for tenant in "abcd":
        debt.charge(tenant, 250, 100.0)
    assert [debt.seconds(tenant, 100.0) for tenant in "abcd"] == [0.0] * 4


def test_debt_is_excess_in_seconds_of_work() -> None:
    """Ten seconds of 100 tokens, 90 of them for one of two: it has 400 above its half, 4 s of the engine's work."""
    debt = TenantDebt()
    for second in range(10):
        debt.charge("flood", 90, second)
        debt.charge("light", 10, second)
    assert debt.seconds("flood", 9.9) == pytest.approx(4.0)
    assert debt.seconds("light", 9.9) == pytest.approx(-4.0)


def test_newcomer_has_a_share_to_come() -> None:
    """A new tenant beside a flood is below its share: it goes before the flood."""
    debt = TenantDebt()
    for second in range(10):
        debt.charge("flood", 100, second)
    assert (debt.seconds("flood", 9.9), debt.seconds("stranger", 9.9)) == (0.0, pytest.approx(-5.0))


def test_idle_seconds_do_not_make_debt_dearer() -> None:
    """A burst of one second is worth at most that second."""
    debt = TenantDebt()
    debt.charge("flood", 990, 5.2)
    debt.charge("light", 10, 5.4)
    assert debt.seconds("flood", 12.0) == pytest.approx(0.49)


def test_debt_ends_with_the_window() -> None:
    """Work older than the window is dropped, and costs no memory."""
    debt = TenantDebt()
    for index in range(1000):
        debt.charge(f"tenant {index}", 1 + index, index / 100)
    debt.charge("late", 1, 100.0)
    assert debt.seconds("tenant 999", 100.0) == debt.seconds("stranger", 100.0)
    assert (len(debt._slices), list(debt._tokens)) == (1, ["late"])


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_plain_count(seed: int) -> None:
    """The running sums equal those over a list of all charges, at every moment."""
    rng, debt, now = random.Random(seed), TenantDebt(), 50.0
    charges: list[tuple[str, int, int]] = []
    for _ in range(500):
        now += rng.expovariate(5)
        tenant, num_tokens = rng.choice("abc"), rng.randint(1, 100)
        debt.charge(tenant, num_tokens, now)
        charges.append((tenant, num_tokens, int(now)))
        recent = [one for one in charges if one[2] > int(now) - WINDOW_SECONDS]
        total = sum(tokens for _, tokens, _ in recent)
        mine = sum(tokens for name, tokens, _ in recent if name == tenant)
        excess = mine - total / len({name for name, _, _ in recent})
        assert debt.seconds(tenant, now) == pytest.approx(excess * len({second for _, _, second in recent}) / total)
