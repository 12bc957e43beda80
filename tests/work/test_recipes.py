"""docs/jobs.md, run: jobs from Python, from a Celery task, and from a task of Django's framework."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from asgiref.sync import async_to_sync
from celery import Celery
from celery.contrib.testing.worker import start_worker
from django.db import transaction

from streamserve import Run, aenqueue_job, enqueue_job, pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.models import Job
from streamserve.protocol.errors import BadRequest, NotFound
from streamserve.rows import orm
from streamserve.web import site
from streamserve.web.calls import background
from tests.support.docs.demo_site import environment, manage, processes_of
from tests.support.docs.doc_blocks import blocks_of
from tests.support.servers.web_servers import daphne, wait_until_ready

pytestmark = pytest.mark.django_db(transaction=True)

SECONDS = 60.0


async def review(run: Run) -> str:
    """Review an account."""
    return f"account {run.input['account']}"


@pytest.fixture
def reviews(transactional_db: Any) -> Iterator[None]:
    background.run(site.reset, "await")
    pipeline("review")(review)
    try:
        yield
        background.run(site.reset, "await")
    finally:
        forget("review")


def task_of(library: str) -> ModuleType:
    """Return docs/jobs.md's block that imports `library`, run as a module."""
    (block,) = [one for one in blocks_of("docs/jobs.md") if f"from {library}" in one.text]
    module = ModuleType("accounts.tasks")
    exec(compile(block.code, "docs/jobs.md", "exec"), vars(module))  # noqa: S102
    return module


def ended(job_id: str) -> Job:
    until = time.monotonic() + SECONDS
    while not (job := Job.objects.get(pk=job_id)).is_finished:
        assert time.monotonic() < until, job.state
        time.sleep(0.02)
    return job


def test_a_job_from_python(reviews: None, alice: Any) -> None:
    """It is the user's, a key queues one job, and wrong calls are refused before anything is queued."""
    job = enqueue_job("review", input={"account": 7}, user=alice, once="a")
    assert enqueue_job("review", input={"account": 7}, user=alice, once="a").id == job.id
    row = ended(job.id)
    assert (row.state, row.tenant) == ("done", f"user:{alice.pk}")
    assert '"account 7"' in row.result
    with pytest.raises(NotFound):
        enqueue_job("none", input={}, user=alice)
    with transaction.atomic(), pytest.raises(BadRequest, match="on_commit"):
        enqueue_job("review", input={"account": 7}, user=alice)
    assert Job.objects.count() == 1


def test_a_job_from_async_code(reviews: None) -> None:
    """The same, awaited."""

    async def ask() -> str:
        job = await aenqueue_job("review", "Hello", input={"account": 9}, tenant="nightly")
        while not (row := await orm.call(Job.objects.get, pk=job.id)).is_finished:
            pass
        await site.reset()
        return str(row.result)

    assert '"account 9"' in async_to_sync(ask)()


def test_a_celery_task_queues_a_job(reviews: None) -> None:
    """In a real worker of Celery, over its broker in memory; the task that runs twice queues one job."""
    app = Celery("accounts", broker="memory://", backend="cache+memory://", set_as_current=True)
    app.set_default()
    task = app.task(task_of("celery").review_account.run, name="review_account")
    with start_worker(app, perform_ping_check=False, pool="solo"):
        ids = {task.delay(7).get(timeout=SECONDS) for _ in range(2)}
    (job_id,) = ids
    assert ended(job_id).state == "done"


@pytest.mark.proof
def test_a_task_of_djangos_framework_queues_a_job(tmp_path: Path) -> None:
    """django-tasks-db's worker runs the task, and streamserve's worker the job."""
    variables = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.tasks_site"}
    commands = [
        ["migrate", "--verbosity=0"],
        ["shell", "-c", "from tests.support.sites.tasks_app.tasks import review_account as r; print(r.enqueue(7).id)"],
        ["db_worker", "--batch", "--no-startup-delay", "--no-reload"],
        ["streamserve_worker", "--drain", "--concurrency", "2"],
        ["shell", "-c", "from streamserve.models import Job; print([(j.state, j.result) for j in Job.objects.all()])"],
    ]
    outputs = []
    try:
        for arguments in commands:
            done = manage(tmp_path, *arguments, **variables)
            assert done.returncode == 0, done.stdout + done.stderr
            outputs.append(done.stdout)
    finally:
        manage(tmp_path, "streamserve_engine", "--stop", **variables)
    assert "'done'" in outputs[-1]
    assert '"account 7"' in outputs[-1]
    assert "jobs (2 at once)" in outputs[-2]
    assert processes_of(tmp_path) == set()


@pytest.mark.proof
def test_the_demo_runs_jobs_without_a_worker(tmp_path: Path) -> None:
    """JOBS is embedded there: the web process under daphne runs what is queued, and no command is needed."""
    variables = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.tasks_site"}
    key = "a-key-for-these-tests"
    for arguments in (["migrate", "--verbosity=0"], ["streamserve_key", "create", "--key", key]):
        done = manage(tmp_path, *arguments, **variables)
        assert done.returncode == 0, done.stderr
    try:
        with (
            daphne("project.asgi:application", env=environment(tmp_path, **variables)) as web,
            httpx.Client(base_url=web.url, headers={"Authorization": f"Bearer {key}"}, trust_env=False) as http,
        ):
            wait_until_ready(web.url)
            job = http.post("/jobs", json={"pipeline": "review", "input": {"account": 7}}).json()
            until = time.monotonic() + SECONDS
            while job["status"] in ("queued", "running"):
                assert time.monotonic() < until, job
                time.sleep(0.1)
                job = http.get(f"/jobs/{job['job_id']}").json()
            assert (job["status"], job["result"]["text"]) == ("done", "account 7")
    finally:
        manage(tmp_path, "streamserve_engine", "--stop", **variables)
    assert processes_of(tmp_path) == set()
