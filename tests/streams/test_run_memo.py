"""Laws of what a run keeps beside its stream, for another process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from streamserve.protocol.errors import ProducerLost
from streamserve.streams.log.base import Batch, LogUnavailable, MemoryLog, Result
from streamserve.streams.run_memo import RunMemo

FIRST, SECOND = ("read", 0), ("search", 0)


class SlowLog(MemoryLog):
    """A log whose callers learn of a commit when `may_answer` is set, or that it failed."""

    def __init__(self) -> None:
        super().__init__()
        self.has_committed, self.may_answer = asyncio.Event(), asyncio.Event()
        self.num_refused = 0  # commits that fail although they were done

    async def commit(self, batches: Sequence[Batch]) -> list[Result]:
        results = await super().commit(batches)
        self.has_committed.set()
        await self.may_answer.wait()
        if self.num_refused and batches[0].events:
            self.num_refused -= 1
            raise LogUnavailable("The log is away.", retry_after=1)
        return results


async def kept(log: MemoryLog, fence: int) -> dict[object, object]:
    """Return what another process finds of a run whose stream has shown nothing."""
    memo = RunMemo(log, "s", log_id="s-log", fence=fence)
    with pytest.raises(KeyError):  # there is no stream's log here
        await memo.load()
    return dict(memo.kept)


async def test_an_entry_that_is_given_up_costs_no_other() -> None:
    """The author's time limit ends the wait for an entry that is in the log already: the next one is kept too."""
    log = SlowLog()
    memo = RunMemo(log, "s")
    keeping = asyncio.create_task(memo.keep(FIRST, {"result": 1}, 0.0))
    await log.has_committed.wait()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    log.may_answer.set()
    await memo.keep(SECOND, {"result": 2}, 0.0)
    assert await kept(log, 2) == {FIRST: {"result": 1}, SECOND: {"result": 2}}


async def test_an_outage_is_waited_for() -> None:
    """An entry that the log had taken when it went away is kept once."""
    log = SlowLog()
    log.may_answer.set()
    log.num_refused = 2
    memo = RunMemo(log, "s")
    await memo.keep(FIRST, {"result": 1}, 0.0)
    await memo.keep(SECOND, {"result": 2}, 0.0)
    assert await log.last_seq("run-s") == 2
    assert await kept(log, 2) == {FIRST: {"result": 1}, SECOND: {"result": 2}}


async def test_a_process_that_has_lost_the_run_keeps_nothing() -> None:
    """The claim of another process refuses it, also where nothing was kept before."""
    log = MemoryLog()
    memo = RunMemo(log, "s")
    assert await kept(log, 2) == {}
    with pytest.raises(ProducerLost):
        await memo.keep(FIRST, {"result": 1}, 0.0)


async def test_a_run_does_not_begin_in_an_outage() -> None:
    """Its stream learns of the outage, and may let another process have the run; it asks again later."""
    log = SlowLog()
    log.may_answer.set()
    log.num_refused = 1
    with pytest.raises(LogUnavailable):
        await RunMemo(log, "s", log_id="s-log", fence=2).load()
    assert await kept(log, 2) == {}
    assert await log.last_seq("run-s") == 1
