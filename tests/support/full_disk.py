"""Fill the file system of a folder, commit until the log has no room, make room, commit again. For test_file_log.py.

A batch that is refused is retried as it is, and is in the log once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
from pathlib import Path

from streamserve.streams.log.base import LogFull, make_batch
from streamserve.streams.log.file_log import FileLog
from tests.support.logs import everything, numbered
from tests.support.streams import tok


async def main(folder: Path) -> None:
    path, ballast, word = folder / "streams.db", folder / "ballast", tok("word " * 20)
    log, num_events = FileLog(path), 0
    assert await log.commit([make_batch("a", 1, 0, [word])]) == [1]
    num_events = 1
    _fill(ballast)
    batch = make_batch("a", 1, num_events, [word])
    for _ in range(20):
        with contextlib.suppress(LogFull):
            while True:  # what room there is in pages that are there
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
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()
    print("sound")


def _fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1024)):
            pass


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
