"""Starts all threads of the stream log, each of which opens the file once, so that open files can be compared later."""

from __future__ import annotations

import asyncio
import threading
from functools import cache
from typing import Any

from streamserve.streams.log import file_log
from streamserve.streams.log.file_store import FileStore
from streamserve.web import site

_DEADLINE_SECONDS = 60.0


@cache
def _beginning() -> asyncio.Task[None]:
    return asyncio.create_task(_begin())


async def begun() -> None:
    """Return when all threads of the process's one runtime have started; its log is a file."""
    await asyncio.shield(_beginning())


async def _begin() -> None:
    log: Any = site.get_site().streams.log
    all_there = threading.Barrier(file_log._NUM_READERS)

    def open_file(store: FileStore) -> None:
        store.compact()  # under the lock, whose file stays open too
        all_there.wait(_DEADLINE_SECONDS)

    await asyncio.gather(*(log._ask(open_file) for _ in range(file_log._NUM_READERS)))
