"""`Replica`: the half of a `Stream` that needs no engine: what is committed, its readers, the wait for other writers.

While another process writes the log, its events are read here for the readers of this process; the stream is claimed
when it is released, when that process dies, or to stop it. Producer and replica meet in `on_committed`. Lives on the
event loop, in the stream's one task (`Stream.run`); `catch_up` is also called by `Streams.reach`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from streamserve.protocol.events import TERMINALS, Done, Error, LoggedEvent, Token
from streamserve.streams.config import JOB
from streamserve.streams.lease.lease import Lease, LeaseResult
from streamserve.streams.log.base import EventLog, LogLost, append
from streamserve.streams.parking import ShownPrompt
from streamserve.streams.readers import Readers
from streamserve.streams.recent import Recent
from streamserve.streams.timers import Timers
from streamserve.streams.transcript import Transcript

# How often it is looked whether another process still writes the log, and what it has written.
_FOLLOW_SECONDS = 0.5
# A replica without a reader for so long is dropped.
_IDLE_SECONDS = 5.0
# Without a database or a log: how long until it is asked again.
RETRY_SECONDS = 2.0
# Events read at once: of a replica with readers, and of one that only counts.
_PAGE, _LONG_PAGE = 64, 512


class Replica:
    """See above. `Stream` adds what makes an answer."""

    def __init__(self, log: EventLog, log_id: str, transcript: Transcript, lease: Lease, on_disconnect: str) -> None:
        self.log_id, self.transcript, self.lease, self.on_disconnect = log_id, transcript, lease, on_disconnect
        self.log = log
        self.readers = Readers()
        self.shown_prompt: ShownPrompt | None = None  # of an answer that shows some of its prompt
        self.recent = Recent()
        self.last_seq = 0  # committed and counted here: while another process writes, the log may be ahead
        self.terminal: Done | Error | None = None
        self.ended = asyncio.Event()  # set once nothing more will be committed here
        self._ending: Done | Error | None = None  # the terminal event that is to be committed
        self._has_left = False
        self._is_worked = False  # the job of this stream runs in this process
        self._idle_at = time.monotonic() + _IDLE_SECONDS
        self._news = asyncio.Event()
        self._is_waiting_for_log = False
        self._timers = Timers()

    @property
    def has_left(self) -> bool:
        """Whether it is over in this process only: readers return and are served by the process that has it then."""
        return self._has_left and self.terminal is None

    @property
    def can_leave(self) -> bool:
        """Whether another process can continue it when this one goes down."""
        is_ours_to_end = self._ending is not None or (self.lease.is_held and self.on_disconnect == "abort")
        return self.lease.is_shared and self.terminal is None and not is_ours_to_end

    async def catch_up(self) -> None:
        """Count what other processes have committed. Raises KeyError when the log is gone."""
        self._idle_at = time.monotonic() + _IDLE_SECONDS
        while not self.lease.is_held and self.terminal is None:
            limit = _PAGE if self.readers.num_attached else _LONG_PAGE
            page = await self.log.read(self.log_id, self.last_seq, limit)
            if self.lease.is_held:
                return
            new = [logged for logged in page if logged.seq > self.last_seq]  # a second caller may have been quicker
            if new:
                self.on_committed(new, is_ours=False)
            if not page:
                return

    def on_committed(self, events: list[LoggedEvent], bodies: Sequence[bytes] | None = None, *, is_ours: bool) -> None:
        """Count events that are in the log, and show them to the readers of this process."""
        for logged in events:
            event = logged.event
            if self.shown_prompt is None or not self.shown_prompt.takes(event):
                self.transcript.note(event, logged.seq, is_ours=is_ours)
            if not isinstance(event, Token) and isinstance(event, TERMINALS):
                self.terminal = event
                self._news.set()
        self.last_seq = events[-1].seq
        if is_ours or self.readers.attached:
            self.recent.add(events, bodies)
        for reader in self.readers.attached:
            reader.advance()
        if len(events) > 1:
            self.recent.shrink()

    async def _stand_by(self) -> None:
        """Follow a log that another process writes, or none does, and continue it once that is due here."""
        try:
            if self.readers.num_attached:
                await self.catch_up()
            is_due = self._ending is not None or self._is_wanted
            result = await self._ask_for_lease() if is_due else LeaseResult.HELD_ELSEWHERE
            if result is LeaseResult.TAKEN:
                await self._take_over()
            elif result is LeaseResult.OVER:
                await self.catch_up()
                self._has_left = True
            elif result is LeaseResult.HELD_ELSEWHERE and self._seconds_beside() == 0 and not self.readers.num_attached:
                self._has_left = True
            elif result is LeaseResult.UNKNOWN:
                await self._change(RETRY_SECONDS)
            elif self.terminal is None:
                await self._change(self._seconds_beside(), follows_log=self.readers.num_attached > 0)
        except KeyError:  # the log is gone
            self._has_left = True

    async def _ask_for_lease(self) -> LeaseResult:
        """Claim the stream: for a reader; by force to stop it; to end it otherwise, only if none claimed it since."""
        is_stop = isinstance(self._ending, Done) and self._ending.finish_reason == "cancelled"
        by_force = is_stop or self._is_worked  # who has the job decides
        result = await self.lease.take(by_force=by_force, only_as_last=self._ending is not None and not by_force)
        if result is LeaseResult.HELD_ELSEWHERE and not by_force:
            self._ending = None
        return result

    async def _take_over(self) -> None:
        """Fence the writer before this one, read what it wrote last, and become the producer."""
        last_seq = await append(self.log, self.log_id, self.lease.fence, [])
        if last_seq < self.last_seq:
            raise LogLost(self.log_id)
        while self.last_seq < last_seq:
            await self.catch_up()
        self.lease.is_held = True
        self._begin_to_produce()

    def _begin_to_produce(self) -> None:
        """The lease is held and the log is read to its end."""

    async def _change(self, seconds: float | None = None, *, follows_log: bool = False) -> None:
        """Wait for a reader, a stop, a result or (`follows_log`) another process's commit; at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if not follows_log:
                    await self._news.wait()
                elif not self._news.is_set():
                    self._is_waiting_for_log = True
                    await self.log.wait(self.log_id, self.last_seq)
        self._is_waiting_for_log = False
        self._news.clear()

    def _wake(self) -> None:
        """Have the stream's task look at what has changed."""
        self._news.set()
        if self._is_waiting_for_log:
            self.log.wake(self.log_id)

    @property
    def _is_wanted(self) -> bool:
        if self.on_disconnect == JOB:
            return self._is_worked
        return self.readers.num_holding > 0 or self.on_disconnect == "finish"

    def _seconds_beside(self) -> float | None:
        """Seconds until a log that another process writes is looked at again. None: until something changes."""
        if self.readers.num_attached:
            return _FOLLOW_SECONDS
        if self._ending is not None:
            return RETRY_SECONDS
        if "resume_window" in self._timers:
            return None
        return max(0.0, self._idle_at - time.monotonic())
