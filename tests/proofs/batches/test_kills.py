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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.proofs.scale import scaled
from tests.support.docs.demo_site import processes_of
from tests.support.processes import command_of
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.web_servers import ROOT, Server, environ_of, stop, wait_until_listening
from tests.support.sites.batch_runs import ENDED, jsonl, line
from tests.support.sites.batch_site import BatchSite, engines_stopped, make_site, start_worker

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
            pids = [pid for pid in processes_of(self._folder) if f"engine-{self._model}" in command_of(pid)]
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


def lines_of(client: httpx.Client, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(one) for one in client.get(f"/v1/files/{file_id}/content").text.splitlines()]


@dataclass
class Killed:
    """One batch whose processes are killed while its rows run; `ledger` is where its pipelines note each run."""

    client: httpx.Client
    processes: Processes
    chance: random.Random
    ledger: Path
    endpoint: str
    names: list[str]
    num_errors: int = 0

    def run(self, num_tokens: int, num_kills: int) -> None:
        """Run it to its end, under `num_kills` kills or as many as come before it has ended, and judge its files."""
        rows = [line(one, self.endpoint, input=_input(one, num_tokens)) for one in self.names]
        up = self.client.post("/v1/files", files={"file": jsonl(rows)}, data={"purpose": "batch"})
        body = {"input_file_id": up.json()["id"], "endpoint": self.endpoint, "completion_window": "24h"}
        path = f"/v1/batches/{self.client.post('/v1/batches', json=body).json()['id']}"
        for num_begun in self._moments(num_kills):
            if not self._has_begun(num_begun, path):
                break
            self.processes.kill(self.chance.choice(VICTIMS))
        while (batch := asked(self.client, path))["status"] not in ENDED:
            time.sleep(0.05)
        assert batch["status"] == "completed", batch
        self._judge(batch, *(lines_of(self.client, batch[f"{one}_file_id"]) for one in ("output", "error")))

    def _moments(self, num_kills: int) -> list[int]:
        """Return after how many rows have begun each kill comes: the first while the file is checked, or soon."""
        least, num_more = NUM_SLOTS, len(self.names) - NUM_SLOTS
        share = max(1, num_more // num_kills)
        later = [least + num_more * kill // num_kills + self.chance.randrange(share) for kill in range(1, num_kills)]
        return [self.chance.randrange(least + share), *later]

    def _has_begun(self, num: int, path: str) -> bool:
        """Wait until `num` rows have begun, by the ledger, which needs no web process; False if the batch has ended."""
        until = time.monotonic() + _DEADLINE_SECONDS
        while (num_begun := len(set(self.names).intersection(self.ledger.read_text().split()))) < num:
            assert time.monotonic() < until, num
            time.sleep(0.02)
        return num_begun < len(self.names) or asked(self.client, path)["status"] not in ENDED

    def _judge(self, batch: dict[str, Any], output: list[dict[str, Any]], errors: list[dict[str, Any]]) -> None:
        """Each row is in one of the files, once, in the order of the input; the counts are theirs."""
        assert sorted(one["custom_id"] for one in output + errors) == sorted(self.names)
        order = {one: index for index, one in enumerate(self.names)}
        for part in (output, errors):
            found = [order[one["custom_id"]] for one in part]
            assert found == sorted(found)
        counts = batch["request_counts"]
        self.num_errors = len(errors)
        expected = {"total": len(self.names), "completed": len(output), "failed": len(errors)}
        assert {name: counts[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("model", "name", "num_rows", "num_tokens"),
    [("echo", "counted_echo", NUM_ECHO, 40), ("helpdesk", "counted_help", NUM_HELP, 120)],
)
def test_each_row_ends_once(site: BatchSite, model: str, name: str, num_rows: int, num_tokens: int) -> None:
    """Whatever is killed, and whenever. A batch that ends before its last kill is followed by another one."""
    seed = random.randrange(2**32)
    print(f"\nseed {seed}")
    ledger = Path(site.env["LEDGER"])
    ledger.write_text("")
    names: list[str] = []
    num_errors = 0
    processes = Processes(site, model)
    try:
        with site.client() as client:
            chance = random.Random(seed)
            while (num_left := NUM_KILLS - processes.killed.total()) > 0:
                more = [f"{model}-{len(names) + index}" for index in range(num_rows)]
                batch = Killed(client, processes, chance, ledger, f"/pipelines/{name}", more)
                batch.run(num_tokens, num_left)
                names += more
                num_errors += batch.num_errors
    finally:
        processes.close()
    assert processes.killed.total() == NUM_KILLS
    runs = Counter(ledger.read_text().split())
    num_again = sum(runs.values()) - len(names)
    assert set(runs) == set(names)
    assert num_again <= NUM_SLOTS * NUM_KILLS
    print(
        f"{len(names):,} rows of {model}, {dict(processes.killed)} killed with -9: each row in one file, once,"
        f" {num_errors:,} in the error file; {num_again} rows run again (most allowed {NUM_SLOTS * NUM_KILLS})"
    )


def _input(name: str, num_tokens: int) -> dict[str, Any]:
    return {"name": name, "question": f"What does the starter plan cost? {name}", "max_tokens": num_tokens}
