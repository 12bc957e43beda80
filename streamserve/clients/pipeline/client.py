"""`pipeline`: register an async function under a name by which it is called like a model; `PipelineClient` does that.

    @pipeline(model="chat")
    async def billing(run: Run) -> None:
        passages = await run.step("Looking up your bill", search, run.question, of=2)
        await run.generate([{"role": "user", "content": f"{passages}\\n\\n{run.question}"}])

Registered by import, as Django's admin is: the site imports `<app>/pipelines.py` of each app once, at its start.

A client is a pipeline in the place of a model, so that every delivery serves it as a model. A request to it starts a
run; the run asks the site's models. It has no engine of its own: it is ready when its model is. asyncio.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from streamserve.clients.agents.adapt import adapted
from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.mcp.servers import McpServers
from streamserve.clients.pipeline.filters import OutputFilter, Stopped
from streamserve.clients.pipeline.interrupts import NOT_IN_TIME, Interrupted, Interrupts, WholeMemo
from streamserve.clients.pipeline.journal import LOST, Journal, Memo, Shown
from streamserve.clients.pipeline.run import Run, enter_run
from streamserve.clients.pipeline.schemas import checker_of
from streamserve.clients.pipeline.speech import RunSource, Speech
from streamserve.clients.pipeline.static import IS_IN_RUN
from streamserve.protocol.engine import Accepted, EngineStats, ModelDescription
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Gone, ProducerLost, StreamserveError, no_model
from streamserve.protocol.events import INTERRUPT, Error, Event
from streamserve.protocol.identity import Identity
from streamserve.protocol.limits import Limits
from streamserve.protocol.permissions import ANYONE, PERMISSION_HINT, Permission, problem_of
from streamserve.protocol.requests import (
    LATENCY_CLASSES,
    NO_CALLER,
    START,
    Admission,
    GenerateRequest,
    Resume,
    check_needs,
    check_sampling,
    refuse_parts,
)
from streamserve.protocol.spelling import Spell, Spelled
from streamserve.tracing.answers import AGENT, WORKFLOW
from streamserve.tracing.spans import enter

Function = Callable[[Run], Awaitable[Any]]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A registered pipeline. `model` "": the site's default. `filters` make a new chain for each run.

    `title` is its name for people. An agent's tokens have no ids: its framework has asked the model.
    """

    name: str
    function: Function
    model: str = ""
    filters: Sequence[Callable[[], OutputFilter]] = ()
    latency_class: str = ""
    permission: Permission = ANYONE
    input_schema: Mapping[str, Any] = field(default_factory=dict, compare=False)
    description: str = field(default="", compare=False)
    title: str = field(default="", compare=False)
    is_agent: bool = False


_pipelines: dict[str, Pipeline] = {}
PIPELINES: Mapping[str, Pipeline] = MappingProxyType(_pipelines)


