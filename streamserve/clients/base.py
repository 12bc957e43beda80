"""The interface to an engine for the rest of the site: `EngineClient`, and `Generation`, its answer to one request.

There is one `Generation`, with one queue of events, over a `Source` of each kind:

    client      runs where                       its source
    thread/     a thread of this process         SequenceSource: updates of the engine's sequences
    process/    a process of this machine        SocketSource: frames of a unix socket
    remote/     a server elsewhere               HTTPSource: an event stream over HTTP
    pipeline/   this loop, over other clients    RunSource: what an author's function shows
    filtered    this loop, over another client   FilterSource: another generation's events, through filters

asyncio; every method is called on the event loop. Knows no stream, no reader and no transport.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self

from streamserve.protocol.embeddings import Embedded, EmbedRequest
from streamserve.protocol.engine import AWAITS_MEMORY, Accepted, EngineStats, ModelDescription, Park
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.events import TERMINALS, Event
from streamserve.protocol.requests import NO_CALLER, START, Admission, GenerateRequest, Resume
from streamserve.protocol.spelling import Spell, Spelled


class Source:
    """Where the events of one generation come from; the base of every kind: engine thread, socket, HTTP, run, filter.

        engine, server, run ── Source ── put, end, announce ──► Generation ── ready ──► its stream
                                 ▲── reader_at, cancel, pull ──────┘

    It makes its generation, and owns what the answer costs: sequences, a connection, a task. It knows no stream.
    """

    def __init__(self, accepted: Accepted, *, max_queued: int | None = None) -> None:
        self.generation = Generation(accepted, self, max_queued=max_queued)

    @property
    def can_park(self) -> bool:
        """Whether a request with what was shown so far would continue the answer."""
        return True

    def pull(self, most: int | None) -> list[Event]:
        """Return up to `most` events that this source holds back in a form of its own; None: all of them.

        A source that has put everything returns []. It may call `Generation.close` here.
        """
        return []

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool) -> None:
        """Follow the reader; see `Generation.reader_at`. Never blocks."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Free what the answer costs: it is not wanted any more. Synchronous; called once, while it is open."""
        raise NotImplementedError


class Generation:
    """One accepted request: an async iterator of events that ends after `Done` or `Error`.

    It also ends, without either, after `cancel()`, and when the engine has parked the sequences: `parked` then has
    the reason, and when to ask again with the tokens so far. `num_cached_tokens`: found in the prefix cache, as far as
    known by now; after a resume shown output tokens may be among them.

    `on_news` is called on the loop when there are events to take after `ready` or `__anext__` left none, and at the
    end, but not for `cancel`. Events that came before it was set are there already: the caller takes them first.
    `is_open` is False when nothing comes after the events that are there. `sent_at`: when its newest events left the
    engine's process, on the machine's monotonic clock; None where no other process of this machine makes them.

    The queue has the bound `max_queued`, which its source keeps by `room`. Without a bound, acceptance bounds it: by
    the prompt's text and n * max_tokens. One event loop.
    """

    def __init__(self, accepted: Accepted, source: Source, *, max_queued: int | None = None) -> None:
        self.accepted = accepted
        self.parked: Park | None = None
        self.num_cached_tokens = 0
        self.sent_at: float | None = None
        self.is_open = True
        self.on_news: Callable[[], None] | None = None
        self._source = source
        self._max_queued = max_queued
        self._events: deque[Event] = deque()
        self._is_announced = False  # `on_news` was called, and not everything is taken
        self._has_news, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()

    # For the stream, or whatever else reads the answer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not (events := self.ready(1)):
            if not self.is_open:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        return events[0]

    def ready(self, most: int | None = None) -> list[Event]:
        """Take the events that are there now, or the first `most`, without waiting; [] does not mean the end."""
        if most is None or len(self._events) < most:
            self._queue(self._source.pull(None if most is None else most - len(self._events)))
        num = len(self._events) if most is None else min(most, len(self._events))
        events = [self._events.popleft() for _ in range(num)]
        self._is_announced = bool(self._events)
        if not self.is_full:
            self._has_room.set()
        return events

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool = False) -> None:
        """Set how many output tokens of each choice the furthest reader has received; None: do not wait for readers.

        The engine measures the reader's pace by these calls, and parks a sequence that is `lead_tokens` ahead.
        `is_away`: the reader does not look at the answer now, as in a hidden tab. Never blocks.
        """
        self._source.reader_at(num_tokens, is_away)

    def cancel(self) -> None:
        """End. Synchronous and idempotent: once it returns, no StepPlan built later holds the sequences."""
        self.on_news = None
        self._events.clear()
        if self.is_open:
            self.is_open = False
            self._source.cancel()
        self._has_news.set()
        self._has_room.set()

    @property
    def can_park(self) -> bool:
        """Whether a new request could continue it after a `cancel`; otherwise its reader's return is waited for."""
        return self._source.can_park

    # For the source

    def put(self, events: Sequence[Event]) -> None:
        """Add events; nothing follows a terminal event."""
        if self.is_open and events:
            self._queue(events)
            self.announce()

    def end(self, events: Sequence[Event] = (), *, parked: Park | None = None) -> None:
        """Add the last events, and end: without a terminal event among them the answer is `parked`."""
        if self.is_open:
            self._queue(events)
            self.close(parked=parked)
            self.announce()

    def close(self, *, parked: Park | None = None) -> None:
        """Note in `pull` that nothing follows what is returned there."""
        self.is_open, self.parked = False, parked

    def announce(self) -> None:
        """Wake the stream: once until everything is taken, and at the end. Also for what `pull` will return."""
        self._has_news.set()
        if self.on_news is not None and (not self._is_announced or not self.is_open):
            self._is_announced = True
            self.on_news()

    @property
    def is_full(self) -> bool:
        """Whether the bound of the queue is reached."""
        return self._max_queued is not None and len(self._events) >= self._max_queued

    async def room(self) -> None:
        """Wait while the queue is full."""
        while self.is_full:
            self._has_room.clear()
            await self._has_room.wait()

    def _queue(self, events: Iterable[Event]) -> None:
        self._events.extend(events)
        if self._events and isinstance(self._events[-1], TERMINALS):
            self.is_open = False


