"""kill -9 of worker, web process and engine, at random moments while a batch runs.

Each custom_id is in the output or in the error file, once. The pipelines of the batch write down each run of a row
(tests/support/sites/batch_app), so that rows that ran twice are counted: at most one for each slot and kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.proofs.scale import scaled
from tests.support.batch_runs import ENDED, jsonl, line
from tests.support.batch_site import BatchSite, engines_stopped, make_site, start_worker
from tests.support.demo_site import processes_of
from tests.support.postgres_server import PostgresServer
from tests.support.servers import ROOT, Server, environ_of, stop, wait_until_listening

pytestmark = pytest.mark.timeout(7200)

NUM_KILLS = scaled(100)
NUM_ECHO, NUM_HELP = scaled(5000), scaled(300, least=30)
NUM_SLOTS = 8  # CONCURRENCY of the site
VICTIMS = ("worker", "worker", "web", "engine")
_DEADLINE_SECONDS = 600.0  # of a step of the test, on a busy machine


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchSite]:
    folder = tmp_path_factory.mktemp(request.param)
    with contextlib.ExitStack() as stack:
        variables = {"STEP_SECONDS": "0.005", "LEDGER": str(folder / "ledger")}
        if request.param == "postgres":
            server = stack.enter_context(PostgresServer())
            _make_database(server.port)
            variables["POSTGRES"] = str(server.port)
        site = make_site(folder, variables)
        stack.enter_context(engines_stopped(site))
        yield site


def _make_database(port: int) -> None:
    with psycopg.connect(host="127.0.0.1", port=port, user="postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE streamserve")


class Processes:
    """The web process and the worker of a site; each is there again after it was killed."""

    def __init__(self, site: BatchSite, model: str) -> None:
        self._site, self._model = site, model
        self._folder = Path(site.env["STREAMSERVE_STATE_DIR"])
        self._env = environ_of(ROOT, site.env)
        self.web, self.worker = self._start_web(), self._start_worker()
        wait_until_listening(Server(site.port, self.web, self._folder / "web.log"))
        self.killed: Counter[str] = Counter()

    def _start_web(self) -> subprocess.Popen[bytes]:
        log = self._folder / "web.log"
        command = [sys.executable, "-m", "daphne", "-b", "127.0.0.1", "-p", str(self._site.port)]
        with log.open("ab") as out:
            command.append("project.asgi:application")
            return subprocess.Popen(command, cwd=ROOT, env=self._env, stdout=out, stderr=out)

    def _start_worker(self) -> subprocess.Popen[bytes]:
        return start_worker(self._env, self._folder / "worker.log")

    def kill(self, what: str) -> None:
        """Kill one with -9; an engine, which its clients start again, only while there is one: else the worker."""
        if what == "engine":
            pids = [pid for pid in processes_of(self._folder) if f"engine-{self._model}" in _command(pid)]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            what = "engine" if pids else "worker"
        self.killed[what] += 1
        if what == "engine":
            return
        process = self.web if what == "web" else self.worker
        process.kill()
        process.wait()
        if what == "web":
            self.web = self._start_web()
        else:
            self.worker = self._start_worker()

    def close(self) -> None:
        stop(self.worker)
        stop(self.web)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def asked(client: httpx.Client, path: str) -> Any:
    """Return the JSON at `path`, as soon as the web process answers."""
    until = time.monotonic() + _DEADLINE_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            response = client.get(path)
            if response.status_code == 200:
                return response.json()
        assert time.monotonic() < until, path
        time.sleep(0.02)


def wait(client: httpx.Client, batch_id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Poll the batch until `condition` holds or it has ended."""
    until = time.monotonic() + _DEADLINE_SECONDS
    while True:
        batch: dict[str, Any] = asked(client, f"/v1/batches/{batch_id}")
        if condition(batch) or batch["status"] in ENDED:
            return batch
        assert time.monotonic() < until, batch
        time.sleep(0.02)


def lines_of(client: httpx.Client, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(one) for one in client.get(f"/v1/files/{file_id}/content").text.splitlines()]


@pytest.mark.parametrize(
    ("model", "name", "num_rows", "num_tokens"),
    [("echo", "counted_echo", NUM_ECHO, 40), ("helpdesk", "counted_help", NUM_HELP, 120)],
)
def test_each_row_ends_once(site: BatchSite, model: str, name: str, num_rows: int, num_tokens: int) -> None:
    """Whatever is killed, and whenever: while the file is checked, while rows run, while the files are made."""
    seed = random.randrange(2**32)
    print(f"\nseed {seed}")
    chance = random.Random(seed)
    ledger = Path(site.env["LEDGER"])
    ledger.write_text("")
    names = [f"{model}-{index}" for index in range(num_rows)]
    rows = [line(one, f"/pipelines/{name}", input=_input(one, num_tokens)) for one in names]
    processes = Processes(site, model)
    try:
        with site.client() as client:
            up = client.post("/v1/files", files={"file": jsonl(rows)}, data={"purpose": "batch"})
            body = {"input_file_id": up.json()["id"], "endpoint": f"/pipelines/{name}", "completion_window": "24h"}
            batch = client.post("/v1/batches", json=body).json()
            for kill in range(NUM_KILLS):
                least = num_rows * kill // NUM_KILLS + chance.randrange(max(1, num_rows // NUM_KILLS))

                def has_come(batch: dict[str, Any], least: int = least) -> bool:
                    counts = batch["request_counts"]
                    return bool(counts["completed"] + counts["failed"] >= least)

                batch = wait(client, batch["id"], has_come)
                if batch["status"] in ENDED:
                    break  # its last rows ended while the site looked away
                processes.kill(chance.choice(VICTIMS))
            batch = wait(client, batch["id"], lambda batch: False)
            output, errors = (lines_of(client, batch[f"{one}_file_id"]) for one in ("output", "error"))
    finally:
        processes.close()
    assert batch["status"] == "completed", batch
    assert processes.killed.total() >= NUM_KILLS // 2 > 0
    ended = [one["custom_id"] for one in output + errors]
    assert sorted(ended) == sorted(names)
    order = {one: index for index, one in enumerate(names)}
    for part in (output, errors):
        assert [one["custom_id"] for one in part] == sorted((one["custom_id"] for one in part), key=order.__getitem__)
    counts = batch["request_counts"]
    assert (counts["total"], counts["completed"], counts["failed"]) == (num_rows, len(output), len(errors))
    runs = Counter(ledger.read_text().split())
    num_again = sum(runs.values()) - num_rows
    assert set(runs) == set(names)
    assert num_again <= NUM_SLOTS * NUM_KILLS
    print(
        f"{num_rows:,} rows of {model}, {dict(processes.killed)} killed with -9: {len(output):,} in the output,"
        f" {len(errors):,} in the error file, each once; {num_again} rows run again (most allowed"
        f" {NUM_SLOTS * NUM_KILLS})"
    )


def _input(name: str, num_tokens: int) -> dict[str, Any]:
    return {"name": name, "question": f"What does the starter plan cost? {name}", "max_tokens": num_tokens}
