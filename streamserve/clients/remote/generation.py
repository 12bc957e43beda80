"""`RemoteGeneration`: one answer that a server elsewhere makes, as the events that its stream pulls.

    server ─► socket ─► exchange (exchange.py) ─► put ─► queue ─► ready ─► log
                           ▲ not read while the queue is full, or the reader is `lead_tokens` behind

Not reading is the back-pressure: the server's socket fills, and TCP holds the server. Lives on the event loop. Its
queue holds `MAX_QUEUED` events, and those of one read more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from streamserve.clients.base import EventQueue
from streamserve.clients.remote.answer import Answer
from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.events import TERMINALS, Error, Event

MAX_QUEUED = 64


class RemoteGeneration(EventQueue):
    """See `clients.base.Generation`. `continues`: the server takes up an answer that has only text so far."""

    def __init__(
        self,
        accepted: Accepted,
        answer: Answer,
        *,
        continues: bool,
        lead_tokens: int,
        reader_tokens: tuple[int, ...] | None,
    ) -> None:
        super().__init__()
        self.accepted = accepted
        self.answer = answer
        self.parked: Park | None = None
        self.num_cached_tokens = 0
        self.task: asyncio.Task[None] | None = None  # of the exchange; the client owns it
        self._continues = continues
        self._lead_tokens = lead_tokens
        self._reader_tokens = reader_tokens
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def can_park(self) -> bool:
        """Whether the server would continue the answer as it is now."""
        return self.answer.num_tokens == 0 or (self._continues and self.answer.is_text_only)

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool = False) -> None:
        """Note how far the furthest reader is; one that has read enough lets the server be read from again."""
        self._reader_tokens = None if num_tokens is None else tuple(num_tokens)
        self._note_room()

    def cancel(self) -> None:
        """End without a terminal event: the connection is closed by the loop's next turn."""
        self.on_news = None
        self._events.clear()
        self._end()

    # For the exchange

    @property
    def has_room(self) -> bool:
        """Whether more is to be read from the server."""
        return len(self._events) < MAX_QUEUED and not self.is_ahead

    async def wait_for_room(self) -> None:
        """Wait until more is to be read."""
        while not self.has_room:
            self._has_room.clear()
            await self._has_room.wait()

    def put(self, events: Sequence[Event]) -> None:
        """Add events; a terminal one ends the generation."""
        if not self.is_open or not events:
            return
        self._events.extend(events)
        if self.answer.usage is not None:
            self.num_cached_tokens = self.answer.usage.cached_tokens
        if isinstance(events[-1], TERMINALS):
            self._end(cancel=False)
        self._announce()

    def fail(self, code: str, message: str, *, retryable: bool = True) -> None:
        """End with an error, unless it has ended already."""
        self.put([Error(code=code, message=message, retryable=retryable)])

    def park(self, park: Park) -> None:
        """End so that the stream asks again with what it has."""
        if self.is_open:
            self.parked = park
            self._end(cancel=False)
            self._announce()

    @property
    def is_ahead(self) -> bool:
        """Whether a choice is as far ahead of its reader as it may be."""
        read = self._reader_tokens
        if read is None:
            return False
        return any(
            made - seen >= self._lead_tokens for made, seen in zip(self.answer.tokens_of_choices, read, strict=False)
        )

    def _on_taken(self) -> None:
        self._note_room()

    def _note_room(self) -> None:
        if self.has_room:
            self._has_room.set()

    def _end(self, *, cancel: bool = True) -> None:
        if not self.is_open:
            return
        self.is_open = False
        if cancel and self.task is not None:
            self.task.cancel()
        self._has_news.set()
