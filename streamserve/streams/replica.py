"""`FollowedStream`: the half of a `Stream` that needs no engine: what it tells its log and hears of it, and the wait
beside it.

While another process of the site writes the log, this one follows it for the readers it has here, and claims the
stream when it is let go of, when that process dies, or to stop it. Lives on the event loop, in the stream's one task
(`Stream.run`); only `catch_up` is for others too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial

from streamserve.protocol.events import TERMINALS, Done, Error, Event, Status, Token
from streamserve.streams.lease.lease import Lease, LeaseResult
from streamserve.streams.log.base import Answer, EventLog, LogUnavailable, Settle, Withdraw
from streamserve.streams.log.spare_log import may_be_away, outage_of
from streamserve.streams.readers import Readers
from streamserve.streams.timers import Timers
from streamserve.streams.transcript import Transcript

# How often the events of a stream that others write are counted here, and whether they still do is looked at.
_FOLLOW_SECONDS = 0.5
# Nobody has read it here for so long: forgotten.
_IDLE_SECONDS = 5.0
# Without a database or a log to ask: how long until it is asked again.
RETRY_SECONDS = 2.0

_LOG_AWAY = "The answer goes on. While the server cannot save it, it cannot be resumed elsewhere."


class FollowedStream:
    """See above. `Stream` adds what makes a stream."""

    def __init__(self, log: EventLog, log_id: str, tally: Transcript, claim: Lease, on_disconnect: str) -> None:
        self.log_id, self.tally, self.claim, self.on_disconnect = log_id, tally, claim, on_disconnect
        self.readers = Readers()
        self.last_seq = 0  # committed and counted here: while another process writes, the log may be ahead
        self.terminal: Done | Error | None = None
        self._log, self._can_be_away = log, may_be_away(log)
        self.is_forked = False  # what readers here have seen is not what the log says: nobody may read on
        self._ending: Done | Error | None = None
        self._has_left = False
        self._says_resumable = True  # as the last `status` of the log had it
        self._idle_at = time.monotonic() + _IDLE_SECONDS
        self._news = asyncio.Event()
        self._timers = Timers()

    @property
    def has_left(self) -> bool:
        """Whether it is over here, and not for others: readers come back and are served by whoever holds it then."""
        return self._has_left and self.terminal is None

    @property
    def is_resumable(self) -> bool:
        """Whether any process can go on with it: all that readers here have seen is in a log that others see."""
        return outage_of(self._log, self.log_id) is None

    @property
    def can_leave(self) -> bool:
        """Whether others can go on with it, when this process goes down."""
        is_ours_alone = self.claim.is_held and (self.on_disconnect == "abort" or not self.is_resumable)
        is_ours_to_end = self._ending is not None or is_ours_alone
        return self.claim.is_shared and self.terminal is None and not is_ours_to_end

    async def catch_up(self) -> None:
        """Count what other processes have committed. Raises KeyError when the log is gone."""
        self._idle_at = time.monotonic() + _IDLE_SECONDS
        while not self.claim.is_held and self.terminal is None:
            page = await self._log.read(self.log_id, self.last_seq)
            if not page or self.claim.is_held:
                return
            for logged in page:
                if logged.seq > self.last_seq:  # others who catch up here may have been quicker
                    self._note(logged.event, logged.seq, is_ours=False)

    async def _follow(self) -> None:
        """Stand beside a log that others write, or nobody does, and go on with it once that is our part."""
        try:
            if self.readers.num_attached:
                await self.catch_up()
            standing = await self._ask_for_it() if self._ending is not None or self._is_wanted else LeaseResult.THEIRS
            if standing is LeaseResult.FREE:
                await self._go_on()
            elif standing is LeaseResult.OVER:
                await self.catch_up()
                self._has_left = True
            elif standing is LeaseResult.THEIRS and self._is_forgotten:
                self._has_left = True
            elif standing is LeaseResult.UNKNOWN:
                await self._change(RETRY_SECONDS)
            elif self.terminal is None:
                await self._change(self._seconds_beside())
        except KeyError:  # the log is gone
            self._has_left = True

    async def _ask_for_it(self) -> LeaseResult:
        """Lease the stream: for a reader; to stop it, from whoever writes it; to end it otherwise, only as the last."""
        is_stop = isinstance(self._ending, Done) and self._ending.finish_reason == "cancelled"
        standing = await self.claim.take(by_force=is_stop, only_as_last=self._ending is not None and not is_stop)
        if standing is LeaseResult.THEIRS and not is_stop:
            self._ending = None
        return standing

    async def _go_on(self) -> None:
        """Have the log refuse who wrote before, read what they wrote, and be the producer."""
        last_seq = await self._log.append(self.log_id, self.claim.fence, [])
        while self.last_seq < last_seq:
            await self.catch_up()
        self.claim.is_held = True
        self._take_over()

    def _take_over(self) -> None:
        """Begin to be the producer."""

    def _note(self, event: Event, seq: int, *, is_ours: bool = True) -> None:
        self.tally.note(event, seq, is_ours=is_ours)
        self.last_seq = seq
        if isinstance(event, Token):
            return
        if isinstance(event, TERMINALS):
            self.terminal = event
            self._news.set()
        elif isinstance(event, Status) and event.resumable is not None:
            self._says_resumable = event.resumable

    def _log_news(self) -> list[Event]:
        """Return what readers are to be told of the log: that it is away, that it is back; nothing twice."""
        outage = outage_of(self._log, self.log_id) if self._can_be_away else None
        if self.terminal is not None or (outage is None) == self._says_resumable:
            return []
        if outage is None:
            return [Status(status="log_back", resumable=True)]
        code = outage.code if isinstance(outage, LogUnavailable) else LogUnavailable.code
        return [Status(status=code, resumable=False, message=_LOG_AWAY)]

    async def _append(self, events: Sequence[Event]) -> None:
        """Commit `events` and what there is to say of the log."""
        batch = self._batch(events)
        while batch:
            answer: Answer[int] = Answer()
            await answer.wait(self._submit(batch, answer.settle))
            batch = self._log_news()  # it may be away since

    def _batch(self, events: Sequence[Event]) -> list[Event]:
        """Return what is to be committed: news of the log, and `events` up to the first terminal one."""
        batch = self._log_news() if self._can_be_away else []
        for event in events:
            if isinstance(event, TERMINALS):
                batch.append(self._settled(event) if isinstance(event, Done) else event)
                break
            if not (self.tally.has_finished and self.tally.is_repeated(event)):
                batch.append(event)
        return batch

    def _submit(self, batch: Sequence[Event], heard: Settle) -> Withdraw:
        """Begin to commit; what is committed counts, and is shown, before it is `heard` of."""
        return self._log.submit(self.log_id, self.claim.fence, batch, partial(self._settle, batch, heard))

    def _settle(self, batch: Sequence[Event], heard: Settle, result: int | Exception) -> None:
        """Count what is committed now, and give it to the readers here who wait for just that; the log wakes others."""
        if isinstance(result, int):
            try:
                first_seq = result - len(batch) + 1
                for seq, event in enumerate(batch, first_seq):
                    self._note(event, seq)
                self.readers.give(batch, first_seq)
            except Exception as error:
                result = error
        heard(result)

    def _settled(self, event: Done) -> Done:
        """Return `event` as it is to be kept."""
        return event

    async def _change(self, seconds: float | None = None) -> None:
        """Wait until somebody came, left or wants the end; at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    @property
    def _is_wanted(self) -> bool:
        return self.readers.num_holding > 0 or self.on_disconnect == "finish"

    @property
    def _is_forgotten(self) -> bool:
        """Whether nothing here needs to know more of it."""
        return self._seconds_beside() == 0 and not self.readers.num_attached

    def _seconds_beside(self) -> float | None:
        """How long until a log that others write is looked at again. None: until somebody comes."""
        if self.readers.num_attached:
            return _FOLLOW_SECONDS
        if "resume_window" in self._timers or self._ending is not None:
            return None if self._ending is None else RETRY_SECONDS
        return max(0.0, self._idle_at - time.monotonic())
