"""`PipelineGeneration`: the events of one run of a pipeline, as the stream pulls them. On the event loop of its client.

    Run ── emit ──► [ events not taken ] ── ready ──► the stream

A run cannot be continued from its tokens, as an answer of a model can: it is never parked, and it continues while its
readers are away. It makes no more than they may read: `emit` waits while `MAX_WAITING` events are not taken, as in an
outage of the log, and the model is given the readers' position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from streamserve.clients.base import EventQueue
from streamserve.clients.pipeline.shown import Shown
from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.events import Event, is_terminal

MAX_WAITING = 256


class PipelineGeneration(EventQueue):
    """See `Generation` in clients/base.py. `task` is the run's; set by the client once it is started."""

    can_park = False

    def __init__(self, max_tokens: int, seed: int) -> None:
        super().__init__()
        self.accepted = Accepted(num_prompt_tokens=0, max_tokens=max_tokens, seed=seed)
        self.parked: Park | None = None
        self.num_cached_tokens = 0
        self.task: asyncio.Task[None] | None = None
        self.shown: Shown | None = None  # of a job that is tried again: what it does not show again
        self.num_read: int | None = 0  # tokens that the furthest reader has; None: the run does not wait for readers
        self.on_read: Callable[[], None] | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool = False) -> None:
        """Note how many tokens the furthest reader has."""
        self.num_read = None if num_tokens is None else num_tokens[0]
        if self.on_read is not None:
            self.on_read()

    def cancel(self) -> None:
        """End the run at the next point where it waits. Nothing that it emits after this is shown."""
        self.is_open = False
        self._events.clear()
        self._has_room.set()
        if self.task is not None:
            self.task.cancel()

    # For the run

    def put(self, event: Event) -> None:
        """Show an event without waiting. Nothing follows a terminal one. Raises NotRepeatable."""
        if not self.is_open:
            return
        if self.shown is not None:
            rest = self.shown.rest_of(event)
            if rest is None:
                return
            event = rest
        self._events.append(event)
        self.is_open = not is_terminal(event)
        if len(self._events) >= MAX_WAITING:
            self._has_room.clear()
        self._announce()

    def _on_taken(self) -> None:
        if len(self._events) < MAX_WAITING:
            self._has_room.set()

    async def emit(self, event: Event) -> None:
        """Show an event; wait while too many are not taken."""
        await self.room()
        self.put(event)

    async def room(self) -> None:
        """Wait while too many events are not taken."""
        await self._has_room.wait()
