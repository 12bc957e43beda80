"""Laws of the drain under servers that have none: the signal is heard beside the server's own handler."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from streamserve.asgi.drain import on_sigterm


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What a server's own handler has heard."""
    heard: list[str] = []

    def own(number: int, frame: FrameType | None) -> None:
        heard.append("server")

    before = signal.signal(signal.SIGTERM, own)
    yield heard
    signal.signal(signal.SIGTERM, before)


async def test_the_hooks_run_at_the_signal_and_after_the_drain(heard: list[str]) -> None:
    """The server's handler still runs; a hook that fails keeps no other from running."""
    gone = asyncio.Event()

    def fail() -> None:
        raise ValueError("planted")

    on_sigterm([fail, lambda: heard.append("drain")], [lambda: heard.append("gone"), gone.set], 0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(gone.wait(), 60)
    assert heard == ["server", "drain", "gone"]


async def test_a_server_that_uses_the_loop_s_handler_hears_it_too() -> None:
    """As hypercorn, granian and gunicorn do."""
    loop, heard = asyncio.get_running_loop(), set[str]()
    server, drain = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, server.set)
    try:
        on_sigterm([drain.set], [lambda: heard.add("gone")], 600)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(server.wait(), drain.wait()), 60)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    assert not heard


async def test_a_signal_that_nobody_handles_is_left_alone(heard: list[str]) -> None:
    """It ends the process, as it would without us; and only the main thread may change a handler."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    on_sigterm([], [], 0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    async def listen() -> None:
        on_sigterm([], [], 0)

    signal.signal(signal.SIGTERM, own := lambda number, frame: None)
    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert signal.getsignal(signal.SIGTERM) is own
