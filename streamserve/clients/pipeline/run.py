"""`Run`: what the author of a pipeline works with: steps, citations, answers of models. asyncio; of one run.

    passages = await run.step("Looking up your bill", search, run.question, of=2)
    run.cite("help", id="7", title="Billing")
    answer = await run.generate([{"role": "user", "content": ...}], max_tokens=200)

Every `await` here ends with the run: by its deadline, a stop, or a reader who does not come back.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from streamserve.clients.base import EngineClient
from streamserve.clients.engine_run import Parking
from streamserve.clients.mcp.servers import McpServers
from streamserve.clients.pipeline.answers import ENGINE_SECONDS, Answering
from streamserve.clients.pipeline.filters import OutputFilter
from streamserve.clients.pipeline.journal import Journal, Key, NotRepeatable, Place
from streamserve.clients.pipeline.mcp_tools import McpTool, described, tools_of
from streamserve.clients.pipeline.phases import RunPhases
from streamserve.clients.pipeline.speech import Speech
from streamserve.clients.pipeline.state import RunState
from streamserve.clients.pipeline.static import num_static
from streamserve.clients.pipeline.tools import FunctionTool, ToolCall, WrongCall, function_tool, result_text
from streamserve.clients.pipeline.voice import Voice
from streamserve.dialects.fields import read
from streamserve.dialects.generate import build, request_fields, sampling_fields
from streamserve.protocol.attached import TextFile, files_of
from streamserve.protocol.errors import BadRequest, NotFound, Refused, StreamserveError
from streamserve.protocol.events import Approval, Citation, Custom, Event, State, Status, Token, Usage
from streamserve.protocol.identity import Identity
from streamserve.protocol.json_patch import json_text, json_value
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Admission, Approved, GenerateRequest, Message
from streamserve.tracing.answers import TOOL, of_tool
from streamserve.tracing.spans import here, within

logger = logging.getLogger("streamserve.pipelines")

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")
_MAX_CITATIONS = 1000
# Of the events of a run's own: how many, how long a name, and how much all their values have as JSON.
_MAX_CUSTOMS, _MAX_CUSTOM_NAME_CHARS, _MAX_CUSTOM_CHARS = 1000, 100, 1024 * 1024
# What is counted of an answer within the run that is asked for over HTTP.
INNER_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer of a model. `str()` of it is its text."""

    text: str
    finish_reason: str
    usage: Usage

    def __str__(self) -> str:
        return self.text


# Set for the task of a run, and so for all that it starts.
_current: ContextVar[Run | None] = ContextVar("current_run", default=None)


def current_run() -> Run | None:
    """Return the run that this code is called in, as a tool of an agent; None outside of runs."""
    return _current.get()


def enter_run(run: Run) -> None:
    """Make `run` the current run of this task."""
    _current.set(run)


