"""Which worker of `pytest -n` runs which file, and when: `--dist loadfile` with two changes.

A folder whose tests share a server is run whole by one worker, so that the server is started once. The slowest begin
first: what is left at the end are small files, and all workers end at about the same time.
"""

from __future__ import annotations

from typing import Any

import pytest

# What has one server (and one Chromium) for a folder. test_tabs.py, which takes longest there, has its own.
SHARED = ("tests/e2e/browser/test_tabs.py", "tests/e2e/browser/", "tests/e2e/clients/")
# Files and folders of over ten seconds, about by their time. What waits for servers and what computes take turns.
SLOWEST = (
    "tests/doctor/test_proxies.py",
    "tests/e2e/browser/",
    "tests/native/test_sanitizers.py",
    "tests/proofs/kills/",
    "tests/proofs/restarts/",
    "tests/proofs/jobs/",
    "tests/proofs/memory/",
    "tests/web/sites/test_postgres.py",
    "tests/proofs/",
    "tests/engine/model/test_engine.py",
    "tests/e2e/clients/",
    "tests/e2e/test_wheel.py",
    "tests/clients/thread/test_loading.py",
    "tests/sim/test_every_fault.py",
    "tests/docs/test_quickstart.py",
    "tests/sim/test_seeds.py",
    "tests/docs/test_tutorial.py",
    "tests/benchmarks/",
    "tests/docs/",
    "tests/engine/model/",
    "tests/e2e/",
    "tests/engine/",
    "tests/web/calls/",
    "tests/sim/",
    "tests/project/",
    "tests/clients/thread/test_overload.py",
    "tests/asgi/flow/",
    "tests/support/models/",
    "tests/web/cli/",
    "tests/web/sites/",
    "tests/streams/test_blocks.py",
    "tests/web/test_own_rows.py",
    "tests/web/test_access.py",
)


def rank(nodeid: str) -> int:
    """Return the place of a test's file among the slowest; all others come after them."""
    return next((index for index, start in enumerate(SLOWEST) if nodeid.startswith(start)), len(SLOWEST))


def scope_of(nodeid: str) -> str:
    """Return what one worker runs: the test's file, or its folder."""
    file = nodeid.partition("::")[0]
    return next((start for start in SHARED if file.startswith(start)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of `--dist loadfile`; leave other ways to xdist."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SlowestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False  # by the number of tests, which says little of their time
    return SlowestFirst(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let a worker's list begin with the slowest: files are handed out in its order."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank(item.nodeid))
