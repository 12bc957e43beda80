"""`Received`: the last event a reader's own system has whole, computed from how many bytes it has not taken. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from streamserve.streams.reader.channel import nothing

# So many ends of frames are remembered; beyond, every other one is dropped.
_MAX_ENDS = 1024
# Transports do not report what is taken, and each poll costs as much as a small event: a few frames wait for one.
_FRAMES_PER_POLL = 16


class Received:
    """Of one reader. `num_untaken` may count more than our frames (heads, chunk marks): never ahead of the truth."""

    def __init__(self, seq: int, num_untaken: Callable[[], int]) -> None:
        self._seq = seq
        self._num_untaken = num_untaken
        self._num_sent = 0
        self._ends: deque[tuple[int, int]] = deque()  # (bytes sent up to the end of a frame, the last event in it)

    @property
    def is_behind(self) -> bool:
        """Whether something was untaken at the last poll, or has been sent since."""
        return bool(self._ends)

    def send(self, num_bytes: int, seq: int) -> bool:
        """Note that so many more bytes are sent, with which the reader has event `seq`.

        Return whether a poll costs nothing, or is worth it by now.
        """
        self._num_sent += num_bytes
        self._ends.append((self._num_sent, seq))
        num_ends = len(self._ends)
        if num_ends > _MAX_ENDS:
            self._ends = deque(list(self._ends)[::2])  # of an odd number: the last one stays
        return num_ends % _FRAMES_PER_POLL == 0 or self._num_untaken is nothing

    def poll(self) -> int:
        """Return the last event that the reader's system has whole by now."""
        num_taken = self._num_sent - self._num_untaken()
        while self._ends and self._ends[0][0] <= num_taken:
            self._seq = self._ends.popleft()[1]
        return self._seq
