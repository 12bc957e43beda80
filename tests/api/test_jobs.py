"""Laws of /jobs: a run of a pipeline that goes on without its caller, and is read, asked about and cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from django.test.utils import override_settings
from django.utils import timezone

from streamserve import Run, pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.models import ApiKey, Job
from streamserve.models import Stream as StreamRow
from streamserve.models import Worker as WorkerRow
from streamserve.protocol.errors import BadRequest
from streamserve.rows import orm
from streamserve.signals import answer_finished, answer_started, job_finished
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.stream_checks import check_native, text_of
from tests.support.sites.batch_runs import without_worker
from tests.support.sites.connected import connected

pytestmark = pytest.mark.django_db(transaction=True)

ASKED = {"pipeline": "review", "messages": [{"role": "user", "content": "Where is my bill?"}], "seed": 7}
DEADLINE = 60.0


class Author:
    """The pipeline `review`, which waits in its second step while `may_end` is clear, and fails as often as told."""

    def __init__(self) -> None:
        self.may_end, self.is_waiting = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.num_failures = 0
        self.error: Exception = RuntimeError("out of order")
        self.calls: list[str] = []

    async def review(self, run: Run) -> None:
        """Review an account."""
        found = await run.step("Looking it up", self.search, run.question, of=2)
        run.cite("help", id="7", title="Bills", url="/help/7/")
        await run.generate(f"{found}", max_tokens=8, seed=7, ignore_eos=True)
        await run.step("Checking", self.check, of=2)
        await run.say(" Checked.")

    def search(self, question: str) -> str:
        self.calls.append("search")
        return question.upper()

    async def check(self) -> None:
        self.calls.append("check")
        self.is_waiting.set()
        if self.num_failures:
            self.num_failures -= 1
            raise self.error
        await self.may_end.wait()


@pytest.fixture
async def author(transactional_db: Any) -> AsyncIterator[Author]:
    author = Author()
    pipeline("review")(author.review)
    try:
        with override_settings(STREAMSERVE={"TESTING": True, "JOBS": {"RETRY_SECONDS": 0.0}}):
            await until_ready()
            yield author
            await site.reset()
    finally:
        forget("review")


@pytest.fixture
def caller(author: Author, alice_key: str) -> Caller:
    return Caller(key=alice_key)


async def ended(caller: Caller, job_id: str) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE):
        while (job := (await caller.get(f"/jobs/{job_id}")).json())["status"] in ("queued", "running"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return dict(job)


async def test_a_job_is_the_run_that_a_pipeline_gives(caller: Caller, author: Author) -> None:
    """202 at once; then the same text, steps and citations as the pipeline's own route, and events that replay."""
    begun = await caller.post("/jobs", ASKED)
    assert begun.status_code == 202
    first = begun.json()
    assert (first["status"], first["pipeline"], first["attempts"], first["place"]) == ("queued", "review", 0, 0)
    job = await ended(caller, first["job_id"])
    whole = (await caller.post("/pipelines/review", {k: v for k, v in ASKED.items() if k != "pipeline"})).json()
    assert job["status"] == "done", job
    assert {name: job["result"][name] for name in ("text", "citations", "steps", "finish_reason")} == {
        name: whole[name] for name in ("text", "citations", "steps", "finish_reason")
    }
    assert job["result"]["usage"]["completion_tokens"] == 8
    assert (job["attempts"], job["error"], job["progress"]["message"]) == (1, None, "Checking")
    events = check_native(await body_of(await caller.get(f"/jobs/{first['job_id']}/events")))
    assert text_of(events) == whole["text"]


