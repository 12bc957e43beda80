"""`Relay`: brings what a generation yields to the log, in the turns of the loop in which there is news of either.

To wake a task for every token would cost more than all else that is done with one. Group commit without a timer: what
comes while a batch is being committed is the next batch. Lives on the event loop; one for each run of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from streamserve.protocol.events import Event
from streamserve.streams.log import Answer

Heard = Callable[[int | Exception], None]


class Relay:
    """`take` returns the next batch, [] if none is there; `is_over` whether none will be; `commit` begins to commit one.

    `go_on` when there is news of any of them. It is over, too, with the first batch that is not committed.
    """

    def __init__(
        self,
        take: Callable[[], Sequence[Event]],
        is_over: Callable[[], bool],
        commit: Callable[[Sequence[Event], Heard], object],
    ) -> None:
        self._take, self._is_over, self._commit = take, is_over, commit
        self._end: Answer[None] = Answer()
        self._has_ended = self._is_committing = self._is_going = False

    def go_on(self) -> None:
        """Commit what is there, unless a commit is under way: that goes on by itself."""
        if self._is_going:
            return
        self._is_going = True
        try:
            while not (self._is_committing or self._has_ended):
                if batch := self._take():
                    self._is_committing = True
                    self._commit(batch, self._hear)
                elif self._is_over():
                    self._finish(None)
                else:
                    break
        except Exception as error:
            self._finish(error)
        finally:
            self._is_going = False

    async def over(self) -> None:
        """Return when all is committed; raise what a commit did. Cancelled, the commit of now is waited for."""
        await self._end.wait(self._leave)

    def _hear(self, result: int | Exception) -> None:
        self._is_committing = False
        if isinstance(result, Exception):
            self._finish(result)
        else:
            self.go_on()

    def _finish(self, result: Exception | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._end.settle(result)

    def _leave(self) -> bool:
        """Take nothing more; tell whether nothing is being committed."""
        self._take, self._is_over = list, _yes
        if not self._is_committing:
            self._has_ended = True
        return self._has_ended


def _yes() -> bool:
    return True
