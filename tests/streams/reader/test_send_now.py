"""Laws of frames that are sent at once: no task is woken for them, and a reader gets what it gets without."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.registry import Streams
from tests.support.checks.stream_checks import check_native, parse_sse
from tests.support.streams.deliveries import DONE, deliver, serving, start
from tests.support.streams.hand_made import ScriptedClient, tok, until
from tests.support.streams.wire import Wire


class QuickWire(Wire):
    """A transport that sends at once while `is_ready()`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = lambda: True
        self.num_now = 0

    async def __call__(self, data: bytes) -> None:
        await self.send(data)

    def now(self, data: bytes) -> bool:
        if self.num_waiting or not self.is_ready():
            return False
        self.num_now += 1
        self.sent.append(data)
        return True


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_token_takes_one_turn_of_the_loop(scripted: ScriptedClient, tmp_path: Path, kind: str) -> None:
    """In the turn of the loop after the engine's news the log has the token, and the transport its frame."""
    log = MemoryLog() if kind == "memory" else FileLog(tmp_path / "log.db")
    streams = Streams({"scripted": scripted}, log, StreamConfig(coalesce_tokens=0))
    wires = [QuickWire() for _ in range(8)]
    reading, sources = [], []
    for wire in wires:
        stream = await start(streams)
        sources.append(scripted.last)
        reading.append(asyncio.create_task(deliver(streams, stream).run(wire)))
    await until(lambda: all(len(wire.sent) == 2 for wire in wires), "first bytes and meta are sent")
    if isinstance(log, FileLog):
        await until(lambda: not log._writer._is_working, "its thread has nothing to do")
    for number in range(3, 20):
        for source in sources:
            source.push(tok("word"))
        await asyncio.sleep(0)
        assert [len(wire.sent) for wire in wires] == [number] * 8
    for source in sources:
        source.push(DONE)
    await asyncio.gather(*reading)
    assert all(wire.num_now == 19 for wire in wires)
    await streams.aclose()
    await log.aclose()


async def test_every_frame_comes_once_and_in_order(scripted: ScriptedClient) -> None:
    """Whichever frames the transport does not take at once, and however long it then takes."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    streams = serving(scripted, coalesce_tokens=0)
    for _ in range(30):
        stream, wire = await start(streams), QuickWire()
        wire.is_ready = lambda: rng.random() < 0.5
        running = asyncio.create_task(deliver(streams, stream).run(wire))
        for number in range(40):
            scripted.last.push(tok(f"{number}"))
            (wire.go.clear if rng.random() < 0.3 else wire.go.set)()
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        wire.go.set()
        scripted.last.push(DONE)
        await running
        frames = check_native(wire.data)
        assert [frame.json["text"] for frame in frames if frame.event == "token"] == [str(one) for one in range(40)], (
            seed
        )
    await streams.aclose()


async def test_a_transport_that_is_full_bounds_what_is_read(scripted: ScriptedClient) -> None:
    """A frame that is not taken at once is the last that is made until it is sent."""
    streams = serving(scripted, coalesce_tokens=0)
    stream, wire = await start(streams), QuickWire()
    running = asyncio.create_task(deliver(streams, stream).run(wire))
    await until(lambda: len(wire.sent) == 2, "first bytes and meta are sent")
    wire.is_ready = lambda: False
    wire.go.clear()
    for _ in range(20):
        scripted.last.push(tok("word"))
        await asyncio.sleep(0)
    await until(lambda: stream.last_seq == 21, "all is committed")
    assert len(parse_sse(wire.data)) == 1
    assert wire.num_waiting == 1
    wire.is_ready = lambda: True
    wire.go.set()
    scripted.last.push(DONE)
    await running
    assert [frame.event for frame in check_native(wire.data)][-1] == "done"
    await streams.aclose()
