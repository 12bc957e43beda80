"""The demo site with a log that stops: once there is a file `stall-<pid>` in the state folder, no append returns here.

Every other stream's events are not written then, and those of the rest are written, and the site never hears of it.
Each append that stops so is a line in `stalled-<pid>`: log id, how many events, "unwritten" or "unheard".
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.conf import settings

from project.asgi import application
from streamserve import runtime
from streamserve.conf import Settings
from streamserve.protocol.events import Event

__all__ = ["application"]

_make_log = runtime.log_for


class _StallingLog:
    """Another log, but for `append`."""

    def __init__(self, log: Any, folder: Path) -> None:
        self._log = log
        self._sign, self._stalled = folder / f"stall-{os.getpid()}", folder / f"stalled-{os.getpid()}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, log_id: str, fence: int, events: Sequence[Event]) -> int:
        """Commit, or seem to take for ever."""
        is_stalled, is_written = bool(events) and self._sign.exists(), ord(log_id[0]) % 2 == 1
        last_seq: int = await self._log.append(log_id, fence, events) if is_written or not is_stalled else 0
        if is_stalled:
            with self._stalled.open("a") as out:
                out.write(f"{log_id} {len(events)} {'unheard' if is_written else 'unwritten'}\n")
            await asyncio.Event().wait()
        return last_seq


def _stalling_log(of: Settings) -> Any:
    return _StallingLog(_make_log(of), Path(settings.STATE_DIR))


runtime.log_for = _stalling_log
