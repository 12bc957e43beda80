"""A process that commits to logs until it is killed, and prints what was acknowledged: `log_id fence seq text`.

    python -m tests.support.streams.log_writer <place> <name> <log ids> <fences>

`place` is a path or a redis:// URL. `fences` is "first,step": it writes each log with `first` until it is fenced, then
claims it with `step` more, so that several of them race. "1,0": one fence for ever, and logs of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys

from streamserve.protocol.events import Token
from streamserve.streams.log.base import Batch, EventLog, Fenced, LogUnavailable, commit_one, make_batch
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.log.redis_log import RedisLog


def log_at(place: str) -> EventLog:
    """Return the log of that place."""
    return RedisLog(place) if place.startswith("redis://") else FileLog(place)


async def write(log: EventLog, name: str, log_id: str, fence: int, step: int) -> None:
    """Commit batches of one to three events for ever; each text has the writer, its fence and a number."""
    number = last_seq = 0
    while True:
        texts = [f"{name}:{fence}:{number + more}" for more in range(1 + number % 3)]
        batch = make_batch(log_id, fence, last_seq, [Token(text=text, token_ids=(1,)) for text in texts])
        try:
            last_seq = await _commit(log, batch)
        except Fenced:
            fence += step
            last_seq = await _claim(log, log_id, fence)
            continue
        number += len(texts)
        lines = [f"{log_id} {fence} {seq} {text}\n" for seq, text in enumerate(texts, last_seq - len(texts) + 1)]
        os.write(1, "".join(lines).encode())
        await asyncio.sleep(0)  # a commit need not wait


async def _claim(log: EventLog, log_id: str, fence: int) -> int:
    """Return where the log ends after the claim by `fence`; if the claim failed, the next commit is refused."""
    try:
        return await _commit(log, make_batch(log_id, fence, None, []))
    except Fenced:
        return 0


async def _commit(log: EventLog, batch: Batch) -> int:
    """Commit this batch, with as many retries as needed."""
    while True:
        try:
            return await commit_one(log, batch)
        except LogUnavailable:
            await asyncio.sleep(0)


async def main(place: str, name: str, log_ids: str, fences: str) -> None:
    """Write to all logs at once."""
    log = log_at(place)
    first, step = map(int, fences.split(","))
    await asyncio.gather(*[write(log, name, log_id, first, step) for log_id in log_ids.split(",")])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
