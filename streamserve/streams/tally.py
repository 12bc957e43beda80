"""`Tally`: what a stream's log holds so far, as far as going on with it needs: tokens of each choice, usage, pace.

Counts committed events only. Pure but for `time.monotonic()`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from streamserve.clients.base import Accepted
from streamserve.protocol.events import ChoiceDone, Done, Event, Token, Usage, is_terminal
from streamserve.streams.summary import Pace


class Tally:
    """Fed every committed event, in order."""

    def __init__(self, accepted: Accepted, n: int, started_at: float) -> None:
        self.pace = Pace(started_at)
        self._num_prompt_tokens = accepted.num_prompt_tokens
        self._token_ids: list[list[int]] = [[] for _ in range(n)]
        self._finished_choices: set[int] = set()

    def fresh(self, events: Sequence[Event]) -> Iterator[Event]:
        """Leave out what a re-admitted generation repeats of choices that had finished, and all after the end."""
        for event in events:
            if isinstance(event, Token | ChoiceDone) and event.choice in self._finished_choices:
                continue
            yield event
            if is_terminal(event):
                return

    def note(self, event: Event) -> None:
        """Count a committed event."""
        if isinstance(event, Token):
            self._token_ids[event.choice].extend(event.token_ids)
            self.pace.note(time.monotonic())
        elif isinstance(event, ChoiceDone):
            self._finished_choices.add(event.choice)

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """The output tokens of each choice."""
        return tuple(map(tuple, self._token_ids))

    @property
    def usage(self) -> Usage:
        """Token counts as far as they are known here; cached tokens are not."""
        return Usage(prompt_tokens=self._num_prompt_tokens, completion_tokens=sum(map(len, self._token_ids)))

    def with_figures(self, done: Done, usage: Usage | None = None) -> Done:
        """Return `done` with the figures of the whole stream: of all its runs in the engine, or of one cut short."""
        latency = time.monotonic() - self.pace.started_at
        return replace(done, usage=usage or self.usage, latency=latency, breakdown=self.pace.breakdown())

    def over_all_runs(self, done: Done) -> Done:
        """Return the engine's `done` of the last run with the figures of all: it counts shown tokens as cached ones."""
        cached_tokens = min(done.usage.cached_tokens, self._num_prompt_tokens)
        return self.with_figures(done, replace(done.usage, cached_tokens=cached_tokens))
