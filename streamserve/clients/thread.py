"""`ThreadClient`: an engine on a thread of this process. For tests, notebooks and single-process sites.

Three kinds of threads meet here. The event loop accepts requests and turns updates into events. A small pool renders
and tokenises. The engine thread steps: one `call_soon_threadsafe` per step and loop. (Idea: transformers'
OutputRouter, one wake per step for all requests.)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TypeVar

from streamserve.clients.acceptance import LoadedEngine, Prepared, encode, prepare, shown_token_ids
from streamserve.clients.base import Accepted, EngineStats, ModelDescription
from streamserve.clients.engine_thread import EngineThread, Load
from streamserve.clients.figures import RecentFigures
from streamserve.clients.generation import LocalGeneration, error_event
from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore, SequenceUpdate
from streamserve.engine.plan import StepPlan
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.errors import EngineUnavailable, Overloaded
from streamserve.protocol.requests import GenerateRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Rendering is Python, tokenising releases the GIL: with two, one long prompt does not block the short ones.
_TOKENIZER_THREADS = 2
# Seeds are what fits into a signed 64-bit number, whatever was asked for.
_MAX_SEED = 2**63 - 1


class ThreadClient:
    """An `EngineClient` whose engine is a thread. `load(progress)` runs on that thread after `start()`.

    `on_plan` sees each plan before it runs, on the engine thread. Several event loops may generate.
    """

    def __init__(
        self,
        alias: str,
        load: Load,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.alias = alias
        self._config = config or EngineConfig()
        self._clock = clock
        self._thread = EngineThread(alias, load, self._config, clock, self, on_plan)
        self._seq_ids = itertools.count(1)
        # Which generation hears of which sequence, and which sequences no step has held yet.
        self._generations: dict[int, LocalGeneration] = {}
        self._unscheduled: set[int] = set()
        self._num_in_preparation = 0
        self._tokenizers = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix=f"tokenize-{alias}")
        self._figures = RecentFigures(clock)

    async def generate(self, request: GenerateRequest) -> LocalGeneration:
        """Accept the request or raise: BadRequest (never fits, bad template), Refused (not now)."""
        engine, _ = self._require_ready()
        accepted_at = self._clock()
        with self._place_in_queue(request.n):
            prepared = await self._in_tokenizer_thread(lambda: prepare(engine, self._config, request))
        _, core = self._require_ready()
        return self._submit(core, engine, request, prepared, accepted_at)

    async def tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's token ids as `generate` would see them."""
        engine, _ = self._require_ready()
        with self._place_in_queue(1):
            prompt = await self._in_tokenizer_thread(lambda: encode(engine.tokenizer, request))
        return prompt.token_ids

    async def warm(self, request: GenerateRequest) -> None:
        """Prefill the prompt into the prefix cache and generate nothing; returns when that is done."""
        sampling = replace(request.sampling, max_tokens=0, min_tokens=0)
        generation = await self.generate(replace(request, sampling=sampling, n=1, output_token_ids=()))
        try:
            async for _ in generation:
                pass
        finally:
            generation.cancel()

    def start(self) -> None:
        """Begin loading, if that has not begun; returns at once."""
        self._thread.start()

    def describe(self) -> ModelDescription:
        """Say what the model is and how far loading has come. Never blocks."""
        return self._thread.describe()

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
        self.on_end("engine_closed")
        await asyncio.to_thread(self._thread.join)
        self._tokenizers.shutdown(wait=False)  # what it still reads is refused afterwards, as the engine is gone

    # Called on the engine thread (`Listener`).

    def on_updates(self, updates: tuple[SequenceUpdate, ...]) -> None:
        """Hand a step's updates to the loops that wait for them: one wake per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[SequenceUpdate]] = defaultdict(list)
        for update in updates:
            generation = self._generations.get(update.seq_id)
            if generation is not None:
                by_loop[generation.loop].append(update)
        for loop, mine in by_loop.items():
            self._call(loop, self._deliver, mine)

    def on_end(self, code: str) -> None:
        """Tell every open generation that the engine is gone."""
        for generation in set(self._generations.copy().values()):
            self._call(generation.loop, generation.fail, error_event(code))

    def _call(self, loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
        try:
            loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed: whoever waited there is gone
            self._forget_loop(loop)

    def _forget_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        for seq_id, generation in self._generations.copy().items():
            if generation.loop is loop:
                self._abort(seq_id)

    # Called on the event loop.

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            generation = self._generations.get(update.seq_id)
            if generation is None:
                continue
            self._unscheduled.discard(update.seq_id)
            self._figures.note(update)
            self._take(generation, update)
            if update.is_last:
                self._forget(update.seq_id)
            if not generation.is_open:
                self._figures.note_finished(generation.timings.breakdown())

    def _take(self, generation: LocalGeneration, update: SequenceUpdate) -> None:
        try:
            generation.take(update)
        except Exception:  # the edge of one request: its text side broke, the others go on
            logger.exception("text of sequence %d failed", update.seq_id)
            generation.fail(error_event("internal_error"))

    def _submit(
        self,
        core: EngineCore,
        engine: LoadedEngine,
        request: GenerateRequest,
        prepared: Prepared,
        accepted_at: float,
    ) -> LocalGeneration:
        """Queue one sequence per choice; nothing may be awaited here."""
        choices = {next(self._seq_ids): choice for choice in prepared.choices}
        generation = LocalGeneration(
            self._accepted(prepared), choices, accepted_at=accepted_at, abort=self._abort, stop=self._stop
        )
        for seq_id, choice in choices.items():
            self._generations[seq_id] = generation
            self._unscheduled.add(seq_id)
            core.add(_sequence_request(seq_id, choice.index, engine, request, prepared, accepted_at))
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
            queue_position=len(self._unscheduled),
        )

    def _abort(self, seq_id: int) -> None:
        self._forget(seq_id)
        if self._thread.core is not None:
            self._thread.core.abort(seq_id)
            self._thread.wake()

    def _stop(self, seq_id: int, at: int) -> None:
        self._forget(seq_id)
        if self._thread.core is not None:
            self._thread.core.stop(seq_id, at)
            self._thread.wake()

    def _forget(self, seq_id: int) -> None:
        self._unscheduled.discard(seq_id)
        self._generations.pop(seq_id, None)

    def _require_ready(self) -> tuple[LoadedEngine, EngineCore]:
        """Return the engine, or begin loading and refuse for now."""
        description = self.describe()
        if description.state == "ready":
            assert self._thread.engine is not None
            assert self._thread.core is not None
            return self._thread.engine, self._thread.core
        if description.state == "failed":
            raise EngineUnavailable(f"model {self.alias} is not available.", retry_after=30)
        self.start()
        raise EngineUnavailable(
            f"model {self.alias} is loading. Try again in a moment.", code="engine_loading", retry_after=2
        )

    @contextmanager
    def _place_in_queue(self, num_new: int) -> Iterator[None]:
        """Hold places while a prompt is read; refuse what would make the queue longer than its bound."""
        num_waiting = len(self._unscheduled) + self._num_in_preparation
        if num_waiting + num_new > self._queue_len():
            raise Overloaded(
                f"{num_waiting:,} answers are waiting already. Try again later.",
                retry_after=self._figures.retry_after(num_waiting, self._config.max_num_seqs),
            )
        self._num_in_preparation += num_new
        try:
            yield
        finally:
            self._num_in_preparation -= num_new

    def _queue_len(self) -> int:
        """How many may wait now: free seats in the batch are no queue."""
        num_seated = len(self._generations) - len(self._unscheduled)
        return self._config.max_waiting + max(0, self._config.max_num_seqs - num_seated)

    async def _in_tokenizer_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, work)


def _sequence_request(
    seq_id: int,
    index: int,
    engine: LoadedEngine,
    request: GenerateRequest,
    prepared: Prepared,
    accepted_at: float,
) -> SequenceRequest:
    """Make the engine's part of one choice; choices differ in their seeds."""
    sampling = prepared.sampling
    assert sampling.seed is not None
    arrived_at = request.arrived_at if request.arrived_at is not None else accepted_at
    seed = (sampling.seed + index) & _MAX_SEED
    return SequenceRequest(
        seq_id=seq_id,
        prompt_token_ids=prepared.prompt.token_ids,
        output_token_ids=shown_token_ids(request, index),
        sampling=replace(sampling, seed=seed),
        salt=request.salt,
        num_public_tokens=prepared.prompt.num_public_tokens,
        eos_token_ids=engine.facts.eos_token_ids,
        arrived_at=arrived_at,
        deadline=None if request.timeout_seconds is None else arrived_at + request.timeout_seconds,
        latency_class=request.latency_class,
        tenant=request.tenant,
    )