async def test_receivers_are_told_of_a_job_and_its_answer(caller: Caller, author: Author, alice: Any) -> None:
    """Its answer starts when it is queued and ends once, after a failed attempt too; then the job ends, once."""
    told: list[tuple[str, str, Any]] = []
    author.num_failures = 1

    def note(name: str, outcome: str) -> Any:
        return lambda **values: told.append((name, values["job_id"], values.get(outcome)))

    with (
        connected(answer_started, note("started", "user_id")),
        connected(answer_finished, lambda **values: told.append(("end", values["job_id"], values["usage"]))),
        connected(job_finished, note("job", "state")),
    ):
        job_id = (await caller.post("/jobs", ASKED)).json()["job_id"]
        job = await ended(caller, job_id)
        await until(lambda: len(told) == 3)
    tokens = job["result"]["usage"]["completion_tokens"]
    assert {one[:2] for one in told} == {("started", job_id), ("end", job_id), ("job", job_id)}
    outcomes = {name: outcome for name, _, outcome in told}
    assert (outcomes["started"], outcomes["end"].completion_tokens, outcomes["job"]) == (alice.pk, tokens, "done")


async def test_who_reads_a_jobs_events_chooses_the_pace(caller: Caller, author: Author) -> None:
    """The job itself has none."""
    refused = await caller.post("/jobs", {**ASKED, "interval_ms": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "interval_ms")
    job = await ended(caller, (await caller.post("/jobs", ASKED)).json()["job_id"])
    events = f"/jobs/{job['job_id']}/events"
    alone, joined = [
        check_native(await body_of(await caller.get(f"{events}?interval_tokens={number}"))) for number in (1, 1000)
    ]
    assert text_of(alone) == text_of(joined)
    assert len(alone) > len(joined)
    wrong = await caller.get(f"{events}?interval_ms=9999")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "interval_ms")


async def test_readers_follow_a_job_and_resume(caller: Caller, author: Author) -> None:
    """A reader that comes while the job waits gets the rest when it comes; one with an id starts after that."""
    author.may_end.clear()
    job_id = (await caller.post("/jobs", ASKED)).json()["job_id"]
    each = f"/jobs/{job_id}/events?interval_tokens=1"  # no token is joined, however busy the machine is
    reading = asyncio.create_task(body_of(await caller.get(each)))
    await asyncio.wait_for(author.is_waiting.wait(), DEADLINE)
    assert (await caller.get(f"/jobs/{job_id}")).json()["status"] == "running"
    author.may_end.set()
    events = check_native(await reading)
    rest = await body_of(await caller.get(each, **{"last-event-id": events[2].id}))
    assert rest.decode().count("\nid: ") == len(events) - 3
    assert text_of(events).endswith(" Checked.")


@pytest.mark.parametrize("when", ["before", "while"])
async def test_a_job_needs_no_reader(caller: Caller, author: Author, when: str) -> None:
    """It runs to its end though its only reader leaves, before it runs or while it does."""
    author.may_end.clear()
    job_id = (await caller.post("/jobs", ASKED)).json()["job_id"]
    if when == "while":
        await asyncio.wait_for(author.is_waiting.wait(), DEADLINE)
    response = await caller.get(f"/jobs/{job_id}/events")
    pieces = aiter(response.streaming_content)
    assert await anext(pieces)
    await pieces.aclose()
    author.may_end.set()
    assert (await ended(caller, job_id))["status"] == "done"
    events = check_native(await body_of(await caller.get(f"/jobs/{job_id}/events")))
    assert text_of(events).endswith(" Checked.")


@pytest.fixture
def admin(root: Any) -> Caller:
    return Caller(user=root)


@pytest.fixture
def guest(staff: Any) -> Caller:
    return Caller(user=staff)


async def test_staff_see_and_cancel_jobs(caller: Caller, author: Author, admin: Caller, guest: Caller) -> None:
    """The admin lists jobs, messages and workers; cancelling needs its own permission."""
    author.may_end.clear()
    job_id = (await caller.post("/jobs", {**ASKED, "input": {"secret": "canary"}})).json()["job_id"]
    await asyncio.wait_for(author.is_waiting.wait(), DEADLINE)
    for name in ("job", "webhookdelivery", "worker"):
        assert (await admin.get(f"/admin/streamserve/{name}/")).status_code == 200
        assert (await guest.get(f"/admin/streamserve/{name}/")).status_code == 403
    page = (await admin.get(f"/admin/streamserve/job/{job_id}/change/")).content.decode()
    assert "Looking it up" in page
    assert "canary" not in page
    chosen = {"action": "cancel", "_selected_action": job_id}
    assert (await admin.client.post("/admin/streamserve/job/", chosen)).status_code == 302
    assert (await caller.get(f"/jobs/{job_id}")).json()["status"] == "cancelled"


