"""The demo site with a log that stops: while `stall-<pid>` holds a number, no commit behind that many events returns.

Half of its batches are not written meanwhile; the others are, and the site does not learn of it. A commit that stops so
is noted in `stalled-<pid>`, a line for each batch: log id, how many events, "unwritten" or "unheard".
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
from streamserve.streams.log.base import Batch, EventLog, Result
from streamserve.web import site as runtime

__all__ = ["application"]

_make_log = runtime.log_for


class _StallingLog:
    """Another log, but for its commits."""

    def __init__(self, log: EventLog, folder: Path) -> None:
        self._log = log
        self._sign, self._stalled = folder / f"stall-{os.getpid()}", folder / f"stalled-{os.getpid()}"
        self._num_stalled = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def commit(self, batches: Sequence[Batch]) -> list[Result]:
        """Commit, perhaps a half now and the other after a while."""
        if not any(map(self._is_to_stall, batches)):
            return await self._log.commit(batches)
        first = self._num_stalled % 2
        self._num_stalled += 1
        results: dict[str, Result] = {}
        unheard, unwritten = batches[first::2], batches[1 - first :: 2]
        await self._commit_into(results, unheard)
        lines = [f"{one.log_id} {len(one.events)} unheard\n" for one in unheard]
        lines += [f"{one.log_id} {len(one.events)} unwritten\n" for one in unwritten]
        with self._stalled.open("a") as out:
            out.write("".join(lines))
        while self._sign.exists():  # noqa: ASYNC110  (the test is another process)
            await asyncio.sleep(0.01)
        await self._commit_into(results, unwritten)
        return [results[batch.log_id] for batch in batches]

    async def _commit_into(self, results: dict[str, Result], batches: Sequence[Batch]) -> None:
        made = await self._log.commit(batches) if batches else []
        results.update(zip((batch.log_id for batch in batches), made, strict=True))

    def _is_to_stall(self, batch: Batch) -> bool:
        return bool(batch.events and self._sign.exists()) and (batch.base_seq or 0) >= int(self._sign.read_text())


def _stalling_log(of: SiteConfig) -> Any:
    return _StallingLog(_make_log(of), Path(settings.STATE_DIR))


runtime.log_for = _stalling_log
