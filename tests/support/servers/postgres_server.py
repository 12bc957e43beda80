"""A real PostgreSQL cluster of the tests' own, on a free port of loopback, without durability."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.processes import children_of
from tests.support.servers.ports import free_port

# Debian's folder, which is not on PATH.
_PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
# A free port may be taken, by a connection of another test, before the server binds it.
_MAX_STARTS = 3
_QUICK = "-c fsync=off -c synchronous_commit=off -c full_page_writes=off"


def postgres_folder() -> Path:
    """Return the folder of initdb and pg_ctl; skip, or fail if everything is required, when there is none."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).parent
    if _PLACES:
        return _PLACES[-1]
    missing = "PostgreSQL is missing: apt-get install -y postgresql"
    if os.environ.get("STREAMSERVE_REQUIRE") == "all":
        pytest.fail(missing)
    pytest.skip(missing)


class PostgresServer:
    """`with PostgresServer() as server: ... server.port`. The superuser is `postgres`, without a password."""

    def __init__(self) -> None:
        self._programs = postgres_folder()
        self._user = "nobody" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
        self.port = 0

    def __enter__(self) -> PostgresServer:
        self._folder = Path(tempfile.mkdtemp(prefix="streamserve-postgres-"))  # pytest's are closed to other users
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self._run("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        for _ in range(_MAX_STARTS):
            self.port = free_port()
            if self.start(is_required=False):
                return self
        raise AssertionError((self._folder / "output").read_text())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run("pg_ctl", "-w", "-m", "immediate", "stop", is_required=False)
        shutil.rmtree(self._folder)

    def start(self, *, is_required: bool = True) -> bool:
        """Start the server, at first or after `stop`; return whether it runs."""
        options = f"-c listen_addresses=127.0.0.1 -p {self.port} -k '' {_QUICK}"
        output = str(self._folder / "output")
        return self._run("pg_ctl", "-w", "-l", output, "-o", options, "start", is_required=is_required)

    def stop(self) -> None:
        """Stop the server; it ends all connections. What was committed is kept, although a crash would lose it."""
        self._run("pg_ctl", "-w", "-m", "fast", "stop")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and to each process of a connection."""
        first = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
        for pid in (first, *children_of(first)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _run(self, program: str, *arguments: str, is_required: bool = True) -> bool:
        command = [str(self._programs / program), "-D", str(self._folder / "data"), *arguments]
        done = subprocess.run(
            command,
            cwd=self._folder,
            user=self._user,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 or not is_required, done.stdout
        return done.returncode == 0
