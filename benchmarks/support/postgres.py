"""A PostgreSQL cluster for one run, on a free port of loopback. Needs its programs: apt-get install postgresql."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DEBIAN = Path("/usr/lib/postgresql")  # its programs are not on PATH there
# As the demo's SQLite: a crash of the machine may lose the last moments, and never breaks the database.
_OPTIONS = "-c synchronous_commit=off"


def _folder() -> Path:
    """Return the folder of its programs."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).parent] if found else sorted(_DEBIAN.glob("*/bin"))
    if not folders:
        raise RuntimeError("PostgreSQL is missing: apt-get install postgresql")
    return folders[-1]


@contextmanager
def cluster(port: int) -> Iterator[None]:
    """Run a cluster while the block runs; its superuser is `postgres`, without a password."""
    user = "nobody" if os.geteuid() == 0 else None  # PostgreSQL does not run as root
    with tempfile.TemporaryDirectory(prefix="postgres-") as name:
        if user is not None:
            shutil.chown(name, user)

        def run(program: str, *arguments: str) -> None:
            command = [str(_folder() / program), "-D", f"{name}/data", *arguments]
            done = subprocess.run(command, cwd=name, user=user, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{program}: {done.stdout}{done.stderr}")

        run("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k '' {_OPTIONS}"
        run("pg_ctl", "-w", "-l", f"{name}/output", "-o", options, "start")
        try:
            yield
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")


def create(port: int, name: str) -> None:
    """Create a database."""
    import psycopg

    with psycopg.connect(f"host=127.0.0.1 port={port} user=postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')


def settings(port: int, name: str) -> str:
    """Return the lines of Django's settings that use it."""
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "HOST": "127.0.0.1",
        "PORT": port,
        "USER": "postgres",
        "CONN_MAX_AGE": None,
    }
    return f"\nDATABASES = {{'default': {database!r}}}\n"
