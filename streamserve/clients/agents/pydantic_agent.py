"""A pydantic-ai `Agent` as a pipeline: `Agent.run_stream_events` becomes the blocks of its run. asyncio.

    PartStart, PartDelta, PartEnd     text, thoughts, calls with their arguments; citations of a text
    FunctionToolResult                the call's result, in the order of the calls
    AgentRunResult                    the usage; an output that is no text, as JSON

Finished answers of its model and finished tools are kept by a capability, `_Keeping`, and not repeated in another
attempt of the run. A tool's result reaches the model as JSON, and is kept as that. Written for pydantic-ai 2.68.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from pydantic_ai import messages as m
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.capabilities import AbstractCapability, ReinjectSystemPrompt
from pydantic_ai.models import CompletedStreamedResponse, Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.run import AgentRunResult, AgentRunResultEvent
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolDenied
from pydantic_core import PydanticSerializationError, to_jsonable_python

from streamserve.clients.agents.conversation import calls_of, turns
from streamserve.clients.agents.failures import needs_decision, refusal
from streamserve.clients.pipeline.run import Run
from streamserve.clients.pipeline.tools import ToolCall, result_text
from streamserve.clients.pipeline.voice import json_text
from streamserve.protocol.events import Usage
from streamserve.protocol.requests import Message

_REASONS = {"length": "length", "content_filter": "content_filter"}


def name_of(agent: AbstractAgent[Any, Any]) -> str:
    """Return the agent's name; "" if it has none."""
    return agent.name or ""


def description_of(agent: AbstractAgent[Any, Any]) -> str:
    """Return what lists show of it."""
    return str(agent.description or "")


async def respond(agent: AbstractAgent[Any, Any], run: Run) -> None:
    """Run the agent on the run's conversation, and show what it does. Its tools find the run as `ctx.deps`."""
    sent = [_message(one) for one in turns(run)]
    keeping = _Keeping(run)
    show = _Show(run, keeping)
    capabilities = [ReinjectSystemPrompt(replace_existing=True), keeping]
    async with agent.run_stream_events(message_history=sent, deps=run, capabilities=capabilities) as events:
        async for event in events:
            await show(event)


class _Show:
    """Puts an agent's events into its run."""

    def __init__(self, run: Run, keeping: _Keeping) -> None:
        self._run, self._keeping, self._voice = run, keeping, run.voice()
        self._calls: list[str] = []  # whose results are to be shown, in order
        self._results: dict[str, str] = {}

    async def __call__(self, event: Any) -> None:
        if isinstance(event, m.PartStartEvent):
            await self._part(event.part)
        elif isinstance(event, m.PartDeltaEvent):
            await self._delta(event.delta)
        elif isinstance(event, m.PartEndEvent):
            self._cite(event.part)
        elif isinstance(event, m.FunctionToolCallEvent):
            await self._voice.end()
            self._calls.append(event.part.tool_call_id)
        elif isinstance(event, m.FunctionToolResultEvent):
            await self._result(event)
        elif isinstance(event, AgentRunResultEvent):
            await self._finish(event.result)

    async def _part(self, part: Any) -> None:
        voice = self._voice
        if isinstance(part, m.TextPart):
            await voice.text(part.content)
        elif isinstance(part, m.ThinkingPart):
            await voice.thought(part.content)
        elif isinstance(part, m.BaseToolCallPart) and part.tool_name not in self._keeping.outputs:
            await voice.call(part.tool_call_id, part.tool_name, part.args)
        elif isinstance(part, m.NativeToolReturnPart):
            await voice.result(part.tool_call_id, result_text(part.content))
        else:
            await voice.end()

    async def _delta(self, delta: Any) -> None:
        if isinstance(delta, m.TextPartDelta):
            await self._voice.text(delta.content_delta)
        elif isinstance(delta, m.ThinkingPartDelta):
            await self._voice.thought(delta.content_delta or "")
        elif isinstance(delta, m.ToolCallPartDelta) and delta.args_delta:
            args = delta.args_delta
            await self._voice.arguments(args if isinstance(args, str) else json_text(args))

    def _cite(self, part: Any) -> None:
        """Show the sources of a text that is whole."""
        for citation in (isinstance(part, m.TextPart) and part.citations) or ():
            for source in citation.sources:
                url = getattr(source, "url", None)
                id = url or getattr(source, "document_id", None) or source.title or ""
                self._run.cite(source.kind, id=id, title=source.title, url=url)

    async def _result(self, event: m.FunctionToolResultEvent) -> None:
        """Show the results that have come, in the order of the calls, which another attempt has too."""
        self._results[event.tool_call_id] = result_text(event.part.model_response_str())
        while self._calls and self._calls[0] in self._results:
            id = self._calls.pop(0)
            await self._voice.result(id, self._results.pop(id))

    async def _finish(self, result: AgentRunResult[Any]) -> None:
        voice, usage = self._voice, result.usage
        if isinstance(result.output, DeferredToolRequests):
            raise needs_decision()
        if not isinstance(result.output, str):
            await voice.text(json_text(to_jsonable_python(result.output)))
        elif not voice.has_text:
            await voice.text(result.output)
        await voice.end()
        voice.finish(_REASONS.get(result.response.finish_reason or "", "stop"))
        voice.count(
            Usage(
                prompt_tokens=usage.input_tokens,
                completion_tokens=usage.output_tokens,
                cached_tokens=usage.cache_read_tokens,
                reasoning_tokens=usage.details.get("reasoning_tokens", 0),
            )
        )


