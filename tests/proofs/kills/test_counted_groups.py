"""Limits over time where starts and ends share transactions, in several processes that are killed with -9.

Each process begins and ends answers of many callers, of every scope, all at once: what waits together is one
transaction. Judged is the database: SQLite and PostgreSQL. tests/proofs/kills/test_bills.py has whole sites.
"""

from __future__ import annotations

import json
import math
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.proofs.scale import scaled
from tests.support.docs.demo_site import environment, manage
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.web_servers import ROOT
from tests.support.sites import counted_site

pytestmark = pytest.mark.timeout(3600)

NUM_PROCESSES, NUM_CALLERS = 3, 30
NUM_KILLS = scaled(100)
MOST_ENDS = 60  # answers that end between two kills
RATES: dict[str, dict[str, float]] = counted_site.STREAMSERVE["RATES"]  # type: ignore[assignment]
LIMITS = {
    ("requests", 60): "REQUESTS_PER_MINUTE",
    ("tokens", 60): "TOKENS_PER_MINUTE",
    ("tokens", 86_400): "TOKENS_PER_DAY",
}


class Processes:
    """Processes on one database, which are started again after a kill."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Processes:
        self._running = [self._start(NUM_CALLERS) for _ in range(NUM_PROCESSES)]
        return self

    def __exit__(self, *of_error: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def _start(self, num_callers: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.proofs.support.counted_program", str(num_callers)]
        return subprocess.Popen(command, cwd=ROOT, env=self._env)

    def kill_one(self, index: int) -> None:
        process = self._running[index]
        assert process.poll() is None, "it has failed by itself"
        process.kill()
        process.wait()
        self._running[index] = self._start(NUM_CALLERS)

    def end_all(self) -> None:
        """Kill all, and have two processes at once end what they have left."""
        self.__exit__()
        self._running = [self._start(0) for _ in range(2)]
        assert [process.wait(120) for process in self._running] == [0, 0]


class Books:
    """What the database has, read beside the processes."""

    def __init__(self, rows: Any, begin: str) -> None:
        self._rows, self._begin = rows, begin
        self.fullest: Counter[str] = Counter()  # share of a scope's limit, in percent

    def all(self, query: str) -> list[tuple[Any, ...]]:
        return list(self._rows.execute(query).fetchall())

    def look(self) -> None:
        """No window is above its limit, and each has what its answers hold and have used, to the token."""
        self._rows.execute(self._begin)  # one moment for all queries
        windows = self.all("SELECT subject, what, seconds, used, ends_at_ms FROM streamserve_ratewindow")
        streams = self.all(
            "SELECT held, state, prompt_tokens + completion_tokens FROM streamserve_stream WHERE held IS NOT NULL"
        )
        self._rows.execute("COMMIT")
        counted: Counter[tuple[str, int, int]] = Counter()
        for held, state, used in streams:
            for *window, weight, amount in json.loads(held):
                counted[tuple(window)] += amount if state == "running" else math.ceil(used * weight)
        for subject, what, seconds, used, ends_at_ms in windows:
            scope = subject.partition(":")[0]
            limit = RATES[scope][LIMITS[what, seconds]]
            assert used <= limit, (subject, what, seconds)
            self.fullest[scope] = max(self.fullest[scope], round(100 * used / limit))
            if what == "tokens":
                assert used == counted[subject, seconds, ends_at_ms], (subject, seconds)

    def num_ended(self) -> int:
        return int(self.all("SELECT COUNT(*) FROM streamserve_stream WHERE state = 'finished'")[0][0])


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, str], Books]]:
    folder: Path = tmp_path_factory.mktemp("site")
    variables = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.counted_site"}
    with ExitStack() as stack:
        if request.param == "postgres":
            port = stack.enter_context(PostgresServer()).port
            variables["COUNTED_POSTGRES"] = str(port)
        assert manage(folder, "migrate", "--verbosity", "0", **variables).returncode == 0
        if request.param == "postgres":
            of_server = psycopg.connect(host="127.0.0.1", port=port, user="postgres", autocommit=True)
            # Sooner than a statement's own patience, LOCK_SECONDS, which would end a circle unseen.
            of_server.execute("ALTER SYSTEM SET deadlock_timeout = '20ms'")
            of_server.execute("SELECT pg_reload_conf()")
            books = Books(stack.enter_context(of_server), "BEGIN ISOLATION LEVEL REPEATABLE READ")
        else:
            of_file = sqlite3.connect(folder / "site.sqlite3", isolation_level=None, timeout=60)
            stack.callback(of_file.close)
            books = Books(of_file, "BEGIN")
        yield environment(folder, **variables), books


def test_no_window_is_passed_and_nothing_stays_held(site: tuple[dict[str, str], Books]) -> None:
    """At every moment, whichever process is killed in whatever group; and PostgreSQL undoes none as a deadlock."""
    env, books = site
    seed = random.randrange(10**6)
    print(f"\nseed {seed}")
    chance, began = random.Random(seed), time.monotonic()
    with Processes(env) as processes:
        for _ in range(NUM_KILLS):
            until = books.num_ended() + chance.randrange(1, MOST_ENDS)
            while books.num_ended() < until:
                books.look()
            processes.kill_one(chance.randrange(NUM_PROCESSES))
        num_left = books.all("SELECT COUNT(*) FROM streamserve_stream WHERE state = 'running'")[0][0]
        processes.end_all()
    books.look()
    streams = books.all("SELECT COUNT(*), SUM(prompt_tokens), SUM(completion_tokens) FROM streamserve_stream")
    assert books.all("SELECT COUNT(*) FROM streamserve_stream WHERE state = 'running'") == [(0,)]
    assert (
        books.all("SELECT SUM(requests), SUM(prompt_tokens), SUM(completion_tokens) FROM streamserve_usageday")
        == streams
    )
    if "COUNTED_POSTGRES" in env:
        assert books.all("SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'") == [(0,)]
    print(
        f"{NUM_KILLS} kills -9 in {time.monotonic() - began:.0f} s: {streams[0][0]:,} answers, {num_left} were left; "
        f"the fullest windows, in percent: {dict(books.fullest)}"
    )
