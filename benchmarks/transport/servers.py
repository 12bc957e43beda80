"""The servers that `benchmarks.transport` measures: how they are started, and what the kernel says of them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
    """Serve while the block runs. Raises RuntimeError if the server printed a traceback: its figures are worthless."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        one.port = probe.getsockname()[1]
    # Until 0.1.0 these modules had other names.
    flow = "streamserve.asgi.flow" + ("" if (one.tree / "streamserve/asgi/flow").is_dir() else "_server")
    apps = "benchmarks.transport" + (".apps" if (one.tree / "benchmarks/transport/apps.py").is_file() else "_apps")
    command = [part.format(port=one.port, app=f"{apps}:{one.app}", flow=flow) for part in _COMMANDS[one.kind]]
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
    text = Path(output.name).read_text()
    if "Traceback" in text:
        raise RuntimeError(f"{one.name} printed a traceback:\n{text[text.index('Traceback') :][:2000]}")


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of all threads of a process: the kernel's MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)."""
    return time.clock_gettime((~pid << 3) | 2)


def memory_of(pid: int) -> int:
    """Return resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def threads_of(pid: int) -> int:
    """Count threads."""
    return len(os.listdir(f"/proc/{pid}/task"))
