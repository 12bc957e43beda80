"""`InterruptLog`: interrupted runs in the site's event log, each under a name of its own. See `Interrupted`.

Another process can continue a run from there, while the database may be away. Such a log has no terminal event, so the
purge of finished streams leaves it; it goes when its continuation has ended, after `APPROVAL_SECONDS`, or with the
purge of unfinished logs. asyncio.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from streamserve.clients.pipeline.interrupts import Interrupted, interrupted_of
from streamserve.protocol.events import Status
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog, commit_one, make_batch

_KEPT = "kept"
_BATCH_BYTES = 4 * 1024 * 1024  # of one commit, about: a frame has an end


class InterruptLog:
    """See above. `forgets`: no other process and no purge looks after this log, so those of this process go here."""

    def __init__(self, log: EventLog, settings: StreamConfig, *, forgets: bool) -> None:
        self._log, self._forgets = log, forgets
        self._seconds, self._most = settings.approval_seconds, settings.max_finished
        self._own: OrderedDict[str, float] = OrderedDict()  # stream id → monotonic time

    async def keep(self, stream_id: str, interrupted: Interrupted) -> None:
        """Keep an interrupted run. One that is there already is replaced: its process was lost before its end."""
        log_id = _log_of(stream_id)
        await self._log.drop(log_id)
        last_seq, batch, num_bytes = 0, list[Status](), 0
        for text in interrupted.entries():
            if batch and num_bytes + len(text) > _BATCH_BYTES:
                last_seq = await commit_one(self._log, make_batch(log_id, 1, last_seq, batch))
                batch, num_bytes = [], 0
            batch.append(Status(status=_KEPT, message=text))
            num_bytes += len(text)
        await commit_one(self._log, make_batch(log_id, 1, last_seq, batch))
        if self._forgets:
            await self._forget_old(stream_id)

    async def find(self, stream_id: str) -> Interrupted | None:
        """Return an interrupted run; None where there is none, or it is too old."""
        texts: list[str] = []
        after = 0
        try:
            while page := await self._log.read(_log_of(stream_id), after):
                after = page[-1].seq
                texts += [one.event.message for one in page if isinstance(one.event, Status) and one.event.message]
        except KeyError:
            return None
        found = interrupted_of(texts)
        return None if found is None or time.time() - found.at > self._seconds else found

    async def drop(self, stream_id: str) -> None:
        """Forget a run: its continuation has ended."""
        self._own.pop(stream_id, None)
        await self._log.drop(_log_of(stream_id))

    async def _forget_old(self, stream_id: str) -> None:
        self._own[stream_id] = time.monotonic()
        for known, at in list(self._own.items()):
            if time.monotonic() - at > self._seconds or len(self._own) > self._most:
                await self.drop(known)


def _log_of(stream_id: str) -> str:
    return f"ask-{stream_id}"
