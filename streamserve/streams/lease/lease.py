"""`Lease`: whether this process writes a stream's log. At most one does, by a fence that only grows.

    held ───── another's fence is in the log, or no owner's reader is left here ─────► not held: the log is followed
      ▲                                                                                           │
      └── the stream has no producer, its producer has died, or its user stops it ────────────────┘
          from here: `take`, then an append of nothing with the new fence, then all
          that came before is read

Two steps: the record names the producer, so that no second generation starts; the log refuses an earlier producer, so
that a mistake about the first step costs nothing. Lives on the event loop; knows no database: see store.py.
"""

from __future__ import annotations

import logging
import time
from enum import Enum

from streamserve.streams.store import Record, StreamStore

logger = logging.getLogger("streamserve.streams")

# What was found out about another process's stream holds this long; its death is noticed at once.
_LOOK_SECONDS = 1.0


class LeaseResult(Enum):
    """What `Lease.take` found."""

    FREE = "free"  # it is ours now
    THEIRS = "theirs"  # another worker, which is alive, writes it
    OVER = "over"  # its record is finished, or gone
    UNKNOWN = "unknown"  # the record cannot be read now


class Lease:
    """Of one stream, in this process. Without a shared `store` it is always held: no other process has the stream."""

    def __init__(
        self, store: StreamStore | None, stream_id: str, *, fence: int = 1, is_held: bool = True, producer: str = ""
    ) -> None:
        self.fence = fence  # the one we write with, or the last one seen in the record
        self.is_held = is_held
        self._store = store if store is not None and store.is_shared else None
        self._stream_id = stream_id
        self._producer: str | None = producer  # the writer with `fence`, "" if it has released it; None: not known
        self._looked_at = -_LOOK_SECONDS

    @property
    def is_shared(self) -> bool:
        """Whether other processes can resume the stream."""
        return self._store is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process, as far as known, writes it."""
        return self._store is not None and not self.is_held and self._is_theirs(self._store)

    def note(self, record: Record) -> None:
        """Take fence and producer from a record that was just read, so that `take` need not read it again."""
        if not self.is_held and record.fence >= self.fence:
            self.fence, self._producer, self._looked_at = record.fence, record.producer, time.monotonic()

    async def take(self, *, by_force: bool = False, only_as_last: bool = False) -> LeaseResult:
        """Claim the stream. `is_held` is set by the caller, once the log has seen `fence`.

        `by_force` takes it from a producer that is alive; `only_as_last` only if it was not claimed since `fence`.
        """
        assert self._store is not None
        is_fresh = time.monotonic() - self._looked_at < _LOOK_SECONDS
        if is_fresh and not by_force and self._is_theirs(self._store):
            return LeaseResult.THEIRS
        try:
            return await self._take(self._store, by_force, only_as_last)
        except Exception:
            # The database may be away for a while. The stream is followed meanwhile, and this is asked again.
            logger.exception("stream %s: its record cannot be reached", self._stream_id)
            return LeaseResult.UNKNOWN

    async def release(self) -> None:
        """Let other processes resume the stream, also one that was claimed and is not held yet.

        It stays ours if the store cannot be reached.
        """
        if self._store is None or not (self.is_held or self._producer == self._store.worker_id):
            return
        try:
            await self._store.release(self._stream_id, self.fence)
        except Exception:
            logger.exception("stream %s: its lease cannot be released", self._stream_id)
        else:
            self.is_held, self._producer = False, ""

    def lose(self) -> bool:
        """Note that another process has claimed it; return whether it can be followed."""
        self.is_held = not self.is_shared
        self._producer = None
        self._looked_at = -_LOOK_SECONDS
        return self.is_shared

    async def _take(self, store: StreamStore, by_force: bool, only_as_last: bool) -> LeaseResult:
        if self._producer is not None and not self._is_theirs(store) and await self._claim(store):
            return LeaseResult.FREE  # what was known of it is still true
        record = await store.find(stream_id=self._stream_id)
        if record is None or record.is_finished:
            return LeaseResult.OVER
        is_last = record.fence == self.fence
        self.fence, self._producer, self._looked_at = record.fence, record.producer, time.monotonic()
        if (self._is_theirs(store) and not by_force) or (only_as_last and not is_last):
            return LeaseResult.THEIRS
        if await self._claim(store):
            return LeaseResult.FREE
        self._looked_at = -_LOOK_SECONDS
        return LeaseResult.THEIRS

    async def _claim(self, store: StreamStore) -> bool:
        """Become the producer, unless another has since `fence`."""
        if not await store.claim(self._stream_id, self.fence):
            return False
        self.fence, self._producer = self.fence + 1, store.worker_id
        return True

    def _is_theirs(self, store: StreamStore) -> bool:
        return self._producer not in (None, "", store.worker_id) and store.is_alive(str(self._producer))
