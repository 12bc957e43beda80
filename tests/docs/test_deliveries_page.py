"""docs/deliveries.md: its pipeline gives one text as a response, a stream, a job and a row of a batch."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.pipeline.client import forget
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import check_native, text_of
from tests.support.docs.doc_blocks import blocks_of
from tests.support.sites.batch_runs import Tenant

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = "docs/deliveries.md"
ROOT = Path(__file__).parents[2]


def requests_of_the_page() -> list[tuple[str, dict[str, Any]]]:
    """Return path and body of each curl line, in order."""
    found = []
    for block in blocks_of(PAGE):
        if block.language == "sh":
            path = re.search(r"127\.0\.0\.1:8000(\S+)", block.text)
            body = re.search(r"-d '(.*)'", block.text)
            assert path is not None
            assert body is not None
            found.append((path[1], json.loads(body[1])))
    return found


async def job_done(caller: Caller, job_id: str) -> dict[str, Any]:
    """Return a job once it has ended."""
    for _ in range(600):
        job = (await caller.get(f"/jobs/{job_id}")).json()
        if job["status"] not in ("queued", "running"):
            return job
        await asyncio.sleep(0.05)
    raise AssertionError(job)


async def test_the_same_code_four_times(transactional_db: Any, alice_key: str) -> None:
    """What the page's lines give, in the order of the page."""
    (python,) = [block.text for block in blocks_of(PAGE) if block.language == "python"]
    (rows,) = [block.text for block in blocks_of(PAGE) if block.language == "json"]
    response, stream, job = requests_of_the_page()
    caller = Caller(key=alice_key)
    try:
        # The page's answers are free and long; these are to be equal, and short.
        source = python.replace('{history}", of=2)', '{history}", of=2, seed=3, max_tokens=12, ignore_eos=True)')
        assert source != python
        exec(source.replace('model="chat"', 'model="echo"'), {"__name__": "tickets.pipelines"})  # noqa: S102  (ours)
        await until_ready()
        whole = (await caller.post(response[0], response[1])).json()
        assert [step["message"] for step in whole["steps"]] == ["Reading the ticket", "Writing"]
        assert whole["text"]
        frames = check_native(await body_of(await caller.post(stream[0], stream[1])))
        assert text_of(frames) == whole["text"]
        queued = await caller.post(job[0], job[1])
        assert queued.status_code == 202
        ended = await job_done(caller, queued.json()["job_id"])
        assert (ended["status"], ended["result"]["text"]) == ("done", whole["text"])
        tenant = Tenant(alice_key)
        batch = await tenant.run(rows.encode(), "/pipelines/digest")
        results = await tenant.lines(batch["output_file_id"])
        assert [one["custom_id"] for one in results] == ["ticket-7", "ticket-8"]
        assert results[0]["response"]["body"]["text"] == whole["text"]
        await site.reset()
    finally:
        forget("digest")


def test_the_picture_is_what_its_script_draws() -> None:
    """It has the four deliveries of the page's table, and the three ways of batching."""
    script = runpy.run_path(str(ROOT / "docs/img/deliveries.py"))
    picture = script["PICTURE"].read_text()
    assert picture == script["drawn"]()
    page = (ROOT / PAGE).read_text()
    for delivery in script["DELIVERIES"]:
        assert f"**{delivery.name}**" in page
    for batching in script["BATCHINGS"]:
        assert f"**{batching.name.split(',')[0]}**" in page
        assert {sum(steps for _, steps in seat) for seat in batching.seats} == {20}
