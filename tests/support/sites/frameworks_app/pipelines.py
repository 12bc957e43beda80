"""One agent of each framework, with the same two tools. Each call of a tool is noted in the state folder.

An agent calls `first`, then `second`, which waits while there is a gate and fails while it is to fail; its answer is
the site's own model's, asked in process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agents import Agent as OpenAIAgent
from agents import ModelSettings, OpenAIChatCompletionsModel, function_tool
from agents.models.interface import Model
from agents.testing import ScriptedModel, function_call
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic_ai import Agent
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel

from streamserve import current_run, openai_client, pipeline

FOLDER = Path(os.environ.get("STREAMSERVE_STATE_DIR", "/nonexistent"))
TOOLS = ("first", "second")
ASKED: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": "What have you found?"}],
    "max_tokens": 100,
    "extra_body": {"ignore_eos": True},
}


def note(name: str) -> None:
    run = current_run()
    assert run is not None
    with (FOLDER / "tools").open("a") as calls:
        calls.write(f"{run.stream_id} {name}\n")


async def first(topic: str) -> str:
    """Look a topic up."""
    note("first")
    return f"found {topic}"


async def second(topic: str) -> str:
    """Check what was found."""
    note("second")
    while (FOLDER / "gate").exists():  # noqa: ASYNC110  (a file of another process)
        await asyncio.sleep(0.05)
    if (FOLDER / "fails").exists():
        (FOLDER / "fails").unlink()
        raise RuntimeError("the second tool fails once")
    return f"checked {topic}"


async def written() -> AsyncIterator[str]:
    """Yield what the site's model writes."""
    async for chunk in await openai_client().chat.completions.create(**ASKED, stream=True):
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


# pydantic-ai


async def steps(messages: list[Any], info: AgentInfo) -> AsyncIterator[Any]:
    num = sum(isinstance(part, ToolReturnPart) for message in messages for part in message.parts)
    if num < len(TOOLS):
        yield {0: DeltaToolCall(TOOLS[num], '{"topic": "bills"}')}
        return
    async for text in written():
        yield text


AGENTS: dict[str, Any] = {"pydantic": Agent(FunctionModel(stream_function=steps), tools=[first, second])}


# OpenAI Agents


class Steps(Model):
    """Calls both tools; then the site's model answers."""

    async def get_response(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def stream_response(self, system: Any, given: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        num = sum(item.get("type") == "function_call_output" for item in given)
        if num < len(TOOLS):
            call = function_call(TOOLS[num], {"topic": "bills"}, call_id=f"call{num}")
            model: Model = ScriptedModel([[call]])
        else:
            model, given = OpenAIChatCompletionsModel("echo", openai_client()), "What have you found?"
        async for event in model.stream_response(system, given, *args, **options):
            yield event


AGENTS["openai"] = OpenAIAgent(
    name="openai",
    model=Steps(),
    model_settings=ModelSettings(max_tokens=ASKED["max_tokens"], extra_body=ASKED["extra_body"]),
    tools=[function_tool(one, failure_error_function=None) for one in (first, second)],
)


# LangGraph


class ChatModel(BaseChatModel):
    """The site's model, for LangChain."""

    @property
    def _llm_type(self) -> str:
        return "site"

    def _generate(self, *args: Any, **options: Any) -> ChatResult:
        raise NotImplementedError

    async def _astream(self, messages: Any, *args: Any, **options: Any) -> AsyncIterator[ChatGenerationChunk]:
        async for text in written():
            chunk = ChatGenerationChunk(message=AIMessageChunk(text))
            manager = options.get("run_manager") or (args[1] if len(args) > 1 else None)
            if manager is not None:
                await manager.on_llm_new_token(text, chunk=chunk)
            yield chunk


async def ask(state: MessagesState) -> dict[str, Any]:
    num = sum(message.type == "tool" for message in state["messages"])
    if num < len(TOOLS):
        call = {"id": f"call{num}", "name": TOOLS[num], "args": {"topic": "bills"}}
        return {"messages": [AIMessage("", tool_calls=[call])]}
    return {"messages": [await ChatModel().ainvoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("ask", ask)
graph.add_node("tools", ToolNode([tool(first), tool(second)], handle_tool_errors=False))
graph.add_edge(START, "ask")
graph.add_conditional_edges("ask", tools_condition)
graph.add_edge("tools", "ask")
AGENTS["graph"] = graph.compile()

for name, agent in AGENTS.items():
    pipeline(name, agent)
