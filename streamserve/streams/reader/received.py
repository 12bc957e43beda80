"""`Position`: which event a reader's own system has, told from how many bytes it has not taken; `Looks`: when to ask.

`Position` is pure; `Looks` lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# So many ends of frames are remembered; beyond, every other one is forgotten.
_MOST_ENDS = 1024
# Nobody says when something is taken, and each look costs as much as a small event: a few frames wait for one look.
# With many at once, of a quick engine, we look right away and soon again, at a stuck reader less and less.
_MANY_FRAMES = 16
_FIRST_LOOK_SECONDS = 0.005
_LOOK_SECONDS = 0.25


def nothing() -> int:
    """Stand for a transport that does not say what is untaken: what it accepted counts as taken."""
    return 0


class Position:
    """Of one reader. `num_untaken` may count more than our frames (heads, chunk marks): never ahead of the truth."""

    def __init__(self, seq: int, num_untaken: Callable[[], int]) -> None:
        self._seq = seq
        self._num_untaken = num_untaken
        self._num_sent = 0
        self._ends: deque[tuple[int, int]] = deque()  # (bytes sent up to the end of a frame, the last event in it)

    @property
    def is_behind(self) -> bool:
        """Whether something was untaken when `advance` last looked, or has been sent since."""
        return bool(self._ends)

    def send(self, num_bytes: int, seq: int) -> bool:
        """Note that so many bytes more are sent, after which the reader has event `seq`.

        Return whether a look costs nothing, or is worth it by now.
        """
        self._num_sent += num_bytes
        self._ends.append((self._num_sent, seq))
        num_ends = len(self._ends)
        if num_ends > _MOST_ENDS:
            self._ends = deque(list(self._ends)[::2])  # of an odd number: the last one stays
        return num_ends % _MANY_FRAMES == 0 or self._num_untaken is nothing

    def advance(self) -> int:
        """Look what is taken by now, and return the last event that the reader's system has whole."""
        num_taken = self._num_sent - self._num_untaken()
        while self._ends and self._ends[0][0] <= num_taken:
            self._seq = self._ends.popleft()[1]
        return self._seq


class Looks:
    """Tells `moved` where the reader is, when told to look, and from then on while something is untaken."""

    def __init__(self, position: Position, moved: Callable[[int], None]) -> None:
        self._position, self._moved = position, moved
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Look in a moment."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self.look)

    def look(self, wait_seconds: float = _FIRST_LOOK_SECONDS) -> None:
        """Look now; again after `wait_seconds`, twice that, and so on, while something is untaken."""
        self.close()
        self._moved(self._position.advance())
        if self._position.is_behind:
            longer = min(2 * wait_seconds, _LOOK_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(wait_seconds, self.look, longer)

    def close(self) -> None:
        """Look no more, until asked to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