@pytest.mark.parametrize("failures", [1, 4])
async def test_a_failed_attempt_is_tried_again_and_repeats_nothing(
    caller: Caller, author: Author, failures: int
) -> None:
    """Finished steps are not run again, what was shown is not shown again, and there is one end."""
    author.num_failures = failures
    job_id = (await caller.post("/jobs", ASKED)).json()["job_id"]
    job = await ended(caller, job_id)
    assert (job["status"], job["attempts"]) == ("done", failures + 1), job
    assert author.calls == ["search"] + ["check"] * (failures + 1)
    events = check_native(await body_of(await caller.get(f"/jobs/{job_id}/events")))
    again = (await caller.post("/pipelines/review", {k: v for k, v in ASKED.items() if k != "pipeline"})).json()
    assert text_of(events) == again["text"] == job["result"]["text"]
    assert job["result"]["steps"] == again["steps"]
    assert job["result"]["citations"] == again["citations"]
    assert job["result"]["usage"] == again["usage"]


async def test_the_last_attempt_ends_the_job(caller: Caller, author: Author) -> None:
    """Five attempts fail: the job is failed, with the error that its stream ends in."""
    author.num_failures = 5
    job_id = (await caller.post("/jobs", ASKED)).json()["job_id"]
    job = await ended(caller, job_id)
    assert (job["status"], job["attempts"], job["error"]["code"]) == ("failed", 5, "pipeline_failed")
    events = check_native(await body_of(await caller.get(f"/jobs/{job_id}/events")))
    assert json.loads(events[-1].data)["code"] == "pipeline_failed"
    assert (await orm.call(StreamRow.objects.get)).state == "finished"


async def test_a_message_with_nul_is_kept(caller: Caller, author: Author) -> None:
    """A database may refuse NUL: the end of a job would be written again and again, and it would run for ever."""
    author.num_failures, author.error = 1, BadRequest("There is no account a\0b.", code="no_account")
    job = await ended(caller, (await caller.post("/jobs", ASKED)).json()["job_id"])
    assert (job["status"], job["attempts"]) == ("failed", 1)
    assert job["error"] == {"code": "no_account", "message": "There is no account a\N{REPLACEMENT CHARACTER}b."}


async def test_a_running_job_is_cancelled(caller: Caller, author: Author) -> None:
    """Its stream ends as cancelled, the author's function is ended, and a second cancel changes nothing."""
    author.may_end.clear()
    job_id = (await caller.post("/jobs", ASKED)).json()["job_id"]
    await asyncio.wait_for(author.is_waiting.wait(), DEADLINE)
    for _ in range(2):
        job = (await caller.post(f"/jobs/{job_id}/cancel")).json()
        assert (job["status"], job["error"]) == ("cancelled", None)
    events = check_native(await body_of(await caller.get(f"/jobs/{job_id}/events")))
    assert json.loads(events[-1].data)["finish_reason"] == "cancelled"
    await until(lambda: not site.get_site().work.embedded.claims)
    assert (await caller.get(f"/jobs/{job_id}")).json()["status"] == "cancelled"


