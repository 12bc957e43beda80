"""Jobs whose workers are killed with -9, on SQLite and on PostgreSQL: no finished step is repeated, readers see no gap.

One web process and one or two workers of a real site; the echo engine is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proofs.scale import scaled
from tests.support.checks.stream_checks import check_native, check_native_part, text_of
from tests.support.docs.demo_site import ROOT, environment, manage, processes_of
from tests.support.plugins.migrated import KEY, MAKE_KEY, MIGRATE, prepare
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.web_servers import daphne, wait_until_ready

pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]

SECONDS = 300.0  # a worker on busy cores needs a while to start
NUM_JOBS = 5
NUM_KILLS = scaled(60)
ASKED = {"pipeline": "audit", "messages": [{"role": "user", "content": "account"}], "seed": 11}


class Site:
    """A web process and the workers that the test starts and kills."""

    def __init__(self, folder: Path, url: str, variables: dict[str, str]) -> None:
        self.folder, self.url, self._variables = folder, url, variables
        self.workers: list[subprocess.Popen[bytes]] = []

    def start_worker(self) -> None:
        with (self.folder / "workers.out").open("ab") as out:
            command = [sys.executable, "manage.py", "streamserve_worker"]
            env = environment(self.folder, **self._variables)
            self.workers.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out))

    def kill_worker(self, index: int = 0) -> None:
        worker = self.workers.pop(index)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()

    def stop_workers(self) -> list[int]:
        """End the workers as systemd does; return their exit statuses."""
        for worker in self.workers:
            worker.terminate()
        statuses = [worker.wait(SECONDS) for worker in self.workers]
        self.workers.clear()
        return statuses

    def calls(self) -> Counter[str]:
        path = self.folder / "calls"
        return Counter(line.split()[2] for line in path.read_text().splitlines()) if path.exists() else Counter()

    @property
    def gate(self) -> Path:
        """While it is there, jobs stay in their third step."""
        return self.folder / "gate"

    @property
    def last_gate(self) -> Path:
        """While it is there, jobs do not end."""
        return self.folder / "last_gate"

    def client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False, timeout=SECONDS)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    variables = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.jobs_site"}
    with ExitStack() as stack:
        if request.param == "postgres":
            variables["JOBS_POSTGRES"] = str(stack.enter_context(PostgresServer()).port)
            for arguments in (MIGRATE, MAKE_KEY):
                done = manage(folder, *arguments, **variables)
                assert done.returncode == 0, done.stderr
        else:
            prepare(folder, MAKE_KEY)
        web = stack.enter_context(daphne("project.asgi:application", env=environment(folder, **variables)))
        wait_until_ready(web.url)
        site = Site(folder, web.url, variables)
        try:
            yield site
        finally:
            site.gate.unlink(missing_ok=True)
            site.last_gate.unlink(missing_ok=True)
            site.stop_workers()
            stack.close()
            manage(folder, "streamserve_engine", "--stop", **variables)
            assert processes_of(folder) == set()


class Reading:
    """A reader of a job's events, from the beginning and over one connection."""

    def __init__(self, site: Site, job_id: str) -> None:
        self.data = bytearray()
        self._site, self.job_id = site, job_id
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self._site.client() as http, http.stream("GET", f"/jobs/{self.job_id}/events") as response:
            async for data in response.aiter_bytes():
                self.data += data

    async def until(self, *, steps: int, tokens: int) -> None:
        """Wait until so many steps and then tokens were read."""
        async with asyncio.timeout(SECONDS):
            while True:
                frames = check_native_part(bytes(self.data.rpartition(b"\n\n")[0] + b"\n\n")) if self.data else []
                num_steps = sum(frame.event == "status" and frame.json["status"] == "step" for frame in frames)
                if num_steps >= steps and sum(frame.event == "token" for frame in frames) >= tokens:
                    return
                await asyncio.sleep(0.02)


async def enqueue(http: httpx.AsyncClient) -> str:
    answer = await http.post("/jobs", json=ASKED)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["job_id"])


async def end_of(http: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    async with asyncio.timeout(SECONDS):
        while (job := (await http.get(f"/jobs/{job_id}")).json())["status"] in ("queued", "running"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return dict(job)


@contextlib.asynccontextmanager
async def reference(site: Site) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, Any]]]:
    """Yield a client, and the job as it is when nothing is killed."""
    async with site.client() as http:
        site.start_worker()
        job = await end_of(http, await enqueue(http))
        assert (job["status"], job["attempts"]) == ("done", 1), job
        assert site.stop_workers() == [0]
        yield http, job


