"""The demo site with a log that stops: while `stall-<pid>` holds a number, no append returns behind that many events.

Of every other stream the events are not written meanwhile, and of the rest they are, and the site does not hear of it.
Each append that stops so is a line in `stalled-<pid>`: log id, how many events, "unwritten" or "unheard".
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings

from project.asgi import application
from streamserve.conf import SiteConfig
from streamserve.protocol.events import Event
from streamserve.streams.log.base import Appending, Settle, Withdraw, too_late
from streamserve.web import site as runtime

__all__ = ["application"]

_make_log = runtime.log_for


class _StallingLog(Appending):
    """Another log, but for what is appended."""

    def __init__(self, log: Any, folder: Path) -> None:
        self._log = log
        self._sign, self._stalled = folder / f"stall-{os.getpid()}", folder / f"stalled-{os.getpid()}"
        self._last_seqs: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def submit(self, log_id: str, fence: int, events: Sequence[Event], settle: Settle) -> Withdraw:
        """Commit, perhaps late, or acknowledge late."""
        note = partial(self._note, log_id, settle)
        commit = partial(self._log.submit, log_id, fence, events)
        if not events or not self._is_to_stall(log_id):
            return commit(note)  # type: ignore[no-any-return]
        if ord(log_id[0]) % 2 == 1:
            commit(lambda result: self._begin(self._later(partial(note, result), f"{log_id} {len(events)} unheard")))
        else:
            self._begin(self._later(partial(commit, note), f"{log_id} {len(events)} unwritten"))
        return too_late

    def _note(self, log_id: str, settle: Settle, result: int | Exception) -> None:
        if isinstance(result, int):
            self._last_seqs[log_id] = result
        settle(result)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _later(self, act: Callable[[], object], said: str) -> None:
        with self._stalled.open("a") as out:
            out.write(f"{said}\n")
        while self._sign.exists():  # noqa: ASYNC110  (the test is another process)
            await asyncio.sleep(0.01)
        act()

    def _is_to_stall(self, log_id: str) -> bool:
        return self._sign.exists() and self._last_seqs.get(log_id, 0) >= int(self._sign.read_text())


def _stalling_log(of: SiteConfig) -> Any:
    return _StallingLog(_make_log(of), Path(settings.STATE_DIR))


runtime.log_for = _stalling_log
