"""Fill the file system of a folder, commit until the log has no room, make room, commit again. For test_file_log.py.

A refused batch is retried unchanged, and is in the log once. Then an answer is read while there is no room.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
from pathlib import Path

from streamserve.protocol.events import Done, LoggedEvent, Status
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import LogFull, make_batch
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.reader.follow import follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.streams.hand_made import ScriptedClient, ask, tok, until, untimed
from tests.support.streams.logs import everything, numbered


async def main(folder: Path) -> None:
    path, ballast, word = folder / "streams.db", folder / "ballast", tok("word " * 20)
    log, num_events = FileLog(path), 0
    assert await log.commit([make_batch("a", 1, 0, [word])]) == [1]
    num_events = 1
    _fill(ballast)
    batch = make_batch("a", 1, num_events, [word])
    for _ in range(20):
        with contextlib.suppress(LogFull):
            while True:  # fill the free room of existing pages
                assert await log.commit([batch]) == [num_events + 1]
                num_events += 1
                batch = make_batch("a", 1, num_events, [word])
    assert await everything(log, "a") == numbered([word] * num_events)
    print("full, ", end="")
    os.unlink(ballast)
    for _ in range(2):
        assert await log.commit([batch]) == [num_events + 1]
    num_events += 1
    print("recovered, ", end="")
    other = FileLog(path)
    assert await everything(other, "a") == numbered([word] * num_events)
    batches = [make_batch(log_id, 1, base, [word] * 5) for log_id, base in (("a", num_events), ("b", 0))]
    for one in (log, other):
        assert await one.commit(batches) == [num_events + 5, 5]
    print("retried, ", end="")
    await log.aclose()
    await other.aclose()
    await _read_through(path, ballast)
    print("read, ", end="")
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()
    print("sound")


async def _read_through(path: Path, ballast: Path) -> None:
    """Check that a reader waits, gets two notices, and has the whole answer."""
    log, scripted, words = FileLog(path), ScriptedClient(), [tok("word " * 20, number) for number in range(600)]
    streams = Streams({"scripted": scripted}, log, StreamConfig(coalesce_tokens=0, snapshot_events=0))
    stream = await streams.start(ask("scripted"), Admission(owner="o", tenant="t"))
    seen: list[LoggedEvent] = []
    reading = asyncio.create_task(_read(streams, stream, seen))
    scripted.last.push(*words[:3])
    await until(lambda: len(seen) == 4, "three words are read")
    _fill(ballast)
    scripted.last.push(*words[3:])
    await until(lambda: isinstance(streams.writer.outage, LogFull), "there is no room")
    await until(lambda: bool(seen) and not seen[-1].seq, "its reader is informed")
    os.unlink(ballast)
    scripted.last.push(Done(finish_reason="stop"))
    await reading
    logged = [one for one in seen if one.seq]
    assert [untimed(one.event) for one in logged[1:]] == [*words, Done(finish_reason="stop")]
    assert await everything(log, stream.log_id) == logged
    notices = [one.event.status for one in seen if isinstance(one.event, Status)]
    assert notices == ["waiting", "resumed"] * (len(notices) // 2)
    await streams.aclose()
    await log.aclose()


async def _read(streams: Streams, stream: Stream, seen: list[LoggedEvent]) -> None:
    async with contextlib.aclosing(follow(streams, stream)) as events:
        async for logged in events:
            seen.append(logged)


def _fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1024)):
            pass


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
