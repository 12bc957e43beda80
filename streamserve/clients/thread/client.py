"""`ThreadClient`: an engine on a thread of this process. For tests, notebooks, and inside the engine's own process.

Three kinds of threads meet here. The event loop accepts requests and turns updates into events. A small pool renders
and tokenises. The engine thread steps; `OutputRouter` carries what passes between it and the loops: it knows which
source each sequence belongs to, in both directions.

Engine thread to loops: a step's updates go to the sources with one `call_soon_threadsafe` per step and loop.
Loops to engine thread: what a source requests for its sequences goes to the core. (Idea: transformers'
OutputRouter, one wake per step for all requests.)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TypeVar

from streamserve.clients.base import Generation, not_loaded
from streamserve.clients.thread.acceptance import LoadedEngine, encode, prepare
from streamserve.clients.thread.admission import AdmissionControl
from streamserve.clients.thread.engine_thread import EngineThread, Load
from streamserve.clients.thread.grammar import constrain
from streamserve.clients.thread.source import SequenceSource, error_event
from streamserve.clients.timings import RecentTimes, RequestTimes
from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.grammar.compiler import NUM_PROVERS
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import OnStep, StepPlan
from streamserve.engine.text.spelling import spell
from streamserve.protocol.engine import EngineStats, ModelDescription
from streamserve.protocol.errors import BadRequest, EngineUnavailable, error_for
from streamserve.protocol.events import Error
from streamserve.protocol.requests import LATENCY_CLASSES, NO_CALLER, START, Admission, GenerateRequest, Resume
from streamserve.protocol.spelling import Spell, Spelled

# Rendering is Python, tokenising releases the GIL: with two threads, one long prompt or chat does not block the short
# ones.
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
        loads_at_once: bool = False,
    ) -> None:
        self.alias = alias
        self._config = config or EngineConfig()
        self._clock = clock
        self._thread = EngineThread(alias, load, self._config, clock, on_plan, on_step, loads_at_once=loads_at_once)
        self._times = RecentTimes(clock)
        self._admission = AdmissionControl(self._config, self._times, clock)
        self._router = OutputRouter(self._thread, self._times)
        self._seq_ids = itertools.count(1)
        self._operator_state = "ready"  # the state of a loaded engine, by the last action of an operator
        self._tokenizers = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix=f"tokenize-{alias}")
        self._compilers = ThreadPoolExecutor(NUM_PROVERS, thread_name_prefix=f"grammar-{alias}")

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        """Accept the request or raise: BadRequest (never fits, bad template), Refused (not now)."""
        engine, core = self._require_engine(resume)
        accepted_at = self._clock()
        if admission.arrived_at is None:
            admission = replace(admission, arrived_at=accepted_at)
        loop = asyncio.get_running_loop()
        may_refuse = not (resume.was_admitted or resume.has_tokens)  # what was accepted once may wait
        with self._admission.reserve(core, request.n, request.latency_class, admission.share_of, may_refuse=may_refuse):
            prepared = await loop.run_in_executor(
                self._tokenizers, prepare, engine, self._config, request, admission, resume
            )
            if prepared.grammar is not None:  # on threads of its own, as it may take seconds
                prepared = await loop.run_in_executor(self._compilers, constrain, engine, prepared)
        # Nothing is awaited from here on, so that the checks still hold when the sequences are added.
        _, core = self._require_engine(resume)
        queue_position, queue_seconds = self._admission.check_wait(
            core,
            request.latency_class,
            tenant=admission.share_of,
            num_tokens=len(prepared.prompt.token_ids),
            waited_seconds=admission.waited_seconds if may_refuse else 0.0,  # spent, once it was accepted
            may_refuse=may_refuse,
        )
        choices = {next(self._seq_ids): choice for choice in prepared.choices}
        source = SequenceSource(
            prepared.accepted(queue_position),
            choices,
            times=RequestTimes(accepted_at, request.latency_class),
            engine=self._router,
            echoes=prepared.echoes,
            first_scored=prepared.first_scored,
        )
        for seq_id, choice in choices.items():
            sequence = prepared.sequence_request(seq_id, choice.index, queue_seconds)
            self._router.add(source, seq_id)
            core.add(sequence)
            if choice.stopped_at is not None:  # resumed after its stop string
                core.stop(seq_id, choice.stopped_at)
        self._thread.wake()
        # Invariant: an engine that ended before it could see this generation ends it here.
        if self._thread.end_code is not None:
            source.fail(error_event(self._thread.end_code))
        return source.generation

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the prompt's token ids as `generate` would see them."""
        engine, core = self._require_engine()
        with self._admission.reserve(core, 1, request.latency_class, admission.share_of):
            loop = asyncio.get_running_loop()
            prompt = await loop.run_in_executor(self._tokenizers, encode, engine, request)
        return prompt.token_ids

    async def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids."""
        engine, core = self._require_engine()
        with self._admission.reserve(core, 1, LATENCY_CLASSES[0]):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._tokenizers, spell, engine.tokenizer, asked)

    async def warm(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> None:
        """Prefill the prompt into the prefix cache and generate nothing. It delays no answer, and counts as none.

        Returns when that is done. Raises StreamserveError if it is not: the engine was never idle, paused, or failed.
        """
        generation = await self.generate(request.of_prefill(), admission)
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
        """Start loading, once; returns at once, or loaded (`loads_at_once`)."""
        self._thread.start()

    def wake(self) -> None:
        """Do `start`."""
        self.start()

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
        return self._thread.loading.description.state == "failed"

    def describe(self) -> ModelDescription:
        """Return what the model is and how far loading has come. Never blocks."""
        description = self._thread.loading.describe()
        return replace(description, state=self._operator_state) if description.state == "ready" else description

    def stats(self) -> EngineStats:
        """Return live counts. Never blocks."""
        core = self._thread.core
        counts = asdict(core.stats) if core is not None else {}
        return EngineStats(
            **counts,
            tokens_per_second=self._times.tokens_per_second(),
            latency=self._times.latency(),
            refused=self._times.num_refused,
            classes=self._times.by_class(self._config.classes),
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

    def _require_engine(self, resume: Resume | None = None) -> tuple[LoadedEngine, EngineCore]:
        """Return the engine; refuse while it has failed, is not loaded (loading starts), or an operator closed it."""
        self.start()
        engine, core = self._thread.engine, self._thread.core
        if engine is None or core is None or self._thread.loading.description.state != "ready":
            self._refuse_failed()
            raise not_loaded(self._thread.loading.describe())
        state = self._operator_state
        if resume is None or state == "ready" or (state == "draining" and resume.has_tokens):
            return engine, core
        raise EngineUnavailable(
            f"model {self.alias} {_REFUSALS[state]} Try again later.",
            code=f"engine_{state}",
            retry_after=_OPERATOR_RETRY_SECONDS,
        )

    def _refuse_failed(self) -> None:
        if self.has_failed:
            raise EngineUnavailable(f"model {self.alias} is not available.", retry_after=30)


logger = logging.getLogger(__name__)

T = TypeVar("T")


class OutputRouter:
    """The listener of an `EngineThread`, and the `EngineSide` of its sources. It knows a sequence until its end."""

    def __init__(self, thread: EngineThread, times: RecentTimes) -> None:
        self._thread = thread
        self._times = times
        self._sources: dict[int, SequenceSource] = {}
        thread.listener = self

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, source: SequenceSource, seq_id: int) -> None:
        """Route a sequence's updates to `source`. Called before the core gets the sequence."""
        self._sources[seq_id] = source

    # Called by sources, on their loop. The thread may rest, while all sequences wait for their readers.

    def abort(self, seq_id: int) -> None:
        """End a sequence: no step planned later holds it."""
        self._sources.pop(seq_id, None)
        if self._thread.core is not None:
            self._thread.core.abort(seq_id)
            self._thread.wake()

    def stop(self, seq_id: int, at: int) -> None:
        """End a sequence after `at` output tokens."""
        self._sources.pop(seq_id, None)
        if self._thread.core is not None:
            self._thread.core.stop(seq_id, at)
            self._thread.wake()

    def reader_at(self, seq_id: int, num_tokens: int | None, is_away: bool = False) -> None:
        """Pass a reader's position to the core."""
        if self._thread.core is not None:
            self._thread.core.reader_at(seq_id, num_tokens, is_away)
            self._thread.wake()

    # Called on the engine thread.

    def on_updates(self, updates: tuple[SequenceUpdate, ...]) -> None:
        """Pass a step's updates to the loops of their sources: one wake per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[SequenceUpdate]] = defaultdict(list)
        for update in updates:
            source = self._sources.get(update.seq_id)
            if source is not None:
                by_loop[source.loop].append(update)
        for loop, mine in by_loop.items():
            self._call(loop, self._deliver, mine)

    def on_end(self, code: str) -> None:
        """End every open generation with an error: the engine is gone."""
        for source in set(self._sources.copy().values()):
            self._call(source.loop, source.fail, error_event(code))

    def _call(self, loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
        try:
            loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed, and its generations cannot be read any more
            for seq_id, source in self._sources.copy().items():
                if source.loop is loop:
                    self.abort(seq_id)

    # Called on the loop that `on_updates` woke.

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            source = self._sources.get(update.seq_id)
            if source is None:
                continue
            self._times.note(update.at, len(update.token_ids))
            if update.is_last:
                del self._sources[update.seq_id]
            if update.error == "queue_timeout":
                self._times.note_refused(source.times.latency_class, has_waited=True)
            try:
                source.take(update)
            except Exception:  # the edge of one request: its text side failed, the other requests are not affected
                logger.exception("text of sequence %d failed", update.seq_id)
                source.fail(error_event("internal_error"))
            generation = source.generation
            is_answer = generation.accepted.max_tokens > 0  # otherwise its prompt was only to be cached
            if is_answer and not generation.is_open and source.times.scheduled_at is not None:
                self._times.note_finished(
                    source.times.breakdown(), is_whole=source.is_whole, latency_class=source.times.latency_class
                )
