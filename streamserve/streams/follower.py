"""`Follower`: a stream's log while this process does not write it: the lease, what other processes write, and the wait
for both.

    catch_up     what another process has committed is counted, and shown to the readers of this process
    take_over    the writer before is fenced, its last events are read, and this process holds the lease
    wait, wake   for the stream's task, whether this process writes or follows

It decides nothing: when a stream is claimed, given up or ended is the stream's. Event loop only; all of it runs in the
stream's one task but `wake`, and `catch_up`, which `Streams.reach` calls too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from streamserve.protocol.events import LoggedEvent
from streamserve.streams.lease.lease import Lease
from streamserve.streams.log.base import EventLog, LogLost, LogUnavailable, append
from streamserve.streams.readers import Readers
from streamserve.streams.transcript import Transcript

# How often it is looked whether another process still writes the log, and what it has written.
_FOLLOW_SECONDS = 0.5
# A stream that is followed without a reader for so long is dropped.
_IDLE_SECONDS = 5.0
# Events read at once: of a stream with readers, and of a stream that only counts.
_PAGE, _LONG_PAGE = 64, 512


class Follower:
    """See above. `away` is why a log that another process writes cannot be read; `on_events` takes what it wrote."""

    def __init__(
        self,
        log: EventLog,
        log_id: str,
        lease: Lease,
        transcript: Transcript,
        readers: Readers,
        on_events: Callable[[list[LoggedEvent]], None],
    ) -> None:
        self.log, self.log_id, self.lease = log, log_id, lease
        self.away: LogUnavailable | None = None
        self._transcript, self._readers, self._on_events = transcript, readers, on_events
        self._idle_at = time.monotonic() + _IDLE_SECONDS
        self._news = asyncio.Event()
        self._waits_for_log = False

    async def catch_up(self) -> None:
        """Count what other processes have committed. Raises KeyError when the log is gone."""
        self._idle_at = time.monotonic() + _IDLE_SECONDS
        transcript = self._transcript
        while not self.lease.is_held and transcript.terminal is None:
            limit = _PAGE if self._readers.num_attached else _LONG_PAGE
            page = await self.log.read(self.log_id, transcript.last_seq, limit)
            if self.lease.is_held:
                return
            # A second caller may have been quicker.
            new = [logged for logged in page if logged.seq > transcript.last_seq]
            if new:
                self._on_events(new)
            if not page:
                return

    async def take_over(self) -> None:
        """Fence the previous writer, and read what it wrote last. Raises LogLost, Fenced and Ended."""
        last_seq = await append(self.log, self.log_id, self.lease.fence, [])
        if last_seq < self._transcript.last_seq:
            raise LogLost(self.log_id)
        while self._transcript.last_seq < last_seq:
            await self.catch_up()
        self.lease.is_held = True

    def seconds_left(self) -> float:
        """Return how long a log is followed without a reader; reading it, by a reader or `catch_up`, begins anew."""
        return _FOLLOW_SECONDS if self._readers.num_attached else max(0.0, self._idle_at - time.monotonic())

    async def wait(self, seconds: float | None = None, *, for_log: bool = False) -> None:
        """Wait until `wake` or, with `for_log`, another process's commit; `seconds` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if not for_log:
                    await self._news.wait()
                elif not self._news.is_set():
                    self._waits_for_log = True
                    await self.log.wait(self.log_id, self._transcript.last_seq)
        self._waits_for_log = False
        self._news.clear()

    def wake(self) -> None:
        """Have the stream's task look at what has changed."""
        self._news.set()
        if self._waits_for_log:
            self.log.wake(self.log_id)

    def note_all(self) -> None:
        """Note that the task looks at all of it now: what changes from here on cuts a wait short."""
        self._news.clear()
