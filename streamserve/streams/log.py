"""`EventLog`: where a stream's events are kept, and the in-memory one. Readers see only committed events.

asyncio. Knows nothing of engines, readers or wires.
"""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import Sequence
from typing import Protocol

from streamserve.protocol.events import Event, LoggedEvent

_LOG_ID_ALPHABET = string.ascii_lowercase + string.digits


class Fenced(Exception):
    """Another producer has claimed the stream; this one must end."""


def new_log_id() -> str:
    """Return a random 12-character name, unique over all streams (62 bits)."""
    return "".join(secrets.choice(_LOG_ID_ALPHABET) for _ in range(12))


class EventLog(Protocol):
    """An append-only list of events for each stream, numbered densely from 1."""

    async def append(self, log_id: str, fence: int, events: Sequence[Event]) -> int:
        """Commit `events` and return the last seq. Raises `Fenced` when a later fence has written."""

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        """Return up to `limit` committed events with seq > `after`. Raises KeyError for an unknown log."""

    async def wait(self, log_id: str, after: int) -> None:
        """Return when there may be an event with seq > `after`, or the log was sealed or dropped.

        A hint: it may return early; read again. A log that other processes write returns after 100 ms at worst.
        """

    async def seal(self, log_id: str) -> None:
        """Say that nothing will follow, and wake who waits; the log may compact."""

    async def drop(self, log_id: str) -> None:
        """Forget the log. A later `read` raises KeyError."""


class MemoryLog:
    """Events in this process's memory: for tests and single-process sites; gone with the process."""

    def __init__(self) -> None:
        self._events: dict[str, list[LoggedEvent]] = {}
        self._fences: dict[str, int] = {}
        self._news: dict[str, asyncio.Event] = {}

    async def append(self, log_id: str, fence: int, events: Sequence[Event]) -> int:
        if fence < self._fences.get(log_id, 0):
            raise Fenced(log_id)
        self._fences[log_id] = fence
        kept = self._events.setdefault(log_id, [])
        for event in events:
            kept.append(LoggedEvent(seq=len(kept) + 1, event=event))
        self._wake(log_id)
        return len(kept)

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        return self._events[log_id][after : after + limit]

    async def wait(self, log_id: str, after: int) -> None:
        if len(self._events.get(log_id, ())) > after or log_id not in self._events:
            return
        await self._news.setdefault(log_id, asyncio.Event()).wait()

    async def seal(self, log_id: str) -> None:
        self._wake(log_id)

    async def drop(self, log_id: str) -> None:
        for store in (self._events, self._fences):
            store.pop(log_id, None)
        self._wake(log_id)

    def _wake(self, log_id: str) -> None:
        """Wake every reader that waits now; each re-reads by seq, so a lost or early wake-up does no harm."""
        news = self._news.pop(log_id, None)
        if news is not None:
            news.set()
