"""`Inbox`: what a generation has yielded and the log has not committed yet.

Group commit without a timer: what came while the last batch was being committed is the next batch. asyncio; knows
nothing of logs or readers.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from streamserve.clients.base import Generation
from streamserve.protocol.events import Event

# Events held at most. Past it the generation is not pulled, which is back-pressure towards the engine.
_MAX_HELD = 256


class Inbox:
    """Pulls a generation while entered (`async with`); `take` gives all that is there at once."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._held: list[Event] = []
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._is_over = False

    async def __aenter__(self) -> Inbox:
        self._task = asyncio.create_task(self._fill(), name="stream inbox")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def take(self) -> list[Event]:
        """Wait for at least one event and return all held; [] when the generation is over. Raises what it raised."""
        if not self._is_over:
            await self._news.wait()
            self._news.clear()
        batch, self._held = self._held, []
        self._room.set()
        if not batch:
            await self._task
        return batch

    async def _fill(self) -> None:
        try:
            async for event in self._generation:
                self._held.append(event)
                self._news.set()
                if len(self._held) >= _MAX_HELD:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._is_over = True
            self._news.set()
