"""Migrations of a site that has many rows already, on PostgreSQL: while they run, streams are inserted and ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.proofs.scale import scaled
from tests.support.docs.demo_site import manage
from tests.support.servers.postgres_server import PostgresServer

pytestmark = pytest.mark.timeout(900)

NUM_ROWS = scaled(1_000_000)
LOCK_SECONDS = 3  # no write may wait so long for a lock

_FILL = """
INSERT INTO streamserve_stream (id, log_id, owner, tenant, model, state, finish_reason, error_code, prompt_tokens,
    cached_tokens, completion_tokens, last_seq, on_disconnect, fence, producer, text, created_at)
SELECT md5(number::text), substr(md5(number::text), 1, 12), 'user:1', 'user:1', 'chat', 'finished', 'stop', '',
    1, 0, 1, 3, 'park', 1, '', repeat('word ', 20), now()
FROM generate_series(%s, %s) AS number ON CONFLICT DO NOTHING
"""


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


class Writer:
    """Inserts rows of streams and changes them, until it is stopped; a write that waits for a lock fails."""

    def __init__(self, server: PostgresServer) -> None:
        self.num, self.errors = 0, list[Exception]()
        self._server, self._is_over = server, threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        with connected(self._server) as rows:
            rows.execute(f"SET lock_timeout = '{LOCK_SECONDS}s'")
            while not self._is_over.is_set():
                number = 10**9 + self.num
                try:
                    rows.execute(_FILL, (number, number))
                    rows.execute("UPDATE streamserve_stream SET text = '' WHERE id = md5(%s::text)", (str(number),))
                except psycopg.Error as error:
                    self.errors.append(error)
                    return
                self.num += 1

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


def connected(server: PostgresServer) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", autocommit=True)


def test_migrations_hold_up_no_stream(server: PostgresServer, tmp_path: Path) -> None:
    """From the first release's tables to those of today, with a million streams: every write goes through."""
    variables = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.jobs_site", "JOBS_POSTGRES": str(server.port)}
    done = manage(tmp_path, "migrate", "streamserve", "0001", "--verbosity=0", **variables)
    assert done.returncode == 0, done.stderr
    with connected(server) as rows:
        rows.execute(_FILL, (1, NUM_ROWS))
    writer, began = Writer(server), time.monotonic()
    try:
        done = manage(tmp_path, "migrate", "--verbosity=0", **variables)
    finally:
        writer.stop()
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert writer.errors == []
    assert writer.num > 0
    print(f"\nmigrations of {NUM_ROWS:,} streams: {seconds:.1f} s with Django's start, {writer.num:,} writes meanwhile")
