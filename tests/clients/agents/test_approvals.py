"""Laws of agents that ask their user: the frameworks' own approvals end a run, and its continuation repeats no tool."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from streamserve.protocol.events import Approval, Done, Event
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import Admission, Approved
from streamserve.streams.reader.follow import follow
from streamserve.streams.stream import Stream
from tests.clients.agents.conftest import AgentSite, blocks_of

Make = Callable[[Counter[str]], Any]


def pydantic_agent(calls: Counter[str]) -> Any:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.messages import ToolReturnPart
    from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel

    async def steps(messages: list[Any], info: AgentInfo) -> AsyncIterator[Any]:
        results = [part.content for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
        calls["model"] += 1
        if len(results) < 2:
            yield {0: DeltaToolCall(("look", "pay")[len(results)], "{}")}
        else:
            yield f"I was told: {results[1]}"

    agent = Agent(FunctionModel(stream_function=steps))

    @agent.tool_plain
    def look() -> str:
        calls["look"] += 1
        return "found"

    @agent.tool_plain(requires_approval=True)
    def pay() -> str:
        calls["pay"] += 1
        return "paid"

    return agent


def openai_agent(calls: Counter[str]) -> Any:
    pytest.importorskip("agents")
    from agents import Agent, function_tool
    from agents.models.interface import Model
    from agents.testing import ScriptedModel, assistant_message, function_call

    class Steps(Model):
        async def get_response(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

        async def stream_response(self, system: Any, given: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
            calls["model"] += 1
            results = [item["output"] for item in given if item.get("type") == "function_call_output"]
            num = len(results)
            step = assistant_message(f"I was told: {results[1]}") if num == 2 else None
            step = step or function_call(("look", "pay")[num], {}, call_id=f"call{num}")
            async for event in ScriptedModel([[step]]).stream_response(system, given, *args, **options):
                yield event

    @function_tool
    def look() -> str:
        calls["look"] += 1
        return "found"

    @function_tool(needs_approval=True)
    def pay() -> str:
        calls["pay"] += 1
        return "paid"

    return Agent(name="p", model=Steps(), tools=[look, pay])


def graph(calls: Counter[str]) -> Any:
    pytest.importorskip("langgraph")
    from langchain_core.messages import AIMessage
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.types import interrupt

    async def look(state: MessagesState) -> dict[str, Any]:
        calls["look"] += 1
        calls["model"] += 2
        return {}

    async def pay(state: MessagesState) -> dict[str, Any]:
        answer = interrupt("Shall I pay?")
        if answer["allow"]:
            calls["pay"] += 1
            return {"messages": [AIMessage("I was told: paid")]}
        return {"messages": [AIMessage(f"I was told: {answer['message']}")]}

    made = StateGraph(MessagesState).add_node("look", look).add_node("pay", pay)
    return made.add_edge(START, "look").add_edge("look", "pay").compile(checkpointer=InMemorySaver())


ALL = pytest.mark.parametrize("make", [pydantic_agent, openai_agent, graph])


async def events_of(site: AgentSite, stream: Stream) -> list[Event]:
    async with aclosing(follow(site.streams, stream)) as reading:
        events = [logged.event async for logged in reading]
    check_events(events)
    return events


async def interrupted(site: AgentSite, agent: Any) -> tuple[Stream, list[Event], Approval]:
    """Run an agent until it asks."""
    site.serve_agent(agent)
    stream = await site.begin()
    events = await events_of(site, stream)
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "interrupt"
    (approval,) = [event for event in events if isinstance(event, Approval)]
    return stream, events, approval


async def resumed(site: AgentSite, before: Stream, *answers: Approved) -> list[Event]:
    """Continue an interrupted run, as api/interrupts.py does."""
    found = await site.streams.interrupts.find(before.id)
    assert found is not None
    request = replace(found.request, continues=before.id, approvals=answers)
    return await events_of(site, await site.streams.start(request, Admission(owner="u1", tenant="t1")))


@ALL
async def test_what_the_user_allows_runs_once(site: AgentSite, make: Make) -> None:
    """The continuation shows the result and the answer, and nothing of before; no model and no tool is asked twice."""
    calls: Counter[str] = Counter()
    first, before, approval = await interrupted(site, make(calls))
    assert calls["pay"] == 0
    assert approval.name == "pay"
    assert blocks_of(before)[-1][:2] == ("server_tool_use", "pay")
    after = await resumed(site, first, Approved(id=approval.id, allow=True))
    assert blocks_of(after)[-1] == ("text", "", "I was told: paid")
    assert [kind for kind, _, _ in blocks_of(after)] == ["tool_result", "text"]
    assert (calls["look"], calls["pay"]) == (1, 1)
    assert calls["model"] == (2 if make is graph else 3)


@ALL
async def test_what_the_user_refuses_does_not_run(site: AgentSite, make: Make) -> None:
    """The agent is told so, in the user's words."""
    calls: Counter[str] = Counter()
    first, _, approval = await interrupted(site, make(calls))
    after = await resumed(site, first, Approved(id=approval.id, allow=False, message="Too dear."))
    assert "Too dear." in blocks_of(after)[-1][2]
    assert (calls["look"], calls["pay"]) == (1, 0)
