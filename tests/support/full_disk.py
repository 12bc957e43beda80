"""Fill the file system of a folder, append until the log refuses, make room, append again. For test_file_log.py.

Then the same with memory to spare: appends go on while there is no room, and are all there when there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
from pathlib import Path

from streamserve.streams.log.base import LogFull
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.log.spare_log import SpareLog
from tests.support.logs import everything, numbered
from tests.support.streams import tok, until


async def main(folder: Path) -> None:
    path = folder / "streams.db"
    log = FileLog(path)
    word = tok("word " * 20)
    assert await log.append("a", 1, [word]) == 1
    ballast = folder / "ballast"
    _fill(ballast)
    num_events, num_refused = 1, 0
    while num_refused < 20:
        try:
            num_events = await log.append("a", 1, [word])
        except LogFull:
            num_refused += 1
    assert await everything(log, "a") == numbered([word] * num_events)
    print("full, ", end="")
    os.unlink(ballast)
    assert await log.append("a", 1, [word] * 5) == num_events + 5
    assert await everything(FileLog(path), "a") == numbered([word] * (num_events + 5))
    print("recovered, ", end="")
    await log.aclose()
    await _go_on(folder)
    print("went on, ", end="")
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()
    print("sound")


async def _go_on(folder: Path) -> None:
    path, ballast, word = folder / "streams.db", folder / "ballast", tok("word " * 20)
    log = SpareLog(FileLog(path))
    num_events = await log.append("b", 1, [word])
    _fill(ballast)
    while log.is_durable("b"):
        num_events = await log.append("b", 1, [word])
    for _ in range(500):
        num_events = await log.append("b", 1, [word] * 3)
    assert not log.is_durable("b")
    assert await everything(log, "b") == numbered([word] * num_events)
    os.unlink(ballast)
    await until(lambda: log.is_durable("b"), "it is written back")
    assert await everything(FileLog(path), "b") == numbered([word] * num_events)
    await log.aclose()


def _fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1024)):
            pass


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
