"""Laws of a run's spans: steps, models' answers and tools stand where they were called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from streamserve.clients.factory import echo_client
from streamserve.clients.pipeline.run import Run
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.requests import Admission
from streamserve.protocol.trace import parse
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import collect
from streamserve.streams.registry import Streams
from tests.clients.pipeline.conftest import Site, closing
from tests.clients.pipeline.test_tools import ANSWERS, weather
from tests.conftest import until
from tests.support.checks.spans import Recorded, lies_within
from tests.support.servers.upstreams import JSON, WHOLE, Upstream, chatting, raw, remote, response, says


@pytest.fixture
async def calling() -> AsyncIterator[ThreadClient]:
    """An engine that calls the tool `weather`."""
    client = echo_client(answers=ANSWERS, format_name="qwen3")
    client.start()
    await until(lambda: client.describe().state == "ready")
    yield client
    await client.aclose()


@pytest.fixture
async def site(calling: ThreadClient) -> AsyncIterator[Site]:
    async with closing(Site(calling)) as site:
        yield site


async def test_a_run_is_a_tree(recorded: Recorded, site: Site) -> None:
    """Each child stands below what has called it, what the site's own code records too, and lies within it."""

    def search(question: str) -> str:
        with trace.get_tracer("site").start_as_current_span("SELECT"):
            return "passages"

    async def function(run: Run) -> None:
        await run.step("Looking up", search, run.question, phase="retrieval")
        await run.step("Asking", run.generate, "sky", tools=[weather], max_tokens=200)

    await site.run(function)
    run = await recorded.until("invoke_workflow p")
    tree = recorded.tree(run, without=("auth", "intake", "queue", "prefill", "decode", "deliver"))
    assert tree == [
        ("step Looking up", ["SELECT"]),
        ("step Asking", ["chat echo", "execute_tool weather", "chat echo"]),
    ]
    assert all("decode" in recorded.tree(one) for one in recorded.all() if one.name == "chat echo")
    below = [one for one in recorded.below(run) if one.name != "deliver"]
    assert all(lies_within(one, run) for one in below)
    asking = recorded.one("step Asking")
    assert all(lies_within(one, asking) for one in recorded.below(asking))
    assert dict(run.attributes or {})["gen_ai.workflow.name"] == "p"
    tool = dict(recorded.one("execute_tool weather").attributes or {})
    assert (tool["gen_ai.tool.name"], tool["gen_ai.tool.type"]) == ("weather", "function")
    shown = " ".join(f"{dict(one.attributes or {})}" for one in recorded.all())
    assert "Oslo" not in shown
    assert "bill" not in shown


async def test_a_failed_step_says_so(recorded: Recorded, site: Site) -> None:
    """The step and the run end in errors, by type and code: the message may have words of a user."""

    async def function(run: Run) -> None:
        def fail() -> None:
            raise ValueError("a private reason")

        await run.step("Failing", fail)

    await site.run(function)
    run, step = await recorded.until("invoke_workflow p"), recorded.one("step Failing")
    assert [one.status.status_code for one in (step, run)] == [StatusCode.ERROR] * 2
    assert dict(step.attributes or {})["error.type"] == "ValueError"
    assert dict(run.attributes or {})["error.type"] == "pipeline_failed"
    assert not any("private" in f"{one.to_json()}" for one in recorded.all())


async def test_steps_side_by_side_are_siblings(recorded: Recorded, site: Site) -> None:
    """Answers that run at the same time do not stand below each other."""

    async def function(run: Run) -> None:
        await asyncio.gather(*(run.generate(f"question {one}", max_tokens=5) for one in range(3)))

    await site.run(function)
    answers = [one for one in recorded.below(await recorded.until("invoke_workflow p")) if one.name == "chat echo"]
    assert len(answers) == 3


@pytest.mark.parametrize("header", [f"00-{'a' * 32}-{'b' * 16}-01", None])
async def test_without_spans_the_header_goes_on(header: str | None) -> None:
    """A server elsewhere gets the caller's `traceparent` as it came, or none."""
    upstream = Upstream(says(*WHOLE))
    request, admission, resume = chatting()
    async with remote(upstream) as client:
        trace = None if header is None else parse(header)
        generation = await client.generate(request, replace(admission, trace=trace), resume)
        assert [event async for event in generation]
    assert upstream.posts[0].headers.get("traceparent") == header


async def test_a_server_elsewhere_continues_the_trace(recorded: Recorded) -> None:
    """Its request is a span of a client below the answer's, and carries that span in its header, and no text."""
    upstream = Upstream(says(*WHOLE))
    async with remote(upstream, remote_model="big") as client:
        streams = Streams({"m": client}, MemoryLog())
        stream = await streams.start(chatting()[0], Admission(owner="u", tenant="u"))
        await collect(streams, stream)
        await streams.aclose()
    answer, asked_elsewhere = await recorded.until("chat m"), recorded.one("chat big")
    own = asked_elsewhere.get_span_context()
    assert own is not None
    sent = parse(upstream.posts[0].headers["traceparent"])
    assert sent is not None
    assert (int(sent.trace_id, 16), int(sent.span_id, 16)) == (own.trace_id, own.span_id)
    assert asked_elsewhere in recorded.below(answer)
    values = dict(asked_elsewhere.attributes or {})
    assert (values["server.address"], values["gen_ai.provider.name"]) == ("127.0.0.1", "vllm")
    assert values["gen_ai.usage.output_tokens"] == 3


async def test_a_refusal_elsewhere_is_an_error_of_its_span(recorded: Recorded) -> None:
    """The span of the request ends in the error's code; the answer's too."""
    upstream = Upstream(raw(response("400 Bad Request", b"{}", JSON)))
    async with remote(upstream) as client:
        streams = Streams({"m": client}, MemoryLog())
        with pytest.raises(StreamserveError):
            await streams.start(chatting()[0], Admission(owner="u", tenant="u"))
        await streams.aclose()
    assert {one.kind.name for one in recorded.all()} == {"CLIENT", "SERVER"}
    assert {one.status.status_code for one in recorded.all()} == {StatusCode.ERROR}
