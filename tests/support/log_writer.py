"""A process that appends to logs until it is killed, and says on stdout what was acknowledged: `log_id fence seq text`.

    python -m tests.support.log_writer <place> <name> <log ids> <fences>

`place` is a path or a redis:// URL. `fences` is "first,step": it claims each log with `first`, appends until it is
fenced, then claims with `step` more, so that several of them race. "1,0": one fence for ever, and logs of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys

from streamserve.protocol.events import Token
from streamserve.streams.log.base import EventLog, Fenced, LogUnavailable, append
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.log.redis_log import RedisLog


def log_at(place: str) -> EventLog:
    """Return the log of that place."""
    return RedisLog(place) if place.startswith("redis://") else FileLog(place)


async def write(log: EventLog, name: str, log_id: str, fence: int, step: int) -> None:
    """Append batches of one to three events for ever; each text says who wrote it, with which fence, and its number."""
    number = 0
    while True:
        texts = [f"{name}:{fence}:{number + more}" for more in range(1 + number % 3)]
        try:
            last_seq = await append(log, log_id, fence, [Token(text=text, token_ids=(1,)) for text in texts])
        except Fenced:
            fence += step
            continue
        except LogUnavailable:
            continue
        number += len(texts)
        first_seq = last_seq - len(texts) + 1
        lines = [f"{log_id} {fence} {seq} {text}\n" for seq, text in enumerate(texts, first_seq)]
        os.write(1, "".join(lines).encode())


async def main(place: str, name: str, log_ids: str, fences: str) -> None:
    """Write to all logs at once."""
    log = log_at(place)
    first, step = map(int, fences.split(","))
    await asyncio.gather(*[write(log, name, log_id, first, step) for log_id in log_ids.split(",")])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
