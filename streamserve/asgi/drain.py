"""`Drain`: how a server shuts down without cutting a response off.

    SIGTERM ─► on_drain: not ready ─► responses in flight finish ─► on_going_away: streams end ─► the rest is ended,
               new requests: 503      (drain_seconds)               (_GOING_AWAY_SECONDS)         then cancelled

A second signal, or the autoreloader, shortens every wait. Knows neither Django nor a server, only a `DrainTarget`.

Other servers do not tell their apps that they shut down, or tell it when every response has ended. `on_sigterm` makes
the first and the third step at the signal itself; what becomes of the responses is the server's.

Event loop only. Ideas: sse-starlette's shutdown_event with a grace period; Envoy's and Kubernetes' drain; uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from streamserve.asgi.guard import RouteBound

logger = logging.getLogger("streamserve.asgi")

# Streams that are asked to end do so within this, on a busy machine too.
_GOING_AWAY_SECONDS = 5.0
# The last accepted connection has so long to send its request: closing it earlier may lose a request that was sent.
_NEWCOMER_SECONDS = 1.0
# From an app's `http.disconnect` until it is cancelled.
_GRACE_SECONDS = 5.0
# How long unsent bytes may take to leave before their connection is closed.
_FLUSH_SECONDS = 2.0
# The bound of every wait above after a second signal, or under the autoreloader.
_HURRIED_SECONDS = 0.5
_POLL_SECONDS = 0.02

Hook = Callable[[], None]


class DrainTarget(Protocol):
    """The server that is drained."""

    def is_busy(self) -> bool:
        """Return whether an app runs, or a response has unsent bytes."""

    def is_running(self) -> bool:
        """Return whether an app runs."""

    def has_unsent(self) -> bool:
        """Return whether a connection has unsent bytes."""

    def stop_listening(self) -> None:
        """Accept the connections that are queued, and none after them."""

    def has_newcomers(self) -> bool:
        """Return whether a connection has not sent a request yet."""

    def end_all(self) -> None:
        """End every response and WebSocket, and send each app its disconnect."""

    def cancel_all(self) -> None:
        """Cancel every app that still runs."""


class Drain:
    """One server's shutdown: the hooks of its apps, and the order of steps.

    `retry_after` is sent with a refused request. `serves` decides by path which new requests are answered meanwhile;
    `bound_of` names, at any time, what bodies the app takes at a path; None leaves it to the server.
    """

    def __init__(self, *, serves: Callable[[str], bool] = lambda path: False, retry_after_seconds: int = 2) -> None:
        self.serves = serves
        self.bound_of: Callable[[str], RouteBound | None] = lambda path: None
        self.retry_after = b"%d" % retry_after_seconds
        self.is_draining = False
        self._on_drain: list[Hook] = []
        self._on_going_away: list[Hook] = []
        self._is_hurried = False

    def on_drain(self, hook: Hook) -> None:
        """Call `hook` when draining begins: report "not ready", start no new work. Each hook is called once."""
        if hook not in self._on_drain:
            self._on_drain.append(hook)

    def on_going_away(self, hook: Hook) -> None:
        """Call `hook` when `drain_seconds` are over: end the streams resumably. Each hook is called once."""
        if hook not in self._on_going_away:
            self._on_going_away.append(hook)

    def hurry(self) -> None:
        """Shorten every wait from now on."""
        self._is_hurried = True

    async def conduct(self, target: DrainTarget, drain_seconds: float) -> None:
        """Drain `target`. On return nothing runs and nothing is unsent, or its time was over."""
        self.is_draining = True
        _call(self._on_drain)
        await self._wait_while(target.is_busy, drain_seconds, hurried=0)
        if self._on_going_away:
            _call(self._on_going_away)
            await self._wait_while(target.is_running, _GOING_AWAY_SECONDS)
        target.stop_listening()
        await self._wait_while(target.has_newcomers, _NEWCOMER_SECONDS)
        target.end_all()
        await self._wait_while(target.is_running, _GRACE_SECONDS)
        target.cancel_all()
        await self._wait_while(target.is_running, _GRACE_SECONDS)
        await self._wait_while(target.has_unsent, _FLUSH_SECONDS)

    async def _wait_while(self, holds: Callable[[], bool], seconds: float, hurried: float = _HURRIED_SECONDS) -> None:
        """Wait while `holds()` is true, for up to `seconds`. Polls: no single event changes the answer."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while holds() and clock() - since < (min(seconds, hurried) if self._is_hurried else seconds):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)


def on_sigterm(on_drain: list[Hook], on_going_away: list[Hook], drain_seconds: float) -> None:
    """Call `on_drain` at SIGTERM, and `on_going_away` after `drain_seconds` more, beside the server's own handler.

    Call it on the running loop, at startup. Does nothing where the signal has no handler, which ends the process then,
    and outside of the main thread, which alone may handle signals.
    """
    previous, loop = signal.getsignal(signal.SIGTERM), asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        return

    def begin() -> None:
        _call(on_drain)
        loop.call_later(drain_seconds, _call, on_going_away)

    def handle(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(begin)
        previous(number, frame)

    signal.signal(signal.SIGTERM, handle)


def _call(hooks: list[Hook]) -> None:
    for hook in hooks:
        try:
            hook()
        except Exception:
            logger.exception("a hook of the drain failed")


def before_exit(callback: Callable[[], None]) -> None:
    """Call `callback` when the main thread ends, while executors still take work: for `atexit` they do not.

    concurrent.futures uses the same hook; the hook registered last is called first.
    """
    import concurrent.futures.thread  # noqa: F401  (registers its own)

    getattr(threading, "_register_atexit")(callback)  # noqa: B009  (in no stub)


async def end_tasks() -> None:
    """Cancel every other task of this loop, then close the generators that are left, as `asyncio.run` does at its end.

    Django 5.2 leaves such tasks when its own is cancelled; the interpreter's exit would collect them half-way.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_HURRIED_SECONDS)
    await asyncio.get_running_loop().shutdown_asyncgens()
