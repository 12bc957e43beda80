"""PostgreSQL stops, or stands still, under a site with load: refusals in time, running streams, recovery."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psycopg
import pytest

from tests.support.checks.stream_checks import check_native
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.web_servers import ROOT, Server, daphne, wait_until_ready

_SETTINGS = """
from tests.settings import *
DATABASES["default"]["NAME"] = "postgres"
STREAMSERVE = {"TESTING": True, "LOG": "file", "STATE_DIR": {state!r}, "ECHO_STEP_SECONDS": 0.03}
"""
KEY = "a-key-of-this-test-0001"
ASK = {"prompt": "tell me", "max_tokens": 5}
LONG = {"prompt": "tell me", "max_tokens": 400, "ignore_eos": True}
NUM_AT_ONCE = 6


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def server(postgres: PostgresServer, tmp_path: Path) -> Iterator[Server]:
    """A site on it, under daphne."""
    (tmp_path / "away_settings.py").write_text(_SETTINGS.replace("{state!r}", repr(str(tmp_path / "state"))))
    variables = {
        "DJANGO_SETTINGS_MODULE": "away_settings",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "STREAMSERVE_TEST_POSTGRES": str(postgres.port),
    }
    make_key = f"from streamserve.models import ApiKey; ApiKey.objects.make({KEY!r}, name='test')"
    for command in (["migrate", "-v", "0"], ["shell", "-c", make_key]):
        manage = [sys.executable, "-m", "django", *command]
        subprocess.run(manage, env={**os.environ, **variables}, check=True, capture_output=True, timeout=120)
    with daphne("streamserve.routing:application", env=variables) as server:
        wait_until_ready(server.url)
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


def until(condition: Callable[[], object], server: Server, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, server.output()
        time.sleep(0.05)


def state_of(client: httpx.Client) -> tuple[int, str]:
    ready = client.get("/readyz")
    return ready.status_code, ready.json()["database"]


@pytest.mark.parametrize(("fault", "state"), [("stop", "away"), ("standstill", "slow")])
def test_postgres_is_away_for_a_while(
    postgres: PostgresServer, server: Server, client: httpx.Client, fault: str, state: str
) -> None:
    """Each POST is refused before it is back, the stream is read to its end, and then all is as before."""
    begin = postgres.stop if fault == "stop" else lambda: postgres.signal(signal.SIGSTOP)
    end = postgres.start if fault == "stop" else lambda: postgres.signal(signal.SIGCONT)
    with client.stream("POST", "/streams", json=LONG) as running, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        pieces = running.iter_raw()
        data = next(pieces)
        begin()
        try:
            refused = list(pool.map(lambda _: client.post("/streams", json=ASK), range(NUM_AT_ONCE)))
            seconds = [one.elapsed.total_seconds() for one in refused]
            assert max(seconds) < 3 * max(1.0, min(seconds)), "they are refused together, not one after the other"
            assert [(one.status_code, one.json()["error"]["code"]) for one in refused] == [
                (503, "database_unavailable")
            ] * NUM_AT_ONCE
            assert state_of(client) == (503, state)
            assert client.get("/livez").status_code == 200
            frames = check_native(data + b"".join(pieces))
            assert frames[-1].json["usage"]["completion_tokens"] == LONG["max_tokens"]
        finally:
            end()
    until(lambda: state_of(client) == (200, "ok"), server)
    until(lambda: client.post("/streams", json=ASK).status_code == 200, server)
    path = f"/streams/{running.headers['x-stream-id']}"
    until(lambda: client.get(path).json()["state"] == "finished", server)


def test_a_locked_row_harms_its_own_stream_only(postgres: PostgresServer, server: Server, client: httpx.Client) -> None:
    """Another program locks the row of a stream that ends: its end waits, and others begin and end meanwhile."""
    address = f"host=127.0.0.1 port={postgres.port} user=postgres dbname=postgres"
    with psycopg.connect(address) as other, client.stream("POST", "/streams", json=LONG) as running:
        stream_id = running.headers["x-stream-id"]
        other.execute("SELECT 1 FROM streamserve_stream WHERE id = %s FOR UPDATE", [stream_id])
        check_native(b"".join(running.iter_raw()))
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            answers = list(pool.map(lambda _: client.post("/streams", json=ASK), range(3 * NUM_AT_ONCE)))
        assert [one.status_code for one in answers] == [200] * len(answers)
        for one in answers:
            check_native(one.content)
        other.rollback()
        until(lambda: client.get(f"/streams/{stream_id}").json()["state"] == "finished", server)
        states = "SELECT state FROM streamserve_stream"
        until(lambda: {row[0] for row in other.execute(states).fetchall()} == {"finished"}, server)
