"""An OpenAI-Agents `Agent` as a pipeline: the events of `Runner.run_streamed` become the blocks of its run. asyncio.

    raw events of a response           text, thoughts, calls with their arguments; citations of pages
    tool_output                        the result of a call
    another agent                      a step: the conversation was handed over

The agent, and each that it may hand over to, is run as a copy whose model and functions keep what they give, for
another attempt of the run. Traces are off: the SDK would send them to its provider. Written for openai-agents 0.24.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from agents import Agent, FunctionTool, Handoff, ModelSettings, RunConfig, Runner
from agents.models.interface import Model
from agents.models.multi_provider import MultiProvider
from agents.stream_events import AgentUpdatedStreamEvent, RawResponsesStreamEvent, RunItemStreamEvent
from openai.types.responses import Response, ResponseCompletedEvent
from pydantic_core import to_jsonable_python

from streamserve.clients.agents.conversation import calls_of, turns
from streamserve.clients.agents.failures import refusal
from streamserve.clients.pipeline.run import Run
from streamserve.clients.pipeline.tools import ToolCall, result_text
from streamserve.protocol.events import Usage
from streamserve.protocol.requests import Message

_MAX_EVENTS_AHEAD = 64  # of a response, before readers have taken them: the SDK's own queue has no bound
_TEXTS = {"response.output_text.delta", "response.refusal.delta"}
_THOUGHTS = {"response.reasoning_summary_text.delta", "response.reasoning_text.delta"}


def name_of(agent: Agent[Any]) -> str:
    """Return the agent's name."""
    return str(agent.name)


def description_of(agent: Agent[Any]) -> str:
    """Return what lists show of it."""
    return agent.handoff_description or ""


async def respond(agent: Agent[Any], run: Run) -> None:
    """Run the agent on the run's conversation, and show what it does. Its tools find the run as `ctx.context`."""
    copies = _Copies(run)
    start, config, show = copies.of(agent), RunConfig(tracing_disabled=True), _Show(run, copies)
    given: Any = [item for turn in turns(run) for item in _items(turn)]
    while given is not None:
        result = Runner.run_streamed(start, given, context=run, run_config=config)
        try:
            async for event in result.stream_events():
                await show(event)
        finally:
            result.cancel()
        given = await _decided(run, result) if result.interruptions else None
    usage = result.context_wrapper.usage
    await show.finish(
        result.final_output,
        Usage(
            prompt_tokens=usage.input_tokens,
            completion_tokens=usage.output_tokens,
            cached_tokens=usage.input_tokens_details.cached_tokens or 0,
            reasoning_tokens=usage.output_tokens_details.reasoning_tokens or 0,
        ),
    )


async def _decided(run: Run, result: Any) -> Any:
    """Return how the agent goes on with its user's answers about calls; ask for them, which ends the run."""
    calls = [(item, _call_of(item)) for item in result.interruptions]
    if any(run.answer_to(call.id) is None for _, call in calls):
        await run.ask([(call, None) for _, call in calls])
    state = result.to_state()
    for item, call in calls:
        answer = run.answer_to(call.id)
        if answer is not None and answer.allow:
            state.approve(item)
        else:
            state.reject(item, rejection_message=refusal(answer))
    return state


def _call_of(item: Any) -> ToolCall:
    raw = item.raw_item if isinstance(item.raw_item, dict) else item.raw_item.model_dump()
    return ToolCall(id=str(raw.get("call_id")), name=str(item.tool_name), arguments=str(raw.get("arguments") or "{}"))


class _Show:
    """Puts an agent's events into its run."""

    def __init__(self, run: Run, copies: _Copies) -> None:
        self._run, self._copies, self._voice = run, copies, run.voice()
        self._agent = ""
        self._shown: set[int] = set()  # of the response's items, by their places

    async def __call__(self, event: Any) -> None:
        if isinstance(event, RawResponsesStreamEvent):
            await self._raw(event.data)
            self._copies.taken()
        elif isinstance(event, RunItemStreamEvent) and event.name == "tool_output":
            await self._result(event.item)
        elif isinstance(event, AgentUpdatedStreamEvent):
            await self._voice.end()
            if self._agent not in ("", event.new_agent.name):
                await self._run.announce(event.new_agent.name)
            self._agent = event.new_agent.name

    async def finish(self, output: Any, usage: Usage) -> None:
        """Show an output that no model has written, and count."""
        if not self._voice.has_text:
            await self._voice.text(result_text(to_jsonable_python(output)))
        await self._voice.end()
        self._voice.count(usage)

    async def _raw(self, event: Any) -> None:
        voice, kind, place = self._voice, event.type, getattr(event, "output_index", -1)
        if kind in _TEXTS:
            self._shown.add(place)
            await voice.text(event.delta)
        elif kind in _THOUGHTS:
            self._shown.add(place)
            await voice.thought(event.delta)
        elif kind == "response.output_item.added" and event.item.type == "function_call":
            self._shown.add(place)
            await self._call(event.item, event.item.arguments)
        elif kind == "response.function_call_arguments.delta":
            await voice.arguments(event.delta)
        elif kind == "response.output_text.annotation.added":
            self._cite(event.annotation)
        elif kind in ("response.completed", "response.incomplete"):
            await self._complete(event.response)

    async def _complete(self, response: Response) -> None:
        """Show what came of a response as a whole, as an answer that was kept."""
        for place, item in enumerate(response.output):
            if place not in self._shown:
                await self._item(item)
        self._shown.clear()
        details = response.incomplete_details
        if details is not None and details.reason == "max_output_tokens":
            self._voice.finish("length")
        await self._voice.end()

    async def _item(self, item: Any) -> None:
        if item.type == "message":
            for part in item.content:
                await self._voice.text(str(getattr(part, "text", None) or getattr(part, "refusal", "")))
                for annotation in getattr(part, "annotations", ()):
                    self._cite(annotation)
        elif item.type == "reasoning":
            for part in (*item.summary, *(item.content or ())):
                await self._voice.thought(part.text)
        elif item.type == "function_call":
            await self._call(item, item.arguments)

    async def _call(self, item: Any, arguments: str) -> None:
        """Show a call of a function; to hand over is a step, once it is done."""
        if item.name in self._copies.handoffs:
            await self._voice.end()
        else:
            await self._voice.call(item.call_id, item.name, arguments)

    async def _result(self, item: Any) -> None:
        raw = item.raw_item
        id = raw.get("call_id") if isinstance(raw, dict) else getattr(raw, "call_id", None)
        if id:
            await self._voice.result(id, result_text(to_jsonable_python(item.output)))

    def _cite(self, annotation: Any) -> None:
        value = annotation if isinstance(annotation, dict) else annotation.model_dump()
        if value.get("type") == "url_citation":
            self._run.cite("web", id=value["url"], title=value.get("title"), url=value["url"])


