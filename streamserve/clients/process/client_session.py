"""`ClientSession`: this process's requests to an engine process, over one connection. Event loop.

The counterpart of `ServerSession`. When the connection is lost, open questions are refused and generations end as
parked: their streams ask again, and the next engine answers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from streamserve.clients.base import Generation, Source
from streamserve.clients.process.frame_socket import Connection
from streamserve.clients.process.messages import (
    TO_CLIENT,
    Cancel,
    Control,
    Embed,
    GenerationNews,
    Goodbye,
    News,
    Open,
    Opened,
    ReaderAt,
    Refusal,
    Reply,
    Spelling,
    Spelt,
    State,
    Tokenize,
    Vectors,
    Warm,
    encode,
    error_of,
)
from streamserve.clients.process.supervision import LastFlight
from streamserve.protocol.embeddings import Embedded
from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.events import Error, Event
from streamserve.protocol.frames import MSGPACK_ERRORS, FrameError, decode_event, encode_event
from streamserve.protocol.spelling import Spelled

Answer = Generation | tuple[int, ...] | Spelled | Embedded  # to what a client asks


class SocketSource(Source):
    """The events of one request to the engine process, as they come over the session's connection.

    They stay encoded until they are taken: with log-probabilities a decoded event is four times as large. They need no
    bound: the engine decodes at most `lead_tokens` beyond its reader; without a reader, n * max_tokens is the bound.
    """

    def __init__(self, request_id: int, accepted: Accepted, session: ClientSession, stream_id: str = "") -> None:
        super().__init__(accepted)
        self.stream_id = stream_id
        self._id = request_id
        self._session = session
        self._encoded: deque[bytes] = deque()
        self._has_ended = False
        self._park: Park | None = None

    def pull(self, most: int | None) -> list[Event]:
        """Decode what the stream takes; the end follows the last event."""
        num = len(self._encoded) if most is None else min(most, len(self._encoded))
        events = [decode_event(self._encoded.popleft()) for _ in range(num)]
        if self._has_ended and not self._encoded:
            self.generation.close(parked=self._park)
        return events

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool) -> None:
        """Send how far the furthest reader is in each choice."""
        if self._id in self._session.sources:
            tokens = None if num_tokens is None else tuple(num_tokens)
            self._session.connection.send(encode(ReaderAt(self._id, tokens, is_away)))

    def cancel(self) -> None:
        """Send that. Once the engine has read it, no step it plans holds the sequences."""
        self._encoded.clear()
        if self._session.sources.pop(self._id, None) is not None:
            self._session.connection.send(encode(Cancel(self._id)))

    def take(self, news: GenerationNews, sent_at: float | None = None) -> None:
        """Queue events, which left the engine at `sent_at`; end with the last of them."""
        self.generation.sent_at = sent_at
        self._encoded.extend(news.events)
        self.generation.num_cached_tokens = news.num_cached_tokens
        if news.is_end:
            self.end(parked=news.park)
        else:
            self.generation.announce()

    def end(self, *, parked: Park | None = None, error: Error | None = None) -> None:
        """End after what has come: as parked, or with an error."""
        if error is not None:
            self._encoded.append(encode_event(error))
        self._has_ended, self._park = True, parked
        if self._encoded:
            self.generation.announce()
        else:
            self.generation.end(parked=parked)


class ClientSession:
    """One connection's open questions and sources, by id. `on_state` is called with the engine's state."""

    def __init__(self, connection: Connection, on_state: Callable[[State], None]) -> None:
        self.connection = connection
        self.sources: dict[int, SocketSource] = {}
        self.goodbye: str | None = None  # the engine's reason, once it has sent that
        self.is_open = True
        self.has_state = self.was_ready = False  # the engine has sent its state; was loaded in one of its states
        self._on_state = on_state
        self._ids = itertools.count(1)
        self._questions: dict[int, asyncio.Future[Answer]] = {}
        self._stream_ids: dict[int, str] = {}  # of the questions

    async def ask(
        self, message: Callable[[int], Open | Warm | Tokenize | Spelling | Embed | Control], *, stream_id: str = ""
    ) -> Answer:
        """Send the message made with a new id and wait for its answer; raises what the engine refuses it with.

        `stream_id`: of the stream that asks, as the engine reports it of its steps.
        """
        request_id = next(self._ids)
        question: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions[request_id] = question
        self._stream_ids[request_id] = stream_id
        try:
            self.connection.send(encode(message(request_id)))
            return await question
        except FrameError as error:
            raise BadRequest("the request is too large, or holds a number beyond 64 bits.") from error
        except asyncio.CancelledError:
            self.sources.pop(request_id, None)
            self.connection.send(encode(Cancel(request_id)))
            raise
        finally:
            del self._questions[request_id], self._stream_ids[request_id]
            question.cancel()

    def wake(self) -> None:
        """Have a sleeping engine loaded; its states show that."""
        self.connection.send(encode(Control(next(self._ids), "wake")))

    def take(self, payload: bytes) -> None:
        """Handle a frame. Messages for ids that are no longer open are ignored. Raises FrameError."""
        try:
            message = TO_CLIENT.decode(payload)
        except MSGPACK_ERRORS as error:
            raise FrameError(f"not understood: {error}") from error
        match message:
            case News():
                for news in message.generations:
                    source = self.sources.get(news.id)
                    if source is not None:
                        if news.is_end:
                            del self.sources[news.id]
                        source.take(news, message.sent_at)
            case State():
                self.has_state = True
                self.was_ready = self.was_ready or message.description.state not in ("loading", "failed")
                self._on_state(message)
            case Goodbye():
                self.goodbye = message.reason
            case Opened() | Reply() | Spelt() | Vectors() | Refusal():
                question = self._questions.get(message.id)
                if question is not None and not question.done():
                    self._answer(question, message)

    def close(self, error: Error | None = None, flight: LastFlight | None = None) -> None:
        """Refuse every question, and end every generation: with `error`, or as parked because the engine is lost.

        `flight`: what the engine has left in flight.
        """
        flight, self.is_open = flight or LastFlight(), False
        for request_id, question in self._questions.items():
            if not question.done():
                refused = EngineUnavailable("the engine is being replaced. Try again.", retry_after=2)
                if self._stream_ids[request_id] in flight.stream_ids:
                    refused.lost = self._lost(self._stream_ids[request_id], flight)
                question.set_exception(refused)
        sources, self.sources = self.sources, {}
        for source in sources.values():
            source.end(error=error, parked=None if error is not None else self._lost(source.stream_id, flight))

    def _lost(self, stream_id: str, flight: LastFlight) -> Park:
        """Return the park of an answer whose engine has ended: not counted after a goodbye, nor for another's step."""
        if self.goodbye is not None:
            return Park(reason="lost", is_counted=False)
        in_flight = flight.stream_ids
        is_counted = not in_flight or not stream_id or stream_id in in_flight
        return Park(reason="lost", is_counted=is_counted, was_alone=in_flight == {stream_id})

    def _answer(self, question: asyncio.Future[Answer], message: Opened | Reply | Spelt | Vectors | Refusal) -> None:
        match message:
            case Opened():
                source = SocketSource(message.id, message.accepted, self, self._stream_ids[message.id])
                self.sources[message.id] = source
                question.set_result(source.generation)
            case Reply():
                question.set_result(message.token_ids)
            case Spelt():
                question.set_result(message.spelled)
            case Vectors():
                question.set_result(message.embedded)
            case Refusal():
                question.set_exception(error_of(message))
