"""What `benchmarks.transport` measures of one server: CPU of events and answers, memory, and how soon things happen."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from statistics import median

from websockets.asyncio.client import connect

from benchmarks.transport.servers import Contender, cpu_of, memory_of, threads_of

NUM_IDLE = 200
NUM_NEVER = 50
NUM_ANSWERS = 20  # at a time, of one event
_SETTLE_SECONDS = 0.5
_FORGET_SECONDS = 1.0  # until a server has dropped its ended streams: longer than its retention
_WORD = b" word"
# 20 MB in few events: the kernel buffers some megabytes of each answer first, and each event of those costs CPU.
_NEVER_QUERY = "n=20000&pace=0&size=1000&abort=1"
_READERS = (20, 200)  # streams, events of each
_REST = 0.01  # CPU seconds in half a second


async def read(one: Contender, query: str) -> None:
    """Read one stream to its terminal event."""
    if one.is_websocket:
        async with connect(f"ws://127.0.0.1:{one.port}/ws?{query}", compression=None, proxy=None, max_queue=None) as ws:
            last = [message async for message in ws][-1]
        assert '"done"' in last, last
        return
    reader, writer = await ask(one, f"{one.path}?{query}")
    tail = b""
    while data := await reader.read(65536):
        tail = (tail + data)[-2000:]
    writer.close()
    assert b"event: done" in tail, tail


async def ask(one: Contender, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a GET request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    return reader, writer


async def flow(one: Contender, num_streams: int, pace: float, seconds: float) -> tuple[float, float]:
    """Return the server's CPU seconds per event, and events per second, while `num_streams` answers are under way."""
    counts = [0] * num_streams
    reading = [asyncio.create_task(_count(one, pace, counts, number)) for number in range(num_streams)]
    async with asyncio.timeout(60):
        while not all(counts):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(_SETTLE_SECONDS)
    cpu, began, num_before = cpu_of(one.pid), time.perf_counter(), sum(counts)
    await asyncio.sleep(seconds)
    cpu, wall, num_events = cpu_of(one.pid) - cpu, time.perf_counter() - began, sum(counts) - num_before
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await asyncio.sleep(_FORGET_SECONDS)
    return cpu / num_events, num_events / wall


async def _count(one: Contender, pace: float, counts: list[int], number: int) -> None:
    """Read an endless stream and count its words."""
    query = f"n={10**9}&pace={pace}&abort=1"
    if one.is_websocket:
        address = f"ws://127.0.0.1:{one.port}/ws?{query}"
        async with connect(address, compression=None, proxy=None, max_queue=None) as ws:
            async for message in ws:
                counts[number] += str(message).encode().count(_WORD)
        return
    reader, writer = await ask(one, f"{one.path}?{query}")
    tail = b""
    try:
        while data := tail + await reader.read(65536):
            counts[number] += data.count(_WORD)
            tail = next((data[-size:] for size in (4, 3, 2, 1) if _WORD.startswith(data[-size:])), b"")
    finally:
        writer.transport.abort()


async def answer(one: Contender) -> float:
    """Return the server's CPU seconds for an answer of one event."""
    await read(one, "n=1&pace=0")
    cpu = cpu_of(one.pid)
    for _ in range(5):
        await asyncio.gather(*(read(one, "n=1&pace=0") for _ in range(NUM_ANSWERS)))
    return (cpu_of(one.pid) - cpu) / (5 * NUM_ANSWERS)


async def load(one: Contender, num_streams: int, num_events: int, pace: float) -> tuple[float, float]:
    """Read the streams concurrently; return the server's CPU seconds and wall seconds, each per event."""
    await read(one, "n=5&pace=0")
    cpu, began = cpu_of(one.pid), time.perf_counter()
    await asyncio.gather(*(read(one, f"n={num_events}&pace={pace}") for _ in range(num_streams)))
    total = num_streams * num_events
    return (cpu_of(one.pid) - cpu) / total, (time.perf_counter() - began) / total


@contextlib.asynccontextmanager
async def _open(one: Contender, query: str) -> AsyncIterator[Callable[[], None]]:
    """Open a stream and wait for its first token; yield the function that disconnects."""
    if one.is_websocket:
        async with connect(f"ws://127.0.0.1:{one.port}/ws?{query}", compression=None, proxy=None) as ws:
            while '"token"' not in str(await ws.recv()):
                pass
            yield ws.transport.abort
        return
    reader, writer = await ask(one, f"{one.path}?{query}")
    await reader.readuntil(b"event: token")
    yield writer.close
    writer.close()


async def idle(one: Contender) -> tuple[float, float]:
    """Return kB and threads per idle stream."""
    await asyncio.gather(*(read(one, "n=5&pace=0") for _ in range(20)))
    before = memory_of(one.pid), threads_of(one.pid)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(NUM_IDLE):
            await stack.enter_async_context(_open(one, "n=2&pace=3600&abort=1"))
        await asyncio.sleep(0.5)
        after = memory_of(one.pid), threads_of(one.pid)
    return (after[0] - before[0]) / NUM_IDLE / 1024, (after[1] - before[1]) / NUM_IDLE


async def leave(one: Contender) -> float:
    """Return the time from a client's disconnect to the cancellation of its source."""
    async with _open(one, "n=2&pace=3600&abort=1") as go:
        left_at = time.monotonic()
        go()
        async with asyncio.timeout(30):
            while (gone_at := await _gone_at(one)) < left_at:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    return gone_at - left_at


async def _gone_at(one: Contender) -> float:
    reader, writer = await ask(one, "/gone")
    data = await reader.read()
    writer.close()
    return float(next(line for line in reversed(data.split(b"\r\n")) if b"." in line))


async def resume(one: Contender) -> float:
    """Return the time from the request for the second half of an answer of 500 tokens to its first event."""
    reader, writer = await ask(one, f"{one.path}?n=500&pace=0")
    head = (await reader.read()).decode()
    writer.close()
    stream_id = next(line for line in head.splitlines() if line.lower().startswith("x-stream-id:")).split()[1]
    began = time.perf_counter()
    reader, writer = await ask(one, f"/events?id={stream_id}&after=250")
    await reader.readuntil(b"event: token")
    seconds = time.perf_counter() - began
    writer.close()
    return seconds


def share(one: Contender, rounds: int) -> tuple[float, bool, float, float, float]:
    """Measure 20 readers alone and beside 50 clients that never read 20 MB, in turns.

    Return the memory of such a client in the first round (kB), whether the server came to rest, the readers' tokens a
    second alone and beside them (medians), and the median of the rounds' ratios.
    """
    grown, rests, without, beside = [], [], [], []
    for _ in range(rounds):
        without.append(1 / asyncio.run(load(one, *_READERS, 0.0))[1])
        before = memory_of(one.pid)
        with contextlib.ExitStack() as stack:
            for _ in range(NUM_NEVER):
                client = stack.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", one.port))
                client.sendall(f"GET {one.path}?{_NEVER_QUERY} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            rests.append(_rest(one))
            grown.append((memory_of(one.pid) - before) / NUM_NEVER / 1024)
            beside.append(1 / asyncio.run(load(one, *_READERS, 0.0))[1])
        _rest(one)
    ratios = [with_them / alone for with_them, alone in zip(beside, without, strict=True)]
    return grown[0], all(rests), median(without), median(beside), median(ratios)


def _rest(one: Contender) -> bool:
    """Wait until the server is idle, a minute at most; return whether it is."""
    for _ in range(120):
        cpu = cpu_of(one.pid)
        time.sleep(0.5)
        if cpu_of(one.pid) - cpu < _REST:
            return True
    return False
