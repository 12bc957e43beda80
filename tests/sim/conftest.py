"""Counts the checked steps, prints the count, and fails a whole run that checks too few."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sim.simulation import Simulation

MIN_STEPS = 200_000
NUM_SHARDS = 8  # of the random runs of test_seeds.py


class StepCount:
    """Steps of all simulations of this run, by test file."""

    def __init__(self) -> None:
        self.by_file: dict[str, int] = {}

    def add(self, file: str, sim: Simulation) -> None:
        """Count a finished simulation."""
        self.by_file[file] = self.by_file.get(file, 0) + sim.num_steps


_COUNT = pytest.StashKey[StepCount]()


@pytest.fixture(scope="session")
def step_count(request: pytest.FixtureRequest) -> Iterator[StepCount]:
    """The count of this session; every test of the simulation adds to it."""
    count = request.config.stash[_COUNT] = StepCount()
    yield count
    total = sum(count.by_file.values())
    if _is_whole(request.session) and not request.session.testsfailed:
        assert total >= MIN_STEPS, f"{total:,} steps checked, fewer than {MIN_STEPS:,}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how many steps were checked."""
    count = config.stash.get(_COUNT, None)
    if count is not None:
        parts = ", ".join(f"{file} {num:,}" for file, num in sorted(count.by_file.items()))
        terminalreporter.write_line(f"simulation: {sum(count.by_file.values()):,} steps checked ({parts})")


@pytest.fixture(scope="package", autouse=True)
def silence() -> Iterator[None]:
    """Turn off logging: these runs consist of faults, and a log line for each would take longer than the runs."""
    before = logging.root.manager.disable
    logging.disable()
    yield
    logging.disable(before)


def _is_whole(session: pytest.Session) -> bool:
    """Whether this process runs all files and shards, and not a selection of them (`-m`, `-k`, xdist)."""
    if hasattr(session.config, "workerinput"):
        return False
    folder = Path(__file__).parent
    files = {item.path for item in session.items}
    shards = [item for item in session.items if item.nodeid.startswith("tests/sim/test_seeds.py::test_random_runs[")]
    return len(shards) == NUM_SHARDS and files >= set(folder.glob("test_*.py"))
