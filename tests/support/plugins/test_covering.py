"""Laws of `covering`: no value, or pair of values, is left to the proofs alone."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.plugins.covering import cover

CASES = [dict(zip("abc", case, strict=True)) for case in product(range(6), range(4), range(2))]


@pytest.mark.parametrize(("strength", "num"), [(1, 6), (2, 24), (3, 48)])
def test_all_that_can_meet_is_covered(strength: int, num: int) -> None:
    """Every set of so many values is in a chosen case, and there are as few cases as there can be."""
    chosen = cover(CASES, strength)

    def held(numbers: set[int]) -> set[object]:
        return {frozenset(some) for number in numbers for some in combinations(CASES[number].items(), strength)}

    assert held(chosen) == held(set(range(len(CASES))))
    assert len(chosen) == num


def test_values_take_turns() -> None:
    """Where one value of each suffices, those of a short argument are used about equally often."""
    chosen = cover(CASES, 1)
    assert sorted(CASES[number]["c"] for number in chosen) == [0, 0, 0, 1, 1, 1]
