"""Laws of a pydantic-ai agent as a pipeline, with the framework's own test models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from streamserve.clients.pipeline import speech
from streamserve.clients.pipeline.filters import Blocklist
from streamserve.clients.pipeline.run import Run
from streamserve.protocol.events import Done, Error, Token
from streamserve.protocol.requests import Message
from streamserve.streams.reader.follow import follow
from tests.clients.agents.conftest import AgentSite, blocks_of, text_of

pytest.importorskip("pydantic_ai")

from pydantic import BaseModel
from pydantic_ai import Agent, RunContext
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import SystemPromptPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel


async def test_text_calls_and_results_are_blocks(site: AgentSite) -> None:
    """A call, its result and the text after it, in their order; the usage is that of the agent."""
    agent = Agent(TestModel(custom_output_text="It is sunny in Paris."))

    @agent.tool_plain
    def weather(city: str) -> str:
        return f"sunny in {city}"

    events = await site.run_agent(agent)
    assert blocks_of(events) == [
        ("server_tool_use", "weather", '{"city": "a"}'),
        ("tool_result", "", "sunny in a"),
        ("text", "", "It is sunny in Paris."),
    ]
    done = events[-1]
    assert isinstance(done, Done)
    assert done.finish_reason == "stop"
    assert done.usage.prompt_tokens > 0
    assert done.usage.completion_tokens > 0


async def test_the_conversation_is_its_history(site: AgentSite) -> None:
    """Earlier turns are its messages, its own instructions stand first, and the caller's system message is left out."""
    seen: list[Any] = []

    async def answer(messages: list[Any], info: AgentInfo) -> AsyncIterator[str]:
        seen.append((messages, info.instructions))
        yield "yes"

    agent = Agent(FunctionModel(stream_function=answer), system_prompt="Be kind.", instructions="Be short.")
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    turns = (
        Message(role="system", content="Be rude."),
        Message(role="user", content="Hello"),
        Message(role="assistant", content="Hi", extra={"tool_calls": [call]}),
        Message(role="tool", content="found", extra={"tool_call_id": "c1", "name": "look"}),
        Message(role="user", content="And now?"),
    )
    assert text_of(await site.run_agent(agent, messages=turns)) == "yes"
    ((messages, instructions),) = seen
    parts = [part for message in messages for part in message.parts]
    assert [one.content for one in parts if isinstance(one, UserPromptPart)] == ["Hello", "And now?"]
    assert [one.content for one in parts if isinstance(one, SystemPromptPart)] == ["Be kind."]
    assert [one.content for one in parts if isinstance(one, ToolReturnPart)] == ["found"]
    assert instructions == "Be short."


class City(BaseModel):
    name: str
    people: int


async def test_a_structured_output_is_json(site: AgentSite) -> None:
    """The call by which the model gives it is no call for readers."""
    agent = Agent(TestModel(custom_output_args={"name": "Paris", "people": 2}), output_type=City)
    assert blocks_of(await site.run_agent(agent)) == [("text", "", '{"name": "Paris", "people": 2}')]


async def test_a_tool_has_the_run(site: AgentSite) -> None:
    """A tool cites, and asks the site's model, with the run that it is given."""
    agent = Agent(TestModel(custom_output_text="done"), deps_type=Run)

    @agent.tool
    async def look(ctx: RunContext[Run]) -> str:
        ctx.deps.cite("help", id="7")
        return (await ctx.deps.generate("a question", show=False, max_tokens=4)).finish_reason

    events = await site.run_agent(agent)
    assert [one.id for one in events if one.type == "citation"] == ["7"]
    assert ("tool_result", "", "length") in blocks_of(events)


@pytest.mark.parametrize(
    ("status", "code", "is_retryable"), [(503, "engine_unavailable", True), (401, "pipeline_failed", False)]
)
async def test_a_failing_model_is_an_error_of_ours(site: AgentSite, status: int, code: str, is_retryable: bool) -> None:
    """What may succeed later is retryable; anything else has its cause in the log."""

    async def fail(messages: list[Any], info: AgentInfo) -> AsyncIterator[str]:
        raise ModelHTTPError(status, "m")
        yield ""

    end = (await site.run_agent(Agent(FunctionModel(stream_function=fail))))[-1]
    assert isinstance(end, Error)
    assert (end.code, end.retryable) == (code, is_retryable)


async def test_a_stop_cancels_the_agent(site: AgentSite) -> None:
    """The tool that runs is cancelled, and nothing of the agent is left."""
    began, ended = asyncio.Event(), asyncio.Event()
    agent = Agent(TestModel())

    @agent.tool_plain
    async def wait() -> str:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    site.serve_agent(agent)
    stream = await site.begin()
    await asyncio.wait_for(began.wait(), 20)
    await stream.stop()
    await asyncio.wait_for(ended.wait(), 20)


async def test_a_filter_stops_the_agent(site: AgentSite) -> None:
    """Its text goes through the pipeline's filters."""
    agent = Agent(TestModel(custom_output_text="The password is swordfish, as always."))
    events = await site.run_agent(agent, filters=[lambda: Blocklist(["swordfish"])])
    assert text_of(events) == "The password is "
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "content_filter"


async def test_a_slow_reader_holds_the_agent_back(site: AgentSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is asked for no more than readers may be behind; all of it comes in the end."""
    monkeypatch.setattr(speech, "LEAD_TOKENS", 16)
    made = 0

    async def write(messages: list[Any], info: AgentInfo) -> AsyncIterator[str]:
        nonlocal made
        for number in range(200):
            made += 1
            yield f"{number} "

    site.serve_agent(Agent(FunctionModel(stream_function=write)))
    stream = await site.begin()
    reading = follow(site.streams, stream, credit=8)
    text, most = "", 0
    async with aclosing(reading):
        async for logged in reading:
            if isinstance(logged.event, Token):
                text += logged.event.text
            most = max(most, made - text.count(" "))
            reading.ack(logged.seq)
    assert text == "".join(f"{number} " for number in range(200))
    assert most <= 2 * (16 + 8)
