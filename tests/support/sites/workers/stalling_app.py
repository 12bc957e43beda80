"""The demo site with a log that stops: while `stall-<pid>` holds a number, no commit returns behind that many events.

Meanwhile every second stream's events are not written; the rest are, but the commit does not return.
Each batch stopped this way is a line in `stalled-<pid>`: log id, how many events, "unwritten" or "unacknowledged".
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.conf import settings

from project.asgi import application
from streamserve.conf import SiteConfig
from streamserve.streams.log.base import Batch, Result
from streamserve.web import resources

__all__ = ["application"]

_make_log = resources.log_for


class _StallingLog:
    """A log that delegates everything but its commits."""

    def __init__(self, log: Any, folder: Path) -> None:
        self._log = log
        self._sign, self._stalled = folder / f"stall-{os.getpid()}", folder / f"stalled-{os.getpid()}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def commit(self, batches: Sequence[Batch]) -> list[Result]:
        """Commit, or commit a part and wait."""
        if not any(self._is_to_stall(batch) for batch in batches):
            return await self._log.commit(batches)  # type: ignore[no-any-return]
        now = [batch for batch in batches if ord(batch.log_id[0]) % 2 == 1]
        await self._log.commit(now)
        states = [(batch, "unacknowledged" if batch in now else "unwritten") for batch in batches]
        with self._stalled.open("a") as out:
            out.write("".join(f"{batch.log_id} {len(batch.events)} {state}\n" for batch, state in states))
        while self._sign.exists():  # noqa: ASYNC110  (the test is another process)
            await asyncio.sleep(0.01)
        return await self._log.commit(batches)  # type: ignore[no-any-return]

    def _is_to_stall(self, batch: Batch) -> bool:
        try:
            num_events = int(self._sign.read_text())
        except FileNotFoundError:
            return False
        return bool(batch.events) and (batch.base_seq or 0) >= num_events


def _stalling_log(of: SiteConfig) -> Any:
    return _StallingLog(_make_log(of), Path(settings.STATE_DIR))


resources.log_for = _stalling_log
