"""`ClientSession`: what this worker has asked of an engine process, over one connection. Event loop of the worker.

The other side's `Session`. When the connection is lost, questions are refused and generations end as parked: whoever
holds one asks again, and is answered by the next engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from streamserve.clients.process.frame_socket import Connection
from streamserve.clients.process.messages import (
    Cancel,
    GenerationNews,
    Goodbye,
    News,
    Open,
    Opened,
    ReaderAt,
    Refusal,
    Reply,
    State,
    ToEngine,
    ToWorker,
    encode,
    error_of,
)
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.events import Error, Event
from streamserve.protocol.frames import FrameError, decode_event
from streamserve.protocol.park import Accepted, Park
from streamserve.protocol.requests import GenerateRequest

_LOST = Park(reason="lost")


class ProcessGeneration:
    """See `clients.base.Generation`.

    Its queue of events needs no bound: the engine runs no further ahead of its reader than `lead_tokens`; without a
    reader, n * max_tokens is one.
    """

    def __init__(self, request_id: int, accepted: Accepted, link: ClientSession) -> None:
        self.accepted = accepted
        self.parked: Park | None = None
        self.num_cached_tokens = 0
        self.on_news: Callable[[], None] | None = None
        self._id = request_id
        self._link = link
        self._events: deque[Event] = deque()
        self._has_news = asyncio.Event()
        self._is_ended = False

    @property
    def is_open(self) -> bool:
        """Whether more may come, after what is there now."""
        return not self._is_ended

    def __aiter__(self) -> ProcessGeneration:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._is_ended:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        return self._events.popleft()

    def ready(self, most: int | None = None) -> list[Event]:
        """Take the events that are there now, or the first `most`, without waiting; [] says nothing of the end."""
        num = len(self._events) if most is None else min(most, len(self._events))
        return [self._events.popleft() for _ in range(num)]

    def reader_at(self, num_tokens: Sequence[int] | None) -> None:
        """Pass on how far the furthest reader is in each choice."""
        if not self._is_ended:
            self._link.send(ReaderAt(self._id, None if num_tokens is None else tuple(num_tokens)))

    def cancel(self) -> None:
        """End. The engine plans no step with the sequences once it has read this: within a step."""
        self.on_news = None
        self._events.clear()
        if not self._is_ended:
            self._link.cancel(self._id)
            self._end()

    # Called by the link.

    def take(self, news: GenerationNews) -> None:
        """Queue events, and end with the last of them."""
        self._events.extend(map(decode_event, news.events))
        self.num_cached_tokens = news.num_cached_tokens
        if news.is_end:
            self.parked = news.park
            self._is_ended = True
        self._announce()

    def lose(self) -> None:
        """End as parked: the engine is gone."""
        self.parked = _LOST
        self._end()

    def fail(self, error: Error) -> None:
        """End with an error."""
        self._events.append(error)
        self._end()

    def _end(self) -> None:
        self._is_ended = True
        self._announce()

    def _announce(self) -> None:
        self._has_news.set()
        if self.on_news is not None:
            self.on_news()


class ClientSession:
    """`take` is given every message that comes; `on_state` hears of the engine's state."""

    def __init__(self, connection: Connection, on_state: Callable[[State], None]) -> None:
        self.goodbye: str | None = None  # the reason, once the engine has taken leave
        self._connection = connection
        self._on_state = on_state
        self._ids = itertools.count(1)
        self._questions: dict[int, asyncio.Future[ProcessGeneration | tuple[int, ...]]] = {}
        self._generations: dict[int, ProcessGeneration] = {}

    async def open(self, request: GenerateRequest) -> ProcessGeneration:
        """Ask for a generation; raises what the engine refuses it with."""
        answer = await self.ask(lambda request_id: Open(request_id, request))
        assert isinstance(answer, ProcessGeneration)
        return answer

    async def ask(self, make: Callable[[int], ToEngine]) -> ProcessGeneration | tuple[int, ...]:
        """Send a message with an id of its own and wait for the answer."""
        message = make(next(self._ids))
        question: asyncio.Future[ProcessGeneration | tuple[int, ...]] = asyncio.get_running_loop().create_future()
        self._questions[message.id] = question
        try:
            self.send(message)
            return await question
        except FrameError as error:
            raise BadRequest("the request is too large, or holds a number beyond 64 bits.") from error
        except asyncio.CancelledError:
            self.cancel(message.id)
            raise
        finally:
            del self._questions[message.id]
            question.cancel()

    def send(self, message: ToEngine) -> None:
        """Send, while the connection holds."""
        self._connection.send(encode(message))

    def cancel(self, request_id: int) -> None:
        """Let the engine forget a question, or the generation it has become."""
        self._generations.pop(request_id, None)
        self.send(Cancel(request_id))

    def take(self, message: ToWorker) -> None:
        """Bring a message to who waits for it. Raises FrameError for one that cannot be."""
        match message:
            case News():
                for news in message.generations:
                    self._bring(news)
            case State():
                self._on_state(message)
            case Goodbye():
                self.goodbye = message.reason
            case Opened() | Reply() | Refusal():
                self._answer(message)

    def lose(self) -> None:
        """The connection is gone: nobody waits for it any longer."""
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineUnavailable("the engine is being replaced. Try again.", retry_after=2))
        for generation in self._generations.values():
            generation.lose()
        self._generations.clear()

    def fail(self, error: Error) -> None:
        """End every generation with an error; questions are refused by `lose`."""
        for generation in self._generations.values():
            generation.fail(error)
        self._generations.clear()

    def _bring(self, news: GenerationNews) -> None:
        generation = self._generations.get(news.id)
        if generation is None:  # cancelled, while this was on its way
            return
        generation.take(news)
        if news.is_end:
            del self._generations[news.id]

    def _answer(self, message: Opened | Reply | Refusal) -> None:
        question = self._questions.get(message.id)
        if question is None or question.done():  # who asked has gone; the engine has been told
            return
        match message:
            case Opened():
                generation = self._generations[message.id] = ProcessGeneration(message.id, message.accepted, self)
                question.set_result(generation)
            case Reply():
                question.set_result(message.token_ids)
            case Refusal():
                question.set_exception(error_of(message))
