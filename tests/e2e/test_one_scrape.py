"""One scrape of /metrics has all processes of a host: two uvicorn workers, one of them killed, and a worker of jobs."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from streamserve.protocol.metrics import PREFIX
from tests.support.docs.demo_site import end_engines, environment, manage
from tests.support.plugins.migrated import KEY, Migrate
from tests.support.processes import children_of, command_of
from tests.support.servers.flow_driver import until
from tests.support.servers.web_servers import Server, uvicorn, wait_until_ready

pytestmark = [pytest.mark.proof, pytest.mark.timeout(300)]

HEADERS = {"Authorization": f"Bearer {KEY}"}
SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.jobs_site"}
NUM_TOKENS = 8
ASK = {"prompt": "tell me", "max_tokens": NUM_TOKENS, "ignore_eos": True}
SECONDS = 60.0
LENGTH = '{finished_reason="length",model_name="echo"}'


@pytest.fixture
def folder(tmp_path: Path, migrated: Migrate) -> Iterator[Path]:
    """The folder of a site with a key."""
    migrated(tmp_path, ("streamserve_key", "create", "--key", KEY, "--scope", "chat", "--scope", "ops"))
    yield tmp_path
    end_engines(tmp_path)


def serve(stack: ExitStack, folder: Path) -> Server:
    """Start a worker of the site."""
    server = stack.enter_context(uvicorn("project.asgi:application", env=environment(folder, **SETTINGS)))
    wait_until_ready(server.url)
    return server


def ask(server: Server, num: int) -> None:
    """Have so many answers."""
    for _ in range(num):
        answer = httpx.post(f"{server.url}/streams", json=ASK, headers=HEADERS, timeout=SECONDS, trust_env=False)
        assert b"event: done" in answer.content


def scrape(server: Server, query: str = "") -> dict[str, float]:
    """Return the values of /metrics by their lines."""
    answer = httpx.get(f"{server.url}/metrics{query}", headers=HEADERS, timeout=SECONDS, trust_env=False)
    assert answer.status_code == 200
    lines = [line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#")]
    return {_by_name(name): float(value) for name, _, value in lines}


def _by_name(line: str) -> str:
    """Return a series with its labels in order."""
    name, _, labels = line.removeprefix(PREFIX).partition("{")
    pairs = sorted(re.findall(r'\w+="[^"]*"', labels))
    return f"{name}{{{','.join(pairs)}}}" if pairs else name


def num_ended(server: Server, query: str = "") -> float:
    """Return how many answers have ended."""
    return scrape(server, query).get(f"request_success_total{LENGTH}", 0.0)


def test_one_scrape_has_all_processes(folder: Path) -> None:
    """Each worker shows the answers of both, the engine's counts once, and a killed worker's counts stay."""
    with ExitStack() as stack:
        first, second = serve(stack, folder), serve(stack, folder)
        ask(first, 2)
        ask(second, 3)
        assert (num_ended(first, "?process=this"), num_ended(second, "?process=this")) == (2, 3)
        for server in (first, second):
            until(lambda server=server: num_ended(server) == 5, "all answers are counted at each")
            until(
                lambda server=server: scrape(server)['generation_tokens_total{model_name="echo"}'] == 5 * NUM_TOKENS,
                "the engine's tokens are counted once",
            )
            shown = scrape(server)
            assert shown['time_to_first_token_seconds_count{model_name="echo"}'] == 5
            assert shown['engine_ready{model_name="echo"}'] == 1
            assert shown['streams_active{model_name="echo"}'] == 0
        assert httpx.get(f"{first.url}/metrics?process=all", headers=HEADERS, trust_env=False).status_code == 400

        os.kill(second.process.pid, signal.SIGKILL)
        second.process.wait()
        assert num_ended(first) == 5
        ask(first, 1)
        assert num_ended(first) == 6

        job = {"pipeline": "audit", "messages": [{"role": "user", "content": "account"}], "seed": 11}
        answer = httpx.post(f"{first.url}/jobs", json=job, headers=HEADERS, timeout=SECONDS, trust_env=False)
        assert answer.status_code == 202, answer.text
        done = manage(folder, "streamserve_worker", "--drain", **SETTINGS)
        assert done.returncode == 0, done.stderr
        shown = scrape(first)
        assert sum(count for line, count in shown.items() if "request_success" in line and "audit" in line) == 1

        third = serve(stack, folder)
        assert num_ended(third) == 6
        assert num_ended(third, "?process=this") == 0


def workers_of(server: Server) -> set[int]:
    """Return the processes that uvicorn has started for the site: those that write figures."""
    return {pid for pid in children_of(server.process.pid) if "spawn_main" in command_of(pid)}


def test_workers_of_one_server_are_one_target(folder: Path) -> None:
    """Whichever worker answers the scrape; a worker that is killed and started anew takes no count away."""
    environ = environment(folder, **SETTINGS)
    with uvicorn("project.asgi:application", "--workers", "2", env=environ) as server:
        wait_until_ready(server.url)
        ask(server, 8)
        until(lambda: num_ended(server) == 8, "all answers are counted")
        shown = []
        for pid in workers_of(server):
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: len(workers_of(server) - {pid}) == 2, "another worker has begun")
            wait_until_ready(server.url)
            ask(server, 1)
            shown.append(num_ended(server))
        # What the other worker counts is there a second later.
        until(lambda: num_ended(server) == 10, "all answers are counted")
        assert shown == sorted(shown)
        assert shown[0] >= 8
