"""Laws of `Alarm`: it rings once, at the earliest time that it was set to."""

from __future__ import annotations

import asyncio
import math
import time

from streamserve.streams.reader.alarm import Alarm
from tests.support.streams.hand_made import until


async def test_the_earliest_time_counts() -> None:
    """Set again to a later time it keeps the earlier time; set to an earlier time it takes that."""
    alarm, rung, now = Alarm(), list[str](), time.monotonic()
    alarm.set(now + 3600, lambda: rung.append("hour"))
    alarm.set(now + 7200, lambda: rung.append("two hours"))
    assert alarm.at == now + 3600
    alarm.set(now, lambda: rung.append("now"))
    assert alarm.at == now
    await until(lambda: bool(rung), "it rings")
    assert rung == ["now"]
    assert alarm.at == math.inf


async def test_it_may_be_set_while_it_rings() -> None:
    """What it calls finds it not set, and may set it anew."""
    alarm, rung = Alarm(), list[float]()

    def ring() -> None:
        rung.append(alarm.at)
        if len(rung) < 3:
            alarm.set(time.monotonic(), ring)

    alarm.set(time.monotonic(), ring)
    await until(lambda: len(rung) == 3, "it rings three times")
    assert rung == [math.inf] * 3


async def test_a_cancelled_alarm_does_not_ring() -> None:
    """Nor does one that never comes: infinity sets nothing."""
    alarm, rung = Alarm(), list[str]()
    alarm.set(math.inf, lambda: rung.append("never"))
    alarm.set(time.monotonic(), lambda: rung.append("now"))
    alarm.cancel()
    assert alarm.at == math.inf
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0, done.set_result, None)
    await done
    assert rung == []