class _Keeping(AbstractCapability[Any]):
    """Keeps what an agent's model and tools have given, for another attempt of the run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.outputs: set[str] = set()  # the calls by which the model gives the agent's output

    def get_wrapper_model(self, model: Model) -> Model:
        """Wrap the model that is asked."""
        return _KeptModel(model, self._run, self.outputs)

    async def wrap_tool_execute(self, ctx: Any, *, call: Any, tool_def: Any, args: Any, handler: Any) -> Any:
        """Call a tool, unless another attempt has its result."""

        async def result() -> Any:
            value = await handler(args)
            try:
                return value if isinstance(value, m.ToolReturn) or _has_files(value) else to_jsonable_python(value)
            except PydanticSerializationError:
                return value  # the framework says what is wrong with it

        return await self._run.keep(f"tool {call.tool_name} {call.tool_call_id}", result, phase="tools")

    async def handle_deferred_tool_calls(self, ctx: Any, *, requests: DeferredToolRequests) -> Any:
        """Give the user's answers about calls that need them, or ask, which ends the run."""
        answers = {call.tool_call_id: self._run.answer_to(call.tool_call_id) for call in requests.approvals}
        if not answers:
            return None
        if None in answers.values():
            asked = [(_call(one), _question(requests, one.tool_call_id)) for one in requests.approvals]
            await self._run.ask(asked)
        return DeferredToolResults(
            approvals={
                id: True if answer is not None and answer.allow else ToolDenied(refusal(answer))
                for id, answer in answers.items()
            }
        )


def _call(part: m.ToolCallPart) -> ToolCall:
    return ToolCall(id=part.tool_call_id, name=part.tool_name, arguments=part.args_as_json_str())


def _question(requests: DeferredToolRequests, id: str) -> str | None:
    """Return what the tool wants its user to be asked: `message` of the metadata of its `ApprovalRequired`."""
    message = (requests.metadata.get(id) or {}).get("message")
    return message if isinstance(message, str) else None


class _KeptModel(WrapperModel):
    """A model whose finished answers are kept."""

    def __init__(self, wrapped: Model, run: Run, outputs: set[str]) -> None:
        super().__init__(wrapped)
        self._run, self._outputs = run, outputs

    @asynccontextmanager
    async def request_stream(
        self,
        messages: Any,
        model_settings: Any,
        model_request_parameters: ModelRequestParameters,
        run_context: Any = None,
    ) -> AsyncGenerator[StreamedResponse]:
        """Ask the model, or give the answer that another attempt has had."""
        self._outputs.update(tool.name for tool in model_request_parameters.output_tools)
        place = self._run.place(f"model {self.wrapped.model_name}")
        if place.found is not None:
            (kept,) = m.ModelMessagesTypeAdapter.validate_json(place.found)
            assert isinstance(kept, m.ModelResponse)
            parameters = model_request_parameters
            yield CompletedStreamedResponse(kept, model_request_parameters=parameters, replay_events=True)
            return
        asked = self.wrapped.request_stream(messages, model_settings, model_request_parameters, run_context)
        async with asked as response:
            yield response
            whole = response.get()
        await place.keep(m.ModelMessagesTypeAdapter.dump_json([whole]).decode())


def _has_files(value: Any) -> bool:
    """Return whether a tool has returned files, which JSON would change."""
    if isinstance(value, list | tuple):
        return any(map(_has_files, value))
    return isinstance(value, m.BinaryContent | m.FileUrl)


def _message(turn: Message) -> m.ModelMessage:
    """Return a message of the conversation as the agent's history has it."""
    if turn.role == "assistant":
        calls = [m.ToolCallPart(name, arguments, tool_call_id=id) for id, name, arguments in calls_of(turn)]
        return m.ModelResponse(parts=[*([m.TextPart(turn.content)] if turn.content else []), *calls])
    if turn.role == "tool":
        name, id = str(turn.extra.get("name") or "tool"), str(turn.extra.get("tool_call_id") or "")
        return m.ModelRequest(parts=[m.ToolReturnPart(name, turn.content, tool_call_id=id)])
    return m.ModelRequest(parts=[m.UserPromptPart(turn.content)])