class EngineClient(Protocol):
    """One model's engine."""

    alias: str

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        """Accept the request or raise: BadRequest (never fits, bad template), Refused (not now).

        With `resume` the answer continues there.
        """

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the prompt's token ids as `generate` would see them."""

    async def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids. Raises BadRequest where its tokenizer is elsewhere."""

    async def warm(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> None:
        """Prefill the prompt into the prefix cache, while there is nothing else to do, and generate nothing.

        Raises StreamserveError if that could not be done.
        """

    def start(self) -> None:
        """Start loading, once; returns at once. A model that sleeps stays asleep."""

    def wake(self) -> None:
        """Start loading, a model that sleeps too; returns at once."""

    async def control(self, action: str) -> None:
        """Carry out an operator's action, for all processes that use this engine; returns when it has taken effect.

        "pause" parks every sequence and refuses all until "resume". "drain" refuses new requests and finishes the open
        answers, parks in between included ("resume" takes it back). "sleep" and "wake" are for engine processes.
        """

    def describe(self) -> ModelDescription:
        """Return what the model is and how far loading has come. Never blocks."""

    def stats(self) -> EngineStats:
        """Return live counts. Never blocks."""

    async def aclose(self) -> None:
        """End every generation with an `error` event and free the engine."""


class WrappedClient:
    """An `EngineClient` that is another, but for what a subclass does otherwise."""

    def __init__(self, client: EngineClient) -> None:
        self.alias = client.alias
        self._client = client

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        """Accept the request, as the client does."""
        return await self._client.generate(request, admission, resume)

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the prompt's token ids."""
        return await self._client.tokenize(request, admission)

    async def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids."""
        return await self._client.spell(asked)

    async def warm(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> None:
        """Prefill the prompt into the prefix cache."""
        await self._client.warm(request, admission)

    def start(self) -> None:
        """Start loading the model."""
        self._client.start()

    def wake(self) -> None:
        """Wake the model."""
        self._client.wake()

    async def control(self, action: str) -> None:
        """Carry out an operator's action."""
        await self._client.control(action)

    def describe(self) -> ModelDescription:
        """Return the model's state."""
        return self._client.describe()

    def stats(self) -> EngineStats:
        """Return the engine's counts."""
        return self._client.stats()

    async def aclose(self) -> None:
        """End every generation and free the engine."""
        await self._client.aclose()


class EmbeddingClient(Protocol):
    """One embedding model."""

    alias: str

    async def embed(self, request: EmbedRequest, admission: Admission = NO_CALLER) -> Embedded:
        """Return the vectors, or raise: BadRequest (an input never fits), Refused (not now).

        Cancelled, the request is withdrawn: what of it was not computed yet never is.
        """

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the ids of a request's `prompt`, as `embed` would see them."""

    async def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids."""

    def start(self) -> None:
        """Start loading, once; returns at once. A model that sleeps stays asleep."""

    def wake(self) -> None:
        """Start loading, a model that sleeps too; returns at once."""

    async def control(self, action: str) -> None:
        """Pause, resume or drain, for all processes that use this model."""

    def describe(self) -> ModelDescription:
        """Return what the model is and how far loading has come. Never blocks."""

    def stats(self) -> EngineStats:
        """Return live counts. Never blocks."""

    async def aclose(self) -> None:
        """Refuse what waits, and free the model."""


_LOADED_SECONDS = 0.1  # how often `until_loaded` looks


async def until_loaded(client: EngineClient | EmbeddingClient, seconds: float) -> None:
    """Start loading, and return when the model is loaded, has failed to load, or after `seconds`."""
    until = time.monotonic() + seconds
    client.wake()
    while client.describe().is_loading and time.monotonic() < until:
        await asyncio.sleep(_LOADED_SECONDS)
        client.wake()  # it may have gone to sleep again


def not_loaded(model: ModelDescription) -> EngineUnavailable:
    """Return the refusal of a request whose model is being loaded."""
    if model.stage.startswith(AWAITS_MEMORY):
        return EngineUnavailable(
            f"model {model.alias} is {model.stage}: other models answer. Try again later.",
            code="model_waiting_for_memory",
            retry_after=5,
        )
    return EngineUnavailable(
        f"model {model.alias} is loading. Try again in a moment.", code="engine_loading", retry_after=2
    )
