"""Laws of what happens later, and elsewhere: jobs, their retries, and answers that another process continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from django.test.utils import override_settings
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from streamserve import Run, aenqueue_job, pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.clients.thread.client import ThreadClient
from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.trace import parse
from streamserve.streams.config import StreamConfig
from streamserve.streams.reader.delivery import Delivery
from streamserve.web import site
from tests.conftest import Caller, until_ready
from tests.support.checks.spans import Recorded
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, ask, until

pytestmark = pytest.mark.django_db(transaction=True)

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture
async def failing() -> AsyncIterator[None]:
    """A site with the pipeline `review`, whose first attempt fails."""
    left = [1]

    async def review(run: Run) -> None:
        """Review an account."""
        await run.generate("first", max_tokens=4, ignore_eos=True)
        if left:
            left.pop()
            raise RuntimeError("out of order")
        await run.generate("second", max_tokens=4, ignore_eos=True)

    pipeline(review)
    with override_settings(STREAMSERVE={"TESTING": True, "JOBS": {"RETRY_SECONDS": 0.0}}):
        await until_ready()
        yield
        await site.reset()
    forget("review")


@pytest.mark.usefixtures("failing")
async def test_a_job_is_of_the_request_that_queued_it(recorded: Recorded, alice_key: str) -> None:
    """Each attempt is a span below the caller's; the second makes only what the first has not kept."""
    asked = {"pipeline": "review", "messages": [{"role": "user", "content": "Where is my bill?"}]}
    queued = await Caller(key=alice_key).post("/jobs", asked, traceparent=PARENT)
    assert queued.status_code == 202
    await until(lambda: len(runs(recorded)) == 2, "both attempts are over")
    first, second = runs(recorded)
    for run in (first, second):
        assert run.parent is not None
        assert (f"{run.parent.trace_id:032x}", f"{run.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
        assert dict(run.attributes or {})["streamserve.stream_id"] == queued.json()["stream_id"]
    assert (first.status.status_code, second.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    answers = [one for one in recorded.below(second) if one.name == "chat echo"]
    assert [bool(recorded.below(one)) for one in answers] == [False, True]


def runs(recorded: Recorded) -> list[Any]:
    return [one for one in recorded.all() if one.name == "invoke_workflow review"]


@pytest.mark.usefixtures("failing")
async def test_a_job_of_python_is_of_the_current_span(recorded: Recorded) -> None:
    """A task of the site's that enqueues a job is the parent of its runs."""
    with trace.get_tracer("site").start_as_current_span("a task") as task:
        await aenqueue_job("review", "Where is my bill?", tenant="shop")
    await until(lambda: len(runs(recorded)) == 2, "both attempts are over")
    assert [run.parent.span_id for run in runs(recorded)] == [task.get_span_context().span_id] * 2


@pytest.fixture
async def workers(echo: ThreadClient, tmp_path: Path) -> AsyncIterator[tuple[Worker, Worker]]:
    one, two = [Worker(tmp_path, echo, StreamConfig(coalesce_tokens=0)) for _ in range(2)]
    yield one, two
    await two.aclose()
    await one.aclose()


async def test_another_process_continues_the_trace(
    recorded: Recorded, workers: tuple[Worker, Worker], gate: Gate
) -> None:
    """What it makes of the answer stands below the span of the process that began it, which says that it has left."""
    one, two = workers
    gate.allow(6)
    stream = await one.start(ask(max_tokens=30, ignore_eos=True), trace=parse(PARENT))

    async def send(more: bytes) -> None:
        """Read on."""

    reading = asyncio.create_task(Delivery(one.streams, stream, NativeEncoder(stream.log_id)).run(send))
    await until(lambda: gate.is_holding and stream.readers.furthest_seq > 5, "it is in the middle, and read so far")
    closing = asyncio.create_task(one.streams.aclose())
    await until(lambda: stream.has_left, "it is cut")
    gate.open()
    await asyncio.gather(reading, closing)
    await two.read(stream.id)
    await until(lambda: len([span for span in recorded.all() if span.name == "text_completion echo"]) == 2, "both")
    first, second = [span for span in recorded.all() if span.name == "text_completion echo"]
    assert f"{first.get_span_context().trace_id:032x}" == TRACE_ID
    assert second in recorded.below(first)
    assert [dict(span.attributes or {})["streamserve.has_ended"] for span in (first, second)] == [False, True]
    assert [one for one in recorded.below(second) if one.name == "decode"]
    readers = [span for span in recorded.below(first) if span.name == "deliver"]
    assert [dict(span.attributes or {})["streamserve.deliver.is_return"] for span in readers] == [False, False]
