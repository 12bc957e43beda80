"""Laws of agents in the site: every front end serves them; a job that is tried again repeats no tool."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve import pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.sites.batch_runs import Tenant, jsonl, line

pytest.importorskip("pydantic_ai")
pytest.importorskip("langgraph")
pytest.importorskip("agents")

from tests.support.sites.frameworks_app import pipelines as app

pytestmark = pytest.mark.django_db(transaction=True)

DEADLINE = 60.0
for registered in app.AGENTS:  # by its import
    forget(registered)


@pytest.fixture(params=app.AGENTS)
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An agent, whose tools note their calls in a folder of this test."""
    monkeypatch.setattr(app, "FOLDER", tmp_path)
    for one in app.AGENTS:
        forget(one)
    pipeline(request.param, app.AGENTS[request.param])
    yield request.param
    forget(request.param)


async def test_a_job_that_is_tried_again_repeats_no_tool(
    name: str, transactional_db: Any, alice_key: str, tmp_path: Path
) -> None:
    """Its second tool fails once: the second attempt calls that tool alone, and the answer is the site's own model's.

    The only row is the job's stream's, and counts what the model has written.
    """
    (tmp_path / "fails").touch()
    with override_settings(STREAMSERVE={"TESTING": True, "JOBS": {"RETRY_SECONDS": 0.0}}):
        await site.reset()
        await until_ready()
        caller = Caller(key=alice_key)
        job = (await caller.post("/jobs", {"pipeline": name, "prompt": "go"})).json()
        async with asyncio.timeout(DEADLINE):
            while job["status"] in ("queued", "running"):
                await asyncio.sleep(0.02)
                job = (await caller.get(f"/jobs/{job['job_id']}")).json()
        await site.reset()
    assert (job["status"], job["attempts"]) == ("done", 2), job
    calls = Counter(line.split()[1] for line in (tmp_path / "tools").read_text().splitlines())
    assert calls == {"first": 1, "second": 2}
    counted = job["result"]["usage"]["completion_tokens"]
    if name == "pydantic":  # whose FunctionModel guesses by how its text is cut; the larger count is the run's
        assert counted >= app.ASKED["max_tokens"]
    else:
        assert counted == app.ASKED["max_tokens"]
    rows = [row async for row in StreamRow.objects.all()]
    assert [(row.id, row.model) for row in rows] == [(job["stream_id"], name)]


MESSAGES = [{"role": "user", "content": "What have you found?"}]
PARTS = [{"id": "q1", "role": "user", "parts": [{"type": "text", "text": "What have you found?"}]}]
# Where it is asked, what with, and what its answer ends with.
FRONT_ENDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "native": ("/streams", {"messages": MESSAGES}, "event: done"),
    "pipelines": ("/pipelines/{name}", {"messages": MESSAGES, "stream": True}, "event: done"),
    "openai": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}, "data: [DONE]"),
    "anthropic": ("/v1/messages", {"messages": MESSAGES, "stream": True, "max_tokens": 1000}, "event: message_stop"),
    "responses": ("/v1/responses", {"input": "What have you found?", "stream": True}, "event: response.completed"),
    "ai-sdk": ("/ai/chat", {"id": "chat-1", "messages": PARTS, "trigger": "submit-message"}, '"type":"finish"'),
    "ag-ui": (
        "/ag-ui/{name}",
        {"threadId": "t1", "runId": "r1", "messages": [{"id": "q1", **MESSAGES[0]}], "tools": [], "context": []},
        "RUN_FINISHED",
    ),
}


async def test_every_front_end_serves_it(
    name: str, transactional_db: Any, alice_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's answer ends well in each of them."""
    monkeypatch.setitem(app.ASKED, "max_tokens", 8)
    with override_settings(STREAMSERVE={"TESTING": True}):
        await site.reset()
        await until_ready()
        caller = Caller(key=alice_key)
        for front_end, (path, body, end) in FRONT_ENDS.items():
            asked = {**body} if "{name}" in path else {"model": name, **body}
            response = await caller.post(path.format(name=name), asked)
            assert response.status_code == 200, front_end
            text = (await body_of(response)).decode()
            assert end in text, front_end
            assert "RUN_ERROR" not in text, front_end
        await site.reset()


async def test_a_batch_runs_it_for_each_row(
    name: str, transactional_db: Any, alice_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has its answer, and tools are called for each."""
    monkeypatch.setitem(app.ASKED, "max_tokens", 8)
    with override_settings(STREAMSERVE={"TESTING": True}):
        await site.reset()
        await until_ready()
        tenant, url = Tenant(alice_key), f"/pipelines/{name}"
        rows = [line(f"row {number}", url, messages=MESSAGES) for number in range(2)]
        batch = await tenant.run(jsonl(rows), url)
        output = await tenant.lines(batch["output_file_id"])
        await site.reset()
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert all(one["response"]["body"]["text"] for one in output)
    calls = Counter(one.split()[1] for one in (app.FOLDER / "tools").read_text().splitlines())
    assert calls == {"first": 2, "second": 2}
