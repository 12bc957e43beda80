"""`ServerSession`: the requests of one client, on the engine's side. Event loop of the engine process.

Holds the client's open generations and sends their events as frames. Knows the engine by its `ThreadClient`, or
`ThreadEmbedder`, no stream.

It lives as long as its connection; when that is lost, everything the client has open here is cancelled at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from streamserve.clients.base import Generation
from streamserve.clients.process.frame_socket import Connection
from streamserve.clients.process.messages import (
    TO_ENGINE,
    Cancel,
    Control,
    Embed,
    GenerationNews,
    News,
    Open,
    Opened,
    ReaderAt,
    Refusal,
    Reply,
    Spelling,
    Spelt,
    ToClient,
    Tokenize,
    Vectors,
    Warm,
    encode,
    refusal,
)
from streamserve.clients.thread.client import ThreadClient
from streamserve.clients.thread.embedder import ThreadEmbedder
from streamserve.protocol.errors import EngineUnavailable, StreamserveError
from streamserve.protocol.events import Event
from streamserve.protocol.frames import MSGPACK_ERRORS, FrameError, encode_event

logger = logging.getLogger(__name__)

# Events to a frame: with the most log-probabilities there can be, still well under the limit of a frame.
_MAX_EVENTS = 2048


Served = ThreadClient | ThreadEmbedder


class ServerSession:
    """One connection's open requests and generations, by id.

    `control` is the server's. Output of a dead engine is not sent: the process ends, and the clients ask its successor.
    """

    def __init__(self, connection: Connection, client: Served, control: Callable[[str], Awaitable[None]]) -> None:
        self.connection = connection
        self._client = client
        self._control = control
        self.num_asked = 0  # requests so far, an operator's apart
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._controls: set[int] = set()  # ids of operators' requests
        self._generations: dict[int, Generation] = {}
        self._with_news: list[int] = []

    @property
    def is_busy(self) -> bool:
        """Whether a generation is open or a request unanswered."""
        return bool(self._tasks or self._generations)

    @property
    def is_answering(self) -> bool:
        """Whether a generation is open or a request unanswered, an operator's apart."""
        return bool(self._tasks.keys() - self._controls or self._generations)

    def take(self, payload: bytes) -> None:
        """Handle a frame; returns at once. Ids that are not open (any more) are ignored. Raises FrameError."""
        try:
            message = TO_ENGINE.decode(payload)
        except MSGPACK_ERRORS as error:
            raise FrameError(f"not understood: {error}") from error
        match message:
            case ReaderAt():
                generation = self._generations.get(message.id)
                if generation is not None:
                    try:
                        generation.reader_at(message.num_tokens, message.is_away)
                    except IndexError as error:
                        raise FrameError(f"generation {message.id} has more choices than that") from error
            case Cancel():
                self.cancel(message.id)
            case _ if message.id in self._tasks or message.id in self._generations:
                raise FrameError(f"request {message.id} is open already")
            case _:
                task = asyncio.get_running_loop().create_task(self._answer(message))
                self._tasks[message.id] = task
                task.add_done_callback(lambda _: self._forget(message.id))
                if isinstance(message, Control):
                    self._controls.add(message.id)
                else:
                    self.num_asked += 1

    def _forget(self, request_id: int) -> None:
        del self._tasks[request_id]
        self._controls.discard(request_id)

    def cancel(self, request_id: int) -> None:
        """End a request or a generation. No step planned after this holds its sequences."""
        task, generation = self._tasks.get(request_id), self._generations.pop(request_id, None)
        if task is not None:
            task.cancel()
        if generation is not None:
            generation.cancel()

    def close(self) -> None:
        """Cancel everything."""
        for request_id in [*self._tasks, *self._generations]:
            self.cancel(request_id)

    def send(self, message: ToClient) -> None:
        """Send a message. If it cannot be encoded the connection ends, so that the client starts afresh."""
        try:
            self.connection.send(encode(message))
        except FrameError:
            logger.exception("a message to process %d cannot be sent: connection dropped", self.connection.peer.pid)
            self.connection.abort()

    async def _answer(self, message: Open | Warm | Tokenize | Spelling | Embed | Control) -> None:
        answer: ToClient = Reply(message.id)
        try:
            match message:
                case Open():
                    generation = self._generations[message.id] = await self._engine().generate(
                        message.request, message.admission, message.resume
                    )
                    answer = Opened(message.id, generation.accepted)
                    generation.on_news = lambda: self._note_news(message.id)
                    self._note_news(message.id)  # what is there already; sent after `Opened`, in a later loop turn
                case Warm():
                    await self._engine().warm(message.request, message.admission)
                case Tokenize():
                    answer = Reply(message.id, await self._client.tokenize(message.request, message.admission))
                case Spelling():
                    answer = Spelt(message.id, await self._client.spell(message.asked))
                case Embed():
                    if not isinstance(self._client, ThreadEmbedder):
                        raise self._other_kind()
                    answer = Vectors(message.id, await self._client.embed(message.request, message.admission))
                case Control():
                    await self._control(message.action)
        except StreamserveError as error:
            answer = refusal(message.id, error)
        except Exception:  # the edge of one request
            logger.exception("request %d of process %d failed", message.id, self.connection.peer.pid)
            answer = refusal(message.id, StreamserveError("the engine could not take this request."))
        if not (isinstance(answer, Refusal) and self._client.has_failed):
            self.send(answer)

    def _engine(self) -> ThreadClient:
        if not isinstance(self._client, ThreadClient):
            raise self._other_kind()
        return self._client

    def _other_kind(self) -> EngineUnavailable:
        """Return the error for a client whose settings are of the time before the model's kind has changed."""
        return EngineUnavailable(f"model {self._client.alias} is of another kind now. Try again.", retry_after=2)

    # News: collected during one turn of the loop, sent in the next.

    def _note_news(self, request_id: int) -> None:
        if not self._with_news:
            asyncio.get_running_loop().call_soon(self._send_news)
        self._with_news.append(request_id)

    def _send_news(self) -> None:
        ids, self._with_news = dict.fromkeys(self._with_news), []
        if self._client.has_failed:
            return
        news = [piece for request_id in ids if request_id in self._generations for piece in self._news_of(request_id)]
        if sum(len(piece.events) for piece in news) <= _MAX_EVENTS:
            self.send(News(tuple(news), time.monotonic()))
            return
        for piece in news:
            self.send(News((piece,), time.monotonic()))

    def _news_of(self, request_id: int) -> list[GenerationNews]:
        """Return the new events of a generation, in pieces that fit a frame; the last piece carries its end."""
        generation = self._generations[request_id]
        events = generation.ready()
        is_end = not generation.is_open
        if is_end:
            del self._generations[request_id]
        *earlier, last = [events[start : start + _MAX_EVENTS] for start in range(0, len(events), _MAX_EVENTS)] or [[]]
        return [
            *(_news(request_id, generation, piece, is_end=False) for piece in earlier),
            _news(request_id, generation, last, is_end=is_end),
        ]


def _news(request_id: int, generation: Generation, events: list[Event], *, is_end: bool) -> GenerationNews:
    return GenerationNews(
        id=request_id,
        events=tuple(map(encode_event, events)),
        num_cached_tokens=generation.num_cached_tokens,
        is_end=is_end,
        park=generation.parked if is_end else None,
    )