async def test_a_queued_job_is_cancelled_before_it_runs(caller: Caller, author: Author) -> None:
    """One that waits for its turn never runs."""
    author.may_end.clear()
    with override_settings(STREAMSERVE={"TESTING": True, "JOBS": {"CONCURRENCY": 1}}):
        await site.reset()
        await until_ready()
        running = (await caller.post("/jobs", ASKED)).json()["job_id"]
        await asyncio.wait_for(author.is_waiting.wait(), DEADLINE)
        ids = [(await caller.post("/jobs", ASKED)).json()["job_id"] for _ in range(2)]
        assert [(await caller.get(f"/jobs/{one}")).json()["place"] for one in ids] == [0, 1]
        assert (await caller.post(f"/jobs/{ids[0]}/cancel")).json()["status"] == "cancelled"
        assert (await caller.get(f"/jobs/{ids[1]}")).json()["place"] == 0
        author.may_end.set()
        states = [(await ended(caller, one))["status"] for one in (running, *ids)]
        assert states == ["done", "cancelled", "done"]
        assert author.calls.count("search") == 2
        await site.reset()


async def test_a_key_queues_one_job(caller: Caller, author: Author) -> None:
    """The same Idempotency-Key returns the job; with another body it is refused, and another caller's is another."""
    ids = {(await caller.post("/jobs", ASKED, **{"idempotency-key": "a"})).json()["job_id"] for _ in range(3)}
    assert len(ids) == 1
    other = await caller.post("/jobs", {**ASKED, "seed": 8}, **{"idempotency-key": "a"})
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert await orm.call(Job.objects.count) == 1


async def test_another_tenant_finds_nothing(caller: Caller, author: Author, lonely_key: str) -> None:
    """Job, events and cancel are a 404 for another tenant, and its list is empty."""
    job_id = (await caller.post("/jobs", ASKED)).json()["job_id"]
    other = Caller(key=lonely_key)
    answers = [
        await other.get(f"/jobs/{job_id}"),
        await other.get(f"/jobs/{job_id}/events"),
        await other.post(f"/jobs/{job_id}/cancel"),
        await other.get(f"/jobs?after={job_id}"),
    ]
    assert [(one.status_code, one.json()["error"]["code"]) for one in answers] == [(404, "job_not_found")] * 4
    assert (await other.get("/jobs")).json() == {"jobs": [], "has_more": False, "last_id": None}
    assert (await ended(caller, job_id))["status"] == "done"


