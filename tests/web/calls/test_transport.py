"""Laws of the site's models in process: a library asks them over HTTP without a socket, as the run's or its own caller.

The real libraries: openai's client and pydantic-ai's model, over the echo engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from django.conf import settings
from django.test import override_settings

from streamserve import Run, http_client, pipeline, run_pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import PromptTooLong
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from streamserve.web import site
from streamserve.web.site import get_site
from tests.conftest import until

pytestmark = pytest.mark.django_db(transaction=True)

BODY = {"model": "echo", "messages": [{"role": "user", "content": "tell me"}], "max_tokens": 12, "seed": 7}


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Pipelines that are forgotten after the test."""
    made: list[str] = []
    yield made
    for name in made:
        forget(name)


def running(streams: Streams) -> list[Stream]:
    """Return the answers that are being made."""
    return [one for group in streams.unfinished.values() for one in group.values()]


async def asked(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/chat/completions", json={**BODY, **fields})


async def test_an_answer_outside_of_runs_is_the_users(engine: None, alice: Any) -> None:
    """It has a row, is within the user's limits, and is the same as over a socket; so are errors."""
    async with http_client(user=alice) as client:
        whole = await asked(client)
        assert whole.status_code == 200
        assert whole.json()["usage"]["completion_tokens"] == 12
        owners = [owner async for owner in StreamRow.objects.values_list("owner", flat=True)]
        assert owners == [f"user:{alice.pk}"]
        wrong = await asked(client, max_tokens="many")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.get("/models")).json()["data"][0]["id"] == "echo"


async def test_frames_come_as_they_are_made(engine: None) -> None:
    """The first frame is read while the answer runs; leaving it stops the answer."""
    async with http_client() as client:
        body = {**BODY, "stream": True, "max_tokens": 4000, "ignore_eos": True}
        async with client.stream("POST", "/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass
            stream = running(get_site().streams)[0]
            assert stream.terminal is None
            await lines.aclose()
        await until(lambda: stream.terminal is not None)


async def test_in_a_run_it_is_the_runs(engine: None, alice: Any, names: list[str]) -> None:
    """One row, the run's, with the usage of what it asked; the run's only place is enough for both."""
    pytest.importorskip("openai")
    from streamserve import openai_client

    names.append("asker")

    @pipeline("asker")
    async def asker(run: Run) -> str:
        client = openai_client()
        chunks = await client.chat.completions.create(**BODY, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]
        whole = await client.chat.completions.create(**BODY)
        assert "".join(texts) == whole.choices[0].message.content
        return "".join(texts)

    with override_settings(STREAMSERVE={**settings.STREAMSERVE, "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 1}}):
        await site.reset()
        result = await run_pipeline("asker", "go", user=alice)
    assert result.text
    assert (result.usage.completion_tokens, result.usage.prompt_tokens > 0) == (24, True)
    rows = [row async for row in StreamRow.objects.all()]
    assert [(row.owner, row.model) for row in rows] == [(f"user:{alice.pk}", "asker")]


async def test_an_agent_asks_the_sites_model(engine: None, names: list[str]) -> None:
    """pydantic-ai's OpenAI model over the echo engine: text as it comes, usage once; an error keeps its code."""
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    from streamserve import openai_client

    names.append("helper")
    model = OpenAIChatModel("echo", provider=OpenAIProvider(openai_client=openai_client()))
    pipeline("helper", Agent(model, model_settings={"max_tokens": 12, "seed": 7}))
    await site.reset()
    result = await run_pipeline("helper", "tell me")
    async with http_client() as client:
        assert result.text == (await asked(client)).json()["choices"][0]["message"]["content"]
    assert result.usage.completion_tokens == 12
    assert result.finish_reason == "length"
    with pytest.raises(PromptTooLong):
        await run_pipeline("helper", "tell me " * 20_000)


async def test_a_stop_reaches_the_model(engine: None, alice: Any, names: list[str]) -> None:
    """A run that is stopped leaves no answer behind."""
    began: list[Stream] = []
    names.append("long")

    @pipeline("long")
    async def long(run: Run) -> None:
        async with http_client() as client:
            body = {**BODY, "stream": True, "max_tokens": 100_000, "ignore_eos": True}
            async with client.stream("POST", "/chat/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    began.extend(running(get_site().inner_streams))

    await site.reset()
    whole = asyncio.ensure_future(run_pipeline("long", "go", user=alice, on_disconnect="park"))
    await until(lambda: bool(began))
    whole.cancel()
    await until(lambda: began[0].terminal is not None)
