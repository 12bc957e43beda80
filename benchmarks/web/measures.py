"""What `benchmarks.web` measures of one web process: its CPU and wakes while answers are under way, and a profile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pstats
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.web.site import MODEL, Contender, Figures, cpu_of, toggle_profile, wakes_of

_SETTLE_SECONDS = 0.5
_UNDER_WAY = 3  # events
_EVENT_ID = re.compile(rb"id: \w+-(\d+)")


@dataclass
class Count:
    """What a reader has had of its answer: the last event of the log, which holds an event a token, and frames."""

    seq: int = 0
    num_frames: int = 0


async def _read(one: Contender, count: Count) -> None:
    """Read an answer that does not end soon, until cancelled."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x" * 64}],
        "max_tokens": 8000,
        "ignore_eos": True,
        "seed": 1,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {one.key}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
    try:
        writer.write("\r\n".join((*head, "", "")).encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the answer was refused: {status!r} {await reader.read(2000)!r}")
        while line := await reader.readline():
            if found := _EVENT_ID.match(line):
                count.seq = int(found[1])
                count.num_frames += 1
            elif b'"error"' in line:
                raise RuntimeError(f"the answer has ended: {line!r}")
        raise RuntimeError("the answer has ended")
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def _reading(one: Contender, num_streams: int) -> AsyncIterator[list[Count]]:
    """Read so many answers while the block runs; it begins when all are under way."""
    counts = [Count() for _ in range(num_streams)]
    tasks = [asyncio.create_task(_read(one, count)) for count in counts]
    try:
        async with asyncio.timeout(60):
            while not all(count.seq > _UNDER_WAY for count in counts):
                await asyncio.sleep(0.05)
                for task in tasks:
                    if task.done():
                        task.result()
        await asyncio.sleep(_SETTLE_SECONDS)
        yield counts
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(_SETTLE_SECONDS)


async def flow(one: Contender, num_streams: int, seconds: float) -> Figures:
    """Return the figures of one measurement."""
    async with _reading(one, num_streams) as counts:
        (main, total), wakes = cpu_of(one.pid), wakes_of(one.pid)
        num_tokens, num_frames = sum(each.seq for each in counts), sum(each.num_frames for each in counts)
        await asyncio.sleep(seconds)
        (main_end, total_end), wakes_end = cpu_of(one.pid), wakes_of(one.pid)
        num_tokens = sum(each.seq for each in counts) - num_tokens
        num_frames = sum(each.num_frames for each in counts) - num_frames
    main, total = main_end - main, total_end - total
    return Figures(
        loop_us=main / num_tokens / 1e3,
        others_us=(total - main) / num_tokens / 1e3,
        loop_wakes=(wakes_end[0] - wakes[0]) / num_tokens,
        other_wakes=(wakes_end[1] - wakes[1]) / num_tokens,
        frames=num_frames / num_tokens,
    )


async def profiled(one: Contender, num_streams: int, seconds: float) -> tuple[pstats.Stats, float, int]:
    """Return a profile of the event loop's thread, its CPU seconds, and the number of tokens meanwhile."""
    async with _reading(one, num_streams) as counts:
        toggle_profile(one)
        num_tokens = sum(each.seq for each in counts)
        await asyncio.sleep(seconds)
        toggle_profile(one)
        num_tokens = sum(each.seq for each in counts) - num_tokens
        async with asyncio.timeout(30):
            while not one.profile.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    stats = pstats.Stats(str(one.profile))
    cpu = float(Path(f"{one.profile}.cpu").read_text())  # noqa: ASYNC240
    one.profile.unlink()
    return stats, cpu, num_tokens
