"""The site that `benchmarks.paths` measures: processes under child.py, and readers of its answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.machine import progress

CHILD = Path(__file__).with_name("child.py")
_END_SECONDS = 5.0
PREPARE = """
import sys

import django
from django.core.management import call_command

django.setup()
call_command("migrate", verbosity=0)
call_command("streamserve_key", "create", "--key", sys.argv[1])
"""
SETTINGS = """
from project.settings import *
from project.settings import STREAMSERVE as DEMO

STREAMSERVE = {{
    **DEMO,
    "MODELS": {{"echo": {{"PATH": "echo"}}}},
    "ECHO_STEP_SECONDS": {step_seconds},
    "ENGINE_AUTOSTART": False,
    "ENGINE_PROCESS": {{"RUNTIME_DIR": {runtime_dir!r}}},
    "LIMITS": {{"MAX_STREAMS_PER_PRINCIPAL": 100}},
}}
"""


class Child:
    """A process of the site under the profiler."""

    def __init__(self, site: Site, name: str, *arguments: str) -> None:
        self.name = name
        self._record_path = site.folder / f"{name}.json"
        self._log_path = site.folder / f"{name}.log"
        command = [sys.executable, "-P", str(CHILD), str(site.tree), str(self._record_path), *arguments]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=site.tree, env=site.environ, stdout=log, stderr=log)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait; raises RuntimeError, with what the process has printed, when it ends first."""
        while not is_so():
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} is not {what}:\n{self._log_path.read_text(errors='replace')[-4000:]}")
            time.sleep(0.02)

    def record(self) -> dict[str, Any]:
        """Return what child.py has recorded in it so far. Once."""
        self._process.send_signal(signal.SIGUSR1)
        self.wait_until(self._record_path.exists, "writing its record")
        return dict(json.loads(self._record_path.read_text()))

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it; kill it if it does not end soon."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()


class Site:
    """The demo site of `tree` on a folder of its own."""

    def __init__(self, folder: Path, tree: Path, step_seconds: float) -> None:
        self.folder, self.tree = folder, tree
        self.key = secrets.token_hex(16)
        settings = SETTINGS.format(step_seconds=step_seconds, runtime_dir=str(folder / "run"))
        (folder / "paths_settings.py").write_text(settings)
        ours = re.compile("STREAMSERVE|DJANGO|PYTHON|(MODEL|DTYPE|HOST|PORT|KEY)$")
        self.environ = {name: value for name, value in os.environ.items() if not ours.match(name)} | {
            "PYTHONPATH": f"{tree}{os.pathsep}{folder}",
            "DJANGO_SETTINGS_MODULE": "paths_settings",
            "STREAMSERVE_STATE_DIR": str(folder / "state"),
            "ALLOWED_HOSTS": "127.0.0.1",
            "DEBUG": "0",
        }

    def prepare(self) -> None:
        """Make the database and the key, in one process: starting Django is what takes the time."""
        command = [sys.executable, "-c", PREPARE, self.key]
        done = subprocess.run(command, cwd=self.tree, env=self.environ, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the site's database cannot be made:\n{done.stderr}")

    def is_ready(self, port: int) -> bool:
        """Whether the worker serves and has its engine. No proxy of the environment comes between."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{port}/readyz", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False


class Reader:
    """One connection of a reader. Marks name it by its port."""

    def __init__(self, site: Site, port: int, method: str, path: str, *headers: str, body: object = None) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self.port = int(self._socket.getsockname()[1])
        self._data = b""
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1",
            "Host: 127.0.0.1",
            f"Authorization: Bearer {site.key}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *headers,
        )
        self._socket.sendall("\r\n".join((*head, "", "")).encode() + content)

    def read(self, num_events: int | None = None) -> None:
        """Read until so many events have come; all there are, without a number."""
        while not self._data.endswith(b"\r\n0\r\n\r\n"):
            if num_events is not None and self._data.count(b"\nid: ") >= num_events:
                return
            data = self._socket.recv(65536)
            self._data += data
            if not data or not self._data.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the answer was refused, or broke off: {self._data!r}")

    def read_to_break(self) -> None:
        """Read what is still to come from a server that is gone."""
        with contextlib.suppress(ConnectionError):
            while data := self._socket.recv(65536):
                self._data += data

    def found(self, pattern: bytes) -> str:
        """Return what the last match of the pattern's group is."""
        return re.findall(pattern, self._data, re.IGNORECASE)[-1].decode()

    def close(self) -> None:
        """Leave."""
        self._socket.close()


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Running:
    """A site that serves: its engine, its web workers and their ports."""

    site: Site
    engine: Child
    workers: list[Child]
    ports: list[int]


@contextlib.contextmanager
def running(tree: Path, step_seconds: float) -> Iterator[Running]:
    """Run an engine and two workers on a new site of `tree` while the block runs. They are ready."""
    with tempfile.TemporaryDirectory(prefix="paths-") as name, contextlib.ExitStack() as stack:
        site = Site(Path(name), tree, step_seconds)

        def start(name: str, *arguments: str) -> Child:
            child = Child(site, name, *arguments)
            stack.callback(child.stop)
            return child

        progress("starting an engine and two web workers")
        ports = [free_port(), free_port()]
        engine = start("engine", "manage", "streamserve_engine")
        site.prepare()
        workers = [start(f"worker{number}", "web", str(port)) for number, port in enumerate(ports, 1)]
        for worker, port in zip(workers, ports, strict=True):
            worker.wait_until(lambda port=port: site.is_ready(port), "ready")
        yield Running(site, engine, workers, ports)
