"""`ThreadClient`: an engine on a thread of this process. For tests, notebooks, and inside the engine's own process.

Three kinds of threads meet here. The event loop accepts requests and turns updates into events. A small pool renders
and tokenises. The engine thread steps; `OutputRouter` carries what passes between it and the loops.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from streamserve.clients.thread.acceptance import LoadedEngine, Prepared, encode, prepare
from streamserve.clients.thread.admission import AdmissionControl, RecentTimings
from streamserve.clients.thread.constrained import constrain
from streamserve.clients.thread.engine_thread import EngineThread, Load
from streamserve.clients.thread.generation import LocalGeneration, error_event
from streamserve.clients.thread.output_router import OutputRouter
from streamserve.engine.config import WARM, EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.grammar.compiler import NUM_PROVERS
from streamserve.engine.plan import OnStep, StepPlan
from streamserve.protocol.engine import EngineStats, ModelDescription
from streamserve.protocol.errors import BadRequest, EngineUnavailable, error_for
from streamserve.protocol.events import Error
from streamserve.protocol.requests import GenerateRequest

# Rendering is Python, tokenising releases the GIL: with two, one long prompt or chat does not block the short ones.
_TOKENIZER_THREADS = 2
# The state after each action of an operator.
_STATES = {"pause": "paused", "resume": "ready", "drain": "draining"}
_REFUSALS = {"paused": "is paused by an operator.", "draining": "finishes its open answers and takes nothing new."}
# Seconds to retry after when an operator has paused the engine: the end is unknown, and a retry is cheap.
_OPERATOR_RETRY_SECONDS = 10


class ThreadClient:
    """An `EngineClient` whose engine is a thread. `load(progress)` runs on that thread after `start()`.

    `on_plan` gets each plan before it runs, `on_step` what is in flight (see `InFlight`), on the engine
    thread. Several event loops may generate.
    """

    def __init__(
        self,
        alias: str,
        load: Load,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_plan: Callable[[StepPlan], None] | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.alias = alias
        self._config = config or EngineConfig()
        self._clock = clock
        self._thread = EngineThread(alias, load, self._config, clock, on_plan, on_step)
        self._timings = RecentTimings(clock)
        self._admission = AdmissionControl(self._config, self._timings, clock)
        self._router = OutputRouter(self._thread, self._admission, self._timings)
        self._seq_ids = itertools.count(1)
        self._operator_state = "ready"  # the state of a loaded engine, by the last action of an operator
        self._tokenizers = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix=f"tokenize-{alias}")
        self._compilers = ThreadPoolExecutor(NUM_PROVERS, thread_name_prefix=f"grammar-{alias}")

    async def generate(self, request: GenerateRequest) -> LocalGeneration:
        """Accept the request or raise: BadRequest (never fits, bad template), Refused (not now)."""
        engine, _ = self._require_engine(request)
        accepted_at = self._clock()
        with self._admission.reserve(request.n, request.latency_class):
            prepared = await self._prepare(engine, request)
        # Nothing is awaited from here on, so that the checks still hold when the sequences are added.
        _, core = self._require_engine(request)
        is_resumed = any(request.output_token_ids)  # it was accepted once, and may wait
        queue_position, queue_seconds = self._admission.check_wait(
            request.latency_class, core.stats(), tenant=request.tenant, may_refuse=not is_resumed
        )
        choices = {next(self._seq_ids): choice for choice in prepared.choices}
        generation = LocalGeneration(
            prepared.accepted(queue_position),
            choices,
            accepted_at=accepted_at,
            engine=self._router,
            latency_class=request.latency_class,
            echoes=prepared.echoes,
            first_scored=prepared.first_scored,
        )
        for seq_id, choice in choices.items():
            sequence = prepared.sequence_request(seq_id, choice.index, accepted_at, queue_seconds)
            self._router.add(generation, sequence)
            core.add(sequence)
            if choice.stopped_at is not None:  # resumed after its stop string
                core.stop(seq_id, choice.stopped_at)
        self._thread.wake()
        # Invariant: an engine that ended before it could see this generation ends it here.
        if self._thread.end_code is not None:
            generation.fail(error_event(self._thread.end_code))
        return generation

    async def _prepare(self, engine: LoadedEngine, request: GenerateRequest) -> Prepared:
        """Render, tokenise and check. A grammar is compiled on threads of its own, as it may take seconds."""
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._tokenizers, prepare, engine, self._config, request)
        if prepared.grammar is None:
            return prepared
        return await loop.run_in_executor(self._compilers, constrain, engine, prepared)

    async def tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's token ids as `generate` would see them."""
        engine, _ = self._require_engine()
        with self._admission.reserve(1, request.latency_class):
            loop = asyncio.get_running_loop()
            prompt = await loop.run_in_executor(self._tokenizers, encode, engine.tokenizer, request)
        return prompt.token_ids

    async def warm(self, request: GenerateRequest) -> None:
        """Prefill the prompt into the prefix cache and generate nothing. It delays no answer, and counts as none.

        Returns when that is done. Raises StreamserveError if it is not: the engine was never idle, paused, or failed.
        """
        sampling = replace(request.sampling, max_tokens=0, min_tokens=0, prompt_logprobs=None)
        generation = await self.generate(
            replace(
                request,
                sampling=sampling,
                n=1,
                output_token_ids=(),
                reader_tokens=None,
                latency_class=WARM,
                grammar=None,
                echo=False,
            )
        )
        try:
            async for event in generation:
                if isinstance(event, Error):
                    raise error_for(event.code, event.message, retryable=event.retryable)
        finally:
            generation.cancel()
        if generation.parked is not None:
            raise EngineUnavailable(
                f"model {self.alias} {_REFUSALS['paused']} Try again later.",
                code="engine_paused",
                retry_after=_OPERATOR_RETRY_SECONDS,
            )

    def start(self) -> None:
        """Start loading, once; returns at once."""
        self._thread.start()

    async def control(self, action: str) -> None:
        """Pause, resume or drain; returns when that has taken effect. A loading engine starts in that state."""
        if action not in _STATES:
            raise BadRequest(f"action is one of {', '.join(_STATES)}.", param="action")
        self._refuse_failed()
        self._operator_state = _STATES[action]
        core = self._thread.core
        if core is not None:
            (core.pause if action == "pause" else core.resume)()
            await asyncio.wrap_future(self._thread.after_step())
            self._refuse_failed()

    @property
    def has_failed(self) -> bool:
        """Whether the engine could not be loaded, or has ended in a fault."""
        return self._thread.description.state == "failed"

    def describe(self) -> ModelDescription:
        """Return what the model is and how far loading has come. Never blocks."""
        description = self._thread.describe()
        return replace(description, state=self._operator_state) if description.state == "ready" else description

    def stats(self) -> EngineStats:
        """Return live counts. Never blocks."""
        core = self._thread.core
        counts = asdict(core.stats()) if core is not None else {}
        return EngineStats(
            **counts,
            tokens_per_second=self._timings.tokens_per_second(),
            latency=self._timings.latency(),
            refused=self._timings.num_refused,
            classes=self._timings.by_class(self._config.classes),
        )

    async def aclose(self) -> None:
        """End every generation with an `error` event and free the engine."""
        self._thread.close()
        self._router.on_end("engine_closed")
        await asyncio.to_thread(self._thread.join)
        if self._thread.engine is not None:
            await asyncio.to_thread(self._thread.engine.grammars.close)
        self._compilers.shutdown(wait=False)
        self._tokenizers.shutdown(wait=False)  # requests that are tokenised afterwards are refused

    def _require_engine(self, request: GenerateRequest | None = None) -> tuple[LoadedEngine, EngineCore]:
        """Return the engine; refuse while it has failed, is not loaded (loading starts), or an operator closed it."""
        engine, core = self._thread.engine, self._thread.core
        if engine is None or core is None or self._thread.description.state != "ready":
            self._refuse_failed()
            self.start()
            raise EngineUnavailable(
                f"model {self.alias} is loading. Try again in a moment.", code="engine_loading", retry_after=2
            )
        state = self._operator_state
        if request is None or state == "ready" or (state == "draining" and any(request.output_token_ids)):
            return engine, core
        raise EngineUnavailable(
            f"model {self.alias} {_REFUSALS[state]} Try again later.",
            code=f"engine_{state}",
            retry_after=_OPERATOR_RETRY_SECONDS,
        )

    def _refuse_failed(self) -> None:
        if self.has_failed:
            raise EngineUnavailable(f"model {self.alias} is not available.", retry_after=30)
