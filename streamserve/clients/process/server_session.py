"""`ServerSession`: what one worker has asked of the engine, on the engine's side. Event loop of the engine process.

It lives as long as its connection: when that is gone, everything the worker had here is cancelled at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from streamserve.clients.process.frame_socket import Connection
from streamserve.clients.process.messages import (
    Cancel,
    Control,
    GenerationNews,
    News,
    Open,
    Opened,
    ReaderAt,
    Refusal,
    Reply,
    ToEngine,
    Tokenize,
    ToWorker,
    Warm,
    encode,
    refusal,
)
from streamserve.clients.thread.client import ThreadClient
from streamserve.clients.thread.generation import LocalGeneration
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import Event
from streamserve.protocol.frames import FrameError, encode_event

logger = logging.getLogger(__name__)

# Events to a frame: with the most log-probabilities there can be, still well under the limit of a frame.
_MAX_EVENTS = 2048


class ServerSession:
    """Requests come in by `take`; `control` is the host's. `on_change` hears when something here has come to its end.

    What a dead engine still says is not passed on: the process ends, and the workers ask its successor.
    """

    def __init__(
        self,
        connection: Connection,
        client: ThreadClient,
        control: Callable[[str], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self.connection = connection
        self._client = client
        self._control = control
        self._on_change = on_change
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._generations: dict[int, LocalGeneration] = {}
        self._with_news: list[int] = []

    @property
    def is_busy(self) -> bool:
        """Whether a generation is open or a question unanswered."""
        return bool(self._asked or self._generations)

    def take(self, message: ToEngine) -> None:
        """Begin what the worker asks. Returns at once. Ids that are not known (any more) are ignored."""
        match message:
            case ReaderAt():
                self._reader_at(message)
            case Cancel():
                self._cancel(message.id)
            case _ if message.id in self._asked or message.id in self._generations:
                raise FrameError(f"request {message.id} is open already")
            case Open():
                self._ask(message.id, self._open(message))
            case Warm():
                self._ask(message.id, self._warm(message))
            case Tokenize():
                self._ask(message.id, self._tokenize(message))
            case Control():
                self._ask(message.id, self._do(message))

    def close(self) -> None:
        """Cancel everything. No step that is planned after this holds a sequence of this worker."""
        for request_id in [*self._asked, *self._generations]:
            self._cancel(request_id)

    def tell(self, message: ToWorker) -> None:
        """Send a message. One that cannot be sent would be missed: then the worker starts over."""
        try:
            self.connection.send(encode(message))
        except FrameError:
            logger.exception("process %d cannot be told something", self.connection.peer.pid)
            self.connection.abort()

    def _ask(self, request_id: int, work: Awaitable[ToWorker]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(request_id, work))
        self._asked[request_id] = task
        task.add_done_callback(lambda _: self._answered(request_id))

    async def _answer(self, request_id: int, work: Awaitable[ToWorker]) -> None:
        try:
            answer = await work
        except StreamserveError as error:
            answer = refusal(request_id, error)
        except Exception:  # the edge of one request
            logger.exception("request %d of process %d failed", request_id, self.connection.peer.pid)
            answer = refusal(request_id, StreamserveError("the engine could not take this request."))
        if not (isinstance(answer, Refusal) and self._is_engine_dead):
            self.tell(answer)

    def _answered(self, request_id: int) -> None:
        self._asked.pop(request_id, None)
        self._on_change()

    async def _open(self, message: Open) -> Opened:
        generation = await self._client.generate(message.request)
        self._generations[message.id] = generation
        generation.on_news = lambda: self._note_news(message.id)
        self._note_news(message.id)  # what came before; it is sent after `Opened`, in a later turn of the loop
        return Opened(message.id, generation.accepted)

    async def _warm(self, message: Warm) -> Reply:
        await self._client.warm(message.request)
        return Reply(message.id)

    async def _tokenize(self, message: Tokenize) -> Reply:
        return Reply(message.id, await self._client.tokenize(message.request))

    async def _do(self, message: Control) -> Reply:
        await self._control(message.action)
        return Reply(message.id)

    def _reader_at(self, message: ReaderAt) -> None:
        generation = self._generations.get(message.id)
        if generation is None:
            return
        try:
            generation.reader_at(message.num_tokens)
        except IndexError as error:
            raise FrameError(f"generation {message.id} has more choices than that") from error

    def _cancel(self, request_id: int) -> None:
        task, generation = self._asked.get(request_id), self._generations.pop(request_id, None)
        if task is not None:
            task.cancel()
        if generation is not None:
            generation.cancel()
            self._on_change()

    # News: collected during one turn of the loop, sent in the next.

    def _note_news(self, request_id: int) -> None:
        if not self._with_news:
            asyncio.get_running_loop().call_soon(self._send_news)
        self._with_news.append(request_id)

    def _send_news(self) -> None:
        ids, self._with_news = dict.fromkeys(self._with_news), []
        if self._is_engine_dead:
            return
        news = [piece for request_id in ids if request_id in self._generations for piece in self._news_of(request_id)]
        if sum(len(piece.events) for piece in news) <= _MAX_EVENTS:
            self.tell(News(tuple(news)))
            return
        for piece in news:
            self.tell(News((piece,)))

    def _news_of(self, request_id: int) -> list[GenerationNews]:
        """Return what a generation has to tell, in pieces that fit a frame; the last one carries its end."""
        generation = self._generations[request_id]
        events = generation.ready()
        pieces = [events[start : start + _MAX_EVENTS] for start in range(0, len(events), _MAX_EVENTS)] or [[]]
        if not generation.is_open:
            del self._generations[request_id]
            self._on_change()
        *earlier, last = pieces
        return [
            *(_news(request_id, generation, piece, is_end=False) for piece in earlier),
            _news(request_id, generation, last, is_end=not generation.is_open),
        ]

    @property
    def _is_engine_dead(self) -> bool:
        return self._client.describe().state == "failed"


def _news(request_id: int, generation: LocalGeneration, events: list[Event], *, is_end: bool) -> GenerationNews:
    return GenerationNews(
        id=request_id,
        events=tuple(map(encode_event, events)),
        num_cached_tokens=generation.num_cached_tokens,
        is_end=is_end,
        park=generation.parked if is_end else None,
    )
