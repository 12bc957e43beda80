"""Laws of a LangGraph graph as a pipeline, with LangChain's own fake chat model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypedDict

import pytest

from streamserve import current_run
from streamserve.clients.agents.adapt import adapted
from streamserve.protocol.events import Done, Error, Event
from streamserve.protocol.requests import Message
from tests.clients.agents.conftest import AgentSite, blocks_of, text_of

pytest.importorskip("langgraph")

from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Send


def steps_of(events: list[Event]) -> list[str | None]:
    return [one.message for one in events if one.type == "status" and one.status == "step"]


def fake(*messages: Any) -> GenericFakeChatModel:
    def each() -> Iterator[Any]:
        yield from messages

    return GenericFakeChatModel(messages=each())


@tool
def weather(city: str) -> str:
    """Return the weather."""
    return f"sunny in {city}"


def react(model: Any, tools: list[Any]) -> Any:
    """Return a graph of a model and its tools."""

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    return graph.compile(name="p")


CALL = AIMessage("", tool_calls=[{"id": "c1", "name": "weather", "args": {"city": "Paris"}}])


async def test_text_calls_and_results_are_blocks(site: AgentSite) -> None:
    """A call, its result and the text after it, in their order; nodes are steps."""
    events = await site.run_agent(
        react(FakeMessagesListChatModel(responses=[CALL, AIMessage("It is sunny.")]), [weather])
    )
    assert blocks_of(events) == [
        ("server_tool_use", "weather", '{"city": "Paris"}'),
        ("tool_result", "", "sunny in Paris"),
        ("text", "", "It is sunny."),
    ]
    assert steps_of(events) == ["ask", "tools", "ask"]
    assert isinstance(events[-1], Done)


async def test_the_conversation_is_its_messages(site: AgentSite) -> None:
    """Earlier turns come first; the caller's system message is left out."""
    seen: list[Any] = []

    async def ask(state: MessagesState) -> dict[str, Any]:
        seen.extend(state["messages"])
        return {"messages": [AIMessage("yes")]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile()
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    turns = (
        Message(role="system", content="Be rude."),
        Message(role="user", content="Hello"),
        Message(role="assistant", content="Hi", extra={"tool_calls": [call]}),
        Message(role="tool", content="found", extra={"tool_call_id": "c1", "name": "look"}),
        Message(role="user", content="And now?"),
    )
    assert text_of(await site.run_agent(graph, messages=turns)) == "yes"
    assert [(one.type, one.text) for one in seen] == [
        ("human", "Hello"),
        ("ai", "Hi"),
        ("tool", "found"),
        ("human", "And now?"),
    ]
    assert seen[1].tool_calls[0]["args"] == {"a": 1}


class Towns(TypedDict, total=False):
    names: list[str]
    town: str
    said: str


async def test_nodes_side_by_side_follow_each_other(site: AgentSite) -> None:
    """Two nodes that speak at once are shown one after the other, in the order in which the graph sent them."""
    second_is_over = asyncio.Event()

    async def tell(state: Towns) -> dict[str, Any]:
        if state["town"] == "Paris":
            await second_is_over.wait()
        await fake(f"In {state['town']} it rains.").ainvoke("x")
        if state["town"] == "Rome":
            second_is_over.set()
        return {}

    graph = StateGraph(Towns)
    graph.add_node("tell", tell)
    graph.add_conditional_edges(START, lambda state: [Send("tell", {"town": name}) for name in state["names"]])
    graph.add_edge("tell", END)
    events = await site.run_agent(graph.compile(), messages=None, input={"names": ["Paris", "Rome"]})
    assert [text for _, _, text in blocks_of(events)] == ["In Paris it rains.", "In Rome it rains."]


async def test_a_state_without_text_is_json(site: AgentSite) -> None:
    """The last state is the answer of a graph that asks no model."""

    async def look(state: Towns) -> dict[str, Any]:
        run = current_run()
        assert run is not None
        run.cite("help", id="7")
        return {"said": "nothing"}

    graph = StateGraph(Towns).add_node("look", look).add_edge(START, "look").compile()
    events = await site.run_agent(graph, messages=None, input={"town": "Paris"})
    assert text_of(events) == '{"town": "Paris", "said": "nothing"}'
    assert [one.id for one in events if one.type == "citation"] == ["7"]


async def test_a_loop_without_end_is_an_error_of_ours(site: AgentSite) -> None:
    """The framework's own limit of steps ends in `too_many_tool_rounds`."""

    async def again(state: Towns) -> dict[str, Any]:
        return {"said": "again"}

    graph = StateGraph(Towns).add_node("again", again).add_edge(START, "again").add_edge("again", "again")
    events = await site.run_agent(graph.compile().with_config(recursion_limit=5), input={"town": "Paris"})
    assert isinstance(events[-1], Error)
    assert events[-1].code == "too_many_tool_rounds"


async def test_a_stop_cancels_the_graph(site: AgentSite) -> None:
    """The node that runs is cancelled."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait(state: MessagesState) -> dict[str, Any]:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return {}

    site.serve_agent(StateGraph(MessagesState).add_node("wait", wait).add_edge(START, "wait").compile())
    stream = await site.begin()
    await asyncio.wait_for(began.wait(), 20)
    await stream.stop()
    await asyncio.wait_for(ended.wait(), 20)


def test_a_graph_that_is_not_compiled_is_refused() -> None:
    """The error names the way out."""
    with pytest.raises(TypeError, match="compile"):
        adapted(StateGraph(MessagesState))
