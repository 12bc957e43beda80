"""`Drain`: how a server goes down without cutting anybody off, and whom it tells.

    SIGTERM ─► on_drain: "not ready" ─► in flight may finish ─► on_farewell: "tell your readers, end" ─► the rest is
               new requests: 503        (drain_seconds)         (farewell seconds)                       ended, told,
                                                                                                         cancelled

A second signal, or the autoreloader, takes the short way. Knows neither Django nor a server: it gets a `DrainTarget`.
Event loop only. Ideas: sse-starlette's shutdown_event with a grace period; Envoy's and Kubernetes' drain; uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("streamserve.asgi")

# Readers that were told end within this, on a busy machine too; who does not listen is ended.
_FAREWELL_SECONDS = 5.0
# Who was accepted last has so long to ask, and to be refused: a connection that is closed first may hold a request.
_NEWCOMER_SECONDS = 1.0
# From "your client has left" until an app that does not listen is cancelled.
_GRACE_SECONDS = 5.0
# What was written goes out for so long; who takes nothing gets a cut connection.
_FLUSH_SECONDS = 2.0
# A second signal, or a reload: every wait above is this at most.
_HURRIED_SECONDS = 0.5
_POLL_SECONDS = 0.02

Hook = Callable[[], None]


class DrainTarget(Protocol):
    """What is drained."""

    def is_busy(self) -> bool:
        """Whether an app runs, or a response is not taken yet."""

    def is_running(self) -> bool:
        """Whether an app runs."""

    def has_unsent(self) -> bool:
        """Whether something written has not gone out."""

    def stop_listening(self) -> None:
        """Accept who is there already, and no connection any more."""

    def has_newcomers(self) -> bool:
        """Whether a connection has not asked anything yet."""

    def end_all(self) -> None:
        """End every response and WebSocket, and tell its app that the client has left."""

    def cancel_all(self) -> None:
        """Cancel every app that still runs."""


class Drain:
    """One server's going down: the hooks an app hangs in, and the order of things.

    `retry_after`: what a refused request is told. `serves` is asked for the path of each new request while draining.
    """

    def __init__(self, *, serves: Callable[[str], bool] = lambda path: False, retry_after_seconds: int = 2) -> None:
        self.serves = serves
        self.retry_after = b"%d" % retry_after_seconds
        self.is_draining = False
        self._on_drain: list[Hook] = []
        self._on_farewell: list[Hook] = []
        self._is_hurried = False

    def on_drain(self, hook: Hook) -> None:
        """Call `hook` when draining begins: say "not ready", take no new work. Once for each hook."""
        _add(hook, self._on_drain)

    def on_farewell(self, hook: Hook) -> None:
        """Call `hook` when time is up: tell your readers where to go on, and end. Once for each hook."""
        _add(hook, self._on_farewell)

    def hurry(self) -> None:
        """Wait for nobody from now on."""
        self._is_hurried = True

    async def conduct(self, house: DrainTarget, drain_seconds: float) -> None:
        """Drain `house`; when this returns nothing runs and nothing is unsent, or time was up."""
        self.is_draining = True
        _call(self._on_drain)
        await self._until_not(house.is_busy, drain_seconds, hurried=0)
        if self._on_farewell:
            _call(self._on_farewell)
            await self._until_not(house.is_running, _FAREWELL_SECONDS)
        house.stop_listening()
        await self._until_not(house.has_newcomers, _NEWCOMER_SECONDS)
        house.end_all()
        await self._until_not(house.is_running, _GRACE_SECONDS)
        house.cancel_all()
        await self._until_not(house.is_running, _GRACE_SECONDS)
        await self._until_not(house.has_unsent, _FLUSH_SECONDS)

    async def _until_not(self, claim: Callable[[], bool], seconds: float, hurried: float = _HURRIED_SECONDS) -> None:
        """Wait until `claim` no longer holds, or time is up. What changes it has no one event."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while claim() and clock() - since < (min(seconds, hurried) if self._is_hurried else seconds):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)


def _add(hook: Hook, hooks: list[Hook]) -> None:
    if hook not in hooks:
        hooks.append(hook)


def _call(hooks: list[Hook]) -> None:
    for hook in hooks:
        try:
            hook()
        except Exception:
            logger.exception("a hook of the drain failed")


async def end_tasks() -> None:
    """Cancel every other task of this loop, then close what generators are left, as `asyncio.run` does at its end.

    Django 5.2 leaves such tasks when its own is cancelled; at interpreter exit they would be collected half-way.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_HURRIED_SECONDS)
    await asyncio.get_running_loop().shutdown_asyncgens()
