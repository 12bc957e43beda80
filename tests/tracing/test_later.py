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
from streamserve.clients.factory import echo_client
from streamserve.clients.mcp.servers import McpServers
from streamserve.clients.pipeline.client import Pipeline, PipelineClient, forget
from streamserve.clients.thread.client import ThreadClient
from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.engine import Park
from streamserve.protocol.requests import Admission, GenerateRequest
from streamserve.protocol.trace import parse
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.registry import Streams
from streamserve.web import site
from tests.clients.mcp.test_servers import over_pipes
from tests.conftest import Caller, until_ready
from tests.support.checks.spans import Recorded
from tests.support.sites.batch_runs import CHAT, Tenant, jsonl, line
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, ParkingClient, ask, until

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


async def test_rows_of_a_batch_are_linked_to_its_request(recorded: Recorded, alice_key: str) -> None:
    """Each row is a trace of its own, however many there are, with a link to the request that made the batch."""
    await until_ready()
    tenant = Tenant(alice_key)
    file_id = await tenant.file(jsonl([line("a"), line("b")]))
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    made = await Caller(key=alice_key).post("/v1/batches", asked, traceparent=PARENT)
    assert made.status_code == 200, made.content
    await until(lambda: sum(one.name == "chat echo" for one in recorded.all()) == 2, "both rows are over")
    await site.reset()
    rows = [one for one in recorded.all() if one.name == "chat echo"]
    assert [one.parent for one in rows] == [None, None]
    assert len({one.get_span_context().trace_id for one in rows}) == 2
    for one in rows:
        [link] = one.links
        assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == (TRACE_ID, SPAN_ID)


async def test_a_lost_engine_is_an_event(recorded: Recorded, echo: ThreadClient) -> None:
    """An answer whose engine ends has a span `parked` with the reason, and the event, and goes on in its span."""
    client = ParkingClient(echo, [Park(reason="lost")], num_tokens=2)
    streams = Streams({"echo": client}, MemoryLog())  # type: ignore[dict-item]
    asked = ask(max_tokens=4, ignore_eos=True)
    stream = await streams.start(asked, Admission(owner="u", tenant="u", on_disconnect="finish"))
    await collect(streams, stream)
    answer = await recorded.until("text_completion echo")
    parked = [one for one in recorded.below(answer) if one.name == "parked"]
    assert parked
    assert [event.name for event in answer.events] == ["streamserve.engine_lost"] * len(parked)
    assert {dict(one.attributes or {})["streamserve.park.reason"] for one in parked} == {"lost"}
    assert dict(answer.attributes or {})["gen_ai.usage.output_tokens"] == 4
    await streams.aclose()


async def test_a_tool_of_an_mcp_server_is_below_its_call(recorded: Recorded, tmp_path: Path) -> None:
    """The span that the package mcp records of its request, which it sends on, stands below ours of the tool."""
    pytest.importorskip("mcp", reason="needs the package mcp")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    echo = echo_client(answers={"Weather report": "It is sunny.", "sky": call}, format_name="qwen3")
    echo.start()
    await until(lambda: echo.describe().state == "ready", "it is ready")
    servers = McpServers({"tools": over_pipes(tmp_path / "notes", tools=("weather",))})

    async def function(run: Run) -> None:
        await run.generate("sky", tools=await run.mcp("tools"), max_tokens=200)

    client = PipelineClient(Pipeline(name="p", function=function), {"echo": echo}, default_model="echo", mcp=servers)
    streams = Streams({"p": client}, MemoryLog())
    request = GenerateRequest(model="p", prompt="How is it?")
    await collect(streams, await streams.start(request, Admission(owner="u", tenant="u")))
    run = await recorded.until("invoke_workflow p")
    [tool] = [one for one in recorded.below(run) if one.name == "execute_tool weather"]
    assert dict(tool.attributes or {})["gen_ai.tool.type"] == "extension"
    assert [dict(one.attributes or {}).get("mcp.method.name") for one in recorded.below(tool)] == ["tools/call"]
    await streams.aclose()
    await client.aclose()
    await servers.aclose()
    await echo.aclose()
