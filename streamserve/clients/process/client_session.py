"""`ClientSession`: this worker's requests to an engine process, over one connection. Event loop of the worker.

The counterpart of `ServerSession`. When the connection is lost, open questions are refused and generations end as
parked: their streams ask again, and the next engine answers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from streamserve.clients.process.frame_socket import Connection
from streamserve.clients.process.messages import (
    TO_WORKER,
    Cancel,
    Control,
    GenerationNews,
    Goodbye,
    News,
    Open,
    Opened,
    ReaderAt,
    Refusal,
    Reply,
    State,
    Tokenize,
    Warm,
    encode,
    error_of,
)
from streamserve.clients.process.supervision import LastFlight
from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.events import Error, Event
from streamserve.protocol.frames import MSGPACK_ERRORS, FrameError, decode_event, encode_event
from streamserve.protocol.requests import GenerateRequest


class ProcessGeneration:
    """See `clients.base.Generation`.

    Its queue of events needs no bound: the engine decodes at most `lead_tokens` beyond its reader; without a reader,
    n * max_tokens is the bound. Queued events stay encoded: with log-probabilities one is four times as large decoded.
    """

    can_park = True

    def __init__(self, request_id: int, accepted: Accepted, session: ClientSession, stream_id: str = "") -> None:
        self.accepted = accepted
        self.parked: Park | None = None
        self.num_cached_tokens = 0
        self.on_news: Callable[[], None] | None = None
        self.is_open = True
        self.stream_id = stream_id
        self._id = request_id
        self._session = session
        self._events: deque[bytes] = deque()
        self._has_news = asyncio.Event()

    def __aiter__(self) -> ProcessGeneration:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if not self.is_open:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        return decode_event(self._events.popleft())

    def ready(self, most: int | None = None) -> list[Event]:
        """Take the events that are there now, or the first `most`, without waiting; [] does not mean the end."""
        num = len(self._events) if most is None else min(most, len(self._events))
        return [decode_event(self._events.popleft()) for _ in range(num)]

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool = False) -> None:
        """Send how far the furthest reader is in each choice."""
        if self.is_open:
            tokens = None if num_tokens is None else tuple(num_tokens)
            self._session.connection.send(encode(ReaderAt(self._id, tokens, is_away)))

    def cancel(self) -> None:
        """End. Once the engine has read this, no step it plans holds the sequences."""
        self.on_news = None
        self._events.clear()
        if self.is_open:
            self.is_open = False
            self._session.generations.pop(self._id, None)
            self._session.connection.send(encode(Cancel(self._id)))
            self._has_news.set()

    def take(self, news: GenerationNews) -> None:
        """Queue events; end with the last of them."""
        self._events.extend(news.events)
        self.num_cached_tokens = news.num_cached_tokens
        if news.is_end:
            self.parked = news.park
            self.is_open = False
        self._has_news.set()
        if self.on_news is not None:
            self.on_news()

    def end(self, *, parked: Park | None = None, error: Error | None = None) -> None:
        """End without the engine: as parked, or with an error."""
        self.parked = parked
        if error is not None:
            self._events.append(encode_event(error))
        self.is_open = False
        self._has_news.set()
        if self.on_news is not None:
            self.on_news()


class ClientSession:
    """One connection's open questions and generations, by id. `on_state` is called with the engine's state."""

    def __init__(self, connection: Connection, on_state: Callable[[State], None]) -> None:
        self.connection = connection
        self.generations: dict[int, ProcessGeneration] = {}
        self.goodbye: str | None = None  # the reason, once the engine has sent one
        self._on_state = on_state
        self._ids = itertools.count(1)
        self._questions: dict[int, asyncio.Future[ProcessGeneration | tuple[int, ...]]] = {}
        self._stream_ids: dict[int, str] = {}  # of the questions

    async def ask(
        self, kind: type[Open] | type[Warm] | type[Tokenize] | type[Control], content: GenerateRequest | str
    ) -> ProcessGeneration | tuple[int, ...]:
        """Send a message with a new id and wait for its answer; raises what the engine refuses it with."""
        request_id = next(self._ids)
        question: asyncio.Future[ProcessGeneration | tuple[int, ...]] = asyncio.get_running_loop().create_future()
        self._questions[request_id] = question
        self._stream_ids[request_id] = content.stream_id if isinstance(content, GenerateRequest) else ""
        try:
            self.connection.send(encode(kind(request_id, content)))  # type: ignore[arg-type]
            return await question
        except FrameError as error:
            raise BadRequest("the request is too large, or holds a number beyond 64 bits.") from error
        except asyncio.CancelledError:
            self.generations.pop(request_id, None)
            self.connection.send(encode(Cancel(request_id)))
            raise
        finally:
            del self._questions[request_id], self._stream_ids[request_id]
            question.cancel()

    def take(self, payload: bytes) -> None:
        """Handle a frame. Messages for ids that are no longer open are ignored. Raises FrameError."""
        try:
            message = TO_WORKER.decode(payload)
        except MSGPACK_ERRORS as error:
            raise FrameError(f"not understood: {error}") from error
        match message:
            case News():
                for news in message.generations:
                    generation = self.generations.get(news.id)
                    if generation is not None:
                        if news.is_end:
                            del self.generations[news.id]
                        generation.take(news)
            case State():
                self._on_state(message)
            case Goodbye():
                self.goodbye = message.reason
            case Opened() | Reply() | Refusal():
                question = self._questions.get(message.id)
                if question is not None and not question.done():
                    self._answer(question, message)

    def close(self, error: Error | None = None, flight: LastFlight | None = None) -> None:
        """Refuse every question, and end every generation: with `error`, or as parked because the engine is lost.

        `flight`: what the engine has left in flight.
        """
        flight = flight or LastFlight()
        for request_id, question in self._questions.items():
            if not question.done():
                refused = EngineUnavailable("the engine is being replaced. Try again.", retry_after=2)
                if self._stream_ids[request_id] in flight.stream_ids:
                    refused.lost = self._lost(self._stream_ids[request_id], flight)
                question.set_exception(refused)
        generations, self.generations = self.generations, {}
        for generation in generations.values():
            generation.end(error=error, parked=None if error is not None else self._lost(generation.stream_id, flight))

    def _lost(self, stream_id: str, flight: LastFlight) -> Park:
        """Return the park of an answer whose engine has ended: not counted after a goodbye, nor for another's step."""
        if self.goodbye is not None:
            return Park(reason="lost", is_counted=False)
        in_flight = flight.stream_ids
        is_counted = not in_flight or not stream_id or stream_id in in_flight
        return Park(reason="lost", is_counted=is_counted, was_alone=in_flight == {stream_id})

    def _answer(
        self, question: asyncio.Future[ProcessGeneration | tuple[int, ...]], message: Opened | Reply | Refusal
    ) -> None:
        match message:
            case Opened():
                generation = self.generations[message.id] = ProcessGeneration(
                    message.id, message.accepted, self, self._stream_ids[message.id]
                )
                question.set_result(generation)
            case Reply():
                question.set_result(message.token_ids)
            case Refusal():
                question.set_exception(error_of(message))