class _Copies:
    """The agents of one run, as copies that keep what their models and functions give."""

    def __init__(self, run: Run) -> None:
        self._run, self._provider = run, MultiProvider()
        self._copies: dict[int, Agent[Any]] = {}
        self.handoffs: set[str] = set()  # the names of the calls that hand over
        self._num_ahead, self._moved = 0, asyncio.Event()

    def of(self, agent: Agent[Any]) -> Agent[Any]:
        """Return the copy of an agent."""
        known = self._copies.get(id(agent))
        if known is not None:
            return known
        model = agent.model if isinstance(agent.model, Model) else self._provider.get_model(agent.model)
        made = agent.clone(
            model=_KeptModel(model, self._run, self),
            model_settings=_counting(agent.model_settings),
            tools=[self._tool(tool) for tool in agent.tools],
            handoffs=[],
        )
        self._copies[id(agent)] = made
        made.handoffs = [self._handoff(one) for one in agent.handoffs]
        return made

    def _handoff(self, given: Any) -> Any:
        if not isinstance(given, Handoff):
            self.handoffs.add(Handoff.default_tool_name(given))
            return self.of(given)
        self.handoffs.add(given.tool_name)
        made = copy.copy(given)

        async def invoke(context: Any, arguments: str) -> Any:
            return self.of(await given.on_invoke_handoff(context, arguments))

        made.on_invoke_handoff = invoke
        return made

    def _tool(self, tool: Any) -> Any:
        if not isinstance(tool, FunctionTool):
            return tool
        made = copy.copy(tool)

        async def invoke(context: Any, arguments: str) -> Any:
            async def result() -> Any:
                return _given(await tool.on_invoke_tool(context, arguments))

            return await self._run.keep(f"tool {tool.name} {context.tool_call_id}", result, phase="tools")

        made.on_invoke_tool = invoke
        return made

    # A response is read no faster than it is shown

    def taken(self) -> None:
        """Note that an event of a response was shown."""
        self._num_ahead -= 1
        self._moved.set()

    async def room(self) -> None:
        """Wait while many events of a response are not shown; then count one more."""
        while self._num_ahead >= _MAX_EVENTS_AHEAD:
            self._moved.clear()
            await self._moved.wait()
        self._num_ahead += 1


class _KeptModel(Model):
    """A model whose finished responses are kept."""

    def __init__(self, wrapped: Model, run: Run, copies: _Copies) -> None:
        self._wrapped, self._run, self._copies = wrapped, run, copies

    async def get_response(self, *args: Any, **options: Any) -> Any:
        """Ask the model for a whole response: a run streams, and does not."""
        return await self._wrapped.get_response(*args, **options)

    async def stream_response(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Ask the model, or give the response that another attempt has had."""
        place = self._run.place("model")
        if place.found is not None:
            response = Response.model_validate_json(place.found)
            await self._copies.room()
            yield ResponseCompletedEvent(response=response, sequence_number=0, type="response.completed")
            return
        async for event in self._wrapped.stream_response(*args, **options):
            await self._copies.room()
            if event.type == "response.completed":
                await place.keep(event.response.model_dump_json())
            yield event

    def get_retry_advice(self, request: Any) -> Any:
        """Return the model's own advice."""
        return self._wrapped.get_retry_advice(request)


def _given(result: Any) -> Any:
    """Return a function's result as the SDK passes it on: what is no JSON as text, but for an output of its own."""
    is_its_own = type(result).__module__.partition(".")[0] == "agents"
    return result if is_its_own or isinstance(result, str | int | float | dict | list | None) else str(result)


def _counting(settings: ModelSettings) -> ModelSettings:
    """Return the settings of a model, which is asked for its usage unless they say otherwise."""
    return settings if settings.include_usage is not None else replace(settings, include_usage=True)


def _items(turn: Message) -> list[Any]:
    """Return a message of the conversation as the items of a Responses input."""
    if turn.role == "tool":
        return [{"type": "function_call_output", "call_id": turn.extra.get("tool_call_id"), "output": turn.content}]
    called = [
        {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}
        for id, name, arguments in calls_of(turn)
    ]
    return [*([{"role": turn.role, "content": turn.content}] if turn.content else []), *called]
