"""A real redis-server on a free port of loopback, for tests that start, kill and restart it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.servers.ports import free_port

_START_SECONDS = 60.0


def redis_path() -> str:
    """Return where redis-server is; skip, or fail if everything is required, when there is none."""
    path = shutil.which("redis-server")
    if path is None:
        missing = "redis-server is missing: apt-get install -y redis-server"
        if os.environ.get("STREAMSERVE_REQUIRE") == "all":
            pytest.fail(missing)
        pytest.skip(missing)
    return path


class RedisServer:
    """`with RedisServer(folder) as server: ... server.url`. Further keywords are lines of its configuration."""

    def __init__(self, folder: Path, **config: str) -> None:
        self._folder = folder
        self._config = {"appendonly": "yes", "appendfsync": "always", "save": "", **config}
        self._path = redis_path()
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and wait until it has loaded its data."""
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self._folder), "daemonize": "no"}
        words = [word for name, value in {**options, **self._config}.items() for word in (f"--{name}", value)]
        with (self._folder / "redis.log").open("ab") as output:
            self._process = subprocess.Popen([self._path, *words], stdout=output, stderr=output)
        deadline = time.monotonic() + _START_SECONDS
        while self.command("PING") != "+PONG":
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((self._folder / "redis.log").read_text())
            time.sleep(0.02)

    def kill(self) -> None:
        """End it with kill -9."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the process; its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """Lose all data, as a fail-over to an empty replica does."""
        assert self.command("FLUSHALL") == "+OK"

    def forget_events(self, key: str, *, keep: int) -> None:
        """Lose all but the first `keep` events of the log with this prefix, as a fail-over to a replica may."""
        last = int(self.command(f"XLEN {key}:events")[1:])
        for seq in range(keep + 1, last + 1):
            assert self.command(f"XDEL {key}:events {seq}-0") == ":1"
        assert self.command(f"XSETID {key}:events {keep}-0") == "+OK"
        assert self.command(f"HSET {key}:head last {keep} ended 0") == ":0"

    def command(self, command: str) -> str:
        """Return the first line of the answer to a command, or "" when no server answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(f"{command}\r\n".encode())
                return connection.recv(4096).decode().splitlines()[0]
        except OSError:
            return ""
