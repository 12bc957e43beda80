"""`FilteredClient`: a model whose answers go through output filters before any reader sees them. asyncio.

    engine ── events ──► FilterSource: a chain of filters for each block ──► the stream, its log, readers

Each token keeps its ids, so that an answer which was parked continues after the model's own text, in any process. The
filters' state is not kept: the engine repeats the events of the shown ids first (`Resume.replay`), and they go
through new filters unseen. A server elsewhere gives no ids, and readers have only what the filters let through: such an
answer is not continued once it has begun. Pipelines have the same filters (clients/pipeline/filters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from streamserve.clients.base import EngineClient, Generation, Source, WrappedClient
from streamserve.clients.pipeline.filters import Chain, OutputFilter, Stopped
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import BlockStart, BlockStop, ChoiceDone, Done, Event, Token, Usage
from streamserve.protocol.requests import NO_CALLER, START, Admission, GenerateRequest, Resume

Filters = Sequence[Callable[[], OutputFilter]]
_STOPPED = "content_filter"
_LOGPROBS = "This model's answers go through filters, and log-probabilities would show what those hide. Leave it out."


class FilteredClient(WrappedClient):
    """A client with output filters: `filters` make new filters for each block of each answer."""

    def __init__(self, client: EngineClient, filters: Filters) -> None:
        super().__init__(client)
        self._filters = tuple(filters)

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        """Accept the request, as the client does. Raises BadRequest for a request with log-probabilities too."""
        asked = request.sampling.logprob_fields
        if asked:
            raise BadRequest(_LOGPROBS, code="invalid_value", param=asked[0])
        unfiltered = await self._client.generate(request, admission, replace(resume, replay=True))
        return FilterSource(unfiltered, request.n, resume, self._filters).generation


class FilterSource(Source):
    """The events of another generation, as the filters let them through. A choice that a filter stops ends alone.

    It takes from that generation what its own stream takes, so that back-pressure passes through it.
    """

    def __init__(self, unfiltered: Generation, n: int, resume: Resume, filters: Filters) -> None:
        needs = tuple(sorted({*unfiltered.accepted.needs, "filters"}))
        super().__init__(replace(unfiltered.accepted, needs=needs))
        unfiltered.on_news = self.generation.announce
        self._unfiltered = unfiltered
        has_ids = unfiltered.accepted.has_token_ids
        self._choices = [
            _Choice(filters, index, num_shown=len(resume.output_of(index)), has_ids=has_ids) for index in range(n)
        ]
        self._reader: tuple[Sequence[int] | None, bool] = (resume.reader_tokens, False)
        self._is_stopped = False  # every choice is

    @property
    def can_park(self) -> bool:
        """Whether a request with what was shown so far would continue it."""
        return self._unfiltered.can_park

    def pull(self, most: int | None) -> list[Event]:
        """Take events until `most` have come through, or there are no more now."""
        out: list[Event] = []
        while not self._is_stopped and (most is None or len(out) < most):
            events = self._unfiltered.ready(None if most is None else most - len(out))
            for event in events:
                out += self._through(event)
            if not events:
                if not self._unfiltered.is_open:
                    self.generation.close(parked=self._unfiltered.parked)
                break
        self.generation.num_cached_tokens = self._unfiltered.num_cached_tokens
        return out

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool) -> None:
        """Pass on how far the reader is. It does not wait for a choice that was stopped."""
        self._reader = (num_tokens, is_away)
        if num_tokens is not None:
            pairs = zip(self._choices, num_tokens, strict=False)
            num_tokens = [choice.made_by(read) for choice, read in pairs]
        self._unfiltered.reader_at(num_tokens, is_away)

    def cancel(self) -> None:
        """End the other generation."""
        self._unfiltered.cancel()
        self.generation.num_cached_tokens = self._unfiltered.num_cached_tokens

    def _through(self, event: Event) -> list[Event]:
        """Return what an event of the engine becomes."""
        if self._is_stopped:
            return []
        if isinstance(event, Token | BlockStart | BlockStop):
            return self._through_choice(self._choices[event.choice], event)
        if isinstance(event, ChoiceDone):
            choice = self._choices[event.choice]
            if choice.is_ended:
                return []
            rest = choice.end(event.finish_reason)
            is_as_it_was = choice.reason == event.finish_reason
            ended = ChoiceDone(choice=event.choice, finish_reason=choice.reason or "")
            return [*rest, event if is_as_it_was else ended]
        if isinstance(event, Done):
            rest = [held for choice in self._choices for held in choice.end(event.finish_reason)]
            is_as_it_was = all(choice.reason != _STOPPED for choice in self._choices)
            return [*rest, event if is_as_it_was else self._done(event)]
        return [event]

    def _through_choice(self, choice: _Choice, event: Token | BlockStart | BlockStop) -> list[Event]:
        """Return what is shown of an event of a choice. A filter may end the choice, and with the last the answer."""
        out = choice.take(event)
        if choice.hides_tokens:
            self.reader_at(*self._reader)
        if choice.reason is None or choice.is_ended:
            return out
        choice.is_ended = True
        if len(self._choices) > 1:
            out.append(ChoiceDone(choice=choice.index, finish_reason=_STOPPED))
        if all(choice.is_ended for choice in self._choices):
            out.append(self._done(Done(finish_reason=_STOPPED)))
            self._is_stopped = True
            self._unfiltered.cancel()
        return out

    def _done(self, done: Done) -> Done:
        """Return a `done` that counts the tokens that were shown."""
        usage = Usage(
            prompt_tokens=self.generation.accepted.num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=self._unfiltered.num_cached_tokens,
            reasoning_tokens=sum(choice.num_thinking for choice in self._choices),
            accepted_prediction_tokens=done.usage.accepted_prediction_tokens,
            rejected_prediction_tokens=done.usage.rejected_prediction_tokens,
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
        self._block: BlockStart | None = None  # that is open; None for the implied block too
        self._block_index = 0

    def take(self, event: Token | BlockStart | BlockStop) -> list[Event]:
        """Return what is shown of an event: [] for an event that was shown before, or comes after a stop."""
        out = self._take(event)
        self._num_pieces += sum(isinstance(one, Token) and bool(one.text) for one in out)
        return out

    @property
    def hides_tokens(self) -> bool:
        """Whether the reader's position is behind by tokens that it will never be sent."""
        return not self._has_ids and self._num_pieces < self.num_made

    def made_by(self, read: int) -> int:
        """Return how many of the engine's tokens a reader has that has read so many of the shown tokens."""
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