async def check(http: httpx.AsyncClient, reading: Reading, wanted: dict[str, Any]) -> dict[str, Any]:
    """Check one job that was killed against one that was not; return it."""
    job = await end_of(http, reading.job_id)
    assert job["status"] == "done", job
    await asyncio.wait_for(reading.task, SECONDS)
    frames = check_native(bytes(reading.data))
    assert text_of(frames) == wanted["result"]["text"]
    assert sum(frame.event in ("done", "error") for frame in frames) == 1
    for name in ("text", "citations", "steps", "finish_reason"):
        assert job["result"][name] == wanted["result"][name]
    counts = ("completion_tokens", "prompt_tokens")
    assert [job["result"]["usage"][name] for name in counts] == [wanted["result"]["usage"][name] for name in counts]
    middle = frames[len(frames) // 2]
    rest = await http.get(f"/jobs/{reading.job_id}/events", headers={"Last-Event-ID": middle.id})
    assert check_native_part(rest.content, after=middle.seq)[-1].seq == frames[-1].seq
    return job


@pytest.mark.parametrize(
    ("steps", "tokens"), [(1, 3), (2, 0), (3, 0), (4, 3)], ids=["in an answer", "hidden", "in a step", "side by side"]
)
async def test_a_killed_workers_job_goes_on(site: Site, steps: int, tokens: int) -> None:
    """The same text, steps, citations and usage as a job that nothing has hit, in two attempts, and one end."""
    async with reference(site) as (http, wanted):
        before = site.calls()
        gate = site.last_gate if steps == 4 else site.gate  # however late the kill is, the job has not ended
        gate.touch()
        site.start_worker()
        reading = Reading(site, await enqueue(http))
        await reading.until(steps=steps, tokens=tokens)
        site.kill_worker()
        gate.unlink()
        site.start_worker()
        job = await check(http, reading, wanted)
        assert job["attempts"] == 2
        assert site.stop_workers() == [0]
        calls = site.calls() - before
        assert calls["repeated"] == 0
        assert calls["called"] <= 3  # the step that was cut off runs again


async def test_a_stopped_worker_gives_its_job_back(site: Site) -> None:
    """SIGTERM: after the grace another worker continues, and the attempt does not count."""
    async with reference(site) as (http, wanted):
        site.gate.touch()
        site.start_worker()
        reading = Reading(site, await enqueue(http))
        await reading.until(steps=3, tokens=0)
        stopping = asyncio.create_task(asyncio.to_thread(site.stop_workers))
        async with asyncio.timeout(SECONDS):
            while (await http.get(f"/jobs/{reading.job_id}")).json()["status"] != "queued":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        site.gate.unlink()
        assert await stopping == [0]
        site.start_worker()
        assert (await check(http, reading, wanted))["attempts"] == 1
        assert site.stop_workers() == [0]


async def later_attempts(http: httpx.AsyncClient, readings: list[Reading], num_attempts: int) -> int:
    """Wait until a worker has begun with a job since there were so many attempts, or all have ended; count them.

    So a kill hits work, and not a worker that is still starting, on a machine of any speed.
    """
    async with asyncio.timeout(SECONDS):
        while True:
            jobs = [(await http.get(f"/jobs/{reading.job_id}")).json() for reading in readings]
            num = sum(job["attempts"] for job in jobs)
            if num > num_attempts or all(reading.task.done() for reading in readings):
                return num
            await asyncio.sleep(0.1)


async def test_random_kills(site: Site) -> None:
    """Two workers, five jobs and readers, kills while they run: each job comes to its one end with the same text."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with reference(site) as (http, wanted):
        before = site.calls()
        num_kills = 0
        for _ in range(2):
            site.start_worker()
        while num_kills < NUM_KILLS:
            readings = [Reading(site, await enqueue(http)) for _ in range(NUM_JOBS)]
            num_attempts = 0
            while num_kills < NUM_KILLS:
                num_attempts = await later_attempts(http, readings, num_attempts)
                if all(reading.task.done() for reading in readings):
                    break
                await asyncio.sleep(rng.uniform(0.0, 2.0))
                site.kill_worker(rng.randrange(2))
                site.start_worker()
                num_kills += 1
            for reading in readings:
                await check(http, reading, wanted)
        assert set(site.stop_workers()) <= {0, -signal.SIGTERM}  # the newest may still be starting
        assert (site.calls() - before)["repeated"] == 0
