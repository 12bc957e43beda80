"""The demo site with an echo engine, as `benchmarks.web` measures it: its settings, its processes, what the kernel
says of the web process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.paths.site import Site, free_port

MODEL = "measured"
ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")
SERVERS = ("daphne", "uvicorn")
LOGS = ("file", "memory")
CLIENTS = ("process", "thread")
_READY_SECONDS, _END_SECONDS = 300.0, 10.0
SETTINGS = """
STREAMSERVE |= {{"LOG": {log!r}, "CLIENT": {client!r}}}
STREAMSERVE["CLASSES"] = {{"chat": {{"TTFT_SECONDS": 60.0, "MAX_QUEUE_SECONDS": 120.0, "MAX_LATE_SECONDS": 60.0}}}}
STREAMSERVE["MODELS"] = {{{model!r}: {{"PATH": {path!r}, "DTYPE": {dtype!r}, "ENGINE": {{"MAX_NUM_SEQS": 64}}}}}}
"""


@dataclass
class Contender:
    """A web process of the checkout `tree`; `profile` is the file that it writes what it has profiled to."""

    tree: Path
    log: str
    client: str
    server: str
    key: str = ""
    port: int = 0
    pid: int = 0
    profile: Path = Path()
    figures: dict[int, list[Figures]] = field(default_factory=dict)  # by the number of streams: of each round

    @property
    def name(self) -> str:
        """What it is."""
        return f"{self.server}, log: {self.log}, engine: {self.client}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of the web process, for each token: CPU in us and wakes (voluntary context switches), and frames sent.

    `loop` is the thread of the event loop; `others` are all other threads.
    """

    loop_us: float
    others_us: float
    loop_wakes: float
    other_wakes: float
    frames: float

    @property
    def ms(self) -> float:
        """CPU milliseconds of all threads."""
        return (self.loop_us + self.others_us) / 1e3


@contextlib.contextmanager
def running(one: Contender, folder: Path, model: tuple[str, str], step_seconds: float) -> Iterator[None]:
    """Serve `model`, a path and a dtype, while the block runs. Raises RuntimeError."""
    folder.mkdir()
    site = Site(folder, one.tree, step_seconds)
    with (folder / "paths_settings.py").open("a") as settings:
        settings.write(SETTINGS.format(log=one.log, client=one.client, model=MODEL, path=model[0], dtype=model[1]))
    site.prepare()
    one.key, one.port, one.profile = site.key, free_port(), folder / "profile"
    with contextlib.ExitStack() as stack:
        if one.client == "process":
            stack.enter_context(_process(site, "engine", "manage.py", "streamserve_engine"))
        web = stack.enter_context(_process(site, "web", str(CHILD), one.server, str(one.port), str(one.profile)))
        one.pid, deadline = web.pid, time.monotonic() + _READY_SECONDS
        while not site.is_ready(one.port):
            if web.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{one.name} is not ready:\n{(folder / 'web.log').read_text()[-4000:]}")
            time.sleep(0.1)
        yield


@contextlib.contextmanager
def _process(site: Site, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with (site.folder / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=site.tree, env=site.environ, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_of(pid: int) -> tuple[int, int]:
    """Return the CPU nanoseconds of a process's main thread, and of all of its threads."""
    main = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
    return main, time.clock_gettime_ns((~pid << 3) | 2)  # the kernel's MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)


def wakes_of(pid: int) -> tuple[int, int]:
    """Return how often a process's main thread, and its other threads that run, have waited and were woken."""
    counts = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            lines = (task / "status").read_text().splitlines()
            counts[int(task.name)] = next(int(one.split()[1]) for one in lines if one.startswith("voluntary_ctxt"))
    main = counts.pop(pid)
    return main, sum(counts.values())


def toggle_profile(one: Contender) -> None:
    """Start the profiler in the web process, or end it and have it write its file."""
    os.kill(one.pid, signal.SIGUSR1)
