"""`LocalGeneration`: one accepted request of an engine in this process, as the events its reader pulls.

Lives on the event loop that asked for it. It turns the engine's updates into events, times them, and knows no engine:
it is given two functions to reach it. Its queue of events needs no bound: n * max_tokens is one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from streamserve.clients.base import Accepted
from streamserve.engine.choice import Choice
from streamserve.engine.core import SequenceUpdate
from streamserve.protocol.events import ChoiceDone, Done, Error, Event, Usage
from streamserve.protocol.figures import percentile

# What a client is told for a sequence's error code, and whether trying again can help.
ERRORS = {
    "timeout": ("the request ran into its timeout_seconds. Ask for less, or raise it.", False),
    "numerical_error": ("the model gave numbers that are not finite for this request.", False),
    "out_of_memory": ("the engine ran out of memory on this request. Try again later.", True),
    "never_fits": ("this request can never fit into the engine's memory. Shorten the prompt.", False),
    "internal_error": ("the text of this answer could not be made.", True),
    "engine_died": ("the engine stopped working. Try again.", True),
    "engine_closed": ("the engine was shut down. Try again.", True),
}
_UNKNOWN_ERROR = ("the engine could not finish this request.", True)


def error_event(code: str) -> Error:
    """Return the terminal event for a sequence's or the engine's error code."""
    message, is_retryable = ERRORS.get(code, _UNKNOWN_ERROR)
    return Error(code=code, message=message, retryable=is_retryable)


class Timings:
    """When things happened to one request, in seconds of the engine's clock, and the figures made of that."""

    def __init__(self, accepted_at: float) -> None:
        self.accepted_at = accepted_at
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_at = accepted_at
        self.gaps: list[float] = []
        self._last_token_at: dict[int, float] = {}

    def note(self, update: SequenceUpdate) -> None:
        """Take an update's times."""
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
        """Return the `done` event's figures; what did not happen took no time."""
        scheduled = self.scheduled_at if self.scheduled_at is not None else self.last_at
        first = self.first_token_at if self.first_token_at is not None else self.last_at
        return {
            "queue": scheduled - self.accepted_at,
            "prefill": first - scheduled,
            "decode": self.last_at - first,
            "ttft": first - self.accepted_at,
            "itl_p50": percentile(self.gaps, 0.50) or 0.0,
            "itl_p95": percentile(self.gaps, 0.95) or 0.0,
        }


class LocalGeneration:
    """See `clients.base.Generation`. `choices` maps the engine's sequence ids to the text sides."""

    def __init__(
        self,
        accepted: Accepted,
        choices: Mapping[int, Choice],
        *,
        accepted_at: float,
        abort: Callable[[int], None],
        stop: Callable[[int, int], None],
    ) -> None:
        self.accepted = accepted
        self.loop = asyncio.get_running_loop()
        self.timings = Timings(accepted_at)
        self._choices = dict(choices)
        self._open = dict(choices)
        self._num_cached_tokens = 0
        self._abort = abort
        self._stop = stop
        self._events: deque[Event] = deque()
        self._has_news = asyncio.Event()
        self._is_ended = False

    @property
    def is_open(self) -> bool:
        """Whether events may still come from the engine."""
        return not self._is_ended

    def __aiter__(self) -> LocalGeneration:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._is_ended:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        return self._events.popleft()

    def cancel(self) -> None:
        """End without a terminal event. When this returns, no step planned later holds a sequence of this request."""
        self._events.clear()
        self._end()

    def fail(self, error: Error) -> None:
        """End with an error, unless it has ended already."""
        if not self._is_ended:
            self._events.append(error)
            self._end()

    def take(self, update: SequenceUpdate) -> None:
        """Turn an update into events."""
        choice = self._open.get(update.seq_id)
        if choice is None or self._is_ended:
            return
        self.timings.note(update)
        self._num_cached_tokens = max(self._num_cached_tokens, update.num_cached_tokens)
        if update.error is not None:
            self.fail(error_event(update.error))
            return
        self._push(choice, update)
        self._has_news.set()

    def _push(self, choice: Choice, update: SequenceUpdate) -> None:
        token = choice.push(update)
        if token is not None:
            self._events.append(token)
        if choice.finish_reason is not None:
            self._close(choice, update)

    def _close(self, choice: Choice, update: SequenceUpdate) -> None:
        assert choice.finish_reason is not None
        del self._open[update.seq_id]
        if choice.stopped_at is not None and not update.is_last:
            self._stop(update.seq_id, choice.stopped_at)
        if len(self._choices) > 1:
            self._events.append(ChoiceDone(choice=choice.index, finish_reason=choice.finish_reason))
        if not self._open:
            self._events.append(self._done())
            self._end()

    def _done(self) -> Done:
        choices = list(self._choices.values())
        assert choices[0].finish_reason is not None
        usage = Usage(
            prompt_tokens=self.accepted.num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in choices),
            cached_tokens=self._num_cached_tokens,
        )
        return Done(
            finish_reason=choices[0].finish_reason,
            usage=usage,
            latency=self.timings.latency,
            breakdown=self.timings.breakdown(),
        )

    def _end(self) -> None:
        """Abort what still runs; nothing more comes."""
        self._is_ended = True
        for seq_id in self._open:
            self._abort(seq_id)
        self._open.clear()
        self._has_news.set()
