"""An engine that takes turns with the event loop, so that on the slowest machine it is no more than a step ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streamserve.web import site
from tests.conftest import until

_TURNS = 100  # of the event loop, more than a token takes from the engine to its reader


def take_turns(is_ready: Callable[[], bool] = lambda: True) -> None:
    """Let each step of the site's echo engine wait until `is_ready`, and for 100 turns of the event loop."""
    loop = asyncio.get_running_loop()

    async def turn() -> None:
        await until(is_ready)
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    runner = site.get_site().clients["echo"]._thread.engine.runner
    runner._pause = lambda: asyncio.run_coroutine_threadsafe(turn(), loop).result()
