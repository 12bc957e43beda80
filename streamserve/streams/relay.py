"""`Relay`: brings what a generation yields to the log, in the turns of the loop in which there is news of either.

To wake a task for every token would cost more than all else that is done with one. Group commit without a timer: what
comes while a batch is being committed is the next batch. Lives on the event loop; one for each run of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from streamserve.clients.base import Generation
from streamserve.protocol.events import TERMINALS, Event
from streamserve.streams.log.base import Answer, Settle

# Events of one commit: while one is written it is in memory several times over, with all its log-probabilities.
_MOST_AT_ONCE = 16


class Relay:
    """Of one generation. `batch` makes of events what is to be committed, `commit` begins to commit it."""

    def __init__(
        self,
        generation: Generation,
        batch: Callable[[Sequence[Event]], Sequence[Event]],
        commit: Callable[[Sequence[Event], Settle], object],
    ) -> None:
        self._generation, self._batch, self._commit = generation, batch, commit
        self._end: Answer[None] = Answer()
        self._has_ended = self._is_committing = self._is_going = self._is_last = False

    def go_on(self) -> None:
        """Commit what is there, unless a commit is under way: then it goes on after that."""
        if self._is_going:
            return
        self._is_going = True
        try:
            while not (self._is_committing or self._has_ended) and self._step():
                pass
        except Exception as error:
            self._finish(error)
        finally:
            self._is_going = False

    async def over(self) -> None:
        """Return when all is committed; raise what a commit did. Cancelled, the commit of now is waited for."""
        await self._end.wait(self._leave)

    def _step(self) -> bool:
        """Begin one commit; return False if the generation will say when there is more."""
        events = self._generation.ready(_MOST_AT_ONCE)
        if batch := self._batch(events):
            self._is_committing, self._is_last = True, isinstance(batch[-1], TERMINALS)
            self._commit(batch, self._hear)
        elif not events and not self._generation.is_open:
            self._finish(None)
        return len(events) == _MOST_AT_ONCE or not self._generation.is_open

    def _hear(self, result: int | Exception) -> None:
        self._is_committing = False
        if isinstance(result, Exception):
            self._finish(result)
        elif self._is_last:
            self._finish(None)
        elif not self._is_going:
            self.go_on()

    def _finish(self, result: Exception | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._end.settle(result)

    def _leave(self) -> bool:
        """Commit nothing more; tell whether nothing is being committed."""
        self._is_last = True
        if not self._is_committing:
            self._has_ended = True
        return self._has_ended
