"""Commit latency of each event log, in turns: from a step of the engine to the acknowledgement of its events.

    python -m benchmarks.logs [--streams 1 50 200] [--steps 40] [--rounds 5] [--folder <on the disk to be measured>]

Every 50 ms a step gives each stream one token, and the tokens of all streams are one commit, as `LogWriter` makes it.
CPU is this process's, per event; that of Redis and of the disk is not counted. The ratio is to FileLog's median with
the same number of streams. The benchmark starts Redis itself, if redis-server is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles

from benchmarks.support.machine import describe_machine, parser, progress
from streamserve.protocol.events import Token
from streamserve.streams.log.base import EventLog, MemoryLog, make_batch, new_log_id
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.log.redis_log import RedisLog

_STEP_SECONDS = 0.05
_BASE = "FileLog"
_NUM_WARM_UP = 3

# One round: seconds of each commit, and CPU seconds per event.
Round = tuple[list[float], float]


async def measure(log: EventLog, num_streams: int, num_steps: int) -> Round:
    """Commit one token of each stream, `num_steps` times after a warm-up."""
    log_ids = [new_log_id() for _ in range(num_streams)]
    seconds: list[float] = []
    cpu_began = 0.0
    for number in range(_NUM_WARM_UP + num_steps):
        if number == _NUM_WARM_UP:
            seconds, cpu_began = [], time.process_time()
        token = Token(text=f" word{number}", token_ids=(number,))
        began = time.perf_counter()
        results = await log.commit([make_batch(log_id, 1, number, [token]) for log_id in log_ids])
        seconds.append(time.perf_counter() - began)
        assert results == [number + 1] * num_streams, results
        await asyncio.sleep(max(0.0, began + _STEP_SECONDS - time.perf_counter()))
    return seconds, (time.process_time() - cpu_began) / (num_steps * num_streams)


async def run(make: Callable[[], EventLog], num_streams: int, num_steps: int) -> Round:
    """Measure a new log, and purge it."""
    log = make()
    try:
        result = await measure(log, num_streams, num_steps)
        await log.purge(time.time() + 3600)
        return result
    finally:
        await log.aclose()


def report(rounds: dict[str, list[Round]], num_streams: int) -> None:
    """Print one line per log."""
    base = _median_of(rounds[_BASE])
    for name, results in rounds.items():
        seconds = [one for round_seconds, _ in results for one in round_seconds]
        cpu = median(cpu for _, cpu in results)
        middle, late = _median_of(results), quantiles(seconds, n=100)[98]
        print(
            f"{num_streams:4} streams  {name:24} median {middle * 1e3:7.2f} ms  p99 {late * 1e3:7.2f} ms"
            f"  CPU {cpu * 1e6:5.0f} us an event  x{middle / base:.2f}"
        )


def _median_of(results: list[Round]) -> float:
    return median(median(seconds) for seconds, _ in results)


@contextlib.contextmanager
def redis_at(folder: Path, fsync: str) -> Iterator[str | None]:
    """Start a Redis with an append-only file and yield its URL; yield None where it is not installed."""
    path = shutil.which("redis-server")
    if path is None:
        yield None
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    folder.mkdir()
    options = {"port": port, "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "yes", "appendfsync": fsync}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    process = subprocess.Popen([path, *words], stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--streams", type=int, nargs="+", default=[1, 50, 200])
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--folder", type=Path)
    chosen = arguments.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        logs: dict[str, Callable[[], EventLog]] = {
            "MemoryLog": MemoryLog,
            _BASE: lambda: FileLog(folder / "streams.db"),
            "FileLog, full sync": lambda: FileLog(folder / "synced.db", is_full_sync=True),
        }
        for fsync in ("everysec", "always"):
            if (url := stack.enter_context(redis_at(folder / fsync, fsync))) is not None:
                logs[f"RedisLog, {fsync}"] = lambda url=url: RedisLog(url)  # type: ignore[misc]
        for num_streams in chosen.streams:
            rounds: dict[str, list[Round]] = {kind: [] for kind in logs}
            for number in range(chosen.rounds):
                progress(f"{num_streams} streams, round {number + 1} of {chosen.rounds}")
                for kind, make in logs.items():
                    rounds[kind].append(asyncio.run(run(make, num_streams, chosen.steps)))
            report(rounds, num_streams)


if __name__ == "__main__":
    main()
