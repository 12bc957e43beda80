"""`LocalGeneration`: one accepted request of an engine in this process, as the events its reader pulls.

Lives on the event loop that made the request. It turns the engine's updates into events, times them, and reaches the
engine only by its `EngineSide`. Its queue of events needs no bound: n * max_tokens is one, and what is
shown of a prompt is bounded at acceptance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamserve.clients.base import EventQueue
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.text.choice import Choice
from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.events import ChoiceDone, Done, Error, Status, Token, Usage
from streamserve.protocol.metrics import percentile

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


@dataclass(slots=True)
class Timings:
    """The times of one request, in seconds of the engine's clock, and what is computed from them."""

    accepted_at: float
    last_at: float
    scheduled_at: float | None = None
    first_token_at: float | None = None
    gaps: list[float] = field(default_factory=list)
    _last_token_at: dict[int, float] = field(default_factory=dict)

    def note(self, update: SequenceUpdate) -> None:
        """Record an update's times."""
        self.last_at = update.at
        if self.scheduled_at is None:
            self.scheduled_at = update.scheduled_at
        if not update.token_ids:
            return
        if self.first_token_at is None:
            self.first_token_at = update.at
        before = self._last_token_at.get(update.seq_id)
        if before is not None:
            self.gaps.append(update.at - before)
        self._last_token_at[update.seq_id] = update.at

    @property
    def latency(self) -> float:
        """Seconds from acceptance to the last update."""
        return self.last_at - self.accepted_at

    def breakdown(self) -> dict[str, float]:
        """Return the `done` event's breakdown; a part that did not happen took no time."""
        scheduled = self.scheduled_at if self.scheduled_at is not None else self.last_at
        first = self.first_token_at if self.first_token_at is not None else self.last_at
        return {
            "queue": scheduled - self.accepted_at,
            "prefill": first - scheduled,
            "decode": self.last_at - first,
            "first_decode": self.gaps[0] if self.gaps else 0.0,
            "ttft": first - self.accepted_at,
            "itl_p50": percentile(self.gaps, 0.50) or 0.0,
            "itl_p95": percentile(self.gaps, 0.95) or 0.0,
        }


class EngineSide(Protocol):
    """What a generation can request for its sequences. Each call returns at once."""

    def abort(self, seq_id: int) -> None:
        """End it: no step planned later holds it."""

    def stop(self, seq_id: int, at: int) -> None:
        """End it after `at` output tokens."""

    def reader_at(self, seq_id: int, num_tokens: int | None, is_away: bool = False) -> None:
        """Its furthest reader has received `num_tokens` output tokens; None: do not wait for readers."""


