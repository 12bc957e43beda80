"""`FilteredClient`: a model whose answers go through output filters before any reader sees them. asyncio.

    engine ── events ──► FilteredGeneration: a chain of filters for each block ──► the stream, its log, readers

Each token keeps its ids, so that an answer which was parked continues after what the model said, in any process. The
filters' state is not kept: the engine repeats the events of the shown ids first (`GenerateRequest.replay`), and they go
through new filters unseen. A server elsewhere gives no ids, and readers have only what the filters let through: such an
answer is not continued once it has begun. The filters are those of pipelines (clients/pipeline/filters.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.pipeline.filters import Chain, OutputFilter, Stopped
from streamserve.protocol.engine import Accepted, EngineStats, ModelDescription, Park
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import BlockStart, BlockStop, ChoiceDone, Done, Event, Token, Usage
from streamserve.protocol.requests import GenerateRequest

Filters = Sequence[Callable[[], OutputFilter]]
_STOPPED = "content_filter"
_LOGPROBS = "This model's answers go through filters, and log-probabilities would show what those hide. Leave it out."


class FilteredClient:
    """See `EngineClient` in clients/base.py. `filters` make new filters for each block of each answer."""

    def __init__(self, client: EngineClient, filters: Filters) -> None:
        self.alias = client.alias
        self._client, self._filters = client, tuple(filters)

    async def generate(self, request: GenerateRequest) -> FilteredGeneration:
        """Accept the request, as the client does. Raises BadRequest for one that asks for log-probabilities too."""
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(request.sampling, name) is not None:
                raise BadRequest(_LOGPROBS, code="invalid_value", param=name)
        generation = await self._client.generate(replace(request, replay=True))
        return FilteredGeneration(generation, request, self._filters)

    async def tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's token ids."""
        return await self._client.tokenize(request)

    async def warm(self, request: GenerateRequest) -> None:
        """Prefill the prompt into the prefix cache."""
        await self._client.warm(request)

    def start(self) -> None:
        """Start loading the model."""
        self._client.start()

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


