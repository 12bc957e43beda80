"""Laws of an OpenAI-Agents agent as a pipeline, with the SDK's own scripted model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamserve.clients.pipeline.run import Run
from streamserve.protocol.events import Done, Error
from streamserve.protocol.requests import Message
from tests.clients.agents.conftest import AgentSite, blocks_of, text_of

pytest.importorskip("agents")

from agents import Agent, RunContextWrapper, function_tool
from agents.testing import ScriptedModel, assistant_message, function_call


@function_tool
def weather(city: str) -> str:
    """Return the weather."""
    return f"sunny in {city}"


def scripted(*steps: Any) -> ScriptedModel:
    return ScriptedModel([[step] for step in steps])


async def test_text_calls_and_results_are_blocks(site: AgentSite) -> None:
    """A call, its result and the text after it, in their order."""
    model = scripted(function_call("weather", {"city": "Paris"}, call_id="c1"), assistant_message("It is sunny."))
    events = await site.run_agent(Agent(name="p", model=model, tools=[weather]))
    assert [(kind, name) for kind, name, _ in blocks_of(events)] == [
        ("server_tool_use", "weather"),
        ("tool_result", ""),
        ("text", ""),
    ]
    assert [text for _, _, text in blocks_of(events)][1:] == ["sunny in Paris", "It is sunny."]
    assert isinstance(events[-1], Done)


async def test_to_hand_over_is_a_step(site: AgentSite) -> None:
    """Readers see who answers now, and no call."""
    second = Agent(name="Billing", model=scripted(assistant_message("Your bill is paid.")))
    first = Agent(
        name="Triage", model=scripted(function_call("transfer_to_billing", {}, call_id="c1")), handoffs=[second]
    )
    events = await site.run_agent(first)
    assert [one.message for one in events if one.type == "status" and one.status == "step"] == ["Billing"]
    assert blocks_of(events) == [("text", "", "Your bill is paid.")]


async def test_the_conversation_is_its_input(site: AgentSite) -> None:
    """Earlier turns come first; the caller's system message is left out."""
    model = scripted(assistant_message("yes"))
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    turns = (
        Message(role="system", content="Be rude."),
        Message(role="user", content="Hello"),
        Message(role="assistant", content="Hi", extra={"tool_calls": [call]}),
        Message(role="tool", content="found", extra={"tool_call_id": "c1", "name": "look"}),
        Message(role="user", content="And now?"),
    )
    assert text_of(await site.run_agent(Agent(name="p", model=model), messages=turns)) == "yes"
    sent = model.calls[0].input
    assert [item.get("type", item.get("role")) for item in sent] == [
        *("user", "assistant", "function_call", "function_call_output", "user"),
    ]
    assert "rude" not in str(sent)


async def test_too_many_turns_is_an_error_of_ours(site: AgentSite) -> None:
    """An agent that never answers ends in `too_many_tool_rounds`."""
    steps = [function_call("weather", {"city": "Paris"}, call_id=f"c{number}") for number in range(12)]
    end = (await site.run_agent(Agent(name="p", model=scripted(*steps), tools=[weather])))[-1]
    assert isinstance(end, Error)
    assert end.code == "too_many_tool_rounds"


async def test_a_stop_cancels_the_agent(site: AgentSite) -> None:
    """The tool that runs is cancelled; it has the run as its context."""
    began, ended = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    @function_tool
    async def wait(ctx: RunContextWrapper[Run]) -> str:
        seen.append(ctx.context.question)
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    site.serve_agent(Agent(name="p", model=scripted(function_call("wait", {}, call_id="c1")), tools=[wait]))
    stream = await site.begin()
    await asyncio.wait_for(began.wait(), 20)
    await stream.stop()
    await asyncio.wait_for(ended.wait(), 20)
    assert seen == ["Where is my bill?"]
