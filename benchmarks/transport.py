"""CPU of a server per streamed event, from the source to the socket: streamserve and other libraries, in turns.

    python -m benchmarks.transport [--streams 1 50 200] [--rounds 5] [--only NAME ...] [--quick] [--never-readers]
    python -m benchmarks.transport --tree DIR     # this checkout and another one, FileLog under FlowServer

Every server streams the same words from the same source (transport_apps.py); an event is one token. CPU is that of the
server's process, all threads, while all answers are under way. Start and end of an answer, which are mostly Django's
request, have a line of their own. "At a pace": a step every 50 ms gives each stream a token, as an engine does. "At
once": as fast as the server can. Ratios are to Django's StreamingHttpResponse on the same server (FlowServer: on
daphne), medians of the rounds' ratios. MemoryLog is the transport alone; FileLog commits every token to a file before
it is shown. Needs tests/requirements.txt and benchmarks/requirements.txt. Commit latencies of the logs:
`benchmarks.logs`.

`--tree` runs the applications of another checkout with its own `.venv`, if it has one, and prints the CPU of an event
at a pace: both medians, the ratio of the medians, and the ratio of each round. The two take turns, and the one that
begins changes from round to round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from websockets.asyncio.client import connect

from benchmarks.machine import describe_machine, parser, progress

PACE_SECONDS = 0.05
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
ROOT = Path(__file__).resolve().parents[1]
_APPS = "benchmarks.transport_apps"
_COMMANDS = {
    "daphne": ["daphne", "-b", "127.0.0.1", "-p", "{port}", "{app}"],
    "FlowServer": ["{flow}", "{app}", "--host", "127.0.0.1", "--port", "{port}"],
    "uvicorn": ["uvicorn", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning", "{app}"],
}


@dataclass
class Contender:
    """A server and its route. `base`: the contender that it is compared with; `tree`: the checkout that it runs."""

    name: str
    kind: str
    app: str
    path: str = "/sse"
    log: str = ""  # "file": FileLog
    base: str = ""
    tree: Path = ROOT
    port: int = 0
    pid: int = 0
    cpu: dict[tuple[int, float], list[float]] = field(default_factory=dict)  # by streams and pace: us an event
    speed: dict[tuple[int, float], list[float]] = field(default_factory=dict)  # events a second
    idle: tuple[float, float] = (0.0, 0.0)  # kB and threads of an idle stream
    answer: list[float] = field(default_factory=list)  # CPU ms of an answer of one event

    @property
    def is_websocket(self) -> bool:
        return self.path == "/ws"


DJANGO = {kind: f"StreamingHttpResponse, {kind}" for kind in ("daphne", "uvicorn")}


def contenders() -> list[Contender]:
    """Return all contenders."""
    return [
        Contender(DJANGO["daphne"], "daphne", "django_app", "/plain"),
        Contender(DJANGO["uvicorn"], "uvicorn", "django_app", "/plain"),
        Contender("sse-starlette, uvicorn", "uvicorn", "starlette_app", base=DJANGO["uvicorn"]),
        Contender("ours, daphne", "daphne", "ours_app", base=DJANGO["daphne"]),
        Contender("ours, FlowServer", "FlowServer", "ours_app", base=DJANGO["daphne"]),
        Contender("ours, uvicorn", "uvicorn", "ours_app", base=DJANGO["uvicorn"]),
        Contender("ours, FlowServer, FileLog", "FlowServer", "ours_app", log="file", base=DJANGO["daphne"]),
        Contender("ours, WebSocket, daphne", "daphne", "ours_app", "/ws"),
        Contender("ours, WebSocket, FlowServer", "FlowServer", "ours_app", "/ws"),
        Contender("ours, WebSocket, uvicorn", "uvicorn", "ours_app", "/ws"),
    ]


def chosen_of(servers: list[Contender], names: list[str] | None) -> list[Contender]:
    """Return those of the names, all if there are none, and their bases."""
    if names is None:
        return servers
    wanted = set(names).union(one.base for one in servers if one.name in names)
    if unknown := set(names) - {one.name for one in servers}:
        raise SystemExit(f"no contender {', '.join(unknown)}; there are: {'; '.join(one.name for one in servers)}")
    return [one for one in servers if one.name in wanted]


@contextlib.contextmanager
def running(one: Contender, folder: str) -> Iterator[None]:
    """Serve while the block runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        one.port = probe.getsockname()[1]
    # Until 0.1.0 the command of FlowServer was a module of its own.
    flow = "streamserve.asgi.flow" + ("" if (one.tree / "streamserve/asgi/flow").is_dir() else "_server")
    command = [part.format(port=one.port, app=f"{_APPS}:{one.app}", flow=flow) for part in _COMMANDS[one.kind]]
    python = one.tree / ".venv/bin/python"
    log = f"{folder}/{one.port}.sqlite3" if one.log else ""
    with open(f"{folder}/{one.port}.txt", "wb") as output:
        process = subprocess.Popen(
            [str(python) if python.exists() else sys.executable, "-m", *command],
            cwd=one.tree,
            env={**os.environ, "BENCHMARK_LOG": log},
            stdout=output,
            stderr=output,
        )
    one.pid = process.pid
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", one.port)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{one.name} does not start:\n{Path(output.name).read_text()}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of all threads of a process: the kernel's MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)."""
    return time.clock_gettime((~pid << 3) | 2)


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


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--streams", type=int, nargs="+", default=[1, 50, 200])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    options.add_argument("--only", nargs="+", metavar="NAME", help="these contenders, and what they are compared with")
    options.add_argument("--never-readers", action="store_true", help="only: 20 readers beside 50 that never read")
    options.add_argument("--quick", action="store_true", help="one short round, as a smoke test")
    options.add_argument("--tree", type=Path, metavar="DIR", help="only: this checkout and the one in DIR")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.seconds = 1, 0.5
    print(describe_machine())
    if chosen.tree is not None:
        compare_trees(chosen.tree.resolve(), chosen)
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = chosen_of(contenders(), chosen.only)
        for one in servers:
            stack.enter_context(running(one, folder))
        if chosen.never_readers:
            report_never(servers, chosen.rounds)
            return
        for one in servers:  # first: idle streams would reuse memory that later measurements free
            progress(f"idle: {one.name}")
            one.idle = asyncio.run(idle(one))
        for number in range(chosen.rounds):
            for one in servers:
                one.answer.append(asyncio.run(answer(one)) * 1e3)
            for num_streams in chosen.streams:
                progress(f"round {number + 1} of {chosen.rounds}, {num_streams} streams")
                for pace in (PACE_SECONDS, 0.0):
                    for one in servers:
                        cpu, speed = asyncio.run(flow(one, num_streams, pace, chosen.seconds))
                        one.cpu.setdefault((num_streams, pace), []).append(cpu * 1e6)
                        one.speed.setdefault((num_streams, pace), []).append(speed)
        for num_streams in chosen.streams:
            report(servers, num_streams)
        report_costs(servers, chosen.rounds)