def pipeline(
    name: Any = "",
    agent: Any = None,
    *,
    model: str = "",
    filters: Sequence[Callable[[], OutputFilter]] = (),
    latency_class: str = "",
    permission: Permission = ANYONE,
    title: str = "",
    input_schema: Mapping[str, Any] | None = None,
) -> Any:
    """Register an async function that takes a `Run`, or an `agent`, and return it unchanged.

    An agent is a pydantic-ai or OpenAI `Agent`, or a compiled LangGraph graph (docs/agents.md). `name`: the function's,
    or the agent's, unless given. `title`: what people are shown instead, as in the chat's model picker; the
    name in words, unless given. Its text goes through `filters` before a reader sees any of it. `permission`: who may
    use it, as PERMISSION of a model; the models that a run asks are the pipeline's own. `input_schema` is the JSON
    Schema of `run.input`: it is checked, and MCP clients are shown it. Raises ValueError for a name that is no name or
    is taken, and for a permission or a schema that is none, TypeError for a function that is not async.
    """

    def register(given: Any) -> Any:
        adapter = adapted(given)
        function: Function = given if adapter is None else adapter
        own = name if isinstance(name, str) and name else getattr(function, "__name__", "")
        if not _NAME.fullmatch(own):
            raise ValueError(f"{own!r} is no name of a pipeline: 1 to 64 of A-Z a-z 0-9 . _ -")
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"the pipeline {own} must be an async function: async def {own}(run): ...")
        if latency_class and latency_class not in LATENCY_CLASSES:
            raise ValueError(f"latency_class of the pipeline {own} is one of {', '.join(LATENCY_CLASSES)}")
        problem = problem_of(permission)
        if problem is not None:
            raise ValueError(f"permission of the pipeline {own} {problem} {PERMISSION_HINT}")
        if input_schema:
            checker_of(input_schema)
            if input_schema.get("type") != "object":
                raise ValueError(f"input_schema of the pipeline {own} is no schema of an object")
        known = _pipelines.get(own)
        if known is not None and _source(known.function) != _source(function):
            raise ValueError(f"there are two pipelines {own}: {_source(known.function)} and {_source(function)}")
        _pipelines[own] = Pipeline(
            name=own,
            function=function,
            model=model,
            filters=tuple(filters),
            latency_class=latency_class,
            permission=permission,
            input_schema=input_schema or {},
            description=inspect.cleandoc(function.__doc__ or ""),
            title=title or _in_words(own),
            is_agent=adapter is not None,
        )
        return given

    if agent is not None:
        return register(agent)
    return register if isinstance(name, str) else register(name)


def _in_words(name: str) -> str:
    """Return "Account review" of `account_review`."""
    text = re.sub(r"[._-]+", " ", name).strip()
    return text[:1].upper() + text[1:]


def _source(function: Function) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', '')}"


def forget(name: str) -> None:
    """Take a pipeline out of the registry: for tests."""
    _pipelines.pop(name, None)


logger = logging.getLogger("streamserve.pipelines")


async def _no_user(caller: Identity) -> None:
    """Return no user: of an application without users."""