async def test_jobs_are_listed_in_pages(caller: Caller, author: Author) -> None:
    """The newest first, each once; by status too."""
    ids = [(await caller.post("/jobs", ASKED)).json()["job_id"] for _ in range(5)]
    for one in ids:
        await ended(caller, one)
    first = (await caller.get("/jobs?limit=3")).json()
    second = (await caller.get(f"/jobs?limit=3&after={first['last_id']}")).json()
    assert [job["job_id"] for job in (*first["jobs"], *second["jobs"])] == ids[::-1]
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert all(job["result"] is None for job in first["jobs"])
    assert len((await caller.get("/jobs?status=done")).json()["jobs"]) == 5
    assert (await caller.get("/jobs?status=failed")).json()["jobs"] == []


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "invalid_request", "pipeline"),
        ({"pipeline": "none", "prompt": "x"}, 404, "pipeline_not_found", "pipeline"),
        ({"pipeline": "echo", "prompt": "x"}, 404, "pipeline_not_found", "pipeline"),
        ({**ASKED, "webhook": "evil"}, 400, "webhook_not_found", "webhook"),
        ({**ASKED, "webhook": 7}, 400, "invalid_request", "webhook"),
        ({**ASKED, "on_disconnect": "park"}, 400, "unknown_field", "on_disconnect"),
        ({**ASKED, "n": 2}, 400, "invalid_value", "n"),
        ({**ASKED, "temperature": "hot"}, 400, None, "temperature"),
    ],
)
async def test_a_wrong_job_is_refused_by_name(
    caller: Caller, body: Any, status: int, code: str | None, param: str
) -> None:
    """With the field at fault, and nothing is queued."""
    answer = await caller.post("/jobs", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert code is None or error["code"] == code
    assert await orm.call(Job.objects.count) == await orm.call(StreamRow.objects.count) == 0


@pytest.mark.parametrize("query", ["status=new", "limit=0", "limit=x", "limit=101", "page=2"])
async def test_a_wrong_list_is_refused(caller: Caller, query: str) -> None:
    """By the parameter's name."""
    answer = await caller.get(f"/jobs?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_caller_has_a_limit_of_jobs(caller: Caller, author: Author) -> None:
    """Two that have not ended are allowed here: the third is a 429, until one ends. Streams do not count."""
    author.may_end.clear()
    with override_settings(STREAMSERVE={"TESTING": True, "LIMITS": {"MAX_JOBS_PER_PRINCIPAL": 2}}):
        await site.reset()
        await until_ready()
        ids = [(await caller.post("/jobs", ASKED)).json()["job_id"] for _ in range(2)]
        refused = await caller.post("/jobs", ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_jobs")
        assert int(refused.headers["retry-after"]) > 0
        await caller.post(f"/jobs/{ids[0]}/cancel")
        key = {"idempotency-key": "last-place"}
        both = await asyncio.gather(*(caller.post("/jobs", ASKED, **key) for _ in range(2)))
        assert [one.status_code for one in both] == [202, 202], both[1].content  # at once, and one is in the way
        assert len({one.json()["job_id"] for one in both}) == 1
        author.may_end.set()
        await site.reset()


async def test_a_revoked_keys_job_does_not_run(caller: Caller, author: Author, lonely_key: str) -> None:
    """It is cancelled when its turn comes."""
    author.may_end.clear()
    with override_settings(STREAMSERVE={"TESTING": True, "JOBS": {"CONCURRENCY": 1}}):
        await site.reset()
        await until_ready()
        await caller.post("/jobs", ASKED)
        await asyncio.wait_for(author.is_waiting.wait(), DEADLINE)
        job_id = (await Caller(key=lonely_key).post("/jobs", ASKED)).json()["job_id"]
        await orm.call(ApiKey.objects.filter(name="lonely").revoke)
        author.may_end.set()
        async with asyncio.timeout(DEADLINE):
            while (job := await orm.call(Job.objects.get, pk=job_id)).state in ("queued", "running"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (job.state, author.calls.count("search")) == ("cancelled", 1)
        await site.reset()


async def test_jobs_take_no_place_of_streams(caller: Caller, author: Author) -> None:
    """A caller with many jobs still starts an answer, and starting one evicts no job."""
    author.may_end.clear()
    ids = [(await caller.post("/jobs", ASKED)).json()["job_id"] for _ in range(20)]
    answer = check_native(await body_of(await caller.post("/streams", {"prompt": "hi", "max_tokens": 3})))
    assert answer[-1].event == "done"
    author.may_end.set()
    assert {(await ended(caller, one))["status"] for one in ids} == {"done"}
    assert json.loads((await orm.call(Job.objects.first)).result)["text"]


async def test_a_queued_job_says_what_it_waits_for(caller: Caller) -> None:
    """A worker where none that runs jobs is alive, its turn, or the next attempt."""
    await without_worker()
    job_id = (await caller.post("/jobs", ASKED)).json()["job_id"]

    async def waits_for() -> str:
        return str((await caller.get(f"/jobs/{job_id}")).json()["waits_for"])

    await orm.call(WorkerRow.objects.all().delete)
    await orm.call(WorkerRow.objects.beat, "other", "batch", 4)
    assert await waits_for() == "worker"
    await orm.call(WorkerRow.objects.beat, "this", "jobs,batch", 4)
    assert await waits_for() == "turn"
    await Job.objects.aupdate(due_at=timezone.now() + timedelta(minutes=5))
    assert await waits_for() == "retry"


@pytest.mark.parametrize("is_embedded", [True, False])
async def test_embedded_jobs_begin_without_lifespan_events(author: Author, alice_key: str, is_embedded: bool) -> None:
    """The first request about jobs starts the worker, under a server that sends no such events."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "JOBS": {"EMBEDDED": is_embedded}}):
        assert (await Caller(key=alice_key).get("/jobs")).status_code == 200
        assert (site.get_site().work.embedded is not None) == is_embedded
        await site.reset()
