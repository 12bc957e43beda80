"""Laws of a stream's timers."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from streamserve.streams.timers import Timers
from tests.support.streams.hand_made import until


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
    """A timer is disarmed by its name or with all of its stream."""
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
