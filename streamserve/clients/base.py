"""The interface to an engine for the rest of the site: `EngineClient` and `Generation`; `EventQueue` is a part of one.

asyncio; every method is called on the event loop. Implementations: thread (this process), process, remote, pipeline.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self

from streamserve.protocol.engine import Accepted, EngineStats, ModelDescription, Park
from streamserve.protocol.events import Event
from streamserve.protocol.requests import GenerateRequest


class Generation(Protocol):
    """One accepted request: an async iterator of events that ends after `Done` or `Error`.

    It also ends, without either, after `cancel()`, and when the engine has parked the sequences: `parked` then has
    the reason, and when to ask again with the tokens so far. `num_cached_tokens`: found in the prefix cache, as far as
    known by now; after a resume shown output tokens may be among them.

    `can_park` is False while no new request could continue it after a `cancel`: its reader's return is waited for.

    `on_news` is called on the loop when there are events to take after `ready` or `__anext__` left none, and at the
    end, but not for `cancel`. Events that came before it was set are there already: the caller takes them first.
    """

    accepted: Accepted
    on_news: Callable[[], None] | None

    @property
    def parked(self) -> Park | None:
        """Why the engine has parked it, and when to ask again; None unless it has."""

    @property
    def num_cached_tokens(self) -> int:
        """How many prompt tokens were found in the prefix cache."""

    @property
    def can_park(self) -> bool:
        """Whether a request with what was shown so far would continue it."""

    @property
    def is_open(self) -> bool:
        """Whether more may come, after what is there now."""

    def __aiter__(self) -> Generation: ...

    async def __anext__(self) -> Event: ...

    def ready(self, most: int | None = None) -> list[Event]:
        """Take the events that are there now, or the first `most`, without waiting; [] does not mean the end."""

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool = False) -> None:
        """Set how many output tokens of each choice the furthest reader has received; None: do not wait for readers.

        The engine measures the reader's pace by these calls, and parks a sequence that is `lead_tokens` ahead.
        `is_away`: the reader does not look at the answer now, as in a hidden tab. Never blocks.
        """

    def cancel(self) -> None:
        """End. Synchronous and idempotent: once it returns, no StepPlan built later holds the sequences."""


class EngineClient(Protocol):
    """One model's engine."""

    alias: str

    async def generate(self, request: GenerateRequest) -> Generation:
        """Accept the request or raise: BadRequest (never fits, bad template), Refused (not now)."""

    async def tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's token ids as `generate` would see them."""

    async def warm(self, request: GenerateRequest) -> None:
        """Prefill the prompt into the prefix cache, while there is nothing else to do, and generate nothing.

        Raises StreamserveError if that could not be done.
        """

    def start(self) -> None:
        """Start loading, once; returns at once."""

    async def control(self, action: str) -> None:
        """Carry out an operator's action, for all workers of this engine; returns when it has taken effect.

        "pause" parks every sequence and refuses all until "resume". "drain" refuses new requests and finishes the open
        answers, parks in between included ("resume" takes it back).
        """

    def describe(self) -> ModelDescription:
        """Return what the model is and how far loading has come. Never blocks."""

    def stats(self) -> EngineStats:
        """Return live counts. Never blocks."""

    async def aclose(self) -> None:
        """End every generation with an `error` event and free the engine."""


_LOADED_SECONDS = 0.1  # how often `until_loaded` looks


async def until_loaded(client: EngineClient, seconds: float) -> None:
    """Start loading, and return when the model is loaded, has failed to load, or after `seconds`."""
    client.start()
    until = time.monotonic() + seconds
    while client.describe().is_loading and time.monotonic() < until:  # noqa: ASYNC110  (loading has no event)
        await asyncio.sleep(_LOADED_SECONDS)


class EventQueue:
    """The events of a generation that its stream has not taken: the base of those that make theirs in this process.

        the producing side ── _events, _announce ──► on_news, once ──► the stream ── ready ──► nothing left

    They bound the queue. See `Generation` for `on_news` and the iteration.
    """

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
