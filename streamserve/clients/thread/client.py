"""`ThreadClient`: an engine on a thread of this process. For tests, notebooks, and inside the engine's own process.

Three kinds of threads meet here. The event loop accepts requests and turns updates into events. A small pool renders
and tokenises. The engine thread steps; what goes between it and the loops goes through `OutputRouter`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TypeVar

from streamserve.clients.thread.acceptance import LoadedEngine, Prepared, encode, prepare
from streamserve.clients.thread.admission import AdmissionControl
from streamserve.clients.thread.engine_thread import EngineThread, Load
from streamserve.clients.thread.generation import LocalGeneration, error_event
from streamserve.clients.thread.output_router import OutputRouter
from streamserve.clients.thread.recent import RecentFigures
from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.plan import StepPlan
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.park import Accepted
from streamserve.protocol.requests import GenerateRequest
from streamserve.protocol.stats import EngineStats, ModelDescription

T = TypeVar("T")

# Rendering is Python, tokenising releases the GIL: with two, one long prompt does not block the short ones.
_TOKENIZER_THREADS = 2
# The state after each action of an operator.
_STATES = {"pause": "paused", "resume": "ready", "drain": "draining"}
_CLOSED = {"paused": "is paused by an operator.", "draining": "finishes what it has begun and takes nothing new."}
# Seconds to come back after when an operator has closed the door: nobody knows, and asking is cheap.
_OPERATOR_RETRY_SECONDS = 10


class ThreadClient:
    """An `EngineClient` whose engine is a thread. `load(progress)` runs on that thread after `start()`.

    `on_plan` sees each plan before it runs, `on_step` how long each step may take (see `EngineCore`), on the engine
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
        on_step: Callable[[float | None], None] | None = None,
    ) -> None:
        self.alias = alias
        self._config = config or EngineConfig()
        self._clock = clock
        self._thread = EngineThread(alias, load, self._config, clock, on_plan, on_step)
        self._figures = RecentFigures(clock)
        self._bounds = AdmissionControl(self._config, self._figures)
        self._sequences = OutputRouter(self._thread, self._bounds, self._figures)
        self._seq_ids = itertools.count(1)
        self._open_state = "ready"  # what a loaded engine is: this, or what an operator has made it
        self._tokenizers = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix=f"tokenize-{alias}")

    async def generate(self, request: GenerateRequest) -> LocalGeneration:
        """Accept the request or raise: BadRequest (never fits, bad template), Refused (not now)."""
        engine, _ = self._require_open(request)
        accepted_at = self._clock()
        with self._bounds.place(request.n):
            prepared = await self._in_tokenizer_thread(lambda: prepare(engine, self._config, request))
        _, core = self._require_open(request)
        self._bounds.check_prefill(prepared.num_tokens, core.stats())
        return self._submit(core, prepared, accepted_at)

    async def tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's token ids as `generate` would see them."""
        engine, _ = self._require_loaded()
        with self._bounds.place(1):
            prompt = await self._in_tokenizer_thread(lambda: encode(engine.tokenizer, request))
        return prompt.token_ids

    async def warm(self, request: GenerateRequest) -> None:
        """Prefill the prompt into the prefix cache and generate nothing; returns when that is done."""
        sampling = replace(request.sampling, max_tokens=0, min_tokens=0)
        generation = await self.generate(
            replace(request, sampling=sampling, n=1, output_token_ids=(), reader_tokens=None)
        )
        try:
            async for _ in generation:
                pass
        finally:
            generation.cancel()

    def start(self) -> None:
        """Begin loading, if that has not begun; returns at once."""
        self._thread.start()

    async def control(self, action: str) -> None:
        """Pause, resume or drain; returns when that has taken effect. What loads meanwhile comes up in that state."""
        if action not in _STATES:
            raise BadRequest(f"action is one of {', '.join(_STATES)}.", param="action")
        self._refuse_failed()
        self._open_state = _STATES[action]
        core = self._thread.core
        if core is not None:
            (core.pause if action == "pause" else core.resume)()
            await asyncio.wrap_future(self._thread.after_step())
            self._refuse_failed()

    def describe(self) -> ModelDescription:
        """Say what the model is and how far loading has come. Never blocks."""
        description = self._thread.describe()
        return replace(description, state=self._open_state) if description.state == "ready" else description

    def stats(self) -> EngineStats:
        """Return live figures. Never blocks."""
        core = self._thread.core
        counts = asdict(core.stats()) if core is not None else {}
        return EngineStats(
            **counts, tokens_per_second=self._figures.tokens_per_second(), latency=self._figures.latency()
        )

    async def aclose(self) -> None:
        """End every generation with an `error` event and free the engine."""
        self._thread.close()
        self._sequences.on_end("engine_closed")
        await asyncio.to_thread(self._thread.join)
        self._tokenizers.shutdown(wait=False)  # what it still reads is refused afterwards, as the engine is gone

    def _submit(self, core: EngineCore, prepared: Prepared, accepted_at: float) -> LocalGeneration:
        """Queue one sequence per choice; nothing may be awaited here."""
        choices = {next(self._seq_ids): choice for choice in prepared.choices}
        accepted = self._accepted(prepared)
        generation = LocalGeneration(accepted, choices, accepted_at=accepted_at, engine=self._sequences)
        for seq_id, choice in choices.items():
            sequence = prepared.sequence_request(seq_id, choice.index, accepted_at)
            self._sequences.add(generation, sequence)
            core.add(sequence)
            if choice.stopped_at is not None:  # resumed after its stop string
                core.stop(seq_id, choice.stopped_at)
        self._thread.wake()
        # Invariant: an engine that ended before it could see this generation ends it here.
        if self._thread.end_code is not None:
            generation.fail(error_event(self._thread.end_code))
        return generation

    def _accepted(self, prepared: Prepared) -> Accepted:
        assert prepared.sampling.max_tokens is not None
        assert prepared.sampling.seed is not None
        return Accepted(
            num_prompt_tokens=len(prepared.prompt.token_ids),
            max_tokens=prepared.sampling.max_tokens,
            seed=prepared.sampling.seed,
            queue_position=self._bounds.num_waiting,
        )

    def _require_open(self, request: GenerateRequest) -> tuple[LoadedEngine, EngineCore]:
        """Return the engine, if it is loaded and no operator keeps this request out."""
        loaded = self._require_loaded()
        state, has_begun = self._open_state, any(request.output_token_ids)
        if state == "paused" or (state == "draining" and not has_begun):
            raise EngineUnavailable(
                f"model {self.alias} {_CLOSED[state]} Try again later.",
                code=f"engine_{state}",
                retry_after=_OPERATOR_RETRY_SECONDS,
            )
        return loaded

    def _require_loaded(self) -> tuple[LoadedEngine, EngineCore]:
        """Return the engine, or begin loading and refuse for now."""
        self._refuse_failed()
        engine, core = self._thread.engine, self._thread.core
        if engine is not None and core is not None:
            return engine, core
        self.start()
        raise EngineUnavailable(
            f"model {self.alias} is loading. Try again in a moment.", code="engine_loading", retry_after=2
        )

    def _refuse_failed(self) -> None:
        if self._thread.describe().state == "failed":
            raise EngineUnavailable(f"model {self.alias} is not available.", retry_after=30)

    async def _in_tokenizer_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, work)
