"""`Lease`: whether this process writes a stream's log. At most one does, by a fence that only grows.

    held ───── another's fence is in the log, or no owner's reader is left here ─────► not held: the log is followed
      ▲                                                                                           │
      └── nobody writes it, its writer has died, or its user stops it from here: `take`, ─────────┘
          then an append of nothing with the new fence, then all that came before is read

Two steps, because two things must be true: the row says who writes, so that nobody starts a second generation; the
log refuses who wrote before, so that a mistake about the first costs nothing. Lives on the event loop; knows no
database: `Claims` is implemented by the Django side.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from streamserve.protocol.requests import GenerateRequest

logger = logging.getLogger("streamserve.streams")

# What was found out of another process's stream holds this long; that it has died is seen at once.
_LOOK_SECONDS = 1.0


class LeaseResult(Enum):
    """What `Lease.take` has found."""

    FREE = "free"  # it is ours now
    THEIRS = "theirs"  # somebody who is alive writes it
    OVER = "over"  # its row is finished, or gone
    UNKNOWN = "unknown"  # the row cannot be read now


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is kept of a stream beside its log: enough to go on with it in any process.

    `request` is forgotten when the stream is finished, and None if it cannot be read. `producer` is the worker that
    writes it, "" if none does. `created` is as `time.time()`.
    """

    id: str
    log_id: str
    owner: str
    tenant: str
    model: str
    created: float
    on_disconnect: str
    request: GenerateRequest | None
    fence: int
    producer: str
    is_finished: bool


class Claims(Protocol):
    """The records of all processes, and who of those is alive."""

    worker_id: str

    async def find(self, stream_id: str) -> Record | None:
        """Return what is kept of a stream."""

    async def claim(self, stream_id: str, seen_fence: int) -> bool:
        """Make this worker the producer, with the next fence, unless another was quicker or it is finished."""

    async def release(self, stream_id: str, fence: int) -> None:
        """Say that nobody writes the stream, if this worker did with that fence."""

    def is_alive(self, worker_id: str) -> bool:
        """Tell whether that worker runs. Never blocks."""


class Lease:
    """Of one stream, in this process. Without `claims` it is held for ever: nobody else can know the stream."""

    def __init__(
        self, claims: Claims | None, stream_id: str, *, fence: int = 1, is_held: bool = True, producer: str = ""
    ) -> None:
        self.fence = fence  # the one we write with, or the last one seen in the row
        self.is_held = is_held
        self._claims, self._stream_id = claims, stream_id
        self._producer: str | None = producer  # who wrote with `fence`, "" once nobody does; None: not known
        self._looked_at = -_LOOK_SECONDS

    @property
    def is_shared(self) -> bool:
        """Whether other processes can go on with the stream."""
        return self._claims is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process, as far as known, writes it."""
        return self._claims is not None and not self.is_held and self._is_theirs(self._claims)

    async def take(self, *, by_force: bool = False, only_as_last: bool = False) -> LeaseResult:
        """Ask for the stream; set `is_held` once the log has heard of `fence`.

        `by_force` takes it from who writes it; `only_as_last` only if nobody has claimed it since `fence`.
        """
        assert self._claims is not None
        is_fresh = time.monotonic() - self._looked_at < _LOOK_SECONDS
        if is_fresh and not by_force and self._is_theirs(self._claims):
            return LeaseResult.THEIRS
        try:
            return await self._take(self._claims, by_force, only_as_last)
        except Exception:
            # The database may be away for a while. The stream is followed meanwhile, and this is asked again.
            logger.exception("stream %s: its row cannot be reached", self._stream_id)
            return LeaseResult.UNKNOWN

    async def release(self) -> None:
        """Let others go on with the stream, also one that was claimed and is not held yet.

        Without a database it stays ours.
        """
        if self._claims is None or not (self.is_held or self._producer == self._claims.worker_id):
            return
        try:
            await self._claims.release(self._stream_id, self.fence)
        except Exception:
            logger.exception("stream %s: its claim cannot be released", self._stream_id)
        else:
            self.is_held, self._producer = False, ""

    def lose(self) -> bool:
        """Note that another has claimed it; return whether it can be followed."""
        self.is_held = not self.is_shared
        self._producer = None
        self._looked_at = -_LOOK_SECONDS
        return self.is_shared

    async def _take(self, claims: Claims, by_force: bool, only_as_last: bool) -> LeaseResult:
        if self._producer is not None and not self._is_theirs(claims) and await self._claim(claims):
            return LeaseResult.FREE  # what was known of it was true still
        record = await claims.find(self._stream_id)
        if record is None or record.is_finished:
            return LeaseResult.OVER
        is_last = record.fence == self.fence
        self.fence, self._producer, self._looked_at = record.fence, record.producer, time.monotonic()
        if (self._is_theirs(claims) and not by_force) or (only_as_last and not is_last):
            return LeaseResult.THEIRS
        if await self._claim(claims):
            return LeaseResult.FREE
        self._looked_at = -_LOOK_SECONDS
        return LeaseResult.THEIRS

    async def _claim(self, claims: Claims) -> bool:
        """Be the producer, if nobody has been since `fence`."""
        if not await claims.claim(self._stream_id, self.fence):
            return False
        self.fence, self._producer = self.fence + 1, claims.worker_id
        return True

    def _is_theirs(self, claims: Claims) -> bool:
        return self._producer not in (None, "", claims.worker_id) and claims.is_alive(str(self._producer))
