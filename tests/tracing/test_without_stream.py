"""Laws of what has no stream of its own: embeddings, moderations, and a conversation's title."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from streamserve import aembed
from streamserve.clients.thread.client import ThreadClient
from streamserve.rows.titles import Titles
from streamserve.tracing.spans import start
from streamserve.web import site
from tests.conftest import Caller, until_ready
from tests.rows.test_titles import answered
from tests.support.checks.spans import Recorded, lies_within

pytestmark = pytest.mark.django_db(transaction=True)

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
SECRET = "a secret question"
SITE = {
    "TESTING": True,
    "EMBEDDING_MODELS": {"search": {"PATH": "echo"}},
    "MODERATION": "tests.tracing.test_without_stream.scores_of",
}


async def scores_of(texts: list[str]) -> list[dict[str, float]]:
    """Look at texts as a site's own function does, with a span of its own."""
    with trace.get_tracer("site").start_as_current_span("a classifier"):
        return [{} for _ in texts]


@pytest.fixture
async def served() -> AsyncIterator[None]:
    """A site with an embedding model and a function that moderates."""
    with override_settings(STREAMSERVE=SITE):
        await site.reset()
        await until_ready()
        yield
        await site.reset()


@pytest.mark.usefixtures("served")
async def test_embeddings_are_a_span(recorded: Recorded, alice_key: str) -> None:
    """Below the caller's span, with the model, the dimensions, and how many inputs and tokens; without a text."""
    body = {"input": [SECRET, "and more"], "dimensions": 16}
    reply = await Caller(key=alice_key).post("/v1/embeddings", body, traceparent=PARENT)
    assert reply.status_code == 200
    span = recorded.one("embeddings search")
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert span.kind is SpanKind.SERVER
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "streamserve",
        "gen_ai.request.model": "search",
        "gen_ai.embeddings.dimension.count": 16,
        "gen_ai.usage.input_tokens": reply.json()["usage"]["prompt_tokens"],
        "streamserve.num_inputs": 2,
    }


@pytest.mark.usefixtures("served")
async def test_refused_embeddings_say_why(recorded: Recorded, alice_key: str) -> None:
    """The span of an unknown model ends in the error's code."""
    reply = await Caller(key=alice_key).post("/v1/embeddings", {"input": SECRET, "model": "unknown"})
    assert reply.status_code == 404
    span = recorded.one("embeddings unknown")
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == reply.json()["error"]["code"]


@pytest.mark.usefixtures("served")
async def test_embeddings_of_python_are_of_the_current_span(recorded: Recorded) -> None:
    """Each request that a call makes of its texts stands below the span of the code that called."""
    with trace.get_tracer("site").start_as_current_span("a task") as task:
        await aembed([SECRET], tenant="shop")
    span = recorded.one("embeddings search")
    assert span.parent == task.get_span_context()
    assert span.kind is SpanKind.INTERNAL


@pytest.mark.usefixtures("served")
async def test_a_moderation_is_a_span(recorded: Recorded, alice_key: str) -> None:
    """What the site's own function records stands below it."""
    reply = await Caller(key=alice_key).post("/v1/moderations", {"input": SECRET}, traceparent=PARENT)
    assert reply.status_code == 200
    span = recorded.one("moderation site")
    assert recorded.tree(span) == ["a classifier"]
    assert dict(span.attributes or {})["gen_ai.operation.name"] == "moderation"
    assert not any(SECRET in one.to_json() for one in recorded.all())


async def test_off_requests_without_a_stream_have_no_spans(recorded: Recorded, alice_key: str) -> None:
    """TRACING False is for them too."""
    with override_settings(STREAMSERVE={**SITE, "MODERATION": "", "TRACING": False}):
        await site.reset()
        await until_ready()
        reply = await Caller(key=alice_key).post("/v1/embeddings", {"input": SECRET}, traceparent=PARENT)
        await site.reset()
    assert reply.status_code == 200
    assert recorded.all() == ()


async def test_a_title_is_below_its_answer(recorded: Recorded, echo: ThreadClient) -> None:
    """It is a model's answer, in the trace of the answer whose conversation it names, with its phases and tokens."""
    answer: Any = start("chat echo", None, at=0.0)
    titles = Titles({"echo": echo}, {})
    titles.note((await answered(SECRET)).stream_id or "", answer.trace)
    titles.note((await answered(SECRET)).stream_id or "")  # of an answer that is not recorded
    await titles.join()
    await titles.aclose()
    span = recorded.one("chat echo")
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == answer.trace.span_id
    values = dict(span.attributes or {})
    assert (values["streamserve.is_title"], values["streamserve.latency_class"]) == (True, "batch")
    assert values["gen_ai.usage.output_tokens"] > 0
    assert "decode" in recorded.tree(span)
    assert all(lies_within(one, span) for one in recorded.below(span))
    assert not any(SECRET in one.to_json() for one in recorded.all())
