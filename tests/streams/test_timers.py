"""Laws of a stream's timers."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from contextvars import ContextVar

import pytest

from streamserve.streams.timers import Patience, Timers
from tests.support.streams import until


async def test_a_timer_fires_once_and_can_be_armed_again() -> None:
    """An armed name keeps its earlier time; once fired it is free."""
    timers, fired = Timers(), []
    timers.arm("a", 0, lambda: fired.append(1))
    timers.arm("a", 0, lambda: fired.append(2))
    await until(lambda: bool(fired), "it fires")
    timers.arm("a", -1, lambda: fired.append(3))
    await until(lambda: len(fired) > 1, "it fires again")
    assert fired == [1, 3]


async def test_a_disarmed_timer_does_not_fire() -> None:
    """Neither by name nor with all others."""
    timers, fired = Timers(), []
    for name in "abc":
        timers.arm(name, 0, lambda: fired.append(0))
    timers.disarm("a", "nosuch")
    timers.disarm_all()
    timers.arm("d", 0, lambda: fired.append(1))
    await until(lambda: bool(fired), "the last one fires")
    assert fired == [1]


async def test_a_timer_keeps_nothing_of_the_request_that_armed_it() -> None:
    """Actions run in an empty context."""
    current_request: ContextVar[str | None] = ContextVar("current_request", default=None)
    current_request.set("GET /")
    seen: list[str | None] = []
    Timers().arm("a", 0, lambda: seen.append(current_request.get()))
    await asyncio.sleep(0)
    await until(lambda: bool(seen), "it fires")
    assert seen == [None]


async def never() -> None:
    """Wait for what does not come."""
    await asyncio.get_running_loop().create_future()


async def test_a_wait_has_its_own_limit() -> None:
    """Whatever the limits before it were: longer, shorter, none, or long over."""
    patience, soon = Patience(), 0.001
    assert await patience.wait(asyncio.sleep(0), time.monotonic() + 3600)
    assert not await patience.wait(never(), time.monotonic() + soon)
    assert not await patience.wait(never(), time.monotonic() - 1)
    assert await patience.wait(asyncio.sleep(10 * soon), math.inf)
    assert await patience.wait(asyncio.sleep(0), time.monotonic() + soon)
    assert await patience.wait(asyncio.sleep(10 * soon), time.monotonic() + 3600)
    assert not await patience.wait(never(), time.monotonic() + soon)
    patience.close()


async def test_a_wait_that_is_cancelled_is_not_out_of_time() -> None:
    """Cancelling comes through, even when it meets the limit, and what the wait raises too."""
    patience = Patience()

    async def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        await patience.wait(fail(), time.monotonic() + 3600)
    for limit in (math.inf, 0.0):
        waiting = asyncio.create_task(patience.wait(never(), limit))
        await asyncio.sleep(0)
        if limit == 0.0:
            asyncio.get_running_loop().call_soon(waiting.cancel)  # in the turn in which the time is up
        else:
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_closed_patience_keeps_no_timer() -> None:
    """Nobody is kept alive by a limit that nobody waits for; a wait of now still has its own."""
    patience = Patience()
    assert await patience.wait(asyncio.sleep(0), time.monotonic() + 3600)
    patience.close()
    gone = weakref.ref(patience)
    waits_still = Patience()
    waiting = asyncio.create_task(waits_still.wait(never(), time.monotonic() + 0.01))
    await asyncio.sleep(0)
    waits_still.close()
    assert not await waiting
    del patience
    assert gone() is None
