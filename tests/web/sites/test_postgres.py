"""The site's core laws on PostgreSQL (rows, claims, tenants, the wire): the same tests, in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.web_servers import ROOT

FILES = [
    "tests/rows/test_store.py",
    "tests/rows/test_rows.py",
    "tests/rows/test_receivers.py",
    "tests/rows/test_conversation_lists.py",
    "tests/rows/test_conversations.py",
    "tests/rows/test_threads.py",
    "tests/rows/test_usage.py",
    "tests/rows/test_rates.py",
    "tests/rows/test_titles.py",
    "tests/management/test_export.py",
    "tests/web/test_auth.py",
    "tests/e2e/test_site_wire.py",
    "tests/test_keys.py",
    "tests/project/help/test_search.py",
    "tests/work/test_worker.py",
    "tests/work/test_limits.py",
    "tests/api/test_jobs.py",
    "tests/api/openai/test_stored.py",
]

SQLITE_ONLY = [
    "tests/rows/test_rows.py::test_an_end_is_written_when_the_database_is_unlocked",
    "tests/work/test_worker.py::test_an_end_waits_for_a_locked_database",
    "tests/work/test_worker.py::test_a_worker_that_stops_does_not_wait_for_a_locked_database",
]

pytestmark = [pytest.mark.proof, pytest.mark.timeout(400)]


def test_the_core_tests_pass_on_postgresql() -> None:
    """Every test of FILES passes, but for those about SQLite's write lock; none is skipped."""
    with PostgresServer() as server:
        env = {**os.environ, "STREAMSERVE_TEST_POSTGRES": str(server.port)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "--reuse-db",
            "-W",
            "ignore::ResourceWarning",
            *FILES,
        ]
        command += [option for test in SQLITE_ONLY for option in ("--deselect", test)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    summary = re.search(r"(\d+) passed", done.stdout)
    assert summary, done.stdout[-2000:]
    assert "skipped" not in done.stdout
    assert int(summary.group(1)) > 40