class LocalGeneration(EventQueue):
    """See `clients.base.Generation`. `choices` maps the engine's sequence ids to the text sides.

    `echoes[choice]` is the prompt's text, as far as the answer begins with it and readers were not shown it.
    `first_scored` is the first of the prompt tokens whose log-probabilities are shown, if readers were not shown it.
    `on_news` is called on the loop once when events come after `ready()` or `__anext__` left none, and once at the end
    (but not for `cancel`). Events that came before it was set are there already: the caller takes them first.
    """

    can_park = True

    def __init__(
        self,
        accepted: Accepted,
        choices: Mapping[int, Choice],
        *,
        accepted_at: float,
        engine: EngineSide,
        latency_class: str = "chat",
        echoes: Sequence[str] = (),
        first_scored: int | None = None,
    ) -> None:
        super().__init__(event for choice in choices.values() for event in choice.replayed)
        if echoes:
            self._events.extend(_echo_events(echoes))
        if first_scored is not None:
            self._events.append(next(iter(choices.values())).first_event(first_scored))
        self.accepted = accepted
        self.latency_class = latency_class
        self.parked: Park | None = None
        self.num_cached_tokens = 0
        self.loop = asyncio.get_running_loop()
        self.timings = Timings(accepted_at, last_at=accepted_at)
        self._choices = dict(choices)
        self._open = dict(choices)
        self._is_resumed = any(choice.num_tokens for choice in choices.values())
        self._engine = engine
        # What was shown before the first token: the place in the queue, and how many prompt tokens are computed.
        self._place: int | None = None
        self._num_prefilled = 0

    @property
    def is_whole(self) -> bool:
        """Whether this run is the whole answer so far: no park lies before or after it."""
        return not self._is_resumed and self.parked is None

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool = False) -> None:
        """Pass on how far the furthest reader is in each choice that still runs."""
        for seq_id, choice in self._open.items():
            self._engine.reader_at(seq_id, None if num_tokens is None else num_tokens[choice.index], is_away)

    def cancel(self) -> None:
        """End without a terminal event. When this returns, no step planned later holds a sequence of this request."""
        self.on_news = None
        self._events.clear()
        self._end()

    def fail(self, error: Error) -> None:
        """End with an error, unless it has ended already."""
        if self.is_open:
            self._events.append(error)
            self._end()
            self._announce()

    def take(self, update: SequenceUpdate) -> None:
        """Turn an update into events."""
        choice = self._open.get(update.seq_id)
        if choice is None or not self.is_open:
            return
        if update.is_last:
            del self._open[update.seq_id]
        if self.timings.first_token_at is None and not self._is_resumed:
            self._show_progress(update)
        self.timings.note(update)
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if update.error is not None:
            self.fail(error_event(update.error))
            return
        if update.scored:
            self._events.extend(choice.prompt_events(update.scored))
        self._events.extend(choice.push(update))
        if choice.finish_reason is not None:
            self._finish_choice(choice, update)
        elif update.park is not None:  # the other choices end with the one that the engine has parked
            self.parked = update.park
            self._end()
        if not self.is_open or self._events:
            self._announce()

    def _show_progress(self, update: SequenceUpdate) -> None:
        """Show what the answer waits for; one that gets its first token from the next step waits for nothing."""
        if update.place is not None and self.timings.scheduled_at is None:
            if self._place is None or 2 * update.place <= self._place:  # of several choices the first in line counts
                self._place = update.place
                self._events.append(Status(status="queued", step=update.place))
        elif update.num_prefilled is not None and update.num_prefilled > self._num_prefilled:
            self._num_prefilled = update.num_prefilled
            of = self.accepted.num_prompt_tokens
            self._events.append(Status(status="prefill", step=update.num_prefilled, of=of))
        elif update.token_ids and (self._place is not None or self._num_prefilled):
            self._events.append(Status(status="generating"))

    def _finish_choice(self, choice: Choice, update: SequenceUpdate) -> None:
        assert choice.finish_reason is not None
        if not update.is_last:
            assert choice.stopped_at is not None
            del self._open[update.seq_id]
            self._engine.stop(update.seq_id, choice.stopped_at)
        if len(self._choices) > 1:
            self._events.append(
                ChoiceDone(choice=choice.index, finish_reason=choice.finish_reason, stop_string=choice.stop_string)
            )
        if self._open:
            return
        choices = list(self._choices.values())
        assert choices[0].finish_reason is not None
        usage = Usage(
            prompt_tokens=self.accepted.num_prompt_tokens,
            completion_tokens=sum(one.num_tokens for one in choices),
            cached_tokens=self.num_cached_tokens,
            reasoning_tokens=sum(one.num_reasoning_tokens for one in choices),
        )
        self._events.append(
            Done(
                finish_reason=choices[0].finish_reason,
                usage=usage,
                latency=self.timings.latency,
                breakdown=self.timings.breakdown(),
                stop_string=choices[0].stop_string if len(choices) == 1 else None,
            )
        )
        self._end()

    def _end(self) -> None:
        """Abort what still runs; nothing more comes."""
        if not self.is_open:
            return
        self.is_open = False
        for seq_id in self._open:
            self._engine.abort(seq_id)
        self._open.clear()
        self._has_news.set()