class FilteredGeneration:
    """See `Generation` in clients/base.py. A choice that a filter stops ends; the others go on."""

    def __init__(self, generation: Generation, request: GenerateRequest, filters: Filters) -> None:
        needs = tuple(sorted({*generation.accepted.needs, "filters"}))
        self.accepted: Accepted = replace(generation.accepted, needs=needs)
        shown = (*request.output_token_ids, *[()] * (request.n - len(request.output_token_ids)))
        self._generation = generation
        has_ids = self.accepted.has_token_ids
        self._choices = [
            _Choice(filters, index, num_shown=len(ids), has_ids=has_ids) for index, ids in enumerate(shown)
        ]
        self._reader: tuple[Sequence[int] | None, bool] = (request.reader_tokens, False)
        self._events: deque[Event] = deque()
        self._is_over = False

    @property
    def parked(self) -> Park | None:
        """Why the engine has ended it early."""
        return None if self._is_over else self._generation.parked

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were found in the prefix cache."""
        return self._generation.num_cached_tokens

    @property
    def can_park(self) -> bool:
        """Whether a request with what was shown so far would continue it."""
        return self._generation.can_park

    @property
    def on_news(self) -> Callable[[], None] | None:
        """Called when there are events to take."""
        return self._generation.on_news

    @on_news.setter
    def on_news(self, call: Callable[[], None] | None) -> None:
        self._generation.on_news = call

    @property
    def is_open(self) -> bool:
        """Whether more may come, after what is there now."""
        return self._generation.is_open and not self._is_over

    def __aiter__(self) -> FilteredGeneration:
        return self

    async def __anext__(self) -> Event:
        while not (events := self.ready(1)):
            if self._is_over:
                raise StopAsyncIteration
            self._take(await anext(self._generation))
        return events[0]

    def ready(self, most: int | None = None) -> list[Event]:
        """Take the events that are there now, or the first `most`."""
        while not self._is_over and (most is None or len(self._events) < most):
            events = self._generation.ready(None if most is None else most - len(self._events))
            if not events:
                break
            for event in events:
                self._take(event)
        num = len(self._events) if most is None else min(most, len(self._events))
        return [self._events.popleft() for _ in range(num)]

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool = False) -> None:
        """Pass on how far the reader is. It waits for nothing of a choice that was stopped."""
        self._reader = (num_tokens, is_away)
        if num_tokens is not None:
            pairs = zip(self._choices, num_tokens, strict=False)
            num_tokens = [choice.made_by(read) for choice, read in pairs]
        self._generation.reader_at(num_tokens, is_away)

    def cancel(self) -> None:
        """End, without another event."""
        self._events.clear()
        self._is_over = True
        self._generation.cancel()

    def _take(self, event: Event) -> None:
        """Put what an event of the engine becomes to the events."""
        if self._is_over:
            return
        if isinstance(event, Token | BlockStart | BlockStop):
            choice = self._choices[event.choice]
            self._events.extend(choice.take(event))
            if choice.hides_tokens:
                self.reader_at(*self._reader)
            if choice.reason is not None and not choice.is_ended:
                self._end_stopped(choice)
        elif isinstance(event, ChoiceDone):
            choice = self._choices[event.choice]
            if not choice.is_ended:
                self._events.extend(choice.end(event.finish_reason))
                is_as_it_was = choice.reason == event.finish_reason
                ended = ChoiceDone(choice=event.choice, finish_reason=choice.reason or "")
                self._events.append(event if is_as_it_was else ended)
        elif isinstance(event, Done):
            for choice in self._choices:
                self._events.extend(choice.end(event.finish_reason))
            is_as_it_was = all(choice.reason != _STOPPED for choice in self._choices)
            self._events.append(event if is_as_it_was else self._done(event))
        else:
            self._events.append(event)

    def _end_stopped(self, choice: _Choice) -> None:
        """End a choice that a filter has stopped, and the answer with the last of them."""
        choice.is_ended = True
        if len(self._choices) > 1:
            self._events.append(ChoiceDone(choice=choice.index, finish_reason=_STOPPED))
        if all(one.is_ended for one in self._choices):
            self._events.append(self._done(Done(finish_reason=_STOPPED)))
            self._is_over = True
            self._generation.cancel()

    def _done(self, done: Done) -> Done:
        """Return a `done` that counts the tokens that were shown."""
        usage = Usage(
            prompt_tokens=self.accepted.num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=self.num_cached_tokens,
            reasoning_tokens=sum(choice.num_thinking for choice in self._choices),
        )
        return replace(done, finish_reason=self._choices[0].reason or _STOPPED, usage=usage, stop_string=None)


class _Choice:
    """One choice's filters. `num_shown`: so many ids are repeated, and what they give was shown before.

    Without ids, as of a server elsewhere, each piece of text is a token for its reader's position.
    """

    def __init__(self, filters: Filters, index: int, *, num_shown: int, has_ids: bool = True) -> None:
        self.index, self._has_ids = index, has_ids
        self._num_pieces = 0  # without ids: of what was shown
        self.reason: str | None = None  # the finish reason, once it has ended
        self.is_ended = False
        self.num_tokens = self.num_made = self.num_thinking = 0  # shown; by the engine; in thinking blocks
        self._filters, self._num_shown = filters, num_shown
        self._chain: Chain | None = None  # of the open block
        self._block: BlockStart | None = None  # that is open; None for the implied one too
        self._block_index = 0

    def take(self, event: Token | BlockStart | BlockStop) -> list[Event]:
        """Return what is shown of an event: nothing of one that was shown before, or after a stop."""
        out = self._take(event)
        self._num_pieces += sum(isinstance(one, Token) and bool(one.text) for one in out)
        return out

    @property
    def hides_tokens(self) -> bool:
        """Whether the reader's position is behind by tokens that it will never be sent."""
        return not self._has_ids and self._num_pieces < self.num_made

    def made_by(self, read: int) -> int:
        """Return how many of the engine's tokens a reader has that has read so many of the shown ones."""
        if self.reason == _STOPPED:
            return self.num_made
        return read if self._has_ids else max(0, self.num_made - max(0, self._num_pieces - read))

    def _take(self, event: Token | BlockStart | BlockStop) -> list[Event]:
        is_repeated = self.num_made < self._num_shown
        num_ids = 0
        if isinstance(event, Token):
            num_ids = len(event.token_ids) if self._has_ids else int(bool(event.text))
        self.num_made += num_ids
        if self.reason is not None:
            return []
        self.num_tokens += num_ids
        self.num_thinking += num_ids if self._block is not None and self._block.kind == "thinking" else 0
        if self._chain is None and isinstance(event, Token) and not num_ids and not self.num_made and self._has_ids:
            return [event]  # the prompt's text, which `echo` repeats
        try:
            out = self._through(event)
        except Stopped as stopped:
            out = self._stop(stopped.text, event)
            if is_repeated:
                self.num_tokens = self._num_shown  # the log may have more of the event that it stopped in
                return out[1:]  # the end of its block may not have been shown
        return [] if is_repeated else out

    def end(self, reason: str) -> list[Event]:
        """End with what the filters held back of the last block."""
        if self.is_ended:
            return []
        self.reason, self.is_ended = self.reason or reason, True
        try:
            return self._rest()
        except Stopped as stopped:
            self.reason = _STOPPED
            return self._held(stopped.text)

    def _through(self, event: Token | BlockStart | BlockStop) -> list[Event]:
        if isinstance(event, Token):
            if self._chain is None:
                self._chain, self._block_index = self._new_chain(), event.index
            return [replace(event, text=self._chain.feed(event.text))]
        rest = self._rest()
        if isinstance(event, BlockStart):
            self._chain, self._block, self._block_index = self._new_chain(), event, event.index
        else:
            self._block = None
        return [*rest, event]

    def _stop(self, text: str, event: Token | BlockStart | BlockStop) -> list[Event]:
        """Return the last of a choice that a filter stops, with the end of the block that is open."""
        self.reason, self._chain = _STOPPED, None
        last: list[Event] = [replace(event, text=text)] if isinstance(event, Token) else self._held(text)
        stop: list[Event] = [] if self._block is None else [BlockStop(choice=self.index, index=self._block.index)]
        return [*last, *stop]

    def _rest(self) -> list[Event]:
        chain, self._chain = self._chain, None
        return [] if chain is None else self._held(chain.flush())

    def _held(self, text: str) -> list[Event]:
        return [Token(text=text, token_ids=(), index=self._block_index, choice=self.index)] if text else []

    def _new_chain(self) -> Chain:
        return Chain([make() for make in self._filters])
