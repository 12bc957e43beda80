"""Laws of a log, on the one in memory."""

from __future__ import annotations

import asyncio

import pytest

from streamserve.streams.log import Fenced, MemoryLog, new_log_id
from tests.streams.fakes import tok


async def test_events_are_numbered_densely_from_one() -> None:
    """Seqs go on from append to append; `after` and `limit` cut exactly."""
    log = MemoryLog()
    assert await log.append("a", 1, [tok("x"), tok("y")]) == 2
    assert await log.append("a", 1, [tok("z")]) == 3
    assert [(entry.seq, entry.event) for entry in await log.read("a", 1)] == [(2, tok("y")), (3, tok("z"))]
    assert [entry.seq for entry in await log.read("a", 0, limit=2)] == [1, 2]
    assert await log.read("a", 3) == []


async def test_a_stale_producer_is_fenced() -> None:
    """Once a later fence has written, an earlier one cannot."""
    log = MemoryLog()
    await log.append("a", 2, [tok("x")])
    with pytest.raises(Fenced):
        await log.append("a", 1, [tok("y")])
    assert len(await log.read("a", 0)) == 1


@pytest.mark.parametrize("what", ["append", "seal", "drop"])
async def test_waiting_readers_are_woken(what: str) -> None:
    """News, the end, and the loss of the log all wake who waits."""
    log = MemoryLog()
    await log.append("a", 1, [tok("x")])
    waiting = [asyncio.create_task(log.wait("a", 1)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    await {
        "append": lambda: log.append("a", 1, [tok("y")]),
        "seal": lambda: log.seal("a"),
        "drop": lambda: log.drop("a"),
    }[what]()
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)


async def test_what_is_gone_raises_and_is_not_waited_for() -> None:
    """A dropped log is unknown, and nobody waits for it for ever."""
    log = MemoryLog()
    await log.append("a", 1, [tok("x")])
    await log.drop("a")
    with pytest.raises(KeyError):
        await log.read("a", 0)
    async with asyncio.timeout(5):
        await log.wait("a", 1)


def test_log_ids_are_unique_names() -> None:
    """Twelve characters that fit an event id."""
    names = {new_log_id() for _ in range(1000)}
    assert len(names) == 1000
    assert all(len(name) == 12 and name.isalnum() and name.islower() | name.isdigit() for name in names)
