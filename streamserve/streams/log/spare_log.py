"""`SpareLog`: a durable log, and this process's memory while that one is full or away: running streams go on.

    append ──► durable log ──► LogUnavailable: what is appended to a log that this process writes becomes its *spare*
    read, last_seq, wait ──► durable log up to where the spare begins, then the spare
    write-back ──► asks the durable log how far it is, appends the rest under the same fence, and then there is no spare

The append that was refused may be committed all the same: it is the beginning of the spare, and the write-back finds
out. No other process knows a spare, so its stream is not resumable meanwhile; it ends with this process; and if another
has claimed the stream by the time the log is back, what was shown here is not in it (`Forked`). New logs are refused as
ever, and so is everything once the spares are too large. Lives on one event loop; its task runs while there is a spare.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import TypeGuard

from streamserve.protocol.events import Event, LoggedEvent, is_terminal
from streamserve.protocol.frames import decode_event, encode_event
from streamserve.streams.log.base import (
    Appending,
    DurableLog,
    Ended,
    EventLog,
    Fenced,
    Forked,
    LogLost,
    LogUnavailable,
    Place,
    Settle,
    Withdraw,
    too_late,
)

logger = logging.getLogger("streamserve.streams")

# All spares of a process: an hour of some hundred streams. `_EVENT_BYTES` is what Python adds to the bytes of each.
SPARE_BYTES = 64 * 1024 * 1024
_EVENT_BYTES = 48
# Events of one append of the write-back: other streams' appends wait for it.
_PAGE = 256
# The durable log is tried after this, then twice that, and so on.
_FIRST_SECONDS, _MOST_SECONDS = 0.1, 2.0
_CLOSE_SECONDS = 5.0
_CLOSED = "The stream log is closed."
_LOST = "The stream log no longer has this stream."


@dataclass(slots=True, kw_only=True)
class _Spare:
    """The events of one log that the durable log has not acknowledged, as bytes: `base_seq` + 1 and on.

    `loss` says why it can never be written back. Sealed: nobody here will append, nor hear of a loss.
    """

    log_id: str
    fence: int
    base_seq: int
    reason: LogUnavailable
    bodies: list[bytes] = field(default_factory=list)
    has_end: bool = False
    is_sealed: bool = False
    loss: Exception | None = None
    touched_at: float = 0.0

    @property
    def last_seq(self) -> int:
        return self.base_seq + len(self.bodies)

    @property
    def num_bytes(self) -> int:
        return _size(self.bodies)

    def events(self, after: int, limit: int) -> list[LoggedEvent]:
        start = after - self.base_seq
        wanted = enumerate(self.bodies[start : start + limit], after + 1)
        return [LoggedEvent(seq=seq, event=decode_event(body)) for seq, body in wanted]


class SpareLog(Appending):
    """See `EventLog`. Owns `log`, and closes it. `max_bytes` bounds the memory of all spares."""

    def __init__(self, log: DurableLog, *, max_bytes: int = SPARE_BYTES) -> None:
        self._log, self._max_bytes = log, max_bytes
        self._written: dict[str, tuple[int, int]] = {}  # fence and last seq of the logs that this process writes
        self._spares: dict[str, _Spare] = {}
        self._num_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    # What streams and operators ask

    def outage(self, log_id: str) -> Exception | None:
        """Return why that log is not durable now: LogUnavailable, or the loss of what was to be written back."""
        spare = self._spares.get(log_id)
        return None if spare is None else spare.loss or spare.reason

    def is_durable(self, log_id: str) -> bool:
        """Tell whether other processes can know all that is readable here of that log."""
        return log_id not in self._spares

    @property
    def trouble(self) -> LogUnavailable | None:
        """Why running streams go on in memory; None while none does."""
        return next((spare.reason for spare in self._waiting()), None)

    # EventLog

    def submit(self, log_id: str, fence: int, events: Sequence[Event], settle: Settle) -> Withdraw:
        spare = self._spares.get(log_id)
        if spare is not None:
            refusal = self._refusal(spare, fence, events)
            if refusal is None:
                self._keep(spare, events, settle)
            else:
                settle(refusal)
            return too_late
        fence_before, base_seq = self._written.get(log_id, (None, 0))

        def note(result: int | Exception) -> None:
            if isinstance(result, int):
                self._written[log_id] = fence, result
                settle(result)
                return
            self._written.pop(log_id, None)  # what is in the log is not known any more
            if not events or fence_before != fence or self._is_closed or not _is_outage(result):
                settle(result)
            else:
                self._keep(_Spare(log_id=log_id, fence=fence, base_seq=base_seq, reason=result), events, settle)

        return self._log.submit(log_id, fence, events, note)

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        if log_id not in self._spares:
            try:
                return await self._log.read(log_id, after, limit)
            except LogUnavailable as reason:
                if not _is_outage(reason) or after < self._last_seq_known(log_id):
                    raise
        spare = self._spares.get(log_id)
        if spare is None:
            return []
        if after < spare.base_seq:
            page = await self._log.read(log_id, after, limit)
            return [logged for logged in page if logged.seq <= spare.base_seq]  # later ones may be another producer's
        if after >= spare.last_seq and spare.loss is not None and not spare.has_end:
            raise copy.copy(spare.loss)
        return spare.events(after, limit)

    async def last_seq(self, log_id: str) -> int:
        spare = self._spares.get(log_id)
        return await self._log.last_seq(log_id) if spare is None else spare.last_seq

    async def wait(self, log_id: str, place: Place) -> None:
        spare = self._spares.get(log_id)
        if spare is None:
            await self._log.wait(log_id, place)
        elif spare.last_seq <= place.seq and spare.loss is None:
            await self._log.waiters.wait(log_id, place)

    async def seal(self, log_id: str) -> None:
        self._written.pop(log_id, None)
        if (spare := self._spares.get(log_id)) is not None:
            spare.is_sealed = True
            if spare.loss is not None and not spare.has_end:
                self._forget(spare)
        await self._log.seal(log_id)

    async def drop(self, log_id: str) -> None:
        self._written.pop(log_id, None)
        if (spare := self._spares.get(log_id)) is not None:
            self._forget(spare)
        await self._log.drop(log_id)

    async def purge(self, before: float) -> int:
        """Drop old logs as ever; none while some are to be written back, which may be among them."""
        for spare in list(self._spares.values()):
            if spare.loss is not None and spare.touched_at < before:
                self._forget(spare)
        return 0 if self._waiting() else await self._log.purge(before)

    async def check(self) -> list[str]:
        """See `DurableLog`."""
        return await self._log.check()

    async def aclose(self) -> None:
        """Try once more to write the spares back, and say what is lost."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._write_back()
        except (LogUnavailable, TimeoutError):
            for spare in self._waiting():
                self._lose(spare, spare.reason)
        self._spares.clear()
        await self._log.aclose()

    # Spares

    def _last_seq_known(self, log_id: str) -> float:
        """How far a log is that this process writes: who has read to there needs no other. Infinite if it does not."""
        spare = self._spares.get(log_id)
        return spare.base_seq if spare is not None else self._written.get(log_id, (0, math.inf))[1]

    def _refusal(self, spare: _Spare, fence: int, events: Sequence[Event]) -> Exception | None:
        if fence < spare.fence:
            return Fenced(spare.log_id)
        if spare.loss is not None:
            return copy.copy(spare.loss)
        if fence > spare.fence or self._is_closed:
            return copy.copy(spare.reason)
        return Ended(spare.log_id) if events and spare.has_end else None

    def _keep(self, spare: _Spare, events: Sequence[Event], settle: Settle) -> None:
        bodies = [encode_event(event) for event in events]
        if self._num_bytes + _size(bodies) > self._max_bytes:
            settle(copy.copy(spare.reason))
            return
        if spare.log_id not in self._spares:
            self._begin(spare)
        self._num_bytes += _size(bodies)
        spare.bodies += bodies
        spare.has_end = bool(events) and is_terminal(events[-1])
        spare.touched_at = time.time()
        settle(spare.last_seq)
        self._log.waiters.wake(spare.log_id, spare.last_seq)

    def _begin(self, spare: _Spare) -> None:
        if not self._waiting():
            logger.error("stream log: %s Running streams go on in memory.", spare.reason)
        self._spares[spare.log_id] = spare
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="spare log", context=Context())

    def _waiting(self) -> list[_Spare]:
        """The spares that are to be written back."""
        return [spare for spare in self._spares.values() if spare.loss is None]

    def _advance(self, spare: _Spare, base_seq: int) -> None:
        """Note how far the durable log is."""
        num_there = base_seq - spare.base_seq
        self._num_bytes -= _size(spare.bodies[:num_there])
        del spare.bodies[:num_there]
        spare.base_seq = base_seq

    def _forget(self, spare: _Spare) -> None:
        del self._spares[spare.log_id]
        self._num_bytes -= spare.num_bytes
        self._log.waiters.wake(spare.log_id)

    # Writing back

    async def _run(self) -> None:
        seconds = _FIRST_SECONDS
        while self._waiting():
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, _MOST_SECONDS)
            try:
                await self._write_back()
            except LogUnavailable:
                continue
            except Exception:
                logger.exception("stream log: writing back has failed; it is tried again")
        logger.warning("stream log: nothing is kept in memory any more")

    async def _write_back(self) -> None:
        """Bring every spare to the durable log. Raises LogUnavailable as soon as that refuses again."""
        for spare in self._waiting():
            try:
                await self._restore(spare)
            except (Fenced, Ended):
                self._lose(spare, Forked(spare.log_id))
            except (LogLost, KeyError):
                self._lose(spare, LogLost(_LOST))

    async def _restore(self, spare: _Spare) -> None:
        last_seq = await self._log.append(spare.log_id, spare.fence, [])  # settles what was in doubt
        while self._spares.get(spare.log_id) is spare:
            if not spare.base_seq <= last_seq <= spare.last_seq:
                raise LogLost(_LOST)
            self._advance(spare, last_seq)
            if not spare.bodies:
                await self._end(spare)
                return
            page = [decode_event(body) for body in spare.bodies[:_PAGE]]
            last_seq = await self._log.append(spare.log_id, spare.fence, page)

    async def _end(self, spare: _Spare) -> None:
        self._forget(spare)
        if spare.is_sealed:
            await self._log.seal(spare.log_id)
        else:
            self._written[spare.log_id] = spare.fence, spare.base_seq

    def _lose(self, spare: _Spare, loss: Exception) -> None:
        """Give up writing it back. Its stream hears of it at its next append; who reads it here has it until then."""
        if self._spares.get(spare.log_id) is not spare:
            return  # dropped meanwhile
        spare.loss = loss
        logger.error(
            "stream log: %d events of log %s, shown here, will not be in it: %s",
            len(spare.bodies),
            spare.log_id,
            type(loss).__name__,
        )
        if spare.is_sealed and not spare.has_end:
            self._forget(spare)
        self._log.waiters.wake(spare.log_id)


def may_be_away(log: EventLog) -> bool:
    """Whether `outage_of` it can be anything."""
    return isinstance(log, SpareLog)


def outage_of(log: EventLog, log_id: str) -> Exception | None:
    """Return why `log` does not have that log durably; None if it does, or never has any."""
    return log.outage(log_id) if isinstance(log, SpareLog) else None


def trouble_of(log: EventLog) -> str:
    """Return for operators why running streams go on in memory: a code of the log's errors; "ok" while none does."""
    trouble = log.trouble if isinstance(log, SpareLog) else None
    return "ok" if trouble is None else trouble.code


def _is_outage(error: BaseException) -> TypeGuard[LogUnavailable]:
    return isinstance(error, LogUnavailable) and not isinstance(error, LogLost)


def _size(bodies: Sequence[bytes]) -> int:
    return sum(map(len, bodies)) + _EVENT_BYTES * len(bodies)
