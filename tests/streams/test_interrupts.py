"""Laws of interrupted runs in a log: they come back whole, for their time, whatever is purged."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.clients.pipeline.interrupts import Interrupted
from streamserve.protocol.events import Approval, BlockStart, BlockStop, Token
from streamserve.protocol.requests import Approved, GenerateRequest, Message, SamplingParams
from streamserve.streams.config import StreamConfig
from streamserve.streams.interrupts import InterruptLog
from streamserve.streams.log.base import EventLog, MemoryLog
from streamserve.streams.log.file_log import FileLog

ID = "a" * 32
REQUEST = GenerateRequest(
    model="p",
    messages=(Message(role="user", content="Pay\0 my bill"),),
    sampling=SamplingParams(seed=7),
    continues="b" * 32,
    approvals=(Approved(id="call_0", allow=False, message="No."),),
)


def run(num_bytes: int = 10) -> Interrupted:
    return Interrupted(
        request=REQUEST,
        calls=(Approval(id="call_1", name="pay", arguments='{"euros": 5}', message="Pay?"),),
        at=time.time(),
        kept={("look", 0): {"result": "x" * num_bytes, "shown": []}, ("look", 1): {"result": [1, None], "shown": []}},
        shown=[
            Token(text="é", token_ids=(1, 2)),
            BlockStart(choice=0, index=1, kind="server_tool_use", id="call_1", name="pay"),
            BlockStop(choice=0, index=1),
        ],
    )


@pytest.fixture(params=["memory", "file"])
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EventLog]:
    log: EventLog = MemoryLog() if request.param == "memory" else FileLog(tmp_path / "streams.sqlite3")
    yield log
    await log.aclose()


def interrupts(log: EventLog, seconds: float = 60.0, *, most: int = 10, forgets: bool = False) -> InterruptLog:
    return InterruptLog(log, StreamConfig(approval_seconds=seconds, max_finished=most), forgets=forgets)


@pytest.mark.parametrize("num_bytes", [10, 3 * 1024 * 1024])
async def test_another_process_finds_what_was_kept(log: EventLog, num_bytes: int) -> None:
    """Of any size, in several commits if need be; kept again it is replaced, and dropped it is gone."""
    one = run(num_bytes)
    big = replace(one, kept={("look", number): one.kept["look", 0] for number in range(4)})
    await interrupts(log).keep(ID, big)
    assert await interrupts(log).find(ID) == big
    await interrupts(log).keep(ID, one)
    assert await interrupts(log).find(ID) == one
    await interrupts(log).drop(ID)
    assert await interrupts(log).find(ID) is None


async def test_it_waits_for_its_time(log: EventLog) -> None:
    """And the purge of finished streams leaves it, which is far shorter."""
    await interrupts(log).keep(ID, run())
    await log.purge(time.time() + 60)
    assert await interrupts(log).find(ID) is not None
    assert await interrupts(log, seconds=0.0).find(ID) is None


async def test_a_result_too_large_is_left_out(log: EventLog) -> None:
    """The run that continues calls its function again."""
    await interrupts(log).keep(ID, run(5 * 1024 * 1024))
    found = await interrupts(log).find(ID)
    assert found is not None
    assert list(found.kept) == [("look", 1)]


async def test_a_lone_process_forgets_its_oldest(log: EventLog) -> None:
    """Where no purge looks after the log, no more are kept than finished answers."""
    own = interrupts(log, most=2, forgets=True)
    for number in range(4):
        await own.keep(f"{number}" * 32, run())
    found = [number for number in range(4) if await own.find(f"{number}" * 32) is not None]
    assert found == [2, 3]
