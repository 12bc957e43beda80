"""`Lease`: whether this process writes a stream's log. At most one process does; a fence that only grows decides.

    held ───── the log has a later fence, or this process has no owner's reader left ─────► not held: a follower
      ▲                                                                                           │
      └── the stream has no producer, its producer has died, or its user stops it here ───────────┘
          `take`, then an empty commit with the new fence, then a read of all events
          before it

Two steps: the record names the producer, so that no second generation starts; the log refuses an earlier fence, so that
an error in the first step does no harm. Lives on the event loop; knows no database: see store.py.
"""

from __future__ import annotations

import logging
import time
from enum import Enum

from streamserve.streams.store import Record, StreamStore

logger = logging.getLogger("streamserve.streams")

# How long a read of the record of another process's stream is valid; its death is noticed at once.
_READ_SECONDS = 1.0


class LeaseResult(Enum):
    """The result of `Lease.take`."""

    TAKEN = "taken"  # by this process, just now
    HELD_ELSEWHERE = "held elsewhere"  # by another live process
    OVER = "over"  # the record is finished, or deleted
    UNKNOWN = "unknown"  # the record cannot be read


class Lease:
    """The lease of one stream in this process. Without a shared `store` it is always held."""

    def __init__(
        self, store: StreamStore | None, stream_id: str, *, fence: int = 1, is_held: bool = True, producer: str = ""
    ) -> None:
        self.fence = fence  # of this process if it holds the lease, else the last one read
        self.is_held = is_held
        self._store = store if store is not None and store.is_shared else None
        self._stream_id = stream_id
        self._producer: str | None = producer  # holds `fence`; "": released; None: unknown
        self._read_at = -_READ_SECONDS

    @property
    def is_shared(self) -> bool:
        """Whether other processes can resume the stream."""
        return self._store is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether another live process holds the lease, by the last read."""
        return self._store is not None and not self.is_held and self._is_held_elsewhere(self._store)

    def note(self, record: Record) -> None:
        """Use fence and producer of a record that was just read, so that `take` does not read it again."""
        if not self.is_held and record.fence >= self.fence:
            self.fence, self._producer, self._read_at = record.fence, record.producer, time.monotonic()

    async def take(self, *, by_force: bool = False, only_as_last: bool = False) -> LeaseResult:
        """Claim the stream. The caller sets `is_held` once the log has `fence`.

        `by_force` takes it from a live producer; `only_as_last` takes it only if no claim followed `fence`.
        """
        assert self._store is not None
        is_fresh = time.monotonic() - self._read_at < _READ_SECONDS
        if is_fresh and not by_force and self._is_held_elsewhere(self._store):
            return LeaseResult.HELD_ELSEWHERE
        try:
            return await self._take(self._store, by_force, only_as_last)
        except Exception:
            # During an outage of the database the stream stays a follower, and tries again.
            logger.exception("stream %s: its record cannot be read or claimed", self._stream_id)
            return LeaseResult.UNKNOWN

    async def release(self) -> None:
        """Let other processes resume the stream, also a stream that was claimed and is not held yet.

        The lease stays held if the store fails.
        """
        if self._store is None or not (self.is_held or self._producer == self._store.own_id):
            return
        try:
            await self._store.release(self._stream_id, self.fence)
        except Exception:
            logger.exception("stream %s: its lease cannot be released", self._stream_id)
        else:
            self.is_held, self._producer = False, ""

    def lose(self) -> bool:
        """Note that another process has claimed it; return whether this process can continue as a follower."""
        self.is_held = not self.is_shared
        self._producer = None
        self._read_at = -_READ_SECONDS
        return self.is_shared

    async def _take(self, store: StreamStore, by_force: bool, only_as_last: bool) -> LeaseResult:
        if self._producer is not None and not self._is_held_elsewhere(store) and await self._claim(store):
            return LeaseResult.TAKEN  # the last read was still valid
        record = await store.find(stream_id=self._stream_id)
        if record is None or record.is_finished:
            return LeaseResult.OVER
        is_last = record.fence == self.fence
        self.fence, self._producer, self._read_at = record.fence, record.producer, time.monotonic()
        if (self._is_held_elsewhere(store) and not by_force) or (only_as_last and not is_last):
            return LeaseResult.HELD_ELSEWHERE
        if await self._claim(store):
            return LeaseResult.TAKEN
        self._read_at = -_READ_SECONDS
        return LeaseResult.HELD_ELSEWHERE

    async def _claim(self, store: StreamStore) -> bool:
        """Become the producer, unless a claim followed `fence`."""
        if not await store.claim(self._stream_id, self.fence):
            return False
        self.fence, self._producer = self.fence + 1, store.own_id
        return True

    def _is_held_elsewhere(self, store: StreamStore) -> bool:
        return self._producer not in (None, "", store.own_id) and store.is_alive(str(self._producer))
