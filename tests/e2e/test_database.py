"""A site's database that is locked, or no database at all, under real daphne: refusals, probes, running streams."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.db import connection

from streamserve.models import ApiKey
from streamserve.models import Stream as StreamRow
from streamserve.testing import DaphneServer
from tests.support.checks.stream_checks import check_native

pytestmark = [
    pytest.mark.proof,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "sqlite", reason="the lock and the file are SQLite's"),
]

ASK = {"prompt": "tell me", "max_tokens": 5}
LONG = {"prompt": "tell me", "max_tokens": 300, "ignore_eos": True}


@pytest.fixture
def key(transactional_db: Any) -> str:
    return ApiKey.objects.make(name="wire")[1]


@pytest.fixture
def settings_of_server(tmp_path: Path) -> dict[str, Any]:
    """A log in a file, as of a site with several processes, and an engine that takes its time."""
    return {"STREAMSERVE": {"LOG": "file", "STATE_DIR": str(tmp_path), "ECHO_STEP_SECONDS": 0.03}}


def client_of(server: DaphneServer, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False)


def until(condition: Callable[[], object], server: DaphneServer, seconds: float = 60.0) -> None:
    """Poll a server that has no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)


def state_of(client: httpx.Client) -> tuple[int, str]:
    ready = client.get("/readyz")
    return ready.status_code, ready.json()["database"]


def test_a_locked_database_harms_no_running_stream(key: str, settings_of_server: dict[str, Any]) -> None:
    """Six POSTs are refused while the lock is held, the stream that runs is read to its end; then all is as before."""
    with DaphneServer(settings=settings_of_server) as server, client_of(server, key) as client:
        until(lambda: state_of(client) == (200, "ok"), server)
        with (
            client.stream("POST", "/streams", json=LONG) as running,
            closing(sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)) as other,
            ThreadPoolExecutor(6) as pool,
        ):
            pieces = running.iter_raw()
            data = next(pieces)
            other.execute("BEGIN IMMEDIATE")
            refused = list(pool.map(lambda _: client.post("/streams", json=ASK), range(6)))
            assert other.in_transaction, "no request has waited for the lock's end"
            seconds = [one.elapsed.total_seconds() for one in refused]
            assert max(seconds) < 3 * max(1.0, min(seconds)), "they are refused together, not one after the other"
            assert [one.status_code for one in refused] == [503] * 6
            assert {one.json()["error"]["code"] for one in refused} == {"database_unavailable"}
            assert {one.headers["retry-after"] for one in refused} == {"2"}
            assert "is locked. Try again" in refused[0].json()["error"]["message"]
            assert state_of(client) == (503, "locked")
            assert client.get("/readyz").json()["reason"] == "the database is locked"
            assert client.get("/livez").status_code == 200
            frames = check_native(data + b"".join(pieces))
            assert frames[-1].json["usage"]["completion_tokens"] == LONG["max_tokens"]
            assert other.in_transaction
            assert StreamRow.objects.get().state == "running"
            other.execute("ROLLBACK")
        until(lambda: state_of(client) == (200, "ok"), server)
        assert client.post("/streams", json=ASK).status_code == 200
        until(lambda: not StreamRow.objects.exclude(state="finished").exists(), server)
    assert StreamRow.objects.count() == 2, "a refused request leaves no row"


def test_a_file_that_is_no_database_is_named(key: str, tmp_path: Path, settings_of_server: dict[str, Any]) -> None:
    """The process lives and is not ready, requests get a 503; with the right file in its place it is ready."""
    path = tmp_path / "site.sqlite3"
    path.write_bytes(b"this is no database at all" * 1000)
    server = DaphneServer(databases={"default": str(path)}, settings=settings_of_server)
    with server, client_of(server, key) as client:
        until(lambda: client.get("/livez").status_code == 200, server)
        until(lambda: state_of(client)[0] == 503, server)
        assert state_of(client) == (503, "away")
        refused = client.post("/streams", json=ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "database_unavailable")
        assert refused.headers["retry-after"] == "2"
        put_database(path)
        until(lambda: state_of(client) == (200, "ok"), server)
        assert client.post("/streams", json=ASK).status_code == 200


def put_database(path: Path) -> None:
    """Put a copy of the tests' database at `path`, in one step."""
    made = path.with_suffix(".made")
    with (
        closing(sqlite3.connect(connection.settings_dict["NAME"])) as here,
        closing(sqlite3.connect(made)) as there,
    ):
        here.backup(there)
    os.replace(made, path)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close this thread's connection, which sees no other process's rows inside a transaction."""
    yield
    connection.close()
