"""Laws of an answer's spans: one tree, whose phases add up, below the request that has asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from django.test.utils import override_settings
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from streamserve import complete
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.spans import Recorded, lies_within, seconds
from tests.support.streams.log_lines import captured_events

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
PHASES = ("auth", "intake", "queue", "prefill", "decode")
SECRET = "a secret question"
ASKED = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "temperature": 0.5, "stop": ["private"]}


async def ask(user: Any, body: dict[str, Any] | None = None, **headers: str) -> str:
    """Ask, read the whole answer, and return the id of its stream."""
    caller = Caller()
    await caller.client.aforce_login(user)
    response = await caller.post("/streams", body or ASKED, **headers)
    await body_of(response)
    return str(response.headers["X-Stream-Id"])


@pytest.fixture
async def paced(transactional_db: Any) -> AsyncIterator[None]:
    """An engine whose steps take some time, so that each phase of an answer does."""
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.005}):
        await site.reset()
        await until_ready()
        yield
        await site.reset()


@pytest.mark.usefixtures("paced")
async def test_an_answer_is_a_tree(recorded: Recorded, alice: Any) -> None:
    """Below the caller's span is the answer's; its phases follow each other within it and add up to no more than it."""
    stream_id = await ask(alice, traceparent=PARENT)
    answer = await recorded.until("chat echo", "deliver")
    assert answer.parent is not None
    assert (f"{answer.parent.trace_id:032x}", f"{answer.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert answer.kind is SpanKind.SERVER
    assert answer.attributes is not None
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "streamserve",
        "gen_ai.request.model": "echo",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": stream_id,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.output_tokens": 5,
        "streamserve.stream_id": stream_id,
    }
    assert {name: answer.attributes.get(name) for name in expected} == expected
    phases = [one for one in recorded.below(answer) if one.name != "deliver"]
    names = [one.name for one in phases]
    assert names == [one for one in PHASES if one in names]  # a phase that took no time has none
    assert {"intake", "decode"} <= set(names)
    assert "deliver" in recorded.tree(answer)
    assert all(lies_within(one, answer) for one in phases)
    for one, following in pairwise(phases):
        assert one.end_time is not None
        assert following.start_time is not None
        assert abs(following.start_time - one.end_time) <= 1_000  # nanoseconds: of floats
    assert sum(map(seconds, phases)) <= seconds(answer) + 1e-6


@pytest.mark.usefixtures("engine")
async def test_no_text_is_in_a_span(recorded: Recorded, alice: Any) -> None:
    """Neither question, stop strings, answer nor owner stand in a name, an attribute or an event."""
    await ask(alice)
    await recorded.until("chat echo", "deliver")
    shown = " ".join(f"{one.name} {dict(one.attributes or {})} {one.events}" for one in recorded.all())
    for word in ("secret", "private", "user:"):
        assert word not in shown


@pytest.mark.usefixtures("engine")
async def test_the_current_span_is_the_parent(recorded: Recorded, alice: Any) -> None:
    """An instrumentation's span, or one of the site's own, goes before the header: it has read that itself."""
    with trace.get_tracer("site").start_as_current_span("GET /shop") as shop:
        await ask(alice, traceparent=PARENT)
    answer = await recorded.until("chat echo", "deliver")
    assert answer.parent == shop.get_span_context()
    assert answer.kind is SpanKind.INTERNAL


@pytest.mark.usefixtures("engine")
async def test_a_header_that_is_not_sampled_records_nothing(recorded: Recorded, alice: Any) -> None:
    """The caller's decision holds, as the site's sampler asks for by itself."""
    await ask(alice, traceparent=PARENT[:-2] + "00")
    await ask(alice)
    await recorded.until("chat echo", "deliver")
    assert {one.name for one in recorded.all()} <= {"chat echo", *PHASES, "deliver"}
    assert len([one for one in recorded.all() if one.parent is None]) == 1


@pytest.mark.usefixtures("engine")
async def test_a_refusal_ends_its_span(recorded: Recorded, alice: Any) -> None:
    """A request that gets no answer has a span with the code of its error, and no phases."""
    await ask(alice, {**ASKED, "max_tokens": 10}, traceparent=PARENT)
    await recorded.until("chat echo", "deliver")
    caller = Caller()
    await caller.client.aforce_login(alice)
    response = await caller.post("/streams", {**ASKED, "messages": [{"role": "user", "content": "long " * 50_000}]})
    assert response.status_code == 400
    refused = [one for one in recorded.all() if one.status.status_code is StatusCode.ERROR]
    assert [one.name for one in refused] == ["chat echo"]
    assert dict(refused[0].attributes or {})["error.type"] == response.json()["error"]["code"]
    assert recorded.below(refused[0]) == []


async def test_off_there_are_no_spans(recorded: Recorded, alice: Any) -> None:
    """With TRACING False none is recorded, and the trace's id is in the log line all the same."""
    with override_settings(STREAMSERVE={"TESTING": True, "TRACING": False}), captured_events() as lines:
        await site.reset()
        await until_ready()
        await ask(alice, traceparent=PARENT)
        await ask(alice, traceparent=PARENT + "-more")
        await until(lambda: sum(line["event"] == "stream_finished" for line in lines) == 2)
        await site.reset()
    assert recorded.all() == ()
    assert [line.get("trace_id") for line in lines if line["event"] == "stream_finished"] == [TRACE_ID, None]


@pytest.mark.usefixtures("engine")
async def test_an_answer_of_python_is_of_the_current_span(recorded: Recorded) -> None:
    """A call of the Python API stands below the span of the code that made it, from synchronous code too."""

    def call() -> None:
        with trace.get_tracer("site").start_as_current_span("a task"):
            complete(SECRET, tenant="shop", max_tokens=3)

    await asyncio.to_thread(call)
    answer = await recorded.until("chat echo", "deliver")
    assert answer.parent == recorded.one("a task").get_span_context()


@pytest.mark.usefixtures("engine")
async def test_a_reader_who_returns_has_a_span_of_his_own(recorded: Recorded, alice: Any) -> None:
    """Each reader's delivery is a child of the answer, linked to the request that it came with."""
    stream_id = await ask(alice, traceparent=PARENT)
    await recorded.until("chat echo", "deliver")
    caller = Caller()
    await caller.client.aforce_login(alice)
    with trace.get_tracer("site").start_as_current_span("GET again") as again:
        await body_of(await caller.get(f"/streams/{stream_id}/events"))
    first, second = (one for one in recorded.below(recorded.one("chat echo")) if one.name == "deliver")
    assert dict(first.attributes or {})["streamserve.deliver.is_return"] is False
    assert dict(second.attributes or {})["streamserve.deliver.is_return"] is True
    assert [link.context for link in second.links] == [again.get_span_context()]
