"""`DatabaseHealth`: the state of the site's database for `/readyz`, which asks often and must not wait for it.

A probe reads and writes nothing through both lanes of the door (orm.py), so it meets a lock as a request does. One
probe runs at a time, and at most one a second; a request gets the result of the last probe. On one event loop.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import Context

from streamserve.api.logs import get_logger
from streamserve.models import Stream
from streamserve.protocol.errors import DatabaseUnavailable
from streamserve.rows import orm

log = get_logger(__name__)

OK, UNUSABLE = "ok", "unusable"
_EVERY_SECONDS = 1.0
_PATIENCE_SECONDS = 0.5  # a probe that takes longer is for the next request


class DatabaseHealth:
    """Each site has one. `aclose()` ends a running probe."""

    def __init__(self) -> None:
        self._probe: asyncio.Task[None] | None = None
        self._probed_at = -_EVERY_SECONDS
        self._is_usable = True

    async def state(self) -> str:
        """Return "ok", "locked", "away", "slow", or "unusable" for a database without streamserve's tables."""
        if self._probe is None or (self._probe.done() and time.monotonic() - self._probed_at >= _EVERY_SECONDS):
            self._probed_at = time.monotonic()
            self._probe = asyncio.get_running_loop().create_task(self._look(), name="database probe", context=Context())
        await asyncio.wait({self._probe}, timeout=_PATIENCE_SECONDS)
        trouble = orm.trouble()
        return trouble.value if trouble is not None else OK if self._is_usable else UNUSABLE

    async def aclose(self) -> None:
        """Cancel the probe."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)

    async def _look(self) -> None:
        """Ask for a row, and have an UPDATE match none: it takes the locks of a write."""
        try:
            await orm.read(Stream.objects.only("pk").first)
            await orm.write(Stream.objects.filter(pk="").update, fence=0)
            self._is_usable = True
        except DatabaseUnavailable:
            pass  # the door knows
        except Exception:
            if self._is_usable:
                log.exception("database_unusable")
            self._is_usable = False