class Run:
    """One run of a pipeline. `input` is what the caller sent as such, `messages` the conversation, if any.

    `state` is a dict of JSON values that readers see as it changes; it begins with the caller's `state`. `caller` is
    who asks, also in a run that another process continues.
    """

    def __init__(
        self,
        request: GenerateRequest,
        admission: Admission,
        speech: Speech,
        clients: Mapping[str, EngineClient],
        *,
        model: str,
        limits: Limits,
        call: Callable[..., Awaitable[Any]],
        journal: Journal | None = None,
        user_of: Callable[[Identity], Awaitable[Any]],
        window_seconds: float = math.inf,
        mcp: McpServers | None = None,
    ) -> None:
        self.input: Mapping[str, Any] = request.input
        # Without their places in the caller's body, which no other attempt knows: answers are known by their messages.
        self.messages: tuple[Message, ...] = tuple(replace(one, param="") for one in request.messages or ())
        self.stream_id, self.tenant, self.model = admission.stream_id, admission.tenant, model
        self.caller = Identity.of(admission.owner, admission.tenant)
        self.deadline = None if request.timeout_seconds is None else time.monotonic() + request.timeout_seconds
        self._request, self._admission, self.trace = request, admission, admission.trace
        self._speech, self._clients = speech, clients
        self._limits, self._call, self._journal = limits, call, journal
        self._user_of, self._window_seconds, self._mcp = user_of, window_seconds, mcp
        self.phases = RunPhases()
        self._num_steps = self._num_citations = self._num_customs = self._num_custom_chars = 0
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self.state = RunState(request.state, self._show_state)
        self._warming: set[asyncio.Task[None]] = set()
        self._approved = {one.id: one for one in request.approvals}
        self.asked: tuple[Approval, ...] = ()  # calls that wait for their user: the run ends in an interrupt
        self.task: asyncio.Task[None] | None = None  # in which the author's function runs

    @property
    def request(self) -> GenerateRequest:
        """The run's own request, with the answers of its user so far."""
        return self._request

    @property
    def is_continued(self) -> bool:
        """Whether an interrupted run comes before it."""
        return bool(self._request.continues)

    @property
    def question(self) -> str:
        """What the user has written last, without the files that came with it; or the prompt."""
        asked = [message.words for message in self.messages if message.role == "user"]
        return asked[-1] if asked else self._request.prompt or ""

    async def auser(self) -> Any:
        """Return the user who asks, of a session or of an API key; None for anybody else, and for a user who may no
        longer sign in. A query at each call.
        """
        return await self._user_of(self.caller)

    @property
    def attachments(self) -> list[TextFile]:
        """The files that the user has attached, of the whole conversation, the oldest first: `name`, `type`, `text`."""
        return [file for message in self.messages for file in files_of(message)]

    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        of: int | None = None,
        phase: str = "",
        **options: Any,
    ) -> Any:
        """Show the step `name`, run `function`, and return its result. A synchronous function runs on a thread.

        Readers see "Step 2 of 4" where `of` is the number of steps. `phase` (retrieval, rerank, context, or a name of
        your own) is where `done` counts its time. In a job the result is kept as JSON: a job that is tried again gets
        it, and does not call the function.
        """
        self._num_steps += 1
        status = Status(status="step", step=self._num_steps, of=of, message=name)
        with self.phases.during(phase), within(self.trace, f"step {name}", attributes={"streamserve.phase": phase}):
            await self._speech.show(status)
            if self._journal is None:
                return await self._do(function, *args, **options)
            self._journal.memo.note_step(status)
            return await self._kept(self._journal, name, lambda: self._do(function, *args, **options))

    async def announce(self, name: str) -> None:
        """Show the step `name`, which is no function of this run: of an agent, its node or the agent that answers."""
        self._num_steps += 1
        status = Status(status="step", step=self._num_steps, message=name)
        await self._speech.show(status)
        if self._journal is not None:
            self._journal.memo.note_step(status)

    async def keep(self, name: str, function: Callable[..., Any], *args: Any, phase: str = "") -> Any:
        """Do what `step` does, and show no step: no other attempt of this run calls what has returned JSON."""
        with self.phases.during(phase):
            if self._journal is None:
                return await self._do(function, *args)
            return await self._kept(self._journal, name, lambda: self._do(function, *args))

    def place(self, name: str) -> Place:
        """Return where the next result of that name is kept: what another attempt has found is there."""
        if self._journal is None:
            return Place(None, (name, 0))
        return Place(self._journal.memo, self._journal.key(name))

    # For what asks the site's models over HTTP, without a socket (web/calls/transport.py)

    @property
    def latency_class(self) -> str:
        """The class of the run, and of what it asks."""
        return self._request.latency_class

    def may_ask(self, alias: str) -> bool:
        """Return whether the run may ask a model: any but its own pipeline."""
        return alias in self._clients and alias != self._request.model

    def inner_admission(self, *, on_disconnect: str) -> Admission:
        """Return whose an answer within the run is: the run's caller's, without a turn or a key of its own."""
        own = self._admission
        return Admission(
            owner=own.owner,
            tenant=own.tenant,
            counted_as=own.counted_as,
            salt=own.salt,
            on_disconnect=on_disconnect,
            received_at=time.monotonic(),
            trace=here(self.trace),
        )

    def as_inner(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request within the run: with the run's class and deadline, and the same seed in every attempt."""
        own = self._request
        if self._journal is not None:
            _, request = self._journal.begin_answer(request)
        left = None if self.deadline is None else max(0.1, self.deadline - time.monotonic())
        seconds = min((one for one in (left, request.timeout_seconds) if one is not None), default=None)
        latency_class = own.latency_class if own.is_row else request.latency_class
        return replace(request, timeout_seconds=seconds, latency_class=latency_class)

    def count_inner(self, counts: Mapping[str, int]) -> None:
        """Count what an answer within the run has used, unless an agent counts it."""
        self._speech.add_inner(Usage(**counts))

    def answer_to(self, call_id: str) -> Approved | None:
        """Return what the user has answered about a call of an agent; None before the user was asked."""
        return self._approved.get(call_id)

    async def ask(self, questions: Sequence[tuple[ToolCall, str | None]]) -> NoReturn:
        """Ask the user about calls of an agent, which are shown, and end the run: the answers come to its continuation.

        A question that is None or "" asks with the call alone.
        """
        await self._interrupt(questions)

    def voice(self) -> Voice:
        """Return what an agent of another framework shows its answer with."""
        return Voice(self._speech)

    def cite(self, source: str, *, id: str, title: str | None = None, url: str | None = None) -> None:
        """Show a source of the answer, as soon as it is known."""
        self._num_citations += 1
        if self._num_citations > _MAX_CITATIONS:
            raise ValueError(f"a run cites {_MAX_CITATIONS:,} sources at most")
        self._put(Citation(source=source, id=str(id), title=title, url=url))

    def emit(self, name: str, value: Any = None) -> None:
        """Show an event of the pipeline's own: `value` is any JSON value. Raises TypeError and ValueError."""
        if not isinstance(name, str) or not 1 <= len(name) <= _MAX_CUSTOM_NAME_CHARS:
            raise ValueError(
                f"the name of an event is a text of 1 to {_MAX_CUSTOM_NAME_CHARS} characters, not {name!r}"
            )
        text = json_text(json_value(value, f"the value of the event {name!r}"))
        self._num_customs += 1
        self._num_custom_chars += len(text)
        if self._num_customs > _MAX_CUSTOMS or self._num_custom_chars > _MAX_CUSTOM_CHARS:
            most = f"{_MAX_CUSTOMS:,} events of its own, with {_MAX_CUSTOM_CHARS:,} characters as JSON,"
            raise ValueError(f"a run shows {most} at most; use run.state for what changes often")
        self._put(Custom(name=name, value=text))

    def _show_state(self, event: State, change: State) -> None:
        """Show a change of the state; a step keeps it as a patch, which fits another order of steps side by side."""
        self._put(event, kept=change)

    def _put(self, event: Event, *, kept: Event | None = None) -> None:
        """Show an event without waiting, from the run's loop or from the thread of a function; a step keeps `kept`."""
        if self._journal is not None:
            self._journal.note(kept or event)
        if threading.get_ident() == self._thread_id:
            self._speech.source.put(event)
        else:
            self._loop.call_soon_threadsafe(self._speech.source.put, event)

    async def say(self, text: str) -> None:
        """Show text that no model has made."""
        await self._speech.say(text)
        if self._journal is not None:
            self._journal.note(Token(text=text, token_ids=()))

    async def generate(
        self,
        messages: str | Messages | None = None,
        *,
        model: str = "",
        show: bool = True,
        tools: Sequence[Callable[..., Any] | FunctionTool] = (),
        max_rounds: int = 4,
        show_results: bool = True,
        through: OutputFilter | None = None,
        **fields: Any,
    ) -> Answer:
        """Have a model answer, show the answer unless `show` is False, and return it whole.

        `fields` are fields of POST /streams: max_tokens, temperature, stop. Several answers may run side by side; those
        that are shown follow each other, in the order in which their first tokens come. Without messages: the caller's
        own. `tools` are functions that the model may call; it is asked again with their results, `max_rounds` times at
        most. Readers see calls and results, unless `show_results` is False. A tool that asks first (`tool(confirm=…)`)
        ends the run, and another run continues here with its user's answer. Messages whose content is `Static`, at the
        beginning, are computed once for all callers. `through` is a filter of this answer alone: readers see its text,
        and `Answer` has the model's own text. Raises StreamserveError.
        """
        client, request, admission = self._prepare(messages, model, fields)
        offered = {one.tool.name: one for one in map(function_tool, tools)}
        request = replace(request, tools=tuple(one.tool for one in offered.values()))
        for round_ in range(max_rounds + 1):
            shown = self._speech if show else None
            answering = Answering(
                client, request, admission, shown, self.phases, through, self._journal, self._window_seconds
            )
            text, done = await answering.run()
            if not (offered and answering.calls):
                return Answer(text=text, finish_reason=done.finish_reason, usage=done.usage)
            if round_ < max_rounds:
                with self.phases.during("tools"):
                    shows = {"is_call_shown": show, "is_result_shown": show and show_results}
                    request = await self._with_results(request, text, answering.calls, offered, **shows)
        message = f"The model called tools {max_rounds + 1} times without an answer, and may {max_rounds} times."
        raise StreamserveError(message, code="too_many_tool_rounds")

    async def mcp(self, server: str, *names: str) -> list[McpTool]:
        """Return tools of a server of MCP_SERVERS for `generate(tools=...)`: those with these names, or all its TOOLS.

        Raises McpUnavailable while the server cannot be reached. A run that is tried again offers the same tools, and
        does not ask the server for them.
        """
        if self._journal is None:
            listed = await described(self._mcp, server)
        else:
            listed = await self._kept(self._journal, f"mcp {server}", partial(described, self._mcp, server))
        assert self._mcp is not None  # else `described` has raised
        return tools_of(self._mcp, server, listed, names)

    def warm(self, messages: str | Messages, *, model: str = "") -> None:
        """Have the prefix of a later `generate` computed meanwhile. Failing, it costs nothing but the time."""
        client, request, admission = self._prepare(messages, model, {})
        task = asyncio.get_running_loop().create_task(_warm(client, request, admission))
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    async def trim(self, passages: Sequence[str], max_tokens: int, *, model: str = "") -> list[str]:
        """Return the first passages that have at most `max_tokens` tokens together; show what was left out.

        They are counted as they are joined by an empty line. A passage is kept whole or not at all. Where the model's
        server counts no tokens, `estimate` does, so that fewer passages are kept than would fit.
        """
        with self.phases.during("context"):
            kept = await self._fitting(passages, max_tokens, model)
        if len(kept) < len(passages):
            message = f"The context was cut to {len(kept)} of {len(passages)} passages ({max_tokens:,} tokens)."
            await self._speech.show(Status(status="trimmed", step=len(kept), of=len(passages), message=message))
        return kept

    async def _fitting(self, passages: Sequence[str], max_tokens: int, model: str) -> list[str]:
        """Return the first passages that fit."""
        client, _, admission = self._prepare("-", model, {})
        kept = list(passages)
        while kept:
            request = replace(self._request, model=client.alias, messages=None, prompt="\n\n".join(kept))
            num_tokens = await self._when_taken(client, partial(_num_tokens, client, request, admission))
            if num_tokens <= max_tokens:
                break
            # As many as fit if all are alike, but one less at least.
            kept = kept[: min(len(kept) - 1, len(kept) * max_tokens // num_tokens + 1)]
        return kept

    async def _when_taken(self, client: EngineClient, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask an engine, again while it refuses: the run was accepted. Raises a refusal that is final."""
        parking = Parking()
        while True:
            try:
                return await ask()
            except Refused as refused:
                patience_seconds = 0.0 if client.describe().state == "failed" else ENGINE_SECONDS
                if not parking.refuse(refused, time.monotonic(), patience_seconds):
                    raise
                await asyncio.sleep(parking.seconds_left(0, time.monotonic()) or 0.0)

    async def _with_results(
        self,
        request: GenerateRequest,
        text: str,
        calls: Sequence[ToolCall],
        tools: Mapping[str, FunctionTool],
        *,
        is_call_shown: bool,
        is_result_shown: bool,
    ) -> GenerateRequest:
        """Run the tools that the model has called, and return the request for the answer to their results.

        Calls that need an approval run last, and not before all of them have it: without, the run ends here.
        """
        said = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in calls
        ]
        questions = {call.id: await self._question(call, tools) for call in calls}
        asking = [call for call in calls if questions[call.id] is not None]
        results: dict[str, str] = {}
        for call in calls:
            if questions[call.id] is None:
                results[call.id] = await self._shown_result(call, tools, is_shown=is_result_shown)
        if asking and not is_call_shown:
            for call in asking:
                await self._speech.show_call(call)
                if self._journal is not None:
                    self._journal.note_call(call)
        if any(call.id not in self._approved for call in asking):
            await self._interrupt([(call, questions[call.id]) for call in asking])
        for call in asking:
            results[call.id] = await self._shown_result(call, tools, is_shown=is_result_shown)
        turns = [Message(role="assistant", content=text, extra={"tool_calls": said})]
        turns += [
            Message(role="tool", content=results[call.id], extra={"tool_call_id": call.id, "name": call.name})
            for call in calls
        ]
        seed = request.sampling.seed  # the ids of calls are made of it, and each round has its own
        sampling = replace(request.sampling, seed=None if seed is None else seed + 1)
        return replace(request, messages=(*(request.messages or ()), *turns), sampling=sampling)

    async def _question(self, call: ToolCall, tools: Mapping[str, FunctionTool]) -> str | None:
        """Return what the user is asked about a call ("": no question of its own); None for a call that just runs."""
        tool = tools.get(call.name)
        if tool is None or tool.confirm is False:
            return None
        confirm = tool.confirm
        try:
            arguments = tool.arguments(call.arguments)
        except WrongCall:
            return None
        if not callable(confirm):
            return ""

        async def asked() -> str | None:
            answer = await self._do(confirm, **arguments)
            return answer if isinstance(answer, str) else "" if answer else None

        if self._journal is None:
            return await asked()
        kept = await self._kept(self._journal, f"confirm {call.name}", asked)
        return None if kept is None else str(kept)

    async def _interrupt(self, questions: Sequence[tuple[ToolCall, str | None]]) -> NoReturn:
        """Ask the user, and end the run: the function is cancelled where it stands."""
        await self._speech.turn.acquire_for_good()  # no other answer is shown in part
        for call, question in questions:
            await self._speech.ask(call, question or None)
        self.asked = tuple(
            Approval(id=call.id, name=call.name, arguments=call.arguments, message=question or None)
            for call, question in questions
        )
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        raise asyncio.CancelledError

    async def _shown_result(self, call: ToolCall, tools: Mapping[str, FunctionTool], *, is_shown: bool) -> str:
        """Show the result of a call, or why there is none; return it as the model gets it."""
        approved = self._approved.get(call.id)
        if approved is not None and not approved.allow:
            result = "The user has refused this call." + (f" {approved.message}" if approved.message else "")
        else:
            result = await self._result(call, tools)
        if is_shown:
            await self._speech.show_result(call.id, result)
            if self._journal is not None:
                self._journal.note_result(call.id, result)
        if approved is not None and approved.allow and approved.message:
            return f"{result}\n\nThe user has allowed this call, and says: {approved.message}"
        return result

    async def _result(self, call: ToolCall, tools: Mapping[str, FunctionTool]) -> str:
        """Return the result of a call, or the error, as the model gets it."""
        try:
            if call.name not in tools:
                raise WrongCall(f"There is no tool {call.name!r}. There are: {', '.join(tools)}.")
            arguments = tools[call.name].arguments(call.arguments)
        except WrongCall as wrong:
            return f"Error: {wrong}"
        tool = tools[call.name]

        async def result() -> str:
            with within(self.trace, f"{TOOL} {call.name}", attributes=of_tool(call.name, call.id, tool.kind)):
                return result_text(await self._do(tool.function, **arguments))

        if self._journal is None:
            return await result()
        return str(await self._kept(self._journal, f"tool {call.name}", result))

    async def _kept(self, journal: Journal, name: str, function: Callable[[], Awaitable[Any]]) -> Any:
        """Run a step of a job, or return what an earlier attempt has kept of it, and show what that has shown."""

        async def show(key: Key | None, events: list[Event]) -> None:
            if key is not None:
                await self._speech.turn.acquire(key)
            try:
                for event in events:
                    if isinstance(event, State):
                        self._repeat_state(event)  # which notes it
                        continue
                    await self._speech.repeat(event, is_counted=key not in journal.before)
                    journal.note(event, key)
            finally:
                if key is not None:
                    self._speech.turn.release()

        return await journal.step(name, function, show, _as_json, _from_json)

    def _repeat_state(self, change: State) -> None:
        try:
            self.state.repeat(change)
        except LookupError:
            raise NotRepeatable("another state") from None

    async def _do(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """Run a function: a synchronous function on a thread, whose result may be a coroutine for this task."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **options)
        made: list[Any] = []
        is_left = threading.Event()

        def close() -> None:
            for result in filter(inspect.iscoroutine, made):
                result.close()  # else Python warns that it was never awaited

        def call() -> Any:
            made.append(function(*args, **options))
            if is_left.is_set():
                close()
            return made[0]

        try:
            result = await self._call(call)
        except asyncio.CancelledError:
            is_left.set()
            close()
            raise
        return await result if inspect.isawaitable(result) else result

    # For the client

    async def finish(self, result: Any) -> None:
        """Show what the function has returned, if it has shown nothing: text as it is, anything else as JSON."""
        if result is None or self._speech.has_text:
            return
        await self.say(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))

    async def aclose(self) -> None:
        """End what still runs in the background."""
        for task in self._warming:
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)

    def _prepare(
        self, messages: str | Messages | None, model: str, fields: Mapping[str, Any]
    ) -> tuple[EngineClient, GenerateRequest, Admission]:
        """Return the model's client, a checked request with the caller's class and time left, and its admission."""
        client = self._clients.get(model or self.model)
        if client is None or client.alias == self._request.model:
            logger.error("a run asks for the model %r; the site serves: %s", model or self.model, [*self._clients])
            message = f"There is no model {(model or self.model)[:100]!r} here that the pipeline could ask."
            raise NotFound(message, code="model_not_found", param="model")
        body: dict[str, Any] = dict(fields)
        if isinstance(messages, str):
            body["messages"] = [{"role": "user", "content": messages}]
        elif messages is not None:
            body["messages"] = list(messages)
        else:
            body["prompt"] = self._request.prompt or "-"
        values = read(body, {**sampling_fields(self._limits), **request_fields(self._limits)})
        request = build(values, self._limits, default_model=client.alias)
        if messages is None and self.messages:
            request = replace(request, messages=self.messages, prompt=None)
        own = self._request
        left = None if self.deadline is None else max(0.1, self.deadline - time.monotonic())
        request = replace(
            request,
            model=client.alias,
            num_static_messages=num_static(body.get("messages", ())),
            latency_class=own.latency_class if own.is_row else fields.get("latency_class", own.latency_class),
            timeout_seconds=left,
        )
        return client, request, replace(self._admission, arrived_at=time.monotonic(), waited_seconds=0.0)


def _as_json(result: Any) -> Any:
    """Return the result of a step as what JSON can hold."""
    return {"$answer": asdict(result)} if isinstance(result, Answer) else result


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"$answer"}:
        kept = value["$answer"]
        return Answer(text=kept["text"], finish_reason=kept["finish_reason"], usage=Usage(**kept["usage"]))
    return value


async def _num_tokens(client: EngineClient, request: GenerateRequest, admission: Admission) -> int:
    """Return how many tokens a prompt has; an estimate if only a server knows, and does not tell it."""
    try:
        return len(await client.tokenize(request, admission))
    except BadRequest as error:
        if error.code != "unsupported_parameter" or request.prompt is None:
            raise
        return estimate(request.prompt)


_PIECE = re.compile(r"(?P<word>[^\W\d_]+)|(?P<space>\s+)|(?P<other>[\d\W_])")
_NUM_AROUND = 8  # tokens that a tokenizer puts before and after a prompt, and more


def estimate(text: str) -> int:
    """Return about how many tokens a text has at most.

    A token for two bytes of a word, for each digit, for each byte of another character, and for each break of a line;
    a space is a part of the word after it. Prose has fewer in every vocabulary from 3,000 words on, half as many in a
    vocabulary of 100,000.
    """
    num = _NUM_AROUND
    for piece in _PIECE.finditer(text):
        if piece.lastgroup == "word":
            num += (len(piece[0].encode("utf-8", "replace")) + 1) // 2
        elif piece.lastgroup == "space":
            num += 0 if piece[0] == " " else 1 + len(piece[0]) // 4
        else:
            num += len(piece[0].encode("utf-8", "replace"))
    return num


async def _warm(client: EngineClient, request: GenerateRequest, admission: Admission) -> None:
    try:
        await client.warm(request, admission)
    except StreamserveError as error:
        logger.debug("a prefix was not warmed: %s", error)
