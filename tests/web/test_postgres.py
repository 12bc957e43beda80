"""The site's core laws on PostgreSQL (rows, claims, tenants, the wire): the same tests, in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.postgres_server import PostgresServer
from tests.support.servers import ROOT

FILES = ["tests/web/test_store.py", "tests/web/test_auth.py", "tests/e2e/test_site_wire.py", "tests/test_keys.py"]

pytestmark = [pytest.mark.proof, pytest.mark.timeout(400)]


def test_the_core_tests_pass_on_postgresql() -> None:
    """Every test of FILES passes; none is skipped."""
    with PostgresServer() as server:
        env = {**os.environ, "STREAMSERVE_TEST_POSTGRES": str(server.port)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    summary = re.search(r"(\d+) passed in ", done.stdout)
    assert summary, done.stdout[-2000:]
    assert int(summary.group(1)) > 40
