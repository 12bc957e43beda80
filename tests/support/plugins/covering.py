"""`@pytest.mark.covering(n)`: `make test` runs as few cases of a test as hold every n values that can meet.

`covering(1)`: each value of each argument is in a case; `covering(2)`: so is each pair of values of two arguments. The
other cases of the full product are proofs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations

import pytest

Values = frozenset[tuple[str, int]]  # of some arguments: name, and what tells the value from others


def cover(cases: list[dict[str, int]], strength: int) -> set[int]:
    """Return the numbers of few cases that hold all sets of `strength` values that any case holds.

    The next case is the one with the most sets that are missing; of equal ones, that with the values used least.
    """
    sets: list[set[Values]] = [{frozenset(some) for some in combinations(case.items(), strength)} for case in cases]
    missing: set[Values] = set().union(*sets)
    uses: Counter[tuple[str, int]] = Counter()
    chosen: set[int] = set()
    while missing:
        best = min(
            range(len(cases)),
            key=lambda number: (-len(sets[number] & missing), sum(uses[value] for value in cases[number].items())),
        )
        missing -= sets[best]
        uses.update(cases[best].items())
        chosen.add(best)
    return chosen


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", "covering(n): `make test` runs a part of the cases, see tests/support/plugins/covering.py"
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as proofs the cases that `make test` can do without."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") is not None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("covering")
        assert marker is not None
        chosen = cover([_values_of(case) for case in cases], *marker.args)
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker(pytest.mark.proof)


def _values_of(case: pytest.Item) -> dict[str, int]:
    """Return the arguments of a case; all cases have the same objects, which need not be hashable."""
    return {name: id(value) for name, value in case.callspec.params.items()}  # type: ignore[attr-defined]
