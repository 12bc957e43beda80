"""`SequenceSource`: the events of one request to an engine in this process.

Lives on the event loop that made the request. It turns the engine's updates into events, times them, and reaches the
engine only by its `EngineSide`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from streamserve.clients.base import Source
from streamserve.clients.timings import RequestTimes
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.text.choice import Choice
from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.events import ChoiceDone, Done, Error, Event, Status, Token, Usage

# The message for each error code of a sequence, and whether a retry can help.
ERRORS = {
    "timeout": ("the request ran into its timeout_seconds. Ask for less, or raise it.", False),
    "queue_timeout": ("the engine was too busy to begin this request in time. Try again later.", True),
    "numerical_error": ("the model gave numbers that are not finite for this request.", False),
    "out_of_memory": ("the engine ran out of memory on this request. Try again later.", True),
    "never_fits": ("this request can never fit into the engine's memory. Shorten the prompt.", False),
    "grammar_failed": ("the grammar of this request could not be followed to its end. Simplify it.", False),
    "internal_error": ("the text of this answer could not be made.", True),
    "engine_died": ("the engine stopped working. Try again.", True),
    "engine_closed": ("the engine was shut down. Try again.", True),
}
_ECHO_CHARS = 4096  # in one event
_UNKNOWN_ERROR = ("the engine could not finish this request.", True)


def error_event(code: str) -> Error:
    """Return the terminal event for a sequence's or the engine's error code."""
    message, is_retryable = ERRORS.get(code, _UNKNOWN_ERROR)
    return Error(code=code, message=message, retryable=is_retryable)


def _echo_events(echoes: Sequence[str]) -> Iterator[Token]:
    """Yield the prompt's text as events of bounded size."""
    for choice, text in enumerate(echoes):
        for start in range(0, len(text), _ECHO_CHARS):
            yield Token(text=text[start : start + _ECHO_CHARS], token_ids=(), choice=choice)


class EngineSide(Protocol):
    """What a generation can request for its sequences. Each call returns at once."""

    def abort(self, seq_id: int) -> None:
        """End it: no step planned later holds it."""

    def stop(self, seq_id: int, at: int) -> None:
        """End it after `at` output tokens."""

    def reader_at(self, seq_id: int, num_tokens: int | None, is_away: bool = False) -> None:
        """Its furthest reader has received `num_tokens` output tokens; None: do not wait for readers."""


class SequenceSource(Source):
    """The events of one request to this process's engine: it turns the updates of its sequences into them.

    `choices` maps the engine's sequence ids to the text sides. `echoes[choice]` is the prompt's text, as far as the
    answer begins with it and readers were not shown it. `first_scored` is the first of the prompt tokens whose
    log-probabilities are shown, if readers were not shown it.
    """

    def __init__(
        self,
        accepted: Accepted,
        choices: Mapping[int, Choice],
        *,
        times: RequestTimes,
        engine: EngineSide,
        echoes: Sequence[str] = (),
        first_scored: int | None = None,
    ) -> None:
        super().__init__(accepted)
        self.loop = asyncio.get_running_loop()
        self.times = times
        self._choices = dict(choices)
        self._open = dict(choices)
        self._proposed: dict[int, tuple[int, int]] = {}  # by choice: tokens that were proposed, and accepted
        self._is_resumed = any(choice.num_tokens for choice in choices.values())
        self._engine = engine
        # What was shown before the first token: the place in the queue, and how many prompt tokens are computed.
        self._place: int | None = None
        self._num_prefilled = 0
        self.generation.put([event for choice in choices.values() for event in choice.replayed])
        self.generation.put([*_echo_events(echoes)])
        if first_scored is not None:
            self.generation.put([next(iter(choices.values())).first_event(first_scored)])

    @property
    def is_whole(self) -> bool:
        """Whether this run is the whole answer so far: no park lies before or after it."""
        return not self._is_resumed and self.generation.parked is None

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool) -> None:
        """Pass on how far the furthest reader is in each choice that still runs."""
        for seq_id, choice in self._open.items():
            self._engine.reader_at(seq_id, None if num_tokens is None else num_tokens[choice.index], is_away)

    def cancel(self) -> None:
        """Abort the sequences that still run."""
        for seq_id in self._open:
            self._engine.abort(seq_id)
        self._open.clear()

    def fail(self, error: Error) -> None:
        """End with an error, unless the answer has ended already."""
        self._end([error])

    def take(self, update: SequenceUpdate) -> None:
        """Turn an update into events."""
        choice = self._open.get(update.seq_id)
        if choice is None:
            return
        if update.is_last:
            del self._open[update.seq_id]
        events: list[Event] = []
        if self.times.first_token_at is None and not self._is_resumed:
            events += self._progress(update)
        self.times.note(update.at, len(update.token_ids), choice=choice.index, scheduled_at=update.scheduled_at)
        self.generation.num_cached_tokens = max(self.generation.num_cached_tokens, update.num_cached_tokens)
        self._proposed[choice.index] = update.num_proposed, update.num_accepted
        if update.error is not None:
            self._end([*events, error_event(update.error)])
            return
        if update.scored:
            events += choice.prompt_events(update.scored)
        events += choice.push(update)
        if choice.finish_reason is not None:
            events += self._finish_choice(choice, update)
        elif update.park is not None:  # the other choices end with the parked choice
            self._end(events, parked=update.park)
            return
        self.generation.put(events)

    def _end(self, events: Sequence[Event], *, parked: Park | None = None) -> None:
        self.generation.end(events, parked=parked)
        self.cancel()

    def _progress(self, update: SequenceUpdate) -> Iterator[Status]:
        """Yield what the answer waits for; an answer that gets its first token from the next step does not wait."""
        if update.place is not None and self.times.scheduled_at is None:
            if self._place is None or 2 * update.place <= self._place:  # of several choices the first in line counts
                self._place = update.place
                yield Status(status="queued", step=update.place)
        elif update.num_prefilled is not None and update.num_prefilled > self._num_prefilled:
            self._num_prefilled = update.num_prefilled
            of = self.generation.accepted.num_prompt_tokens
            yield Status(status="prefill", step=update.num_prefilled, of=of)
        elif update.token_ids and (self._place is not None or self._num_prefilled):
            yield Status(status="generating")

    def _finish_choice(self, choice: Choice, update: SequenceUpdate) -> Iterator[Event]:
        """Yield the end of a choice, and of the answer with the last of them."""
        assert choice.finish_reason is not None
        if not update.is_last:
            assert choice.stopped_at is not None
            del self._open[update.seq_id]
            self._engine.stop(update.seq_id, choice.stopped_at)
        if len(self._choices) > 1:
            yield ChoiceDone(choice=choice.index, finish_reason=choice.finish_reason, stop_string=choice.stop_string)
        if not self._open:
            yield self._done()

    def _done(self) -> Done:
        choices = list(self._choices.values())
        assert choices[0].finish_reason is not None
        usage = Usage(
            prompt_tokens=self.generation.accepted.num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in choices),
            cached_tokens=self.generation.num_cached_tokens,
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices),
            accepted_prediction_tokens=sum(num_accepted for _, num_accepted in self._proposed.values()),
            rejected_prediction_tokens=sum(
                num_proposed - num_accepted for num_proposed, num_accepted in self._proposed.values()
            ),
        )
        return Done(
            finish_reason=choices[0].finish_reason,
            usage=usage,
            latency=self.times.latency,
            breakdown=self.times.breakdown(),
            stop_string=choices[0].stop_string if len(choices) == 1 else None,
        )
