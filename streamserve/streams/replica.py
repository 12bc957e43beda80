"""`Replica`: the half of a `Stream` that needs no engine: what is committed, its readers, the wait for other writers.

While another process writes the log, its events are read here for the readers of this process; the stream is claimed
when it is released, when that process dies, or to stop it. Producer and replica meet in `on_committed`. Lives on the
event loop, in the stream's one task (`Stream.run`); `catch_up` is also called by `Streams.reach`. `Recent` and `Timers`
are parts of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from itertools import islice

from streamserve.protocol.events import TERMINALS, Done, Error, LoggedEvent, Token
from streamserve.protocol.frames import decode_event, encode_event
from streamserve.streams.config import JOB
from streamserve.streams.lease.lease import Lease, LeaseResult
from streamserve.streams.log.base import Ended, EventLog, Fenced, LogLost, LogUnavailable, append
from streamserve.streams.readers import Readers
from streamserve.streams.shown_prompt import ShownPrompt
from streamserve.streams.transcript import Transcript

# How often it is looked whether another process still writes the log, and what it has written.
_FOLLOW_SECONDS = 0.5
# A replica without a reader for so long is dropped.
_IDLE_SECONDS = 5.0
# Without a database or a log: how long until it is asked again.
RETRY_SECONDS = 2.0
# Events read at once: of a replica with readers, and of one that only counts.
_PAGE, _LONG_PAGE = 64, 512
# What `Recent` keeps: about four pages of plain tokens.
_MAX_BYTES = 16 * 1024
# Of its last batch. One of plain tokens is smaller; one with log-probabilities takes some ten kilobytes as objects.
_MAX_OBJECT_BYTES = 4 * 1024


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
        self._away: LogUnavailable | None = None  # why a log that another process writes cannot be read

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

    async def _follow(self) -> None:
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
            self._away = None
        except KeyError:  # the log is gone
            self._has_left, self._away = True, None
        except LogUnavailable as reason:
            self._away = reason
            await self.lease.release()  # else a claim without a producer keeps every other process away
            await self._change(RETRY_SECONDS)
        except (Fenced, Ended):
            self.lease.lose()

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


@dataclass(slots=True, eq=False)
class Recent:
    """The newest committed events, so that readers of this process need not ask the log. Fed all of them in order.

    All are kept as bytes, which take a fifth of the memory, the oldest dropped above `_MAX_BYTES`; the last batch as
    objects too, which nearly every reader takes next. A large last batch is kept as objects only until the readers that
    are level have taken it.

    bodies:  ............................. up to last_seq
    last:                 | last batch ... up to last_seq
    """

    num_bytes: int = 0
    _bodies: deque[bytes] = field(default_factory=deque)
    _last: list[LoggedEvent] = field(default_factory=list)
    _last_seq: int = 0
    _num_last_bytes: int = 0

    def add(self, events: list[LoggedEvent], bodies: Sequence[bytes] | None) -> None:
        """Keep a batch; `bodies` are its events encoded, where known. After a gap only this batch is kept."""
        if self._last_seq + 1 != events[0].seq:
            self.clear()
        if bodies is None:
            bodies = [encode_event(logged.event) for logged in events]
        self._last, self._last_seq = events, events[-1].seq
        self._bodies.extend(bodies)
        self._num_last_bytes = sum(map(len, bodies))
        self.num_bytes += self._num_last_bytes
        while self.num_bytes > _MAX_BYTES:
            self.num_bytes -= len(self._bodies.popleft())

    def shrink(self) -> None:
        """Keep the last batch as bytes only, if it is large."""
        if self._num_last_bytes > _MAX_OBJECT_BYTES:
            self._last = []

    def since(self, after: int, limit: int) -> list[LoggedEvent]:
        """Return up to `limit` events that follow `after` directly, or none."""
        if after >= self._last_seq:
            return []
        last = self._last
        start = after - self._last_seq + len(last)
        if start >= 0:
            return last if start == 0 and len(last) <= limit else last[start : start + limit]
        start = after - self._last_seq + len(self._bodies)
        if start < 0:
            return []
        bodies = islice(self._bodies, start, start + limit)
        return [LoggedEvent(seq, decode_event(body)) for seq, body in enumerate(bodies, after + 1)]

    def clear(self) -> None:
        """Keep nothing."""
        self._last, self.num_bytes, self._num_last_bytes, self._last_seq = [], 0, 0, 0
        self._bodies.clear()


class Timers(dict[str, asyncio.TimerHandle]):
    """Named one-shot timers that are armed. Arming one again changes nothing."""

    def arm(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` once after `seconds`, unless disarmed."""

        def fire() -> None:
            del self[name]
            action()

        if name not in self:
            loop = asyncio.get_running_loop()
            # An empty context: a timer must not keep alive the request that armed it.
            self[name] = loop.call_later(max(0.0, seconds), fire, context=Context())

    def disarm(self, *names: str) -> None:
        """Cancel these timers; a name that is not armed is skipped."""
        for name in names:
            handle = self.pop(name, None)
            if handle is not None:
                handle.cancel()

    def disarm_all(self) -> None:
        """Cancel every timer."""
        self.disarm(*self)
