"""`EventQueue`: the events of a generation that its stream has not taken. On one event loop.

    the producing side ── _events, _announce ──► on_news, once ──► the stream ── ready ──► nothing left

The base of generations that make their events in this process: thread, remote, pipeline. They bound the queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Self

from streamserve.protocol.events import Event


class EventQueue:
    """See `Generation` in clients/base.py for `on_news`, `is_open` and the iteration."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.is_open = True
        self.on_news: Callable[[], None] | None = None
        self._events: deque[Event] = deque(events)
        self._has_news = asyncio.Event()
        self._is_announced = False  # `on_news` was called, and not everything is taken

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if not self.is_open:
                raise StopAsyncIteration
            self._is_announced = False
            self._has_news.clear()
            await self._has_news.wait()
        return self.ready(1)[0]

    def ready(self, most: int | None = None) -> list[Event]:
        """Take the events that are there now, or the first `most`; [] does not mean the end (`is_open` does)."""
        num = len(self._events) if most is None else min(most, len(self._events))
        events = [self._events.popleft() for _ in range(num)]
        self._is_announced = bool(self._events)
        self._on_taken()
        return events

    def _on_taken(self) -> None:
        """Let the producing side go on, if it waits for room."""

    def _announce(self) -> None:
        """Wake the stream: once until everything is taken, and at the end."""
        self._has_news.set()
        if self.on_news is not None and (not self._is_announced or not self.is_open):
            self.on_news()
        self._is_announced = True
