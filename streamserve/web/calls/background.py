"""Which event loop serves calls from synchronous code, and how they wait for it.

    a synchronous view of an ASGI server      the server's own loop
    anything else without a running loop      one background thread with a loop of its own, started on the first call

A process has one site of engines and streams (web/site.py), which belongs to one loop, so every thread uses the same.
Any thread. A process that is forked (Celery) starts its own loop, whether its parent has made a call or not.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from asgiref.sync import SyncToAsync
from django.core.exceptions import SynchronousOnlyOperation

from streamserve.asgi.drain import before_exit
from streamserve.web import site

T = TypeVar("T")

_CLOSE_SECONDS = 10.0
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None  # under _lock, with the process that has started it
_loop_pid = 0


def run(make: Callable[[], Coroutine[Any, Any, T]], instead: str) -> T:
    """Run the coroutine that `make` returns on the loop of this process and return its result.

    Raises SynchronousOnlyOperation on a thread whose event loop runs, which would wait for itself; `instead` works
    there.
    """
    refuse_on_loop(instead)
    # An empty context: a stream that starts here outlives the request, and must not use its thread.
    future = Context().run(asyncio.run_coroutine_threadsafe, make(), _serving_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def refuse_on_loop(instead: str) -> None:
    """Raise SynchronousOnlyOperation on a thread whose event loop runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SynchronousOnlyOperation(f"This call would block the event loop. In async code: {instead}.")


def _serving_loop() -> asyncio.AbstractEventLoop:
    of_server = getattr(SyncToAsync.threadlocal, "main_event_loop", None)
    if of_server is not None and of_server.is_running() and SyncToAsync.threadlocal.main_event_loop_pid == os.getpid():
        return of_server  # type: ignore[no-any-return]
    of_site = site.running_loop()
    return of_site if of_site is not None else _background_loop()


def _background_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of the background thread; start both on the first call in this process."""
    global _loop, _loop_pid
    with _lock:
        if _loop is None or _loop_pid != os.getpid():
            _loop, _loop_pid = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="streamserve", daemon=True).start()
            before_exit(_close)
        return _loop


def _close() -> None:
    """End this process's streams so that other processes can resume them, and disconnect from the engines."""
    if _loop is None or _loop_pid != os.getpid():
        return
    with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
        asyncio.run_coroutine_threadsafe(site.reset(), _loop).result(_CLOSE_SECONDS)
    _loop.call_soon_threadsafe(_loop.stop)
