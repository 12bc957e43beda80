"""`Channel`: where one reader's frames go, and when there is room for another. `Received`: the last event that it has.

One frame at a time is written: sent at once where the transport does that without a wait, else pulled by a task that
sends it or by an `async for`. What a reader has received is what it acknowledges, else what its system has taken of
what was sent. Event loop only.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from streamserve.protocol.errors import BadRequest


def nothing() -> int:
    """Stand for a transport that does not know what is untaken: what it accepted counts as taken."""
    return 0


class Channel:
    """A frame may be written while `is_writable`; `on_writable` is called when that is so again: the frame is sent.

    `pull` marks the last frame as sent and returns the next. `send_now` sends a frame and returns True if
    that needs no wait; then there is room for another, and no task is woken. `num_untaken` returns how many bytes of
    what the transport has accepted the reader's system has not taken.
    """

    def __init__(
        self, num_untaken: Callable[[], int] = nothing, send_now: Callable[[bytes], bool] | None = None
    ) -> None:
        self.num_untaken = num_untaken
        self._send_now = send_now
        self.is_writable = True
        self.on_writable: Callable[[], None] | None = None
        self._frame: Any = None
        self._is_ended = False
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None

    def write(self, frame: Any) -> None:
        if self._send_now is not None and self._send_now(frame):
            return
        self._frame, self.is_writable = frame, False
        self._wake()

    def end(self, error: Exception | None) -> None:
        """Nothing more is written; `error` is why the frames are not all, None if they are."""
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self.is_writable = False
            self._wake()

    async def pull(self) -> Any:
        """Return the next frame, None after the last. Raises what kept the frames from being all."""
        if self._frame is None and not self.is_writable and not self._is_ended:
            self.is_writable = True
            if self.on_writable is not None:
                self.on_writable()
        while self._frame is None:
            if self._is_ended:
                if self._error is not None:
                    raise self._error
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        frame, self._frame = self._frame, None
        return frame

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


# So many ends of frames are remembered; beyond, every other end is dropped.
_MAX_ENDS = 1024
# Transports do not report what is taken, and each poll costs as much as a small event: a few frames wait for one poll.
_FRAMES_PER_POLL = 16
# A reader that acknowledges is at its last ack. After so long without another ack (a page that is frozen, or whose acks
# reach another web process) what its system has taken counts again.
_ACK_SECONDS = 5.0
# What the reader's system has taken is polled this long after a frame; while something is untaken, soon and then rarer.
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.005, 0.25


def check_sent(seq: int, last_seq: int) -> None:
    """Raise BadRequest for the acknowledgement of an event after the last event that was sent."""
    if seq > last_seq:
        message = f"Event {seq} has not been sent; the last event sent was {last_seq}."
        raise BadRequest(message, code="not_sent", param="seq")


class Received:
    """Of one reader. `num_untaken` may count more than our frames (heads, chunk marks): never ahead of the truth.

    `poll_at` is when a poll is due: soon after a poll that found something untaken, and then rarer; inf: nothing is.
    """

    def __init__(self, seq: int, num_untaken: Callable[[], int]) -> None:
        self._seq = seq
        self._num_untaken = num_untaken
        self._num_sent = 0
        self._ends: deque[tuple[int, int]] = deque()  # (bytes sent up to the end of a frame, the last event in it)
        self._acked_seq, self._acked_at = 0, -math.inf
        self.poll_at, self._poll_seconds = math.inf, _FIRST_POLL_SECONDS

    @property
    def is_behind(self) -> bool:
        """Whether something was untaken or unacknowledged at the last poll, or has been sent since."""
        return bool(self._ends) or (self._acked_at > -math.inf and self._acked_seq < self._seq)

    def send(self, num_bytes: int, seq: int, now: float) -> bool:
        """Note that so many more bytes are sent, with which the reader has event `seq`.

        Return whether a poll costs nothing, or is worth it by now.
        """
        self._num_sent += num_bytes
        self._ends.append((self._num_sent, seq))
        num_ends = len(self._ends)
        if num_ends > _MAX_ENDS:
            self._ends = deque(list(self._ends)[::2])  # of an odd number: the last end stays
        if num_ends % _FRAMES_PER_POLL == 0 or self._num_untaken is nothing:
            self._poll_seconds = _FIRST_POLL_SECONDS
            return True
        if self.poll_at == math.inf:
            self.poll_at = now + _POLL_SECONDS
        return False

    def ack(self, seq: int, now: float) -> None:
        """Note that the reader has every event up to `seq`."""
        self._acked_seq, self._acked_at = max(seq, self._acked_seq), now
        self._seq = max(seq, self._seq)
        while self._ends and self._ends[0][1] <= seq:
            self._ends.popleft()

    def poll(self, now: float) -> int:
        """Return the last event that the reader has by now."""
        seq = self._seq_at(now)
        if self.is_behind:
            self.poll_at = now + self._poll_seconds
            self._poll_seconds = min(2 * self._poll_seconds, _POLL_SECONDS)
        else:
            self.poll_at = math.inf
        return seq

    def _seq_at(self, now: float) -> int:
        num_taken = self._num_sent - self._num_untaken()
        while self._ends and self._ends[0][0] <= num_taken:
            self._seq = max(self._seq, self._ends.popleft()[1])
        if now - self._acked_at < _ACK_SECONDS:
            return self._acked_seq
        self._acked_at = -math.inf
        return self._seq