def compare_trees(other: Path, chosen: argparse.Namespace) -> None:
    """Measure FileLog under FlowServer in this checkout and in `other`; print the CPU of an event."""
    new = Contender("this checkout", "FlowServer", "ours_app", log="file")
    old = Contender(str(other), "FlowServer", "ours_app", log="file", tree=other)
    with tempfile.TemporaryDirectory() as folder, running(new, folder), running(old, folder):
        for number in range(chosen.rounds):
            for num_streams in chosen.streams:
                progress(f"round {number + 1} of {chosen.rounds}, {num_streams} streams")
                for one in (old, new) if number % 2 == 0 else (new, old):
                    cpu, _ = asyncio.run(flow(one, num_streams, PACE_SECONDS, chosen.seconds))
                    one.cpu.setdefault((num_streams, PACE_SECONDS), []).append(cpu * 1e6)
    print(f"\nCPU us of an event, FileLog, at a pace; old: {other}")
    print(f"{'streams':>9}{'old':>9}{'new':>9}{'ratio':>8}   rounds")
    for num_streams in chosen.streams:
        before, after = old.cpu[num_streams, PACE_SECONDS], new.cpu[num_streams, PACE_SECONDS]
        rounds = " ".join(f"{ours / theirs:.3f}" for ours, theirs in zip(after, before, strict=True))
        row = f"{num_streams:9}{median(before):9.1f}{median(after):9.1f}{median(after) / median(before):8.3f}"
        print(f"{row}   {rounds}", flush=True)


def report(servers: list[Contender], num_streams: int) -> None:
    """Print one line per contender."""
    print(f"\n{num_streams} streams{'':21}  at a pace: CPU us    ratio   at once: CPU us    ratio   events/s")
    by_name = {one.name: one for one in servers}
    for one in servers:
        columns = []
        for pace in (PACE_SECONDS, 0.0):
            base = by_name.get(one.base)
            columns += [f"{median(one.cpu[num_streams, pace]):8.0f}", ratio(one, base, (num_streams, pace))]
        speed = median(one.speed[num_streams, 0.0])
        print(f"  {one.name:32}{columns[0]:>16}{columns[1]:>9}{columns[2]:>18}{columns[3]:>9}{speed:11.0f}", flush=True)


def ratio(one: Contender, base: Contender | None, what: tuple[int, float]) -> str:
    """Return the CPU divided by the base's, the median of the rounds' ratios."""
    if base is None:
        return "-"
    return f"{median(ours / theirs for ours, theirs in zip(one.cpu[what], base.cpu[what], strict=True)):.2f}"


def report_costs(servers: list[Contender], rounds: int) -> None:
    """Print the memory of an idle stream, the time until a disconnect is noticed, of a resume, and an answer's CPU."""
    print(f"\n{'an idle stream':34}{'kB':>8}{'threads':>9}{'left ms':>10}{'resume ms':>11}{'an answer, CPU ms':>20}")
    for one in servers:
        progress(f"left, resumed: {one.name}")
        left = median(asyncio.run(leave(one)) for _ in range(4 * rounds))
        is_resumable = one.app == "ours_app" and not one.is_websocket
        resumed = median(asyncio.run(resume(one)) for _ in range(4 * rounds)) if is_resumable else None
        text = "-" if resumed is None else f"{resumed * 1e3:.2f}"
        idle_text = f"{one.idle[0]:8.1f}{one.idle[1]:9.2f}"
        print(f"  {one.name:32}{idle_text}{left * 1e3:10.2f}{text:>11}{median(one.answer):20.2f}", flush=True)


def report_never(servers: list[Contender], rounds: int) -> None:
    """Print the memory of a client that never reads, and the throughput of 20 readers beside 50 such clients."""
    print(f"\n{f'{NUM_NEVER} that never read 20 MB':34}{'kB each':>9}{'at rest':>9}", end="")
    print(f"{'20 readers: tokens/s alone, beside':>34}{'ratio':>7}")
    for one in (one for one in servers if not one.is_websocket):
        progress(f"never read: {one.name}")
        grown, rests, without, beside, ratio = share(one, rounds)
        print(f"  {one.name:32}{grown:9.0f}{rests!s:>9}{without:24.0f}{beside:10.0f}{ratio:7.2f}", flush=True)


def memory_of(pid: int) -> int:
    """Return resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads_of(pid: int) -> int:
    """Count threads."""
    return len(os.listdir(f"/proc/{pid}/task"))


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


if __name__ == "__main__":
    main()
