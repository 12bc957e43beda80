"""`OutputRouter`: which generation each sequence belongs to, in both directions.

Engine thread to loops: a step's updates go to the generations with one `call_soon_threadsafe` per step and loop.
Loops to engine thread: what a generation requests for its sequences goes to the core. (Idea: transformers'
OutputRouter, one wake per step for all requests.)
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from streamserve.clients.thread.admission import AdmissionControl, RecentTimings
from streamserve.clients.thread.engine_thread import EngineThread
from streamserve.clients.thread.generation import LocalGeneration, error_event
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.sequence import SequenceRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OutputRouter:
    """The listener of an `EngineThread`, and the `EngineSide` of its generations. It knows a sequence until its end."""

    def __init__(self, thread: EngineThread, admission: AdmissionControl, timings: RecentTimings) -> None:
        self._thread = thread
        self._admission = admission
        self._timings = timings
        self._generations: dict[int, LocalGeneration] = {}
        thread.listener = self

    def __len__(self) -> int:
        return len(self._generations)

    def add(self, generation: LocalGeneration, sequence: SequenceRequest) -> None:
        """Route a sequence's updates to `generation`. Called before the core gets the sequence."""
        self._generations[sequence.seq_id] = generation
        num_tokens = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        self._admission.add(sequence.seq_id, num_tokens, sequence.latency_class, sequence.tenant)

    # Called by generations, on their loop. The thread may rest, while all sequences wait for their readers.

    def abort(self, seq_id: int) -> None:
        """End a sequence: no step planned later holds it."""
        self._generations.pop(seq_id, None)
        self._admission.remove(seq_id)
        if self._thread.core is not None:
            self._thread.core.abort(seq_id)
            self._thread.wake()

    def stop(self, seq_id: int, at: int) -> None:
        """End a sequence after `at` output tokens."""
        self._generations.pop(seq_id, None)
        self._admission.remove(seq_id)
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
        """Pass a step's updates to the loops of their generations: one wake per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[SequenceUpdate]] = defaultdict(list)
        for update in updates:
            generation = self._generations.get(update.seq_id)
            if generation is not None:
                by_loop[generation.loop].append(update)
        for loop, mine in by_loop.items():
            self._call(loop, self._deliver, mine)

    def on_end(self, code: str) -> None:
        """End every open generation with an error: the engine is gone."""
        for generation in set(self._generations.copy().values()):
            self._call(generation.loop, generation.fail, error_event(code))

    def _call(self, loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
        try:
            loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed, and its generations cannot be read any more
            for seq_id, generation in self._generations.copy().items():
                if generation.loop is loop:
                    self.abort(seq_id)

    # Called on the loop that `on_updates` woke.

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            generation = self._generations.get(update.seq_id)
            if generation is None:
                continue
            self._admission.note(update)
            self._timings.note(update)
            if update.is_last:
                del self._generations[update.seq_id]
                self._admission.remove(update.seq_id)
            try:
                generation.take(update)
            except Exception:  # the edge of one request: its text side failed, the other requests are not affected
                logger.exception("text of sequence %d failed", update.seq_id)
                generation.fail(error_event("internal_error"))
            is_answer = generation.accepted.max_tokens > 0  # otherwise its prompt was only to be cached
            if is_answer and not generation.is_open and generation.timings.scheduled_at is not None:
                self._timings.note_finished(
                    generation.timings.breakdown(),
                    is_whole=generation.is_whole,
                    latency_class=generation.latency_class,
                )
