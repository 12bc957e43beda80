"""Real servers for tests: daphne, uvicorn and others as subprocesses on free loopback ports, ready when entered."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from tests.support.servers.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
_READY_SECONDS = 120.0
_STOP_SECONDS = 15.0


@dataclass(frozen=True)
class Server:
    """A running server. `output()` is what it has printed so far."""

    port: int
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def websocket_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    def connect(self) -> socket.socket:
        """Return a new TCP connection to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextlib.contextmanager
def daphne(
    app: str,
    *options: str,
    port: int | None = None,
    cwd: Path = ROOT,
    python: Path | str = sys.executable,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Serve `app` ("module:name") with daphne while the block runs; `env` is added to ours."""
    port = free_port() if port is None else port
    command = [str(python), "-m", "daphne", "-b", "127.0.0.1", "-p", str(port), *options, app]
    with run_server(command, port, cwd, environ_of(cwd, env)) as server:
        yield server


@contextlib.contextmanager
def uvicorn(
    app: str, *options: str, cwd: Path = ROOT, python: Path | str = sys.executable, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serve `app` with uvicorn, the same way."""
    port = free_port()
    command = [str(python), "-m", "uvicorn", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--timeout-graceful-shutdown", "2", *options, app]
    with run_server(command, port, cwd, environ_of(cwd, env)) as server:
        yield server


@contextlib.contextmanager
def hypercorn(app: str, *options: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Serve `app` with hypercorn, the same way."""
    port = free_port()
    command = [sys.executable, "-m", "hypercorn", "--bind", f"127.0.0.1:{port}", "--graceful-timeout", "10"]
    with run_server([*command, *options, app], port, cwd, environ_of(cwd, env)) as server:
        yield server


@contextlib.contextmanager
def granian(app: str, *options: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Serve `app` with granian and one worker, the same way."""
    port = free_port()
    command = [sys.executable, "-m", "granian", "--interface", "asgi", "--host", "127.0.0.1", "--port", str(port)]
    with run_server([*command, *options, app], port, cwd, environ_of(cwd, env)) as server:
        yield server


@contextlib.contextmanager
def gunicorn(app: str, *options: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Serve `app` with gunicorn and one worker of its own ASGI kind, the same way."""
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "--worker-class", "asgi", "--bind", f"127.0.0.1:{port}"]
    command += ["--graceful-timeout", "10", "--no-control-socket"]
    with run_server([*command, *options, app], port, cwd, environ_of(cwd, env)) as server:
        yield server


SERVERS = {"daphne": daphne, "uvicorn": uvicorn}
ALL_SERVERS = {**SERVERS, "hypercorn": hypercorn, "granian": granian, "gunicorn": gunicorn}


@contextlib.contextmanager
def run_server(command: list[str], port: int, cwd: Path, environ: Mapping[str, str]) -> Iterator[Server]:
    """Run any command that listens on `port` while the block runs, with this environment only."""
    with tempfile.NamedTemporaryFile(prefix="server-", suffix=".log") as log:
        process = subprocess.Popen(command, cwd=cwd, env=environ, stdout=_raw(log), stderr=subprocess.STDOUT)
        server = Server(port, process, Path(log.name))
        try:
            wait_until_listening(server)
            yield server
        finally:
            stop(process)


def _raw(log: IO[bytes]) -> int:
    return log.fileno()


def environ_of(cwd: Path, env: Mapping[str, str] | None) -> dict[str, str]:
    """Return an environment without this one's paths: the child finds its app in `cwd`; output is unbuffered."""
    environ = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "DJANGO_SETTINGS_MODULE"}
    }
    return {**environ, "PYTHONPATH": str(cwd), "PYTHONUNBUFFERED": "1", **(env or {})}


def wait_until_listening(server: Server) -> None:
    """Wait until the server accepts connections. Raises RuntimeError, with its output, if it does not."""
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with {server.process.returncode}:\n{server.output()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server is not ready after {_READY_SECONDS:.0f} s:\n{server.output()}")


def wait_until_ready(url: str, seconds: float = 240.0) -> None:
    """Wait until the site at `url` has its models."""
    deadline = time.monotonic() + seconds
    with httpx.Client(trust_env=False, timeout=10) as client:
        while (answer := _readiness(client, url)) is not None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the models are not ready after {seconds:.0f} s: {answer}")
            time.sleep(0.05)


def _readiness(client: httpx.Client, url: str) -> str | None:
    """Return what /readyz answers, None once it is ready. gunicorn listens before its worker serves."""
    try:
        response = client.get(f"{url}/readyz")
    except httpx.ReadTimeout:
        return "no answer"
    return None if response.status_code == 200 else response.text


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process: first by a signal, then by kill."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