class PipelineClient:
    """See `EngineClient` in clients/base.py. `clients` are the site's, `call` runs a synchronous function elsewhere.

    `memo_of` is given the id of a run's stream, and returns what is kept of the run; without a memo no other process
    continues it. `user_of` returns the site's user who asks, `mcp` has the servers of `run.mcp`. An answer that has
    begun waits for an engine that refuses to continue it for `window_seconds`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        clients: Mapping[str, EngineClient],
        *,
        default_model: str,
        limits: Limits | None = None,
        call: Callable[..., Awaitable[Any]] = asyncio.to_thread,
        memo_of: Callable[[str], Memo | None] = lambda stream_id: None,
        user_of: Callable[[Identity], Awaitable[Any]] = _no_user,
        window_seconds: float = math.inf,
        mcp: McpServers | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        self.alias = pipeline.name
        self.pipeline, self._clients = pipeline, clients
        self._model = pipeline.model or default_model
        self._limits, self._call, self._memo_of = limits or Limits(), call, memo_of
        self._user_of = user_of
        self._check = checker_of(pipeline.input_schema) if pipeline.input_schema else None
        self._window_seconds, self._mcp, self._interrupts = window_seconds, mcp, interrupts
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        """Start a run, or continue it. Raises what a model that cannot answer raises.

        Raises ProducerLost for a run that had begun and kept nothing, LogUnavailable while that cannot be read.
        """
        check_needs(request.needs)
        check_sampling(request.sampling)
        refuse_parts(request, who="a pipeline")
        before, own = await self._interrupted(request), self._memo_of(admission.stream_id)
        memo = None if own is None else WholeMemo(own, before)
        if (resume.output_token_ids or resume.shown) and memo is None:
            raise ProducerLost(LOST)
        if request.n != 1:
            raise BadRequest("A pipeline gives one answer: leave n out.", code="invalid_value", param="n")
        if request.sampling.prompt_logprobs is not None:  # its models' prompts are the pipeline's own
            message = "A pipeline has no prompt of yours to score: leave prompt_logprobs out, or echo with logprobs."
            raise BadRequest(message, code="unsupported_parameter", param="prompt_logprobs")
        _refuse_forms(request)
        self.check_input(request)
        self._refuse_without_model()
        seed = request.sampling.seed
        seed = secrets.randbits(63) if seed is None else seed
        most = request.sampling.max_tokens or self._limits.max_tokens
        has_ids = not self.pipeline.is_agent
        accepted = Accepted(num_prompt_tokens=0, max_tokens=most, seed=seed, may_repeat=False, has_token_ids=has_ids)
        source = RunSource(accepted)
        source.num_put = sum(one.num_tokens for one in resume.shown)
        source.num_read = None if resume.reader_tokens is None else resume.reader_tokens[0]
        request = replace(request, sampling=replace(request.sampling, seed=seed))
        journal = None
        if memo is not None:
            await memo.load()
            journal, source.shown = Journal(memo, seed, () if before is None else before.kept), Shown(memo.shown)
        if before is not None:
            source.follow(before.shown)
        speech = Speech(source, self.pipeline.filters, None if journal is None else journal.turns())
        run = Run(
            request,
            admission,
            speech,
            self._clients,
            model=self._model,
            limits=self._limits,
            call=self._call,
            journal=journal,
            user_of=self._user_of,
            window_seconds=self._window_seconds,
            mcp=self._mcp,
        )
        task = asyncio.get_running_loop().create_task(
            self._run(run, speech, memo), name=f"pipeline {self.alias} {admission.stream_id}", context=Context()
        )
        source.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return source.generation

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the prompt's token ids for the pipeline's model."""
        return await self._client.tokenize(replace(request, model=self._model), admission)

    async def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids, for the pipeline's model."""
        return await self._client.spell(asked)

    async def warm(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> None:
        """Prefill a prompt of the pipeline's model."""
        await self._client.warm(replace(request, model=self._model), admission)

    def start(self) -> None:
        """Start loading the pipeline's model."""
        self._client.start()

    def wake(self) -> None:
        """Wake the model."""
        self._client.wake()

    async def control(self, action: str) -> None:
        """Refuse: operators control the model."""
        message = f"{self.alias} is a pipeline. Control its model, {self._model}."
        raise BadRequest(message, code="invalid_value", param="model")

    def describe(self) -> ModelDescription:
        """Return the model's state, under the pipeline's name."""
        return replace(self._client.describe(), alias=self.alias)

    def stats(self) -> EngineStats:
        """Return no counts: they are the model's."""
        return EngineStats()

    async def aclose(self) -> None:
        """End every run."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def as_json(self) -> dict[str, str | None]:
        """Return what lists show of it."""
        pipeline = self.pipeline
        title, description = str(pipeline.title), pipeline.description  # a title may be a lazy translation
        return {"name": self.alias, "title": title, "model": self._model, "description": description}

    @property
    def input_schema(self) -> Mapping[str, Any]:
        """The JSON Schema of its input; {} where any is taken."""
        return self.pipeline.input_schema

    def check_input(self, request: GenerateRequest) -> None:
        """Raise BadRequest for an input that does not fit the pipeline's schema. A conversation needs no input."""
        if self._check is None or not (request.input or (request.messages is None and request.prompt is None)):
            return
        try:
            self._check(request.input)
        except ValueError as error:
            message = f"The input does not fit the pipeline's schema. {error}"
            raise BadRequest(message, code="invalid_value", param="input") from None

    @property
    def model(self) -> str:
        """The model that its runs ask, where they name none."""
        return self._model

    @property
    def operation(self) -> str:
        """What its runs are, in a trace."""
        return AGENT if self.pipeline.is_agent else WORKFLOW

    @property
    def default_class(self) -> str:
        """The class of requests that name none; "" where it has no class of its own."""
        return self.pipeline.latency_class

    @property
    def _client(self) -> EngineClient:
        client = self._clients.get(self._model)
        if client is None:
            raise no_model(self._model, ())
        return client

    def _refuse_without_model(self) -> None:
        """Raise before the answer begins where its model cannot answer: the pipeline would fail in the middle."""
        if self._is_closed:
            raise EngineUnavailable("The server is shutting down.")
        self._client.start()
        model = self._client.describe()
        if model.state == "failed":
            message = (
                f"The model of the pipeline {self.alias} is not available. {model.message}"  # unnamed: it may be hidden
            )
            raise EngineUnavailable(message.strip(), retry_after=5)

    async def _run(self, run: Run, speech: Speech, memo: WholeMemo | None) -> None:
        """Run the author's function to its end; the events end with `done` or `error`."""
        IS_IN_RUN.set(True)
        enter_run(run)
        enter(run.trace)
        started_at = time.monotonic()
        ending: Event | None
        try:
            run.task = asyncio.current_task()
            if memo is not None and run.is_continued:  # no tool runs twice: of two answers the second is refused
                await memo.until_begun()
            if await self._whole(run, speech):
                reason = ""
            else:
                await self._keep_interrupted(run, speech, memo)
                reason = INTERRUPT
            latency, phases = time.monotonic() - started_at, run.phases.seconds()
            ending = speech.done(latency=latency, phases=phases, finish_reason=reason)
        except Stopped:
            speech.cut_block()
            latency, phases = time.monotonic() - started_at, run.phases.seconds()
            ending = speech.done(latency=latency, phases=phases, finish_reason="content_filter")
        except StreamserveError as error:
            phases, retryable = run.phases.seconds(), error.is_retryable
            ending = Error(code=error.code, message=error.message, retryable=retryable, phases=phases)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("the pipeline %s failed on stream %s", self.alias, run.stream_id)
            message = f"The pipeline failed on this request. The server's log has the cause under {run.stream_id}."
            ending = Error(code="pipeline_failed", message=message, phases=run.phases.seconds())
        finally:
            await run.aclose()
        if memo is not None and isinstance(ending, Error):
            ending = memo.end_of(ending)
        if ending is not None:
            speech.source.put(ending)

    async def _whole(self, run: Run, speech: Speech) -> bool:
        """Call the author's function; return whether it has come to its end, and not to a call that asks first."""
        try:
            result = await self.pipeline.function(run)
        except asyncio.CancelledError:
            if run.asked and speech.source.generation.is_open:
                return False
            raise
        if run.asked:
            return False
        await run.finish(result)
        speech.close_block()
        speech.source.finish()
        return True

    async def _interrupted(self, request: GenerateRequest) -> Interrupted | None:
        """Return the run that a request continues. Raises Gone, LogUnavailable."""
        if not request.continues:
            return None
        found = None if self._interrupts is None else await self._interrupts.find(request.continues)
        if found is None:
            raise Gone(NOT_IN_TIME, code="approval_expired", param="id")
        return found

    async def _keep_interrupted(self, run: Run, speech: Speech, memo: WholeMemo | None) -> None:
        """Keep the run for the answer of its user. Raises where the run was taken from this process."""
        if self._interrupts is None or memo is None:
            raise RuntimeError("a tool asks first, and there is no log that would keep the run meanwhile")
        request = run.request
        await memo.keep(("approval", len(request.approvals)), {"calls": [call.id for call in run.asked]}, 0.0)
        kept = {key: value for key, value in memo.kept.items() if key[0] != "approval"}
        interrupted = Interrupted(
            request=request, calls=run.asked, at=time.time(), kept=kept, shown=speech.source.said.events()
        )
        await self._interrupts.keep(run.stream_id, interrupted)


def _refuse_forms(request: GenerateRequest) -> None:
    """Raise BadRequest for what promises the caller a form of the answer: a run decides that itself."""
    asked = {
        "grammar": request.grammar is not None,
        "tools": bool(request.tools) and request.tool_choice.mode != "none",
        "logprobs": request.sampling.logprobs is not None,
        "continue_final_message": request.continue_final_message,
    }
    for name, is_asked in asked.items():
        if is_asked:
            message = f"A pipeline decides itself what its answer is made of: leave {name} out, or ask its model."
            raise BadRequest(message, code="unsupported_parameter", param=name)
