"""The demo site with a log that stops: while `stall-<pid>` holds a number, no append returns behind that many events.

Of every other stream the events are not written meanwhile, and of the rest they are, and the site does not hear of it.
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
        self._last_seqs: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, log_id: str, fence: int, events: Sequence[Event]) -> int:
        """Commit, perhaps after a while, or say so after a while."""
        is_written = ord(log_id[0]) % 2 == 1
        if not events or not self._is_to_stall(log_id):
            return await self._append(log_id, fence, events)
        last_seq = await self._append(log_id, fence, events) if is_written else 0
        with self._stalled.open("a") as out:
            out.write(f"{log_id} {len(events)} {'unheard' if is_written else 'unwritten'}\n")
        while self._sign.exists():  # noqa: ASYNC110  (the test is another process)
            await asyncio.sleep(0.01)
        return last_seq or await self._append(log_id, fence, events)

    async def _append(self, log_id: str, fence: int, events: Sequence[Event]) -> int:
        last_seq = self._last_seqs[log_id] = await self._log.append(log_id, fence, events)
        return last_seq

    def _is_to_stall(self, log_id: str) -> bool:
        return self._sign.exists() and self._last_seqs.get(log_id, 0) >= int(self._sign.read_text())


def _stalling_log(of: Settings) -> Any:
    return _StallingLog(_make_log(of), Path(settings.STATE_DIR))


runtime.log_for = _stalling_log
